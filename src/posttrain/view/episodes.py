"""Episodes as data for the report page: text, and tokens and units colored by their credit."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from posttrain.credit.units.mixing import CreditedUnits
from posttrain.credit.units.offsets import AlignedText, Decode, align
from posttrain.episode import Episode, Outcome, Turn
from posttrain.errors import PosttrainError
from posttrain.recipe.units import UnitCreditRecipe
from posttrain.rollout.store import StoredEpisodes, StoredStep, read_episodes, stored_steps
from posttrain.rollout.view import judge_verdict, unit_summary, unit_text, units_in_turn
from posttrain.runs.directory import RunDirectory

_NAMES = {1: ("the only one",), 2: ("best", "worst"), 3: ("best", "median", "worst")}


@dataclass(frozen=True)
class Sample:
    """One episode with its credit, if known; `why` says why it was selected."""

    why: str
    episode: Episode
    advantages: list[np.ndarray] | None
    """Per stream, [T] float32."""
    units: CreditedUnits | None


@dataclass(frozen=True)
class Samples:
    """Selected episodes of one file of the episode store."""

    title: str
    samples: list[Sample]


def samples_of(run: RunDirectory) -> tuple[list[Samples], list[str]]:
    """The episodes to show, and messages on what could not be read.

    Three held-out episodes of the last evaluation, and two of the last training step.
    """
    try:
        steps = list(stored_steps(run.episodes))
    except PosttrainError as error:
        return [], [str(error)]
    held_out = [one for one in steps if one.split == "evaluation"] or [one for one in steps if one.split == "final"]
    shown = [(held_out[-1], 3)] if held_out else []
    trained = [one for one in steps if one.split == "train"]
    shown += [(trained[-1], 2)] if trained else []
    selected, missing = [], []
    for step, count in shown:
        try:
            selected.append(_of_step(step, read_episodes(step.path), count))
        except PosttrainError as error:
            missing.append(str(error))
    return [one for one in selected if one.samples], missing


def by_return(episodes: Sequence[Episode], count: int) -> list[tuple[str, int]]:
    """(why, index) of the best, the median (if `count` is 3) and the worst episode by return.

    Failed episodes are considered only if all failed. The result is shorter if there are fewer episodes.
    """
    indices = [i for i, one in enumerate(episodes) if one.outcome is not Outcome.FAILED] or list(range(len(episodes)))
    order = sorted(indices, key=lambda i: -episodes[i].total_reward)
    if not order:
        return []
    chosen = [order[0], order[len(order) // 2], order[-1]] if count == 3 else [order[0], order[-1]]
    chosen = list(dict.fromkeys(chosen))
    return list(zip(_NAMES[len(chosen)], chosen, strict=True))


def _of_step(step: StoredStep, stored: StoredEpisodes, count: int) -> Samples:
    advantages = stored.advantages
    samples = [
        Sample(why, stored.episodes[i], None if advantages is None else advantages.values[i], stored.units[i])
        for why, i in by_return(stored.episodes, count)
    ]
    kinds = {"train": "training episodes", "evaluation": "held-out episodes", "final": "final held-out episodes"}
    mean = "" if step.mean_return is None else f", mean return {step.mean_return:.3f}"
    failed = f", {step.failed} failed" if step.failed else ""
    return Samples(f"Step {step.step}: {step.episodes} {kinds[step.split]}{mean}{failed}", samples)


LONGEST = 12_000
"""Characters shown of one message."""
_LONGEST_ROLE = 100
_STRONGEST = 0.5
"""Opacity of the color of the largest credit, low enough that text stays readable in light and dark mode."""


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens with equal credit."""

    text: str
    style: str
    """CSS, built from numbers only."""
    tooltip: str
    """The credit as text."""


@dataclass(frozen=True)
class UnitRow:
    """One unit of an answer."""

    number: str
    credit: str
    tokens: int
    text: str
    """Shown if the credit of the tokens is unknown."""
    pieces: tuple[Piece, ...]
    style: str


@dataclass(frozen=True)
class Message:
    """One message of the conversation, as `text`, `pieces` or `units`."""

    role: str
    text: str = ""
    pieces: tuple[Piece, ...] = ()
    units: tuple[UnitRow, ...] = ()
    about: str = ""
    """Reward, tokens and stop reason of a turn."""
    rejected: str = ""
    verdict: str = ""
    """Score and reason of a judge."""


@dataclass(frozen=True)
class EpisodePage:
    """One episode as shown on the page."""

    title: str
    ending: str
    messages: list[Message]
    units: str
    failure: str
    picture: str = ""
    """The states as the data URI of an image, if the environment has a grid."""


def largest_advantage(samples: Sequence[Sample]) -> float:
    """The largest absolute advantage of any token in `samples`, which gets the strongest color."""
    streams = [stream for sample in samples for stream in sample.advantages or []]
    return max((float(np.abs(stream).max(initial=0.0)) for stream in streams), default=0.0)


def episode_page(sample: Sample, scale: float, decode: Decode | None, credited: UnitCreditRecipe | None) -> EpisodePage:
    """The page of one episode; `scale` is the advantage with the strongest color.

    Without `decode`, tokens cannot be shown separately and have no colors.
    """
    episode = sample.episode
    messages: list[Message] = []
    waiting = list(enumerate(episode.turns))
    for message in episode.messages:
        if message["role"] == "assistant" and waiting:
            messages.append(_answer(*waiting.pop(0), sample, decode, scale))
        else:
            messages.append(Message(message["role"][:_LONGEST_ROLE], shortened(message["content"])))
    messages += [_answer(number, turn, sample, decode, scale) for number, turn in waiting]
    ending = "success" if episode.success else episode.outcome.value
    tokens = sum(turn.stop - turn.start for turn in episode.turns)
    return EpisodePage(
        f"{sample.why}: return {episode.total_reward:+.3f} · {_counted(len(episode.turns), 'turn')} · {_counted(tokens, 'token')} · "
        f"seed {episode.seed} · group {episode.group} episode {episode.index}",
        ending,
        messages,
        "" if sample.units is None else unit_summary(sample.units, credited).plain,
        shortened(episode.failure or ""),
    )


def color(value: float, scale: float) -> str:
    """CSS background: blue for positive values, orange for negative ones, with opacity proportional to |value| / scale."""
    strength = _STRONGEST * min(1.0, abs(value) / scale) if scale > 0 else 0.0
    hue = "86,180,233" if value > 0 else "230,140,0"
    return f"background:rgba({hue},{strength:.3f})"


def _answer(number: int, turn: Turn, sample: Sample, decode: Decode | None, scale: float) -> Message:
    about = f"turn {number} · reward {turn.reward:+.3f} · {turn.stop - turn.start} tokens · {turn.stop_reason.value}"
    advantages = None if sample.advantages is None else sample.advantages[turn.stream][turn.start : turn.stop]
    if advantages is not None and len(advantages):
        low, high = float(advantages.min()), float(advantages.max())
        spread = "" if low == high else f" ({low:+.3f} to {high:+.3f})"
        about += f" · advantage {float(advantages.mean()):+.3f}{spread}"
    empty = Message(
        "assistant",
        about=about,
        rejected=shortened(str(turn.info.get("rejected") or "")),
        verdict=shortened(judge_verdict(turn)),
    )
    if sample.units is not None and decode is not None:
        return replace(empty, units=tuple(_unit_rows(sample, turn, sample.units, decode, scale)))
    if advantages is not None and decode is not None and len(advantages):
        aligned = _aligned(sample.episode, turn, decode)
        return replace(empty, pieces=tuple(_pieces(aligned, advantages, 0, len(advantages), scale)))
    return replace(empty, text=shortened(turn.answer))


def _aligned(episode: Episode, turn: Turn, decode: Decode) -> AlignedText:
    return align(episode.streams[turn.stream].ids[turn.start : turn.stop].tolist(), decode)


def _pieces(aligned: AlignedText, credit: np.ndarray, first: int, stop: int, scale: float) -> Iterator[Piece]:
    """The tokens `first` to `stop` of an answer, grouped by equal credit and cut at `LONGEST` characters.

    `credit`: [n] float32, of the tokens of the answer.
    """
    start = first
    for value, same in groupby(credit[first:stop].tolist()):
        end = start + len(list(same))
        many = f", {end - start} tokens" if end - start > 1 else ""
        text = aligned.slice(start, end)
        left = LONGEST - int(aligned.offsets[start] - aligned.offsets[first])
        yield Piece(text[:left], color(value, scale), f"{value:+.4f}{many}")
        if len(text) > left:
            yield Piece(_more(len(aligned.slice(first, stop)) - LONGEST), "", "")
            return
        start = end


def _unit_rows(sample: Sample, turn: Turn, units: CreditedUnits, decode: Decode, scale: float) -> Iterator[UnitRow]:
    """Units in order. A unit that began in an earlier answer shows its credit there."""
    text, aligned = unit_text(sample.episode, turn, decode), _aligned(sample.episode, turn, decode)
    advantages = None if sample.advantages is None else sample.advantages[turn.stream][turn.start : turn.stop]
    largest = float(np.abs(units.credits).max(initial=0.0))
    numbers = np.cumsum(units.spans.is_unit)
    for unit, start, stop, continued in units_in_turn(sample.episode, turn, units):
        credit, is_unit = float(units.credits[unit]), bool(units.spans.is_unit[unit])
        number = "…" if continued else str(numbers[unit]) if is_unit else "–"
        shown = "" if continued else f"{credit:+z.3f}"
        pieces = (
            ()
            if advantages is None
            else tuple(_pieces(aligned, advantages, start - turn.start, stop - turn.start, scale))
        )
        yield UnitRow(number, shown, stop - start, shortened(text(start, stop).plain), pieces, color(credit, largest))


def shortened(text: str) -> str:
    """`text`, cut to `LONGEST` characters with a note on how many there are more."""
    cut = len(text) - LONGEST
    return text if cut <= 0 else f"{text[:LONGEST]}{_more(cut)}"


def _more(characters: int) -> str:
    return f"\n[{characters} more characters are not shown]"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
