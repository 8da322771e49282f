"""From a recipe to the units of answers."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from posttrain.credit.units.entropy import entropy_cuts
from posttrain.credit.units.limits import merge_small, merge_tail
from posttrain.credit.units.offsets import AlignedText, Decode, align
from posttrain.credit.units.spans import Spans, joined, spans
from posttrain.credit.units.steps import closing_start, step_starts
from posttrain.credit.units.text import paragraph_starts, sentence_starts
from posttrain.credit.units.thinking import OPENING, thinking_tokens
from posttrain.recipe.units import EntropyUnits, StepUnits, TextUnits, UnitsRecipe, WholeUnits
from posttrain.rollout.streams import Episode, StopReason

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


def answers_of(episode: Episode, decode: Decode, entropies: Sequence[np.ndarray] | None = None) -> list[Answer]:
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


def opened(before: np.ndarray, decode: Decode) -> bool:
    """Whether the token ids `before` [n] int64 an answer end with `<think>`, so that it begins inside the block."""
    return decode(before[-_PROMPT_TAIL:].tolist()).rstrip().endswith(OPENING)


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
        return spans(sum(lengths), inner)
    return joined([_of_answer(recipe, answer, decode) for answer in answers])


def _of_answer(recipe: StepUnits | EntropyUnits | TextUnits, answer: Answer, decode: Decode) -> Spans:
    body = len(answer.ids) - answer.ended
    if body <= 0:
        return spans(len(answer.ids), np.zeros(0), found=False)
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
