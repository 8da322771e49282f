"""Sampled tokens as text for a terminal, and the colours of numbers with a sign."""

import numpy as np
from rich.text import Text

from posttrain.credit.units.offsets import Decode
from posttrain.rollout.streams import Stream


def visible(text: str) -> str:
    """`text` with control characters written out, so that a sampled escape sequence cannot drive the terminal."""
    return "".join(c if c in "\n\t" or c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def colour(value: float, scale: float) -> str:
    """Blue for positive, orange for negative, fading to grey at zero: told apart with any colour vision."""
    strength = min(1.0, abs(value) / scale) if scale > 0 else 0.0
    target = (86, 180, 233) if value > 0 else (230, 140, 0)
    red, green, blue = (round(150 + (end - 150) * strength) for end in target)
    return f"rgb({red},{green},{blue})"


def token_text(
    stream: Stream, start: int, stop: int, advantages: np.ndarray | None, scale: float, decode: Decode | None
) -> Text:
    """The tokens from `start` to `stop` one by one, coloured by `advantages` [T]; their ids without `decode`.

    `scale`: the advantage that has the full colour.
    """
    text = Text()
    for position in range(start, stop):
        token = int(stream.ids[position])
        shown = f"{token} " if decode is None else visible(decode([token])).replace("\n", "\\n\n")
        # Neighbours differ in underlining, so that the boundaries of tokens can be seen.
        line = "underline " if decode is not None and (position - start) % 2 else ""
        text.append(shown, style=line + ("" if advantages is None else colour(float(advantages[position]), scale)))
    if text.plain.endswith("\n"):
        text.right_crop(1)
    return text
