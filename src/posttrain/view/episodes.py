"""Episodes as data for the report page: text, and tokens and units colored by their credit."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from posttrain.credit.units.mixing import CreditedUnits
from posttrain.credit.units.offsets import AlignedText, Decode, align
from posttrain.data.messages import UnusableRow, picture_url
from posttrain.episode import Episode, Turn
from posttrain.errors import InputError, PosttrainError
from posttrain.images import MARK, readable
from posttrain.recipe.units import UnitCreditRecipe
from posttrain.rollout.store import read_episodes, stored_steps
from posttrain.rollout.view import judge_verdict, unit_summary, unit_text, units_in_turn
from posttrain.runs.directory import RunDirectory
from posttrain.runs.reader import read_bytes

_KINDS = {"train": "training episodes", "evaluation": "held-out episodes", "final": "final held-out episodes"}
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
            stored = read_episodes(step.path)
            advantages = None if stored.advantages is None else stored.advantages.values
            samples = [
                Sample(why, stored.episodes[i], None if advantages is None else advantages[i], stored.units[i])
                for why, i in by_return(stored.episodes, count)
            ]
            mean = "" if step.mean_return is None else f", mean return {step.mean_return:.3f}"
            failed = f", {step.failed} failed" if step.failed else ""
            title = f"Step {step.step}: {step.episodes} {_KINDS[step.split]}{mean}{failed}"
            selected += [Samples(title, samples)] if samples else []
        except PosttrainError as error:
            missing.append(str(error))
    return selected, missing


def by_return(episodes: Sequence[Episode], count: int) -> list[tuple[str, int]]:
    """(why, index) of the best, the median (if `count` is 3) and the worst episode by return.

    Episodes without a return are considered only if there are no others. The result is shorter if there are fewer episodes.
    """
    indices = [i for i, one in enumerate(episodes) if one.has_return] or list(range(len(episodes)))
    order = sorted(indices, key=lambda i: -episodes[i].total_reward)
    if not order:
        return []
    chosen = [order[0], order[len(order) // 2], order[-1]] if count == 3 else [order[0], order[-1]]
    chosen = list(dict.fromkeys(chosen))
    return list(zip(_NAMES[len(chosen)], chosen, strict=True))


LONGEST = 12_000
"""Characters shown of one message."""
_LONGEST_ROLE = 100
_MOST_PICTURES, _LARGEST_PICTURE = 8, 1 << 20
"""Images of a message that are shown, and the bytes of one."""
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
    parted: bool = False
    """Whether the best and the worst answer of the group differ from here on."""


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
    turn: int | None = None
    """Which turn of the episode answered with it."""
    pictures: tuple[str, ...] = ()
    """Data URLs of its images."""
    problems: tuple[str, ...] = ()
    """Why other images are not shown."""


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


Tint = Literal["advantage", "unit credit", "log-probability", "nothing"]
TINTS: tuple[Tint, ...] = get_args(Tint)
"""What the color of a token shows."""
IMPROBABLE = 6.0
"""Nats below which a log-probability has the strongest color."""


@dataclass(frozen=True)
class Look:
    """How the tokens of an episode are shown."""

    scale: float
    """The value with the strongest color."""
    tint: Tint = "advantage"
    each: bool = False
    """Whether each token is shown separately, with all of its values. Otherwise tokens with equal values are one piece."""
    parted: tuple[int, int] | None = None
    """Turn and token at which this answer parts from that of another episode of the group."""


def episode_page(
    sample: Sample,
    scale: float | Look,
    decode: Decode | None,
    credited: UnitCreditRecipe | None,
    run: Path | None = None,
) -> EpisodePage:
    """The page of one episode; `scale` is the advantage with the strongest color, or the whole look.

    Without `decode`, tokens cannot be shown separately and have no colors. `run`: the run whose images are shown.
    """
    look = scale if isinstance(scale, Look) else Look(scale)
    episode = sample.episode
    messages: list[Message] = []
    waiting = list(enumerate(episode.turns))
    for message in episode.messages:
        if message["role"] == "assistant" and waiting:
            messages.append(_answer(*waiting.pop(0), sample, decode, look))
        else:
            named = " ".join(filter(None, (message["role"], str(message.get("name") or ""))))
            content = message.get("content") or ""
            pictures, problems = pictures_of(content, run) if run is not None else ((), ())
            text = shortened(readable(content))
            messages.append(Message(named[:_LONGEST_ROLE], text, pictures=pictures, problems=problems))
    messages += [_answer(number, turn, sample, decode, look) for number, turn in waiting]
    ending = "success" if episode.success else episode.outcome.value
    tokens = sum(turn.stop - turn.start for turn in episode.turns)
    return EpisodePage(
        f"{sample.why}{': ' if sample.why else ''}return {episode.total_reward:+.3f} · {_counted(len(episode.turns), 'turn')} · {_counted(tokens, 'token')} · "
        f"seed {episode.seed} · group {episode.group} episode {episode.index}",
        ending,
        messages,
        "" if sample.units is None else unit_summary(sample.units, credited).plain,
        shortened(episode.failure or ""),
    )


def pictures_of(content: str, run: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The first images of a message of a run as data URLs, and why others are not shown: files that are missing, altered, large
    or links."""
    urls, problems = [], []
    for key in MARK.findall(content)[:_MOST_PICTURES]:
        try:
            urls.append(picture_url(key, read_bytes(run / "images" / f"{key}.png", _LARGEST_PICTURE, run)))
        except (InputError, UnusableRow) as error:
            problems.append(shortened(str(error)))
    return tuple(urls), tuple(problems)


def prompt_text(episode: Episode, decode: Decode | None) -> tuple[int, str]:
    """The number of tokens before the first answer, and their text as the policy saw it, with the template and tools."""
    if not episode.turns or not episode.streams or decode is None:
        return 0, ""
    first = episode.turns[0]
    ids = episode.streams[first.stream].ids[: first.start].tolist()
    return len(ids), shortened(decode(ids))


def color(value: float, scale: float) -> str:
    """CSS background: blue for positive values, orange for negative ones, with opacity proportional to |value| / scale."""
    strength = _STRONGEST * min(1.0, abs(value) / scale) if scale > 0 else 0.0
    hue = "86,180,233" if value > 0 else "230,140,0"
    return f"background:rgba({hue},{strength:.3f})"


def _answer(number: int, turn: Turn, sample: Sample, decode: Decode | None, look: Look) -> Message:
    about = f"turn {number} · reward {turn.reward:+.3f} · {turn.stop - turn.start} tokens · {turn.stop_reason.words}"
    advantages = None if sample.advantages is None else sample.advantages[turn.stream][turn.start : turn.stop]
    if advantages is not None and len(advantages):
        low, high = float(advantages.min()), float(advantages.max())
        spread = "" if low == high else f" ({low:+.3f} to {high:+.3f})"
        about += f" · advantage {float(advantages.mean()):+.3f}{spread}"
    if turn.info.get("tool_calls"):
        about += f" · {_counted(turn.info['tool_calls'], 'tool call')}"
    counts = [(turn.info.get(f"{kind}_calls"), f"{kind} tool call") for kind in ("malformed", "failed")]
    bad_calls = ", ".join(_counted(count, noun) for count, noun in counts if isinstance(count, int) and count)
    empty = Message(
        "assistant",
        about=about,
        rejected=shortened(str(turn.info.get("rejected") or bad_calls)),
        verdict=shortened(judge_verdict(turn)),
        turn=number,
    )
    tokens = _tokens(number, turn, sample, look) if sample.episode.streams else None
    if sample.units is not None and decode is not None:
        return replace(empty, units=tuple(_unit_rows(sample, turn, sample.units, decode, tokens)))
    if tokens is not None and decode is not None and len(tokens.values):
        aligned = _aligned(sample.episode, turn, decode)
        return replace(empty, pieces=tuple(_pieces(aligned, tokens, 0, len(tokens.values))))
    return replace(empty, text=shortened(turn.answer))


@dataclass(frozen=True)
class _Tokens:
    """The values of the n tokens of an answer that its pieces show."""

    values: np.ndarray
    """[n] float32: what the color shows."""
    look: Look
    notes: list[str] | None
    """All values of each token as text; None if tokens with equal values are one piece."""
    parted: int | None
    """The token at which the answer parts from another one."""


def _tokens(number: int, turn: Turn, sample: Sample, look: Look) -> _Tokens | None:
    """What the pieces of an answer show; None where no color is known and tokens are not shown separately."""
    stream, here = sample.episode.streams[turn.stream], slice(turn.start, turn.stop)
    advantages = None if sample.advantages is None else sample.advantages[turn.stream][here]
    logprobs = stream.rollout_logprobs[here]
    if not look.each:
        return None if advantages is None else _Tokens(advantages, look, None, None)
    none, notes = np.zeros(len(logprobs), np.float32), []
    credits = none.copy()
    if sample.units is not None:
        for unit, start, stop, _ in units_in_turn(sample.episode, turn, sample.units):
            credits[start - turn.start : stop - turn.start] = sample.units.credits[unit]
    for position, (token, logprob) in enumerate(zip(stream.ids[here].tolist(), logprobs.tolist(), strict=True)):
        credit = "" if advantages is None else f"advantage {advantages[position]:+.4f} · "
        credit += "" if sample.units is None else f"unit credit {credits[position]:+.4f} · "
        chance = f"log-probability {logprob:.4f} ({100 * math.exp(min(0.0, logprob)):.1f}%)"
        notes.append(
            f"token {position}: {credit}{chance} · id {token} · version {stream.versions[turn.start + position]}"
        )
    parted = look.parted[1] if look.parted is not None and look.parted[0] == number else None
    shown = {
        "advantage": none if advantages is None else advantages,
        "unit credit": credits,
        "log-probability": logprobs,
        "nothing": none,
    }
    return _Tokens(shown[look.tint], look, notes, parted)


def _aligned(episode: Episode, turn: Turn, decode: Decode) -> AlignedText:
    return align(episode.streams[turn.stream].ids[turn.start : turn.stop].tolist(), decode)


def _pieces(aligned: AlignedText, tokens: _Tokens, first: int, stop: int) -> Iterator[Piece]:
    """The tokens `first` to `stop` of an answer, cut at `LONGEST` characters."""
    runs = (
        [(value, len(list(same))) for value, same in groupby(tokens.values[first:stop].tolist())]
        if tokens.notes is None
        else [(value, 1) for value in tokens.values[first:stop].tolist()]
    )
    start, scale = first, tokens.look.scale if tokens.look.tint != "log-probability" else IMPROBABLE
    for value, count in runs:
        end = start + count
        many = f", {count} tokens" if count > 1 else ""
        text = aligned.slice(start, end)
        left = LONGEST - int(aligned.offsets[start] - aligned.offsets[first])
        note = f"{value:+.4f}{many}" if tokens.notes is None else tokens.notes[start]
        yield Piece(text[:left], color(value, scale), note, start == tokens.parted)
        if len(text) > left:
            yield Piece(_more(len(aligned.slice(first, stop)) - LONGEST), "", "")
            return
        start = end


def _unit_rows(
    sample: Sample, turn: Turn, units: CreditedUnits, decode: Decode, tokens: _Tokens | None
) -> Iterator[UnitRow]:
    """Units in order. A unit that began in an earlier answer shows its credit there."""
    text, aligned = unit_text(sample.episode, turn, decode), _aligned(sample.episode, turn, decode)
    largest = float(np.abs(units.credits).max(initial=0.0))
    numbers = np.cumsum(units.spans.is_unit)
    for unit, start, stop, continued in units_in_turn(sample.episode, turn, units):
        credit, is_unit = float(units.credits[unit]), bool(units.spans.is_unit[unit])
        number = "…" if continued else str(numbers[unit]) if is_unit else "–"
        shown = "" if continued else f"{credit:+z.3f}"
        pieces = () if tokens is None else tuple(_pieces(aligned, tokens, start - turn.start, stop - turn.start))
        yield UnitRow(number, shown, stop - start, shortened(text(start, stop).plain), pieces, color(credit, largest))


def shortened(text: str) -> str:
    """`text`, cut to `LONGEST` characters with a note on how many there are more."""
    cut = len(text) - LONGEST
    return text if cut <= 0 else f"{text[:LONGEST]}{_more(cut)}"


def _more(characters: int) -> str:
    return f"\n[{characters} more characters are not shown]"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def scale_of(samples: Sequence[Sample], tint: Tint) -> float:
    """The value of a token in `samples` that gets the strongest color."""
    if tint == "advantage":
        values = [stream for sample in samples for stream in sample.advantages or []]
    else:
        values = [sample.units.credits for sample in samples if sample.units] if tint == "unit credit" else []
    return max((float(np.abs(credit).max(initial=0.0)) for credit in values), default=0.0)


@dataclass(frozen=True)
class Parting:
    """Where the best and the worst episode of a group differ first."""

    best: int
    """Positions of the two among the samples."""
    worst: int
    turn: int
    token: int
    sentence: str


def parting_of(samples: Sequence[Sample], decode: Decode | None) -> Parting | None:
    """What made the difference in a group: the first token at which its best and worst episode differ.

    None if all returns are equal, if fewer than two episodes have tokens, or if the two sampled the same tokens.
    """
    played = [i for i, one in enumerate(samples) if one.episode.turns and one.episode.streams]
    if len(played) < 2:
        return None
    best, worst = (choose(played, key=lambda i: samples[i].episode.total_reward) for choose in (max, min))
    a, b = samples[best].episode, samples[worst].episode
    if a.total_reward == b.total_reward:
        return None
    for number, (left, right) in enumerate(zip(a.turns, b.turns, strict=False)):
        ids_a, ids_b = (
            one.streams[turn.stream].ids[turn.start : turn.stop].tolist() for one, turn in ((a, left), (b, right))
        )
        if ids_a == ids_b:
            continue
        token = next(
            (i for i, (x, y) in enumerate(zip(ids_a, ids_b, strict=False)) if x != y), min(len(ids_a), len(ids_b))
        )
        shown = [
            repr(decode(ids[token : token + 8]))[:80] if decode and ids[token:] else "the end" for ids in (ids_a, ids_b)
        ]
        sentence = (
            f"Episode {a.index} (return {a.total_reward:+.3f}) and episode {b.index} (return {b.total_reward:+.3f}) differ "
            f"first in turn {number}, after {_counted(token, 'common token')}: {shown[0]} against {shown[1]}."
        )
        return Parting(best, worst, number, token, sentence)
    return None
