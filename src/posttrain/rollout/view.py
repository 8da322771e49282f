"""Episodes as text that a person can read in a terminal."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby

import numpy as np
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from posttrain.credit.units.mixing import CreditedUnits, UnitAdvantages
from posttrain.credit.units.offsets import Decode, align
from posttrain.episode import Episode, Outcome, StopReason, Stream, Turn
from posttrain.errors import InputError
from posttrain.recipe.units import UnitCreditRecipe
from posttrain.rollout.store import StoredStep
from posttrain.runs.directory import RunDirectory


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
    numbers = np.cumsum(units.spans.is_unit)
    for unit, start, stop, continued in units_of(episode, turn, units):
        credit, found = float(units.credits[unit]), bool(units.spans.is_unit[unit])
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


def unit_summary(units: CreditedUnits, recipe: UnitCreditRecipe | None) -> Text:
    """What the credits of an episode sum to, and what is done with them; `recipe` is None if it is not known."""
    parts = [(units.empty_value, "empty answer"), (float(units.credits.sum()), "units"), (units.residual, "residual")]
    scale = max(abs(units.outcome), float(np.abs(units.credits).max(initial=0.0)))
    line = Text("outcome ", style="dim")
    line.append(f"{units.outcome:+z.3f}", style=f"not dim {colour(units.outcome, scale)}")
    line.append(" = " + "  ".join(f"{value:+z.3f} {name}" for value, name in parts) + "\n")
    channel = "an advantage" if isinstance(units, UnitAdvantages) else "a reward"
    if recipe is None:
        line.append(f"credit of units is {channel}")
    else:
        line.append(f"{recipe.type}, {channel} · {recipe.beta:g} × units + {1 - recipe.beta:g} × outcome")
    if not units.has_units:
        line.append("\nno unit was found here, so all credit is the outcome's", style="not dim yellow")
    elif not units.spans.is_unit.all():
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
        parts.append(_inset(unit_summary(units, credited)))
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
