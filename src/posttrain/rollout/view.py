"""Episodes as text that a person can read in a terminal."""

import sys
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import groupby

import numpy as np
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from posttrain.credit.units.credited import CreditedUnits
from posttrain.credit.units.offsets import Decode
from posttrain.errors import InputError
from posttrain.recipe.unit_credit import UnitCreditRecipe
from posttrain.rollout.store import StoredStep
from posttrain.rollout.streams import Episode, Outcome, Turn
from posttrain.rollout.view_tokens import token_text, visible
from posttrain.rollout.view_units import UnitText, unit_text, units_lines, view_units
from posttrain.runs.directory import RunDirectory

ROLE_STYLES = {"system": "yellow", "user": "cyan", "assistant": "green"}


def view_steps(steps: Iterable[StoredStep]) -> Table:
    """The files of a store, one row each."""
    table = Table()
    for heading in ("step", "split", "episodes", "successes", "failed", "mean reward"):
        table.add_column(heading, justify="left" if heading == "split" else "right")
    for step in steps:
        paid = "–" if step.mean_return is None else f"{step.mean_return:.3f}"
        counts = (str(step.episodes), str(step.successes), str(step.failed))
        table.add_row(str(step.step), step.split, *counts, paid)
    return table


def view_episode(
    episode: Episode,
    advantages: list[np.ndarray] | None,
    decode: Decode | None = None,
    tokens: bool = False,
    units: CreditedUnits | None = None,
    credited: UnitCreditRecipe | None = None,
) -> RenderableType:
    """The conversation of one episode with reward, stop reason and advantages under each answer.

    `advantages`: per stream [T] float32, None where the step has none. Where credit is of `units`, an answer is shown
    unit by unit, each with its credit; `credited` is the recipe of that credit, None where it is not known. With
    `tokens` answers are shown as their sampled tokens, coloured by advantage. `decode` turns token ids into text;
    without it ids are shown where tokens or units would be.
    """
    scale = max((float(np.abs(a).max()) for a in advantages if len(a)), default=0.0) if advantages else 0.0

    def coloured(turn: Turn) -> UnitText:
        own = None if advantages is None else advantages[turn.stream]
        return lambda start, stop: token_text(episode.streams[turn.stream], start, stop, own, scale, decode)

    def answer(said: str, turn: Turn) -> RenderableType:
        if units is not None:
            text = coloured(turn) if tokens else unit_text(episode, turn, decode)
            return view_units(episode, turn, units, text)
        return coloured(turn)(turn.start, turn.stop) if tokens else Text(visible(said))

    parts: list[RenderableType] = [Rule(_title(episode), align="left", style="bold")]
    waiting = list(enumerate(episode.turns))
    for message in episode.messages:
        parts.append(_speaker(message["role"]))
        if message["role"] == "assistant" and waiting:
            number, turn = waiting.pop(0)
            parts += [
                _inset(answer(message["content"], turn)),
                _turn_line(number, turn, advantages, _changes(episode, turn)),
            ]
        else:
            parts.append(_inset(Text(visible(message["content"]))))
    for number, turn in waiting:
        parts += [
            _speaker("assistant"),
            _inset(answer(turn.answer, turn)),
            _turn_line(number, turn, advantages, _changes(episode, turn)),
        ]
    if units is not None:
        parts.append(_inset(units_lines(units, credited)))
    if episode.failure is not None:
        parts.append(Text(f"failed: {visible(episode.failure)}", style="bold red"))
    return Group(*parts, Text())


def token_decoder(run: RunDirectory) -> Decode | None:
    """What turns token ids of this run into text; None, with a word on stderr, if its tokenizer cannot be loaded."""
    from posttrain.models.load import load_tokenizer

    try:
        tokenizer = load_tokenizer(run.load_recipe().model)
    except Exception as error:
        print(f"the tokenizer cannot be loaded, so token ids are shown: {error}", file=sys.stderr)
        return None
    return partial(tokenizer.decode, clean_up_tokenization_spaces=False)


def unit_credit(run: RunDirectory) -> UnitCreditRecipe | None:
    """How the run gives credit to units; None if its recipe does not say so, or cannot be read."""
    try:
        return getattr(run.load_recipe(), "unit_credit", None)
    except InputError:
        return None


def _title(episode: Episode) -> Text:
    ending = "success" if episode.success else episode.outcome.value
    style = "green" if episode.success else "red" if episode.outcome is Outcome.FAILED else "yellow"
    tokens = sum(turn.stop - turn.start for turn in episode.turns)
    many = f" · {tokens} tokens" if len(episode.turns) > 1 else ""  # of one, its own line tells
    return Text.assemble(
        f"group {episode.group} episode {episode.index} · seed {episode.seed} · ",
        (ending, style),
        f" · return {episode.total_reward:+.3f}{many} · {_versions(episode)}",
    )


def _versions(episode: Episode) -> str:
    """Which weights sampled it: one version, or the first and the last of several."""
    own = episode.versions
    mixed = len(own) and own.min() != own.max()
    return f"versions {own.min()} to {own.max()}" if mixed else f"version {episode.version}"


def _speaker(role: str) -> Text:
    return Text(role, style=f"bold {ROLE_STYLES.get(role, 'white')}")


def _inset(said: RenderableType) -> Padding:
    return Padding(said, (0, 0, 0, 2))


def _changes(episode: Episode, turn: Turn) -> list[tuple[int, int]]:
    """(version, tokens in a row) of an answer; empty where all tokens of the episode are of one version."""
    if len(set(episode.versions.tolist())) < 2:
        return []
    own = episode.streams[turn.stream].versions[turn.start : turn.stop].tolist()
    return [(version, len(list(run))) for version, run in groupby(own)]


def _turn_line(
    number: int, turn: Turn, advantages: list[np.ndarray] | None, runs: Sequence[tuple[int, int]] = ()
) -> Padding:
    line = Text(
        f"turn {number} · reward {turn.reward:+.3f} · {turn.stop - turn.start} tokens · {turn.stop_reason.value}", "dim"
    )
    if runs:
        line.append(" · " + ", ".join(f"{count} by version {version}" for version, count in runs))
    if advantages is not None:
        own = advantages[turn.stream][turn.start : turn.stop]
        if len(own):
            low, high, middle = float(own.min()), float(own.max()), float(own.mean())
            line.append(f" · advantage {middle:+.3f}" + ("" if low == high else f" ({low:+.3f}…{high:+.3f})"))
    if turn.info.get("rejected"):
        line.append(f" · rejected: {visible(str(turn.info['rejected']))}", style="not dim red")
    if turn.info.get("judge"):
        judged = turn.info["judge"]
        line.append(f" · judge {judged['score']:.2f}: {visible(judged['reason'])}", style="not dim")
    return _inset(line)
