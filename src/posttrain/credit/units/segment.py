"""Segmentation of answers into units, as a recipe describes."""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Literal

import numpy as np

from posttrain.credit.units.offsets import AlignedText, Decode, align
from posttrain.credit.units.spans import Spans
from posttrain.episode import Stream
from posttrain.recipe.units import EntropyUnits, StepUnits, TextUnits, UnitsRecipe, WholeUnits

Location = tuple[int, int]
"""Where a unit may begin in a text: the first and the last possible character of the cut."""


def step_starts(text: str, pattern: str) -> list[Location]:
    """Locations where the steps of `text` begin: from the start of the label's line to the label.

    Every match of `pattern` (multi-line) is a candidate. If the pattern has a group `label`, labels must
    count 1, 2, 3, … or A, B, …, Z, AA, …: a candidate that does not continue the count is text inside the current step.
    If both numbers and letters count up, as in lettered steps with numbered parts, the longer count wins. Of equal
    counts, the one that begins first wins.

    The published code treats every line that matches `^(\\*?[A-Z]{1,2}\\.)\\s+` as a step, including `OK. fine`, and
    rejects numbers although its documentation allows them. That pattern, which has no group `label`, reproduces this. Its
    offsets are those of the text without blank lines; offsets here are those of the text itself.
    """
    label = re.compile(pattern, re.MULTILINE)
    matches = list(label.finditer(text))
    if "label" in label.groupindex:
        counts: dict[bool, list[re.Match[str]]] = {True: [], False: []}  # by whether labels are letters
        for letters, count in counts.items():
            for match in matches:
                name = match["label"] or ""
                if name.isdigit() != letters and ordinal_of(name) == len(count) + 1:
                    count.append(match)
        matches = max(counts.values(), key=lambda count: (len(count), -count[0].start() if count else 0))
    return [(match.start(), _visible(text, match.start())) for match in matches]


def ordinal_of(label: str) -> int | None:
    """1 for `A` or `1`, 26 for `Z` or `26`, 27 for `AA`; None for other text."""
    if label.isascii() and label.isdigit():
        return int(label)
    number = 0
    for letter in label.upper():
        if letter not in ascii_uppercase:
            return None
        number = number * 26 + ascii_uppercase.index(letter) + 1
    return number or None


def _visible(text: str, start: int) -> int:
    """Index of the first non-space character from `start` on; `start` if there is none."""
    match = re.compile(r"\S").search(text, start)
    return match.start() if match else start


_CLOSERS = "\"'”’»)]*_」』）"
_ENDS = (".", "!", "?", "…")
_FULL_WIDTH_ENDS = ("。", "！", "？")
_LABEL = re.compile(r"\W*(?:[A-Z]{1,2}|\d{1,3})[.)]\W*", re.ASCII)
_ABBREVIATIONS = frozenset(
    ("mr.", "mrs.", "ms.", "dr.", "prof.", "st.", "vs.", "e.g.", "i.e.", "cf.", "etc.", "fig.", "eq.", "approx.")
)
_FULL_WIDTH = re.compile(r"[。！？]+[”’」』）]*")


def sentence_starts(text: str) -> list[tuple[int, int]]:
    """Locations where the sentences of `text` begin, except the first.

    A sentence ends at a line break, at `。`, `！` or `？`, and at a word that ends in `.`, `!`, `?` or `…` (quotes and
    brackets may follow) if the next word does not begin in lower case. Labels at the start of a line (`A.`, `12)`) and
    common abbreviations do not end a sentence. Initials (`J. Smith`) do, because they look like the end of `go to Step
    B. If`.
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


def _ends(word: str, following: str) -> bool:
    bare = word.rstrip(_CLOSERS)
    if not bare.endswith(_ENDS) or following[0].islower():
        return bare.endswith(_FULL_WIDTH_ENDS)
    return bare.lstrip(_CLOSERS + "(").lower() not in _ABBREVIATIONS


OPENING, CLOSING = "<think>", "</think>"


def thinking_tokens(answer: AlignedText, opened: bool = False) -> int:
    """Number of tokens at the start of an answer that are thinking: up to `</think>` and the white space after it.

    `opened`: the prompt ended with `<think>`, so the answer begins inside the block. Returns 0 for an
    answer without thinking, and all tokens if the block was not closed. A token that contains the end of the block and
    text after it counts as thinking. The published code drops the first four tokens of every answer, which is the empty
    block of one model.
    """
    total = len(answer.offsets) - 1
    if not opened and not answer.text.lstrip().startswith(OPENING):
        return 0
    closing = answer.text.find(CLOSING)
    visible = re.compile(r"\S").search(answer.text, closing + len(CLOSING)) if closing >= 0 else None
    if visible is None:
        return total
    end = closing + len(CLOSING)
    token = int(answer.cuts([(visible.start(), visible.start())])[0])
    while token < total and (answer.offsets[token] < end or not answer.whole[token]):
        token += 1
    return token


ANSWER_OPENING, ANSWER_CLOSING = "<answer>", "</answer>"


def answer_tokens(
    part: Literal["after_thinking", "answer"], before: np.ndarray, ids: np.ndarray, ended: bool, decode: Decode
) -> np.ndarray:
    """[n] bool: the tokens of an answer that are its content rather than its format.

    `after_thinking`: those after the thinking block; none if the block is not closed. `answer`: those between the last
    `<answer>` and the next `</answer>`, or the end of the answer; tokens that contain part of a tag are excluded. The
    end token is never included. Text selects among sampled tokens, as for units; it never adds tokens.

    `before`: the token ids that precede the answer, which may end with the opening tag. `ids` [n]; `ended`: the last
    one is an end token.
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


def entropy_cuts(entropies: np.ndarray, threshold: float) -> np.ndarray:
    """[m] int64: indices of the tokens that begin a unit, except the first token (Yin et al. 2025, arXiv 2501.02790).

    `entropies` [n] float, in nats: of the distribution that each token was drawn from, under the frozen reference
    model, full vocabulary, temperature 1. Token t begins a unit iff entropies[t] > threshold.

    The authors' segmentation is called `peak` and is the plain threshold. A threshold that no entropy reaches (1000 in
    their code) gives one unit; 0 gives nearly one per token. A later variant uses the entropies of the policy in
    training, so that units change during training; pass those of the reference model instead. Raises `ValueError` if an
    entropy is not finite.
    """
    values = np.asarray(entropies, dtype=np.float64)
    if not np.isfinite(values).all():
        raise ValueError("the reference model's entropies are not all finite")
    return np.flatnonzero(values[1:] > threshold) + 1


_PROMPT_TAIL = 8
"""Tokens before an answer that are searched for the start of a thinking block."""


@dataclass(frozen=True, eq=False)
class Answer:
    """The n sampled tokens of one turn."""

    ids: np.ndarray
    """[n] int64."""
    ended: bool
    """Whether the last token is an end token. False for a truncated answer."""
    opened: bool = False
    """Whether the prompt ended with `<think>`."""
    entropies: np.ndarray | None = None
    """[n] float, in nats, for `entropy_cuts`."""


def opened(before: np.ndarray, decode: Decode, tag: str = OPENING) -> bool:
    """Whether the token ids `before` an answer [n] int64 end with `tag`, so that the answer begins inside the block."""
    return decode(before[-_PROMPT_TAIL:].tolist()).rstrip().endswith(tag)


def segment(recipe: UnitsRecipe, answers: Sequence[Answer], decode: Decode) -> Spans:
    """The units of an episode's answers over all its sampled tokens [n], one answer after the other.

    Only the unit of `outcome` spans several answers. The end token belongs to the last unit of its answer, except with
    `token`, where it is a separate unit. Only `token` units may split a character. The published code excludes the end
    token from all units and, for a truncated answer, also the last token, which it mistakes for the end token. Raises
    `ValueError` if entropies for `entropy` units are missing.
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
        cuts = text.between_characters(entropy_cuts(answer.entropies, recipe.threshold))
    else:
        cuts = _places(text, sentence_starts(text.text[text.offsets[thought] :]), thought)
    edges = np.unique(np.concatenate([[first, last], cuts[(cuts > first) & (cuts < last)]])).astype(np.int64)
    if recipe.max_units is not None and first < last and len(edges) - 1 > recipe.max_units:
        # The last unit takes all that follow, as in the published code, which has no limit for units by entropy.
        edges = np.concatenate([edges[: recipe.max_units], edges[-1:]])
    edges = np.unique(np.concatenate([[0, thought], edges, [body]])).astype(np.int64)
    is_unit = (edges[:-1] >= first) & (edges[1:] <= last)
    edges[-1] = len(answer.ids)
    return Spans(edges, is_unit)


def _steps(recipe: StepUnits, text: AlignedText, thought: int) -> tuple[int, int, np.ndarray]:
    """The first token of the steps, the token after the last step, and the tokens that begin a step."""
    shift = int(text.offsets[thought])
    shown = text.text[shift:]
    starts = step_starts(shown, recipe.pattern)
    total = len(text.offsets) - 1
    if not starts:
        return total, total, np.zeros(0, dtype=np.int64)
    if not shown[: starts[0][0]].strip():
        starts[0] = (0, 0)
    cuts = _places(text, starts, thought)
    closing = None
    if recipe.closing is not None:
        closing = re.compile(recipe.closing, re.MULTILINE).search(shown, starts[-1][1] + 1)
    if closing is None:
        return int(cuts[0]), total, cuts
    (end,) = _places(text, [(closing.start(), _visible(shown, closing.start()))], thought)
    return int(cuts[0]), int(end), cuts


def _places(text: AlignedText, places: list[tuple[int, int]], thought: int) -> np.ndarray:
    """The tokens before which to cut at `places`, which are relative to the token `thought`."""
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
    """[K] int64, increasing: position in the stream of the last token of each span, over all answers. A model that rewards
    units rewards every span, also those that are not units.

    The last one is the last sampled token, so the reward there is that of the whole answer. Arguments as in
    `stream_answers`.
    Raises `ValueError` if entropies for `entropy` units are missing.
    """
    spans = segment(recipe, stream_answers(stream, end_tokens, decode, entropies), decode)
    return np.flatnonzero(stream.sampled)[spans.cuts[1:] - 1]
