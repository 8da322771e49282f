"""From a recipe to the units of answers."""

import heapq
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from string import ascii_uppercase
from typing import Literal

import numpy as np

from posttrain.credit.units.offsets import AlignedText, Decode, align
from posttrain.credit.units.spans import Spans
from posttrain.episode import Episode, StopReason, Stream
from posttrain.recipe.units import EntropyUnits, StepUnits, TextUnits, UnitsRecipe, WholeUnits

Location = tuple[int, int]
"""Where a unit may begin in a text: the first and the last character at which to cut."""


def step_starts(text: str, pattern: str, ordinal: bool) -> list[Location]:
    """Where the steps of `text` begin: from the start of the label's line to the label.

    Every match of `pattern` (multi-line) is a candidate. With `ordinal`, labels (the pattern's group `label`) must
    count 1, 2, 3, … or A, B, …, Z, AA, …, from the first on: a candidate that is not the successor of the step before
    it is text inside that step. Where numbers and letters both count up, as in lettered steps with numbered parts,
    the longer count is the steps, of equal ones the one that begins first.

    The published code takes every line that `^(\\*?[A-Z]{1,2}\\.)\\s+` matches for a step, `OK. fine` among them, and
    accepts no numbers though its documentation says so; `ordinal` false with that pattern is that reading. It counts
    offsets in a text without its blank lines; here they are those of the text itself.
    """
    matches = list(re.finditer(pattern, text, re.MULTILINE))
    if ordinal:
        counts = [_counting(matches, letters) for letters in (True, False)]
        matches = max(counts, key=lambda count: (len(count), -count[0].start() if count else 0))
    return [(match.start(), _visible(text, match.start())) for match in matches]


def closing_start(text: str, pattern: str, after: int) -> list[Location]:
    """Where what follows the steps begins: the first match of `pattern` after the character `after`; or nothing."""
    found = re.compile(pattern, re.MULTILINE).search(text, after + 1)
    return [(found.start(), _visible(text, found.start()))] if found else []


def ordinal_of(label: str) -> int | None:
    """1 for `A` or `1`, 26 for `Z` or `26`, 27 for `AA`; None for what is neither letters nor a number."""
    if label.isascii() and label.isdigit():
        return int(label)
    number = 0
    for letter in label.upper():
        if letter not in ascii_uppercase:
            return None
        number = number * 26 + ascii_uppercase.index(letter) + 1
    return number or None


def _counting(matches: Sequence[re.Match[str]], letters: bool) -> list[re.Match[str]]:
    """The matches whose labels count up from 1, of letters or of numbers."""
    count: list[re.Match[str]] = []
    for match in matches:
        label = match["label"] or ""
        if label.isdigit() != letters and ordinal_of(label) == len(count) + 1:
            count.append(match)
    return count


def _visible(text: str, start: int) -> int:
    """The first character from `start` on that is not white space; `start` where there is none."""
    found = re.compile(r"\S").search(text, start)
    return found.start() if found else start


_CLOSERS = "\"'”’»)]*_」』）"
_ENDS = (".", "!", "?", "…")
_FULL_WIDTH_ENDS = ("。", "！", "？")
_LABEL = re.compile(r"\W*(?:[A-Z]{1,2}|\d{1,3})[.)]\W*", re.ASCII)
_ABBREVIATIONS = frozenset(
    ("mr.", "mrs.", "ms.", "dr.", "prof.", "st.", "vs.", "e.g.", "i.e.", "cf.", "etc.", "fig.", "eq.", "approx.")
)
_FULL_WIDTH = re.compile(r"[。！？]+[”’」』）]*")


def sentence_starts(text: str) -> list[tuple[int, int]]:
    """Where the sentences of `text` begin, the first one aside.

    A sentence ends with its line, with `。`, `！` or `？`, and with a word that ends in `.`, `!`, `?` or `…` (quotes and
    brackets may follow) before a word that does not begin in lower case. A label at the start of a line (`A.`, `12)`)
    and common abbreviations end none. An initial (`J. Smith`) does: it looks like the end of `go to Step B. If`.
    """
    ends = [match.end() for match in _FULL_WIDTH.finditer(text)]
    places = [(end, end) for end in ends if end < len(text) and not text[end].isspace()]
    before, first_of_line = None, True
    for word in re.finditer(r"\S+", text):
        if before is not None:
            line = text.rfind("\n", before.end(), word.start())
            ended = line >= 0 or (not (first_of_line and _LABEL.fullmatch(before[0])) and _ends(before[0], word[0]))
            if ended:
                places.append((line + 1 if line >= 0 else before.end(), word.start()))
            first_of_line = line >= 0
        before = word
    return sorted(places)


def paragraph_starts(text: str) -> list[tuple[int, int]]:
    """Where the paragraphs of `text` begin, the first one aside: at the first line with something on it after a line
    with nothing but white space."""
    places, start, blank, begun = [], 0, False, False
    for line in text.split("\n"):
        shown = line.strip()
        if shown and blank and begun:
            places.append((start, start + len(line) - len(line.lstrip())))
        blank, begun = not shown, begun or bool(shown)
        start += len(line) + 1
    return places


def _ends(word: str, following: str) -> bool:
    bare = word.rstrip(_CLOSERS)
    if not bare.endswith(_ENDS) or following[0].islower():
        return bare.endswith(_FULL_WIDTH_ENDS)
    return bare.lstrip(_CLOSERS + "(").lower() not in _ABBREVIATIONS


OPENING, CLOSING = "<think>", "</think>"


def thinking_tokens(answer: AlignedText, opened: bool = False) -> int:
    """How many tokens at the start of an answer are its thinking: up to `</think>`, and the white space after it.

    `opened`: the prompt ended with `<think>`, so the answer begins inside the block. 0 for an answer without thinking;
    all tokens where the block was not closed. A token that holds the end of the block and something after it is counted
    as thinking. The published code drops the first four tokens of every answer, which is the empty block of one model.
    """
    total = len(answer.offsets) - 1
    if not opened and not answer.text.lstrip().startswith(OPENING):
        return 0
    found = answer.text.find(CLOSING)
    visible = re.compile(r"\S").search(answer.text, found + len(CLOSING)) if found >= 0 else None
    if visible is None:
        return total
    end = found + len(CLOSING)
    token = int(answer.cuts([(visible.start(), visible.start())])[0])
    while token < total and (answer.offsets[token] < end or not answer.whole[token]):
        token += 1
    return token


ANSWER_OPENING, ANSWER_CLOSING = "<answer>", "</answer>"


def answer_tokens(
    part: Literal["after_thinking", "answer"], before: np.ndarray, ids: np.ndarray, ended: bool, decode: Decode
) -> np.ndarray:
    """[n] bool: the tokens of an answer that are its content, not its form.

    `after_thinking`: those after the thinking block; none of a block that is not closed. `answer`: those that lie between the
    last `<answer>` and the `</answer>` after it, or the end; a token that also holds a part of a tag is not among them. The
    end token is in neither. The text only chooses among sampled tokens, as it does for units.

    `before`: the token ids in front of the answer, which may end with the opening tag. `ids` [n]; `ended`: the last one is an
    end token.
    """
    marks = np.zeros(len(ids), dtype=bool)
    body = len(ids) - ended
    if body <= 0:
        return marks
    text = align(ids[:body].tolist(), decode)
    if part == "after_thinking":
        marks[thinking_tokens(text, opened(before, decode)) : body] = True
        return marks
    start = text.text.rfind(ANSWER_OPENING)
    if start >= 0:
        start += len(ANSWER_OPENING)
    elif opened(before, decode, ANSWER_OPENING):
        start = 0
    else:
        return marks
    end = text.text.find(ANSWER_CLOSING, start)
    end = len(text.text) if end < 0 else end
    marks[:body] = (text.offsets[:-1] >= start) & (text.offsets[1:] <= end)
    return marks


def entropy_cuts(
    entropies: np.ndarray, threshold: float, peak: Literal["threshold", "local_max"] = "threshold"
) -> np.ndarray:
    """[m] int64: the tokens that begin a unit, the first token aside (Yin et al. 2025, arXiv 2501.02790).

    `entropies` [n] float, in nats: of the distribution that each token was drawn from, under the frozen reference
    model, full vocabulary, temperature 1. `threshold`: token t begins a unit iff entropies[t] > threshold. `local_max`:
    and if it is also above its neighbours; of equal neighbours that stand above the others, the first.

    The authors' segmentation is called `peak` and is the plain threshold. A threshold no entropy reaches (their 1000)
    gives one unit, 0 nearly one per token. A later variant takes the entropies of the policy in training, so that units
    move while they are learned from; the caller passes those of the reference. `ValueError` for entropies that are not
    finite.
    """
    values = np.asarray(entropies, dtype=np.float64)
    if not np.isfinite(values).all():
        raise ValueError("the reference model's entropies are not all finite")
    high = values > threshold
    if peak == "local_max":
        high &= _peaks(values)
    return np.flatnonzero(high[1:]) + 1


def _peaks(values: np.ndarray) -> np.ndarray:
    """[n] bool: the first token of each run of equal values that lie above what stands on both sides of the run."""
    heads = np.flatnonzero(np.diff(values, prepend=np.nan) != 0)  # NaN differs from everything
    runs = np.concatenate([[-np.inf], values[heads], [-np.inf]])
    found = np.zeros(len(values), dtype=bool)
    found[heads] = (runs[1:-1] > runs[:-2]) & (runs[1:-1] > runs[2:])
    return found


def merge_tail(cuts: np.ndarray, most: int) -> np.ndarray:
    """`cuts` [K + 1] of K units with at most `most` left: the first ones stay and the last takes all that follows.

    As in the published code for labelled steps, which forgets the cap for units by entropy.
    """
    return cuts if len(cuts) - 1 <= most else np.concatenate([cuts[:most], cuts[-1:]])


def merge_small(cuts: np.ndarray, most: int) -> np.ndarray:
    """`cuts` [K + 1] of K units with at most `most` left: again and again the unit with the fewest tokens joins the
    smaller of its neighbours; of equal ones, the earlier. O(K log K)."""
    edges = cuts.tolist()
    count = len(edges) - 1
    size = [stop - start for start, stop in pairwise(edges)]
    left, right = list(range(-1, count - 1)), list(range(1, count + 1))
    smallest = [(tokens, unit) for unit, tokens in enumerate(size)]
    heapq.heapify(smallest)
    remaining = count
    while remaining > most:
        tokens, unit = heapq.heappop(smallest)
        if size[unit] != tokens:
            continue  # it has grown, or is gone, since this was written
        before, after = left[unit], right[unit]
        into = before if after == count or (before >= 0 and size[before] <= size[after]) else unit
        gone = unit if into == before else after
        size[into] += size[gone]
        size[gone] = 0
        right[into] = right[gone]
        if right[gone] < count:
            left[right[gone]] = into
        heapq.heappush(smallest, (size[into], into))
        remaining -= 1
    return np.array([*(edges[unit] for unit in range(count) if size[unit]), edges[-1]], dtype=np.int64)


_PROMPT_TAIL = 8
"""Tokens before an answer that are looked at for a thinking block the prompt has opened."""


@dataclass(frozen=True, eq=False)
class Answer:
    """The n sampled tokens of one turn."""

    ids: np.ndarray
    """[n] int64."""
    ended: bool
    """The last token is an end token; false for an answer that was cut off."""
    opened: bool = False
    """The prompt ended with `<think>`."""
    entropies: np.ndarray | None = None
    """[n] float, nats: as `entropy_cuts` takes them."""


def episode_answers(episode: Episode, decode: Decode, entropies: Sequence[np.ndarray] | None = None) -> list[Answer]:
    """The answers of an episode in their order. `entropies`: per stream [T] float, aligned with `Stream.ids`."""
    answers = []
    for turn in episode.turns:
        ids = episode.streams[turn.stream].ids
        answers.append(
            Answer(
                ids=ids[turn.start : turn.stop],
                ended=turn.stop_reason is StopReason.END_TOKEN,
                opened=opened(ids[: turn.start], decode),
                entropies=None if entropies is None else entropies[turn.stream][turn.start : turn.stop],
            )
        )
    return answers


def opened(before: np.ndarray, decode: Decode, tag: str = OPENING) -> bool:
    """Whether the token ids `before` [n] int64 an answer end with `tag`, so that it begins inside the block."""
    return decode(before[-_PROMPT_TAIL:].tolist()).rstrip().endswith(tag)


def segment(recipe: UnitsRecipe, answers: Sequence[Answer], decode: Decode) -> Spans:
    """The units of an episode's answers over all its sampled tokens [n], one answer after the other.

    Only the unit of `outcome` reaches from one answer into the next. The end token belongs to the last unit of its
    answer and is not read; only with `token` is it a unit. Units divide no character, but with `token`. The published
    code leaves the end token out of every unit and, where an answer was cut off, its last token as well, which it takes
    for the end token. `ValueError` where `entropy` units lack entropies.
    """
    if isinstance(recipe, WholeUnits):
        lengths = [len(answer.ids) for answer in answers]
        inner = {"outcome": np.zeros(0), "turn": np.cumsum(lengths), "token": np.arange(sum(lengths))}[recipe.type]
        return Spans.from_cuts(sum(lengths), inner)
    return Spans.concatenate([_of_answer(recipe, answer, decode) for answer in answers])


def _of_answer(recipe: StepUnits | EntropyUnits | TextUnits, answer: Answer, decode: Decode) -> Spans:
    body = len(answer.ids) - answer.ended
    if body <= 0:
        return Spans.from_cuts(len(answer.ids), np.zeros(0), is_unit=False)
    text = align(answer.ids[:body].tolist(), decode)
    thought = thinking_tokens(text, answer.opened) if recipe.thinking == "whole" else 0
    first, last, cuts = thought, body, np.zeros(0, dtype=np.int64)
    if isinstance(recipe, StepUnits):
        first, last, cuts = _steps(recipe, text, thought)
    elif isinstance(recipe, EntropyUnits):
        if answer.entropies is None or len(answer.entropies) != len(answer.ids):
            raise ValueError("units by entropy need one entropy of the reference model per sampled token")
        cuts = text.between_characters(entropy_cuts(answer.entropies, recipe.threshold, recipe.peak))
    else:
        read = sentence_starts if recipe.type == "sentence" else paragraph_starts
        cuts = _places(text, read(text.text[text.offsets[thought] :]), thought)
    edges = np.unique(np.concatenate([[first, last], cuts[(cuts > first) & (cuts < last)]])).astype(np.int64)
    if recipe.max_units is not None and first < last:
        edges = (merge_tail if recipe.merge == "merge_tail" else merge_small)(edges, recipe.max_units)
    edges = np.unique(np.concatenate([[0, thought], edges, [body]])).astype(np.int64)
    found = (edges[:-1] >= first) & (edges[1:] <= last)
    edges[-1] = len(answer.ids)
    return Spans(edges, found)


def _steps(recipe: StepUnits, text: AlignedText, thought: int) -> tuple[int, int, np.ndarray]:
    """The first token of the steps, the one after their last, and the tokens that begin a step."""
    shift = int(text.offsets[thought])
    said = text.text[shift:]
    starts = step_starts(said, recipe.pattern, recipe.ordinal)
    total = len(text.offsets) - 1
    if not starts:
        return total, total, np.zeros(0, dtype=np.int64)
    if not said[: starts[0][0]].strip():
        starts[0] = (0, 0)
    closing = closing_start(said, recipe.closing, starts[-1][1]) if recipe.closing is not None else []
    cuts = _places(text, starts, thought)
    return int(cuts[0]), int(_places(text, closing, thought)[0]) if closing else total, cuts


def _places(text: AlignedText, places: list[tuple[int, int]], thought: int) -> np.ndarray:
    """The tokens before which to cut at `places`, which are counted from the token `thought` on."""
    shift = int(text.offsets[thought])
    return np.maximum(text.cuts([(first + shift, last + shift) for first, last in places]), thought)


def stream_answers(
    stream: Stream, end_tokens: Collection[int], decode: Decode, entropies: np.ndarray | None = None
) -> list[Answer]:
    """The answers of a stream, in order: each run of sampled tokens of one turn.

    An answer has ended if its last token is one of `end_tokens`. `entropies` [n] float, nats: one per sampled token.
    """
    places = np.flatnonzero(stream.sampled)
    apart = (np.diff(places) > 1) | (np.diff(stream.turn[places]) != 0)
    cuts = np.flatnonzero(apart) + 1
    shares = [None] * (len(cuts) + 1) if entropies is None else np.split(entropies, cuts)
    return [
        Answer(
            ids=stream.ids[run],
            ended=int(stream.ids[run[-1]]) in end_tokens,
            opened=opened(stream.ids[: run[0]], decode),
            entropies=share,
        )
        for run, share in zip(np.split(places, cuts), shares, strict=True)
    ]


def unit_ends(
    recipe: UnitsRecipe,
    stream: Stream,
    end_tokens: Collection[int],
    decode: Decode,
    entropies: np.ndarray | None = None,
) -> np.ndarray:
    """[K] int64, rising: the place in the stream of the last token of each unit, all answers together.

    The last one is the last sampled token, so a reward read there is that of the whole. Arguments as in `stream_answers`;
    `ValueError` where `entropy` units lack entropies.
    """
    found = segment(recipe, stream_answers(stream, end_tokens, decode, entropies), decode)
    return np.flatnonzero(stream.sampled)[found.cuts[1:] - 1]
