"""Right solutions of held-out questions, the same with one wrong step, and both as a reward model reads them."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.credit.units.offsets import align
from posttrain.credit.units.segment import segment, stream_answers
from posttrain.credit.units.spans import Spans
from posttrain.data.rendering import Renderer
from posttrain.episode import Stream
from posttrain.errors import InputError
from posttrain.models.reward import RewardModel
from posttrain.recipe.units import UnitsRecipe
from posttrain.seeds import random_stream
from posttrain.training.rows import stream_of
from quality.injection import Injected, NotExactError, inject


@dataclass(frozen=True)
class Solved:
    """A question, its right solution and the same with one wrong step."""

    row: int
    question: str
    injected: Injected

    def pair(self) -> dict[str, Any]:
        """As a preference pair."""
        asked = {"role": "user", "content": self.question}
        answers = {"chosen": self.injected.right, "rejected": self.injected.wrong}
        return {"id": self.row} | {k: [asked, {"role": "assistant", "content": a}] for k, a in answers.items()}


@dataclass(frozen=True, eq=False)
class Case:
    """A `Solved` as tokens. Both answers have K units, and `step` is the number of the wrong one."""

    label: str
    right: Stream
    wrong: Stream
    right_units: Spans
    wrong_units: Spans
    step: int


def read_jsonl(file: Path) -> list[dict[str, Any]]:
    """The rows of a file of JSON lines; InputError if there is none."""
    try:
        with file.open(encoding="utf-8") as lines:
            return [json.loads(line) for line in lines if line.strip()]
    except OSError as error:
        raise InputError(f"{file} cannot be read ({error.strerror}); put the files of GSM8K there") from error


def solve(rows: Iterable[tuple[int, dict[str, Any]]], final: str, most: int, seed: int) -> tuple[list[Solved], Counter]:
    """Wrong solutions for at most `most` of the numbered rows `question`, `answer`, in their order, and how many rows
    could not be made wrong exactly, by reason. `final` stands before the final answer instead of `#### `."""
    found: list[Solved] = []
    skipped: Counter[str] = Counter()
    for number, row in rows:
        if len(found) == most:
            break
        solution = row["answer"].replace("#### ", final)
        try:
            made = inject(row["question"], solution, random_stream("credit quality", seed, number))
        except NotExactError as error:
            skipped[str(error)] += 1
        else:
            found.append(Solved(number, row["question"], made))
    return found, skipped


class Reader:
    """Makes tokens and units of questions and answers as the training rows of a reward model were made."""

    def __init__(self, model: RewardModel, segmenter: UnitsRecipe) -> None:
        self.model = model
        self.segmenter = segmenter
        self.renderer = Renderer(model.tokenizer, model.end_tokens)
        self.decode = partial(model.tokenizer.decode, clean_up_tokenization_spaces=False)

    def stream(self, question: str, answer: str) -> Stream:
        """The tokens of prompt and answer, the answer's own and its end token marked."""
        prompt = self.renderer.prompt([{"role": "user", "content": question}])
        ids = np.array([*prompt, *self.renderer.answer(answer)], dtype=np.int64)
        return stream_of(ids, np.arange(len(ids)) >= len(prompt))

    def units(self, stream: Stream) -> Spans:
        """The units of the answer."""
        return segment(self.segmenter, stream_answers(stream, self.model.end_tokens, self.decode), self.decode)

    def case(self, solved: Solved) -> Case | None:
        """None where the change moves a boundary of units, there are fewer than 3, or it is in the last one."""
        right, wrong = (self.stream(solved.question, a) for a in (solved.injected.right, solved.injected.wrong))
        units = [self.units(stream) for stream in (right, wrong)]
        steps = [self._unit_at(*part, solved.injected.place) for part in zip((right, wrong), units, strict=True)]
        last = len(units[0]) - 1
        if len(units[1]) - 1 != last or steps[0] != steps[1] or last < 2 or steps[0] == last:
            return None
        return Case(f"row {solved.row}", right, wrong, *units, steps[0])

    def _unit_at(self, stream: Stream, units: Spans, place: int) -> int:
        """The unit that holds the character `place` of the answer."""
        text = align(stream.ids[stream.sampled][:-1].tolist(), self.decode)
        token = int(np.searchsorted(text.offsets, place, side="right")) - 1
        return int(units.unit_of_token[token])


def pairs_of(rows: Sequence[dict[str, Any]]) -> list[tuple[str, str, str]]:
    """Question, chosen and rejected answer of each preference pair."""
    return [(row["chosen"][0]["content"], row["chosen"][-1]["content"], row["rejected"][-1]["content"]) for row in rows]
