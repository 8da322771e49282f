"""Episodes as data for the pages and the terminal: text, and tokens and units with their credit."""

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import groupby
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from posttrain.credit.units.mixing import CreditedUnits, UnitAdvantages
from posttrain.credit.units.offsets import AlignedText, Decode, align
from posttrain.data.messages import UnusableRow, picture_url
from posttrain.episode import Episode, StopReason, Turn
from posttrain.errors import InputError
from posttrain.images import MARK, decoding, readable
from posttrain.recipe.model import ModelRecipe
from posttrain.recipe.units import UnitCreditRecipe
from posttrain.runs.directory import RunDirectory
from posttrain.runs.reader import is_file, read_bytes
from posttrain.terminal import printable

LONGEST = 12_000
"""Characters shown of one message on a page."""
_MOST_PICTURES, _LARGEST_PICTURE = 8, 1 << 20
"""Images of a message that are shown, and the bytes of one."""

Tint = Literal["advantage", "unit credit", "log-probability", "nothing"]
TINTS: tuple[Tint, ...] = get_args(Tint)
"""What the color of a token shows."""


@dataclass(frozen=True)
class Sample:
    """One episode with its credit, if known; `why` says why it was selected."""

    why: str
    episode: Episode
    advantages: list[np.ndarray] | None
    """Per stream, [T] float32."""
    units: CreditedUnits | None


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens with equal credit."""

    text: str
    strength: float = 0.0
    """From -1 to 1: the credit as a share of the value with the strongest color."""
    tooltip: str = ""
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
    strength: float


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
    """One episode as it is shown."""

    title: str
    ending: str
    messages: list[Message]
    units: str
    failure: str
    picture: str = ""
    """The states as the data URI of an image, if the environment has a grid."""


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
    longest: int = LONGEST
    """Characters shown of one message."""


def strength(value: float, scale: float) -> float:
    """`value` as a share of `scale`, within [-1, 1]."""
    return max(-1.0, min(1.0, value / scale)) if scale > 0 else 0.0


def shortened(text: str, longest: int = LONGEST) -> str:
    """`text`, cut to `longest` characters with a note on how many there are more."""
    return text if len(text) <= longest else f"{text[:longest]}{_more(len(text) - longest)}"


def _more(characters: int) -> str:
    return f"\n[{characters} more characters are not shown]"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def scale_of(samples: Sequence[Sample], tint: Tint) -> float:
    """The value of a token in `samples` that gets the strongest color."""
    values: list[np.ndarray] = []
    if tint == "log-probability":
        return 6.0  # nats
    if tint == "advantage":
        values = [stream for sample in samples for stream in sample.advantages or []]
    elif tint == "unit credit":
        values = [sample.units.credits for sample in samples if sample.units]
    return max((float(np.abs(credit).max(initial=0.0)) for credit in values), default=0.0)


def episode_page(
    sample: Sample,
    scale: float | Look,
    decode: Decode | None,
    credited: UnitCreditRecipe | None,
    run: Path | None = None,
) -> EpisodePage:
    """What is shown of one episode; `scale` is the advantage with the strongest color, or the whole look.

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
            text = shortened(readable(content), look.longest)
            messages.append(Message(named[:100], text, pictures=pictures, problems=problems))
    messages += [_answer(number, turn, sample, decode, look) for number, turn in waiting]
    tokens = sum(turn.stop - turn.start for turn in episode.turns)
    versions = episode.versions
    mixed = len(versions) and versions.min() != versions.max()
    about = (
        f"group {episode.group} episode {episode.index}",
        f"seed {episode.seed}",
        f"return {episode.total_reward:+.3f}",
        _counted(len(episode.turns), "turn"),
        _counted(tokens, "token"),
        f"versions {versions.min()} to {versions.max()}" if mixed else f"version {episode.version}",
    )
    return EpisodePage(
        f"{sample.why}{': ' if sample.why else ''}{' · '.join(about)}",
        "success" if episode.success else episode.outcome.value,
        messages,
        "" if sample.units is None else _unit_summary(sample.units, credited),
        shortened(episode.failure or "", look.longest),
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


def _answer(number: int, turn: Turn, sample: Sample, decode: Decode | None, look: Look) -> Message:
    episode = sample.episode
    about = [f"turn {number}", f"reward {turn.reward:+.3f}", f"{turn.stop - turn.start} tokens", turn.stop_reason.words]
    if len(set(episode.versions.tolist())) > 1:
        versions = groupby(episode.streams[turn.stream].versions[turn.start : turn.stop].tolist())
        about.append(", ".join(f"{len(list(run))} by version {version}" for version, run in versions))
    advantages = None if sample.advantages is None else sample.advantages[turn.stream][turn.start : turn.stop]
    if advantages is not None and len(advantages):
        low, high = float(advantages.min()), float(advantages.max())
        spread = "" if low == high else f" ({low:+.3f} to {high:+.3f})"
        about.append(f"advantage {float(advantages.mean()):+.3f}{spread}")
    if turn.info.get("tool_calls"):
        about.append(_counted(turn.info["tool_calls"], "tool call"))
    counts = [(turn.info.get(f"{kind}_calls"), f"{kind} tool call") for kind in ("malformed", "failed")]
    bad_calls = ", ".join(_counted(count, noun) for count, noun in counts if isinstance(count, int) and count)
    verdict = ""
    match turn.info.get("judge"):
        case {"score": int() | float() as score, "reason": str(reason)}:
            verdict = f"judge {score:.2f}: {reason}"
    message = Message(
        "assistant",
        about=" · ".join(about),
        rejected=shortened(str(turn.info.get("rejected") or bad_calls), look.longest),
        verdict=shortened(verdict, look.longest),
        turn=number,
    )
    if decode is not None and episode.streams:
        aligned = align(episode.streams[turn.stream].ids[turn.start : turn.stop].tolist(), decode)
        tokens = _tokens(number, turn, sample, look, advantages)
        if sample.units is not None:
            return replace(message, units=tuple(_unit_rows(sample, turn, sample.units, aligned, tokens)))
        if tokens is not None and len(tokens.values):
            return replace(message, pieces=tuple(tokens.pieces(aligned, 0, len(tokens.values))))
    return replace(message, text=shortened(turn.answer, look.longest))


@dataclass(frozen=True)
class _Tokens:
    """The values of the n tokens of an answer that its pieces show."""

    values: np.ndarray
    """[n] float32: what the color shows."""
    look: Look
    notes: list[str] | None = None
    """All values of each token as text; None if tokens with equal values are one piece."""
    parted: int | None = None
    """The token at which the answer parts from another one."""

    def pieces(self, aligned: AlignedText, first: int, stop: int) -> Iterator[Piece]:
        """The tokens `first` to `stop`, cut at `look.longest` characters."""
        values = self.values[first:stop].tolist()
        runs = groupby(values) if self.notes is None else ((value, [value]) for value in values)
        start = first
        for value, same in runs:
            count = len(list(same))
            text = aligned.slice(start, start + count)
            left = self.look.longest - int(aligned.offsets[start] - aligned.offsets[first])
            many = f", {count} tokens" if count > 1 else ""
            note = f"{value:+.4f}{many}" if self.notes is None else self.notes[start]
            yield Piece(text[:left], strength(value, self.look.scale), note, start == self.parted)
            if len(text) > left:
                yield Piece(_more(len(aligned.slice(first, stop)) - self.look.longest))
                return
            start += count


def _tokens(number: int, turn: Turn, sample: Sample, look: Look, advantages: np.ndarray | None) -> _Tokens | None:
    """What the pieces of an answer show; None where no color is known and tokens are not shown separately."""
    if not look.each:
        return None if advantages is None else _Tokens(advantages, look)
    stream, here = sample.episode.streams[turn.stream], slice(turn.start, turn.stop)
    logprobs = stream.rollout_logprobs[here]
    none, notes = np.zeros(len(logprobs), np.float32), []
    credits = none.copy()
    if sample.units is not None:
        for unit, start, stop, _ in _units_in_turn(sample.episode, turn, sample.units):
            credits[start:stop] = sample.units.credits[unit]
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


def _units_in_turn(episode: Episode, turn: Turn, units: CreditedUnits) -> Iterator[tuple[int, int, int, bool]]:
    """(unit, start, stop, continued) of each unit of `turn`. Positions are in the answer; `continued` units start in an
    earlier answer."""
    before = sum(int(stream.sampled.sum()) for stream in episode.streams[: turn.stream])
    first = before + int(episode.streams[turn.stream].sampled[: turn.start].sum())
    for unit, (start, stop) in enumerate(units.spans):
        low, high = max(start, first), min(stop, first + turn.stop - turn.start)
        if low < high:
            yield unit, low - first, high - first, start < first


def _unit_rows(
    sample: Sample, turn: Turn, units: CreditedUnits, aligned: AlignedText, tokens: _Tokens | None
) -> Iterator[UnitRow]:
    """Units in order. A unit that began in an earlier answer shows its credit there. Colors are scaled by the episode's largest
    credit."""
    body = turn.stop - turn.start - (turn.stop_reason is StopReason.END_TOKEN)
    largest = float(np.abs(units.credits).max(initial=0.0))
    numbers = np.cumsum(units.spans.is_unit)
    for unit, start, stop, continued in _units_in_turn(sample.episode, turn, units):
        exact = aligned.slice(start, min(stop, body)) if start < body else ""
        text = printable(exact).strip() or (repr(exact) if exact else "")
        ending = printable(aligned.slice(body, stop)) if stop > body else ""
        yield UnitRow(
            "…" if continued else str(numbers[unit]) if units.spans.is_unit[unit] else "–",
            "" if continued else f"{units.credits[unit]:+z.3f}",
            stop - start,
            # "…": the first bytes of a character that is completed in the next unit
            shortened(" ".join(filter(None, (text, ending))) or "…"),
            () if tokens is None else tuple(tokens.pieces(aligned, start, stop)),
            strength(float(units.credits[unit]), largest),
        )


def _unit_summary(units: CreditedUnits, recipe: UnitCreditRecipe | None) -> str:
    """How the credits of an episode sum to its outcome, and how they are used. `recipe` is None if unknown."""
    parts = [(units.empty_value, "empty answer"), (float(units.credits.sum()), "units"), (units.residual, "residual")]
    lines = [f"outcome {units.outcome:+z.3f} = " + "  ".join(f"{value:+z.3f} {name}" for value, name in parts)]
    channel = "an advantage" if isinstance(units, UnitAdvantages) else "a reward"
    if recipe is None:
        lines.append(f"unit credit is {channel}")
    else:
        lines.append(f"{recipe.type}, {channel} · {recipe.beta:g} × units + {1 - recipe.beta:g} × outcome")
    if not units.has_units:
        lines.append("no units found; all credit is that of the outcome")
    elif not units.spans.is_unit.all():
        lines.append("– marks text outside the segmenter's units")
    return "\n".join(lines)


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
    for number, turns in enumerate(zip(a.turns, b.turns, strict=False)):
        ids_a, ids_b = (
            one.streams[turn.stream].ids[turn.start : turn.stop].tolist()
            for one, turn in zip((a, b), turns, strict=True)
        )
        if ids_a == ids_b:
            continue
        differs = (i for i, (x, y) in enumerate(zip(ids_a, ids_b, strict=False)) if x != y)
        token = next(differs, min(len(ids_a), len(ids_b)))
        shown = [
            repr(decode(ids[token : token + 8]))[:80] if decode and ids[token:] else "the end" for ids in (ids_a, ids_b)
        ]
        sentence = (
            f"Episode {a.index} (return {a.total_reward:+.3f}) and episode {b.index} (return {b.total_reward:+.3f}) differ "
            f"first in turn {number}, after {_counted(token, 'common token')}: {shown[0]} against {shown[1]}."
        )
        return Parting(best, worst, number, token, sentence)
    return None


def unit_credit_recipe(run: RunDirectory) -> UnitCreditRecipe | None:
    """The `unit_credit` section of the run's recipe; None if it has none or cannot be read."""
    try:
        return getattr(run.load_recipe(), "unit_credit", None)
    except InputError:
        return None


def token_decoder(run: RunDirectory) -> Decode | None:
    """The decoder of the run's tokenizer; None, with a message on stderr, if the tokenizer cannot be loaded.

    The tokenizer saved in the run is tried first, because the initial model may no longer exist. Code that belongs to a
    model is never executed.
    """
    for directory in (run.path / "model", *sorted(run.checkpoints.glob("step_*/policy"))[::-1]):
        if (decode := _decoder_in(directory, run.path)) is not None:
            return decode
    try:
        model = run.load_recipe().model.model_copy(update={"trust_remote_code": False})
        return _decoder_in(Path(model.path)) or _loaded_decoder(model.model_dump_json())
    except Exception as error:
        print(printable(f"showing token ids because the tokenizer cannot be loaded: {error}"), file=sys.stderr)
        return None


def _decoder_in(directory: Path, run: Path | None = None) -> Decode | None:
    """The decoder of the `tokenizer.json` in a directory, of a run or elsewhere; None if there is none, or it is damaged."""
    file = directory / "tokenizer.json" if run else (directory / "tokenizer.json").resolve()
    # The time of the last change of the inode: another file may have the same time of modification.
    return _saved_decoder(file, run, file.stat().st_ctime_ns) if is_file(file) else None


@lru_cache(maxsize=4)
def _loaded_decoder(model: str) -> Decode:
    """The decoder of the model of a recipe, given as JSON. InputError if the model is not on this machine."""
    from posttrain.models.files import on_disk

    recipe = ModelRecipe.model_validate_json(model)
    if not on_disk(recipe.path):  # looking at a run downloads nothing that it names, and imports no torch to say so
        raise InputError(f"{recipe.path} is not on this machine")
    from posttrain.models.load import load_tokenizer

    tokenizer = load_tokenizer(recipe)
    return decoding(partial(tokenizer.decode, clean_up_tokenization_spaces=False))


@lru_cache(maxsize=4)
def _saved_decoder(file: Path, run: Path | None, changed: int) -> Decode | None:
    """The decoder of a `tokenizer.json` as it was at time `changed`, without torch and transformers; None if it is damaged."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_buffer(read_bytes(file, 256 << 20, run))
        return decoding(partial(tokenizer.decode, skip_special_tokens=False))
    except Exception:  # a damaged tokenizer counts as missing, for any error
        return None
