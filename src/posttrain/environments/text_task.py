"""One prompt, one answer, one score: from a rule, a verifier or a judge; a reward model scores outside of here."""

import copy
import json
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from threading import Lock
from typing import Any, Literal

import numpy as np
from pydantic import Field, model_validator

from posttrain.data.examples import read_examples
from posttrain.data.messages import Prompt
from posttrain.data.problems import Problems
from posttrain.environments.game import play, require
from posttrain.environments.judge import judge_score, prepare_judge
from posttrain.environments.protocol import Environment, Message, Observation, Step, require_rows
from posttrain.environments.rules import SCORE, load_rule
from posttrain.errors import InputError
from posttrain.plugins import require_module
from posttrain.recipe.components import EnvironmentRecipe
from posttrain.recipe.data import ColumnsRecipe, Sources
from posttrain.recipe.judge import JudgeRecipe, ReasoningGymRecipe
from posttrain.seeds import derive_seed

_WRONG = "?"
"""What `validate` gives as a wrong answer."""


class TextTaskRecipe(EnvironmentRecipe):
    """Keys of `text_task`."""

    type: Literal["text_task"] = "text_task"
    """One prompt, one answer, one score."""
    max_turns: Literal[1] = 1
    """One answer ends the episode."""
    prompts: Sources = []
    """Rows to answer: a path, or a list of paths and sections. The environment seed is the row, counted from 0 over all sources."""
    columns: ColumnsRecipe = ColumnsRecipe()
    """What the columns of `prompts` are called."""
    reasoning_gym: ReasoningGymRecipe | None = None
    """Tasks of reasoning-gym instead of `prompts`; its own verifier scores unless `rule` or `judge` is given."""
    strict: bool = False
    """Whether a row that cannot be used is an error; otherwise such rows are left out, counted and named."""
    system: str | None = None
    """System message put before every prompt; it takes the place of one that the row has."""
    rule: str | None = Field(None, pattern=r"^.+:\w+$")
    """A function `(answer, row) -> float` that scores: `module:function` or `path/to/file.py:function`. It may give a mapping instead, whose `score` is the score; its other numbers are reported."""
    judge: JudgeRecipe | None = None
    """A language model that scores."""
    score_weight: float = Field(1.0, ge=0)
    """What the score of the rule, judge or verifier counts in the reward; 0 only reports it, beside what a reward model pays."""
    success_reward: float | None = 1.0
    """An answer succeeds where its score is at least this; null reports no success, and so does a missing score."""

    @model_validator(mode="after")
    def _one_of_each(self) -> "TextTaskRecipe":
        if bool(self.prompts) == (self.reasoning_gym is not None):
            raise ValueError("give exactly one of `prompts` (files with rows) and `reasoning_gym` (made-up tasks)")
        if self.rule is not None and self.judge is not None:
            raise ValueError("`rule` and `judge` both score the answer; keep one")
        if any(source.weight != 1 for source in self.prompts):
            raise ValueError("`prompts.weight` means nothing here, for the seed chooses the row; remove it")
        return self


@dataclass(frozen=True)
class PromptTable:
    """The rows of `prompts` that can be used, in order, and what is wrong with the others."""

    rows: list[Prompt]
    problems: Problems


@dataclass(frozen=True)
class _Task:
    """One task, from a row or from reasoning-gym."""

    messages: list[Message]
    row: dict[str, Any]
    reference: str | None
    origin: str
    verifier: Callable[[str], float] | None = None


class TextTask(Environment):
    """One prompt of a data set is answered once and scored. Success is a score of at least `success_reward`."""

    Recipe = TextTaskRecipe
    self_contained = False

    def __init__(self, recipe: EnvironmentRecipe) -> None:
        """InputError where the data, the rule, the data set of reasoning-gym or the judge's key is missing."""
        super().__init__(recipe)
        self._rule = load_rule(self.recipe.rule) if self.recipe.rule is not None else None
        if self.recipe.judge is not None:
            prepare_judge(self.recipe.judge)
        self.task_count(recipe)
        self._task: _Task | None = None

    @classmethod
    def task_count(cls, recipe: EnvironmentRecipe) -> int | None:
        """Number of tasks: seeds 0 to one less are valid; None where every seed is. Reads the rows, once."""
        assert isinstance(recipe, TextTaskRecipe)
        if recipe.reasoning_gym is None:
            return len(prompt_table(recipe).rows)
        _require_gym(recipe.reasoning_gym.model_dump_json())
        return None

    @classmethod
    def check_tasks(cls, recipe: EnvironmentRecipe, training: range, held_out: Sequence[range]) -> list[str]:
        """Rows that are left out, and held-out prompts that are also trained on, which flatter the evaluation."""
        assert isinstance(recipe, TextTaskRecipe)
        if recipe.reasoning_gym is not None:
            cls.task_count(recipe)
            return []
        table = prompt_table(recipe)
        table.problems.raise_if(recipe.strict)
        require_rows("environment.prompts", len(table.rows), training, held_out)
        trained = {_text_of(table.rows[seed]) for seed in training}
        known = sum(_text_of(table.rows[seed]) in trained for seeds in held_out for seed in seeds)
        messages = table.problems.summary()
        if known:
            messages.append(f"{known} of the held-out prompts are also trained on, word for word; move them apart")
        return messages

    @classmethod
    def pays(cls, recipe: EnvironmentRecipe) -> bool:
        """Whether there is a rule, a judge or a verifier whose score counts."""
        assert isinstance(recipe, TextTaskRecipe)
        return recipe.score_weight > 0 and any(
            part is not None for part in (recipe.rule, recipe.judge, recipe.reasoning_gym)
        )

    @classmethod
    def task_name(cls, recipe: EnvironmentRecipe, seed: int) -> str:
        """The file and row of `seed`."""
        assert isinstance(recipe, TextTaskRecipe)
        rows = prompt_table(recipe).rows if recipe.reasoning_gym is None else []
        return rows[seed].origin if seed < len(rows) else f"environment seed {seed}"

    def reset(self, seed: int) -> Observation:
        """Show the prompt of row `seed`; InputError for a seed beyond the last row."""
        gym = self.recipe.reasoning_gym
        self._task = self._of_row(seed) if gym is None else _gym_task(gym, seed)
        messages = self._task.messages
        if self.recipe.system is not None:
            system = {"role": "system", "content": self.recipe.system}
            messages = [system, *(message for message in messages if message["role"] != "system")]
        self._shown = messages
        return Observation(list(messages))

    def step(self, action: str) -> Step:
        """Score the answer; 0 where only a reward model scores. Raises RuleFailure or JudgeFailure instead of a guess."""
        task = self._current()
        scores, weight = self._scored(action, task), self.recipe.score_weight
        self._task = None
        if not scores:
            return Step([], 0.0, terminated=True, truncated=False)
        wanted = self.recipe.success_reward
        info: dict[str, Any] = {} if wanted is None else {"success": scores[SCORE] >= wanted}
        if len(scores) > 1 or weight != 1:
            info["scores"] = scores
        return Step([], weight * scores[SCORE], terminated=True, truncated=False, info=info)

    def expert(self) -> str:
        """The reference answer; NotImplementedError where the row has no text `completion` or `label`."""
        task = self._current()
        if task.reference is None:
            raise NotImplementedError(f"{task.origin} has no reference answer, neither `completion` nor `label`")
        return task.reference

    @classmethod
    def validate(cls, recipe: EnvironmentRecipe, seeds: Sequence[int]) -> None:
        """A seed repeats its task, and no step follows the end. With a rule or verifier and a reference answer, that
        answer earns full reward (`success_reward`, or 1) and a wrong one does not. A judge is not asked.

        Seeds beyond the last row are left out; InputError where that leaves none.
        """
        assert isinstance(recipe, TextTaskRecipe)
        environment = cls(recipe)
        count = cls.task_count(recipe)
        full = 1.0 if recipe.success_reward is None else recipe.success_reward
        for seed in [seed for seed in seeds if count is None or seed < count] or seeds[:1]:
            require(environment.reset(seed) == environment.reset(seed), seed, "two resets differ")
            if recipe.judge is not None:
                continue
            score = environment._score_in_validation(seed, _WRONG)
            if environment._scores():
                require(score < full, seed, f"the wrong answer {_WRONG!r} earned {score:g}")
            environment.reset(seed)
            reference = environment._current().reference
            if environment._scores() and reference is not None:
                score = environment._score_in_validation(seed, reference)
                require(score >= full, seed, f"the reference answer {reference[:80]!r} earned {score:g}")

    def _score_in_validation(self, seed: int, answer: str) -> float:
        try:
            step = play(self, seed, [answer])[-1]
        except RuleFailure as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        require(step.terminated, seed, "one answer did not end the episode")
        try:
            self.step(answer)
        except RuntimeError:
            return float(step.info.get("scores", {SCORE: step.reward})[SCORE])
        raise AssertionError(f"seed {seed}: a step was taken after the end")

    def _current(self) -> _Task:
        if self._task is None:
            raise RuntimeError("the episode is over; call reset")
        return self._task

    def _scores(self) -> bool:
        """Whether something other than a reward model scores."""
        return any(part is not None for part in (self._rule, self.recipe.judge, self.recipe.reasoning_gym))

    def _scored(self, answer: str, task: _Task) -> dict[str, float]:
        """The score of a rule, a judge or a verifier, and what else the rule reports; empty where there is none."""
        if self.recipe.judge is not None:
            return {SCORE: judge_score(self.recipe.judge, self._shown, answer)}
        scoring: Callable[[], Any]
        if self._rule is not None:
            # A copy, so that a rule that changes its row changes no later episode.
            scoring, name = partial(self._rule, answer, copy.deepcopy(task.row)), f"rule {self.recipe.rule}"
        elif task.verifier is not None:
            # Policies end answers in line breaks, and no reference of reasoning-gym begins or ends in white space.
            scoring, name = partial(task.verifier, answer.strip()), "the verifier"
        else:
            return {}
        try:
            found = scoring()
        except Exception as error:
            raise RuleFailure(f"{name} raised {type(error).__name__} on {task.origin}: {error}") from error
        scores = {str(key): _number(value) for key, value in found.items()} if isinstance(found, Mapping) else None
        scores = {SCORE: _number(found)} if scores is None else scores
        if SCORE not in scores or not all(map(math.isfinite, scores.values())):
            wanted = f"a finite number, or finite numbers by name with {SCORE!r} among them"
            raise RuleFailure(f"{name} returned {found!r} on {task.origin}; it must return {wanted}")
        return scores

    def _of_row(self, seed: int) -> _Task:
        rows = prompt_table(self.recipe).rows
        if not 0 <= seed < len(rows):
            raise InputError(
                f"environment seed {seed} is no row of environment.prompts, which has {len(rows)} usable rows "
                f"(0 to {len(rows) - 1}); change `seeds` or `evaluation.seeds`"
            )
        prompt = rows[seed]
        row = dict(prompt.row)
        for name in ("completion", "label"):
            given = prompt.row.get(getattr(self.recipe.columns, name))
            if row.get(name) is None and given is not None:
                row[name] = given
        messages = [{k: v for k, v in message.items() if k not in ("train", "primer")} for message in prompt.messages]
        return _Task(messages, row, _reference(row), prompt.origin)


def _number(value: Any) -> float:
    """NaN for what is no number, text included."""
    try:
        return math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError):
        return math.nan


class RuleFailure(Exception):
    """A rule or verifier gave no finite score."""


_reading = Lock()
_drawing = Lock()


def prompt_table(recipe: TextTaskRecipe) -> PromptTable:
    """The rows of `recipe.prompts`, read once per process. InputError where no row can be used."""
    # Environments run in threads, and one of them should read while the others wait.
    with _reading:
        return _prompt_table(recipe.model_dump_json(include={"prompts", "columns"}))


@lru_cache(maxsize=16)
def _prompt_table(key: str) -> PromptTable:
    values = json.loads(key)
    recipe = TextTaskRecipe.model_validate(values)
    problems = Problems()
    examples = read_examples("prompt", recipe.prompts, recipe.columns, problems)
    rows = [row for row in examples if isinstance(row, Prompt)]
    if not rows:
        problems.require_any(", ".join(source.path for source in recipe.prompts))
    with_tools = next((row for row in rows if row.tools), None)
    if with_tools is not None:
        raise InputError(
            f"{with_tools.origin} offers tools, which a single answer cannot use; remove that column, or name an absent "
            "one in columns.tools"
        )
    return PromptTable(rows, problems)


@lru_cache(maxsize=16)
def _require_gym(key: str) -> None:
    """Try the data set of a `ReasoningGymRecipe` (as JSON); InputError where it cannot make a task."""
    recipe = ReasoningGymRecipe.model_validate_json(key)
    known = require_module("reasoning_gym.factory", "environment.reasoning_gym").DATASETS
    if recipe.dataset not in known:
        raise InputError(
            f"environment.reasoning_gym.dataset: there is no {recipe.dataset!r}; "
            f"use one of {', '.join(sorted(name for name in known if name[0].isalpha()))}"
        )
    try:
        _gym_task(recipe, 0)
    except Exception as error:
        raise InputError(
            f"environment.reasoning_gym.config: {recipe.dataset} refuses {recipe.config} "
            f"({type(error).__name__}: {error})"
        ) from error


def _gym_task(recipe: ReasoningGymRecipe, seed: int) -> _Task:
    make = require_module("reasoning_gym", "environment.reasoning_gym").create_dataset
    with _own_chance(seed):
        dataset = make(recipe.dataset, seed=seed, size=1, **recipe.config)
        item = dataset[0]
    reference = item["answer"]
    messages = [{"role": "user", "content": item["question"]}]
    row = {**item, "label": reference}
    return _Task(
        messages, row, reference, f"{recipe.dataset} seed {seed}", lambda answer: dataset.score_answer(answer, item)
    )


@contextmanager
def _own_chance(seed: int) -> Iterator[None]:
    """Python's and numpy's global random numbers begin at `seed` inside, and go on outside as if nothing had been.

    Some data sets of reasoning-gym draw from them (list_functions) or seed them (pool_matrix).
    """
    with _drawing:
        states = random.getstate(), np.random.get_state()
        random.seed(derive_seed("reasoning_gym", seed))
        np.random.seed(derive_seed("reasoning_gym", seed) % 2**32)
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


def _text_of(prompt: Prompt) -> str:
    return json.dumps(prompt.messages, sort_keys=True)


def _reference(row: dict[str, Any]) -> str | None:
    """The answer that the row gives as text or as a number."""
    for value in (row.get("completion"), row.get("label")):
        if isinstance(value, str) and value.strip():
            return value
        if isinstance(value, int | float) and not isinstance(value, bool):
            return str(value)
    return None
