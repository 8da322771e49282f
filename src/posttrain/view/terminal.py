"""Episodes in the terminal."""

import sys
from collections.abc import Iterable, Sequence

import numpy as np
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from posttrain.credit.units.mixing import CreditedUnits
from posttrain.credit.units.offsets import Decode
from posttrain.episode import Episode, Outcome
from posttrain.recipe.units import UnitCreditRecipe
from posttrain.rollout.store import StoredStep
from posttrain.terminal import printable
from posttrain.view.episodes import Look, Piece, Sample, UnitRow, episode_page, scale_of

_ROLE_STYLES = {"system": "yellow", "user": "cyan", "assistant": "green"}


def view_steps(steps: Iterable[StoredStep]) -> Table:
    """One row per file of the store."""
    table = Table()
    for heading in ("step", "split", "episodes", "successes", "failed", "mean reward"):
        table.add_column(heading, justify="left" if heading == "split" else "right")
    for step in steps:
        mean_return = "–" if step.mean_return is None else f"{step.mean_return:.3f}"
        counts = (str(step.episodes), str(step.successes), str(step.failed))
        table.add_row(str(step.step), step.split, *counts, mean_return)
    return table


def view_episode(
    episode: Episode,
    advantages: list[np.ndarray] | None,
    decode: Decode | None = None,
    tokens: bool = False,
    units: CreditedUnits | None = None,
    recipe: UnitCreditRecipe | None = None,
) -> RenderableType:
    """The conversation of one episode with reward, stop reason and advantages under each answer.

    `advantages`: per stream [T] float32, or None if the step has none. With `units`, each answer is shown unit by unit
    with its credit; `recipe` is the recipe of that credit, or None if unknown. With `tokens`, answers are shown as
    sampled tokens colored by advantage. `decode` turns token ids into text; without it, ids are shown.
    """
    sample = Sample("", episode, advantages, units)
    look = Look(scale_of([sample], "advantage"), each=tokens, longest=sys.maxsize)
    shown = (decode or (lambda ids: "".join(f"{token} " for token in ids))) if tokens or units is not None else None
    page = episode_page(sample, look, shown, recipe)
    style = "green" if episode.success else "red" if episode.outcome is Outcome.FAILED else "yellow"
    parts: list[RenderableType] = [
        Rule(Text.assemble(f"{page.title} · ", (page.ending, style)), align="left", style="bold")
    ]
    for message in page.messages:
        parts.append(Text(printable(message.role), style=f"bold {_ROLE_STYLES.get(message.role, 'white')}"))
        content: RenderableType = Text(printable(message.text))
        if message.units:
            content = _unit_table(message.units, tokens)
        elif message.pieces:
            content = _token_text(message.pieces)
        parts.append(Padding(content, (0, 0, 0, 2)))
        about = Text(message.about, style="dim")
        if message.rejected:
            about.append(f" · rejected: {printable(message.rejected)}", style="not dim red")
        if message.verdict:
            about.append(f" · {printable(message.verdict)}", style="not dim")
        parts += [Padding(about, (0, 0, 0, 2))] if about else []
    if page.units:
        parts.append(Padding(Text(page.units, style="dim"), (0, 0, 0, 2)))
    if page.failure:
        parts.append(Text(f"failed: {printable(page.failure)}", style="bold red"))
    return Group(*parts, Text())


def _unit_table(units: Sequence[UnitRow], tokens: bool) -> Table:
    """One row per unit of an answer: number, credit, tokens, text."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("unit", justify="right", style="dim", no_wrap=True)
    table.add_column("credit", justify="right", no_wrap=True)
    table.add_column("tokens", justify="right", style="dim", no_wrap=True)
    table.add_column("", overflow="fold")
    for unit in units:
        text = _token_text(unit.pieces) if tokens else Text(unit.text)
        if unit.number == "–":
            text.stylize_before("dim")
        table.add_row(unit.number, Text(unit.credit, style=_color(unit.strength)), str(unit.tokens), text)
    return table


def _token_text(pieces: Sequence[Piece]) -> Text:
    """Tokens with the color of their credit. Every other one is underlined, which shows their boundaries."""
    text = Text()
    for number, piece in enumerate(pieces):
        line = "underline " if number % 2 else ""
        text.append(printable(piece.text).replace("\n", "\\n\n"), style=line + _color(piece.strength))
    if text.plain.endswith("\n"):
        text.right_crop(1)
    return text


def _color(strength: float) -> str:
    """Blue for positive and orange for negative strengths, grey at zero. Safe for color-blind readers."""
    target = (86, 180, 233) if strength > 0 else (230, 140, 0)
    red, green, blue = (round(150 + (end - 150) * abs(strength)) for end in target)
    return f"rgb({red},{green},{blue})"
