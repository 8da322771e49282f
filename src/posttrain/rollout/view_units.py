"""The units of answers and their credit as a table that a person can read in a terminal."""

from collections.abc import Callable, Iterator

import numpy as np
from rich.table import Table
from rich.text import Text

from posttrain.credit.units.credited import CreditedUnits, UnitAdvantages
from posttrain.credit.units.offsets import Decode, align
from posttrain.recipe.unit_credit import UnitCreditRecipe
from posttrain.rollout.streams import Episode, StopReason, Turn
from posttrain.rollout.view_tokens import colour, visible

HALF_BAR = 5
"""Width of the largest credit of an episode, to each side, in characters."""

UnitText = Callable[[int, int], Text]
"""What a unit's tokens say; `start` and `stop` are positions in the stream of the turn."""


def view_units(episode: Episode, turn: Turn, units: CreditedUnits, text: UnitText) -> Table:
    """The units of the answer of `turn`, a row each: number, credit and its bar, tokens, text.

    Bars are to the scale of the episode. A unit that began in an earlier answer has its credit there.
    """
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("unit", justify="right", style="dim", no_wrap=True)
    table.add_column("credit", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("tokens", justify="right", style="dim", no_wrap=True)
    table.add_column("", overflow="fold")
    scale = float(np.abs(units.credits).max(initial=0.0))
    numbers = np.cumsum(units.spans.found)
    for unit, start, stop, continued in units_of(episode, turn, units):
        credit, found = float(units.credits[unit]), bool(units.spans.found[unit])
        said = text(start, stop)
        if not found:
            said.stylize_before("dim")
        table.add_row(
            "…" if continued else str(numbers[unit]) if found else "–",
            "" if continued else Text(f"{credit:+z.3f}", style=colour(credit, scale)),
            "" if continued else _bar(credit, scale),
            str(stop - start),
            said,
        )
    return table


def units_lines(units: CreditedUnits, recipe: UnitCreditRecipe | None) -> Text:
    """What the credits of an episode sum to, and what is done with them; `recipe` is None if it is not known."""
    parts = [(units.empty, "empty answer"), (float(units.credits.sum()), "units"), (units.residual, "residual")]
    scale = max(abs(units.outcome), float(np.abs(units.credits).max(initial=0.0)))
    line = Text("outcome ", style="dim")
    line.append(f"{units.outcome:+z.3f}", style=f"not dim {colour(units.outcome, scale)}")
    line.append(" = " + "  ".join(f"{value:+z.3f} {name}" for value, name in parts) + "\n")
    channel = "an advantage" if isinstance(units, UnitAdvantages) else "a reward"
    if recipe is None:
        line.append(f"credit of units is {channel}")
    else:
        line.append(f"{recipe.type}, {channel} · {recipe.beta:g} × units + {1 - recipe.beta:g} × outcome")
    if not units.any:
        line.append("\nno unit was found here, so all credit is the outcome's", style="not dim yellow")
    elif not units.spans.found.all():
        line.append("\n– is text in which the segmenter found no unit")
    return line


def unit_text(episode: Episode, turn: Turn, decode: Decode | None) -> UnitText:
    """What tells the text of units by true offsets: no character is lost or broken where a unit ends; ids without
    `decode`."""
    ids = episode.streams[turn.stream].ids
    if decode is None:
        return lambda start, stop: Text(" ".join(map(str, ids[start:stop].tolist())))
    body = turn.stop - (turn.stop_reason is StopReason.END_TOKEN)
    aligned = align(ids[turn.start : body].tolist(), decode)
    ending = visible(decode(ids[body : turn.stop].tolist()))

    def said(start: int, stop: int) -> Text:
        exact = aligned.slice(start - turn.start, min(stop, body) - turn.start) if start < body else ""
        shown = Text(visible(exact).strip())
        if exact and not shown:
            shown.append(repr(exact), style="dim")
        if stop > body:
            shown.append(f" {ending}" if shown else ending, style="dim")
        return shown or Text("…", style="dim")  # the beginning of a character whose last token is in the next unit

    return said


def units_of(episode: Episode, turn: Turn, units: CreditedUnits) -> Iterator[tuple[int, int, int, bool]]:
    """(unit, start, stop, whether it began in an earlier answer) of the units of `turn`; positions in its stream."""
    streams = episode.streams
    before = sum(int(stream.sampled.sum()) for stream in streams[: turn.stream])
    first = before + int(streams[turn.stream].sampled[: turn.start].sum())
    for unit, (start, stop) in enumerate(units.spans):
        low, high = max(start, first), min(stop, first + turn.stop - turn.start)
        if low < high:
            yield unit, turn.start + low - first, turn.start + high - first, start < first


def _bar(credit: float, scale: float) -> Text:
    """From the middle to the right for credit above 0, to the left below."""
    full, half = divmod(round(2 * HALF_BAR * abs(credit) / scale) if scale > 0 else 0, 2)
    left = ("▐" * half + "█" * full if credit < 0 else "").rjust(HALF_BAR)
    right = ("█" * full + "▌" * half if credit > 0 else "").ljust(HALF_BAR)
    style = colour(credit, scale)
    return Text.assemble((left, style), ("│", "dim"), (right, style))
