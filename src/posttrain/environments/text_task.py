"""One prompt, one answer, one score from a reward function, a verifier or a judge. Reward models score outside the
environment."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator

from posttrain.data.examples import read_examples
from posttrain.data.held_out import TaskRow
from posttrain.data.messages import PromptExample, without_training_keys
from posttrain.data.problems import Problems
from posttrain.data.tools import ParsedAnswer, parse_hermes
from posttrain.environments.game import play, require
from posttrain.environments.global_random import GlobalRandom
from posttrain.environments.judge import check_judge, judge_score, require_judge
from posttrain.environments.mcp import McpRecipe, mcp_tools
from posttrain.environments.protocol import Environment, Message, Observation, Step
from posttrain.environments.rewards import (
    BUILT_IN,
    SCORE,
    RewardFailure,
    RewardFunction,
    Scores,
    WeightedRewards,
    finite_scores,
    load_function,
    load_reward,
    named_reward,
    parameter_of,
    try_reward,
)
from posttrain.environments.tools import Tool, ToolCalls, tool
from posttrain.errors import InputError
from posttrain.plugins import require_module
from posttrain.recipe.base import BaseConfig, Executes, Text
from posttrain.recipe.components import EnvironmentRecipe
from posttrain.recipe.data import ColumnsRecipe, TaskSources
from posttrain.recipe.judge import JudgeRecipe, ReasoningGymRecipe
from posttrain.seeds import derive_seed

_WRONG = "?"
"""The wrong answer of `validate`."""
_MAX_DRAWS = 500
"""Draws of reasoning-gym for one task, until the question is of the wanted part."""


_Function = Annotated[Literal["exact", "contains", "final_number"] | Executes, AfterValidator(named_reward)]


class WeightedRewardRecipe(BaseConfig):
    """One of several reward functions."""

    function: _Function
    """Location of the function, as for a single function."""
    weight: float = 1.0
    """Factor of its score in the sum."""


class TextTaskRecipe(EnvironmentRecipe):
    """Keys of `text_task`."""

    scoring = EnvironmentRecipe.scoring | {"score_weight", "columns.label", "strict"}

    type: Literal["text_task"] = "text_task"
    """One prompt, one answer, one score."""
    max_turns: int = Field(1, ge=1)
    """Maximum number of answers. An answer without calls ends the episode, so more than one needs `tools` or `mcp`."""
    prompts: TaskSources = []
    """Rows to answer: a path, or a list of paths and sections. The environment seed is the row number, from 0, over all
    sources. `evaluation.held_out` divides them."""
    columns: ColumnsRecipe = ColumnsRecipe()
    """Column names of `prompts`."""
    reasoning_gym: ReasoningGymRecipe | None = None
    """Tasks of reasoning-gym instead of `prompts`, scored by their own verifier unless `reward` or `judge` is set."""
    strict: bool = False
    """Whether an unusable row is an error. Otherwise such rows are skipped, counted and reported."""
    system: Text | None = None
    """System message of every prompt; it replaces a system message of the row."""
    reward: _Function | Annotated[list[WeightedRewardRecipe], Field(min_length=1)] | None = None
    """A function `(prompt, answer, **row) -> float` that scores, or a list of functions and of sections with `function`
    and `weight`, whose weighted sum is the score: `exact`, `contains`, `final_number`, `module:function` or
    `path/to/file.py:function`. It may be `async`, and may return a mapping whose `score` is the score; its other
    numbers are reported, and `credit.type: gdpo` trains on them."""
    judge: JudgeRecipe | None = None
    """A language model that scores."""
    score_weight: float = Field(1.0, ge=0)
    """Weight of the score of the function, judge or verifier in the reward. 0 only reports it, beside the reward of a
    reward model."""
    success_reward: float | None = 1.0
    """Success is a score of at least this. null, or a missing score, reports no success."""
    tools: list[Executes] = []
    """Typed functions that the policy may call: `module:function` or `path/to/file.py:function`."""
    mcp: list[McpRecipe] = []
    """MCP servers whose tools the policy may call."""
    penalty: float = Field(-0.1, le=0)
    """Reward of a turn with a malformed or failed tool call."""

    @property
    def rows_key(self) -> str | None:
        """`environment.prompts`, unless tasks are generated."""
        return None if self.reasoning_gym is not None else "environment.prompts"

    @property
    def reward_name(self) -> str:
        """Functions with their weights, judge or verifier."""
        listed = self.reward if isinstance(self.reward, list) else []
        names = [part.function if part.weight == 1 else f"{part.weight:g} x {part.function}" for part in listed]
        names += [self.reward] if isinstance(self.reward, str) else []
        names += [f"judge {self.judge.model}"] if self.judge is not None else []
        if not names and self.reasoning_gym is not None:
            names = [self.reasoning_gym.dataset]
        if not names or not self.score_weight:
            return ""
        scale = "" if self.score_weight == 1 else f"{self.score_weight:g} x "
        return f"{scale}{self.type} ({', '.join(names)})"

    @field_validator("reward", mode="before")
    @classmethod
    def _reward_sections(cls, value: Any) -> Any:
        """A list of functions and sections as a list of sections."""
        if not isinstance(value, list):
            return value
        return [{"function": item} if isinstance(item, str) else item for item in value]

    def _check(self) -> None:
        if bool(self.prompts) == (self.reasoning_gym is not None):
            raise ValueError("give exactly one of `prompts` (files of rows) and `reasoning_gym` (generated tasks)")
        if self.columns.weight is not None:
            raise ValueError(
                "`columns.weight` would have no effect: only the rows of sft, dpo and reward are weighed; remove it"
            )
        if self.reward is not None and self.judge is not None:
            raise ValueError("`reward` and `judge` both score the answer; keep one")
        if (self.max_turns > 1) != bool(self.tools or self.mcp):
            raise ValueError(
                "`max_turns` above 1 and `tools` or `mcp` need each other: calls take turns before the answer; set both"
            )
        if any(source.weight != 1 for source in self.prompts):
            raise ValueError("`prompts.weight` has no effect here, because the seed selects the row; remove it")


@dataclass(frozen=True)
class PromptTable:
    """The usable rows of `prompts`, in order, and the problems of the others."""

    rows: list[PromptExample]
    tasks: list[TaskRow]
    """The use of each row, and its prompt as text."""
    columns: frozenset[str]
    """Columns in which any row has a value, by the names of a reward function's parameters."""
    problems: Problems


@dataclass(frozen=True)
class _Task:
    """A task from a row or from reasoning-gym."""

    messages: list[Message]
    row: dict[str, Any]
    reference: str | None
    origin: str
    verifier: Callable[[str], float] | None = None


class TextTask(Environment):
    """Answer one prompt of a data set once, after calls of tools if there are any. Success is a score of at least
    `success_reward`."""

    Recipe = TextTaskRecipe
    self_contained = False

    def __init__(self, recipe: EnvironmentRecipe) -> None:
        """InputError if data, a function, a data set of reasoning-gym or the API key of the judge is missing."""
        super().__init__(recipe)
        self._reward = None if unscored(self.recipe) else _reward_of(self.recipe)
        if self._reward is not None and self._reward.blocking:
            self.blocking = True
        if self.recipe.judge is not None:
            check_judge(self.recipe.judge)
            self.blocking = True
        tools = [tool(load_function(where, "environment.tools")) for where in self.recipe.tools]
        for server in self.recipe.mcp:
            tools += mcp_tools(server)
            self.blocking = True
        names = [one.name for one in tools]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise InputError(f"environment.tools: two tools have the name {twice!r}; leave one out")
        self._tools: list[Tool] = tools
        self._calls: ToolCalls | None = None
        self.task_rows(self.recipe)
        self._task: _Task | None = None

    @classmethod
    def task_rows(cls, recipe: TextTaskRecipe) -> Sequence[TaskRow] | None:
        """Return the prompts, which are read once per process; None for generated tasks."""
        if recipe.reasoning_gym is None:
            return prompt_table(recipe).tasks
        _require_gym(recipe.reasoning_gym.model_dump_json())
        return None

    @classmethod
    def check_tasks(
        cls, recipe: TextTaskRecipe, training: Sequence[int], held_out: Sequence[Sequence[int]]
    ) -> list[str]:
        """Return warnings about skipped rows and about held-out prompts that are also training prompts."""
        tasks = cls.task_rows(recipe)
        if tasks is None:
            return []
        problems = prompt_table(recipe).problems
        problems.raise_if(recipe.strict)
        if recipe.judge is not None:
            require_judge(recipe.judge)
        messages = problems.summary()
        training_prompts = {tasks[seed].key for seed in training}
        shared = sum(tasks[seed].key in training_prompts for seeds in held_out for seed in seeds)
        if shared:
            messages.append(
                f"{shared} held-out prompts are also training prompts; leave out `seeds` and `evaluation.seeds`, or remove "
                "them from one of the files"
            )
        return messages

    def try_reward(self, seed: int) -> list[str]:
        """Call the reward function once on row `seed`. InputError if it cannot score any answer."""
        if missing := unscored(self.recipe):
            reward = _reward_of(self.recipe)
            return [
                f"environment.reward: {reward.name if reward else ''} is not reported, because no row of environment.prompts "
                f"has a column `{missing}`"
            ]
        if self._reward is None:
            return []
        messages = self.reset(seed).messages
        task = self._current()
        return try_reward(self._reward, messages, task.reference, task.row, task.origin)

    @classmethod
    def has_reward(cls, recipe: TextTaskRecipe) -> bool:
        """Whether a reward function, a judge or a verifier scores answers with a weight above 0."""
        return recipe.score_weight > 0 and any(
            part is not None for part in (recipe.reward, recipe.judge, recipe.reasoning_gym)
        )

    @classmethod
    def return_range(cls, recipe: TextTaskRecipe) -> tuple[float, float] | None:
        """Built-in reward functions and judges score from 0 to 1, other functions and verifiers as they like."""
        parts = [(recipe.reward, 1.0)] if isinstance(recipe.reward, str) else []
        if isinstance(recipe.reward, list):
            parts = [(part.function, part.weight) for part in recipe.reward]
        if recipe.max_turns > 1 or (
            recipe.judge is None and not (parts and all(name in BUILT_IN for name, _ in parts))
        ):
            return None
        weights = [recipe.score_weight * weight for _, weight in parts or [("judge", 1.0)]]
        return math.fsum(min(weight, 0) for weight in weights), math.fsum(max(weight, 0) for weight in weights)

    @classmethod
    def reports_scores(cls, recipe: TextTaskRecipe) -> bool:
        """Whether a user's reward function scores answers, or the score is reported separately from the reward."""
        return (
            recipe.score_weight != 1
            or isinstance(recipe.reward, list)
            or not (recipe.reward is None or recipe.reward in BUILT_IN)
        )

    @classmethod
    def task_name(cls, recipe: TextTaskRecipe, seed: int) -> str:
        """Return the file and row of `seed`."""
        rows = prompt_table(recipe).rows if recipe.reasoning_gym is None else []
        return rows[seed].origin if seed < len(rows) else f"environment seed {seed}"

    def reset(self, seed: int) -> Observation:
        """Return the prompt of row `seed`; InputError for a seed beyond the last row."""
        if self.recipe.reasoning_gym is not None:
            self._task = _gym_task(self.recipe.reasoning_gym, seed)
        else:
            rows = prompt_table(self.recipe).rows
            if not 0 <= seed < len(rows):
                raise InputError(
                    f"environment seed {seed} is not a row of environment.prompts, which has {len(rows)} usable rows "
                    f"(0 to {len(rows) - 1}); change `seeds` or `evaluation.seeds`"
                )
            prompt = rows[seed]
            row = _with_references(prompt.row, self.recipe.columns)
            plain = [without_training_keys(message) for message in prompt.messages]
            self._task = _Task(plain, row, _reference(row), prompt.origin)
        messages = self._task.messages
        if self.recipe.system is not None:
            system = {"role": "system", "content": self.recipe.system}
            messages = [system, *(message for message in messages if message["role"] != "system")]
        self._messages = messages
        if not self._tools:
            return Observation(list(messages))
        self._calls = ToolCalls(self._tools, self.recipe.max_turns, self.recipe.penalty)
        return Observation(list(messages), tools=self._calls.schemas)

    def step(self, action: str) -> Step:
        """Score the answer; the reward is 0 if only a reward model scores. With tools, calls in the syntax of Hermes
        are run. Raises RewardFailure or JudgeFailure."""
        return self._finish(action) if self._calls is None else self.act(parse_hermes(action))

    def act(self, answer: ParsedAnswer) -> Step:
        """Run the calls of an answer, or score one without calls."""
        assert self._calls is not None
        step = self._calls.step(answer)
        if step is None:
            return self._finish(answer.text)
        if step.truncated:
            self._task = None
            if self.recipe.success_reward is None:
                del step.info["success"]
        return step

    def _finish(self, action: str) -> Step:
        task = self._current()
        scores, weight = self._score(action, task), self.recipe.score_weight
        self._task = None
        threshold, score = self.recipe.success_reward, scores.get(SCORE)
        info: dict[str, Any] = {} if threshold is None or score is None else {"success": score >= threshold}
        if scores and self.reports_scores(self.recipe):
            info["scores"] = scores
        scored = score is not None or weight == 0 or not self._has_scorer()
        return Step([], weight * (score or 0.0), True, False, info, scored=scored)

    @classmethod
    def variants(cls) -> Sequence[Mapping[str, Any]]:
        """Every data set of reasoning-gym that needs no keys."""
        names = require_module("reasoning_gym.factory", "environment.reasoning_gym").DATASETS
        # Names that begin with an underscore are for tests, and `composite` needs keys that name its data sets.
        return [
            {"reasoning_gym": {"dataset": name}} for name in sorted(names) if name[0].isalpha() and name != "composite"
        ]

    def expert(self) -> str:
        """Return the reference answer; NotImplementedError if the row has no `completion` or `label` text."""
        task = self._current()
        if task.reference is None:
            raise NotImplementedError(f"{task.origin} has no reference answer in `completion` or `label`")
        return task.reference

    def row(self) -> Mapping[str, Any]:
        """Return the row of the prompt, or the item of reasoning-gym."""
        return self._current().row

    @classmethod
    def validate(cls, recipe: TextTaskRecipe, seeds: Sequence[int]) -> None:
        """Check that seeds repeat their tasks and that episodes end after one step. With a reward function or verifier
        and a reference answer, also check that the reference earns full reward (`success_reward`, or 1) and a wrong
        answer does not. A judge is not called.

        Seeds beyond the last row are skipped; InputError if none is left.
        """
        environment = cls(recipe)
        tasks = cls.task_rows(recipe)
        full = 1.0 if recipe.success_reward is None else recipe.success_reward
        for seed in [seed for seed in seeds if tasks is None or seed < len(tasks)] or seeds[:1]:
            require(environment.reset(seed) == environment.reset(seed), seed, "two resets differ")
            if recipe.judge is not None:
                continue
            score = environment._score_in_validation(seed, _WRONG)
            if score is None:
                continue
            if environment._has_scorer():
                require(score < full, seed, f"the wrong answer {_WRONG!r} earned {score:g}")
            environment.reset(seed)
            reference = environment._current().reference
            if environment._has_scorer() and reference is not None:
                score = environment._score_in_validation(seed, reference)
                require(
                    score is None or score >= full, seed, f"the reference answer {reference[:80]!r} earned {score:g}"
                )

    def _score_in_validation(self, seed: int, answer: str) -> float | None:
        """The score of an answer; None if no reward applies to it."""
        try:
            step = play(self, seed, [answer])[-1]
        except RewardFailure as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        require(step.terminated, seed, "one answer did not end the episode")
        try:
            self.step(answer)
        except RuntimeError:
            return step.info.get("scores", {SCORE: step.reward}).get(SCORE) if step.scored else None
        raise AssertionError(f"seed {seed}: a step was possible after the end")

    def _current(self) -> _Task:
        if self._task is None:
            raise RuntimeError("the episode is over; call reset")
        return self._task

    def _has_scorer(self) -> bool:
        """Whether a reward function, a judge or a verifier scores answers."""
        return any(part is not None for part in (self._reward, self.recipe.judge, self.recipe.reasoning_gym))

    def _score(self, answer: str, task: _Task) -> Scores:
        """Return the score and the other numbers of the reward function, judge or verifier; empty if there is none."""
        if self.recipe.judge is not None:
            return {SCORE: judge_score(self.recipe.judge, self._messages, answer)}
        if self._reward is not None:
            return self._reward(self._messages, answer, task.row, task.origin)
        if task.verifier is None:
            return {}
        try:
            # Policies often end an answer with a newline; no reference of reasoning-gym starts or ends with white
            # space.
            result = task.verifier(answer.strip())
        except Exception as error:
            raise RewardFailure(f"the verifier raised {type(error).__name__} on {task.origin}: {error}") from error
        return finite_scores(result, "the verifier", task.origin)


def _reward_of(recipe: TextTaskRecipe) -> RewardFunction | WeightedRewards | None:
    if isinstance(recipe.reward, list):
        return WeightedRewards([(load_reward(part.function), part.weight) for part in recipe.reward])
    return load_reward(recipe.reward) if recipe.reward is not None else None


def unscored(recipe: TextTaskRecipe) -> str | None:
    """The column whose absence means that a reward function that is only reported (`score_weight: 0`) is not called at
    all: a parameter of the function that no row has. None if it is called."""
    if recipe.score_weight > 0 or recipe.reasoning_gym is not None or (reward := _reward_of(recipe)) is None:
        return None
    return next(iter(sorted(reward.columns - prompt_table(recipe).columns)), None)


_table_lock = Lock()


def prompt_table(recipe: TextTaskRecipe) -> PromptTable:
    """Return the rows of `recipe.prompts`, read once per process unless a file changes. InputError if no row is
    usable."""
    # Environments run in threads; without the lock, each thread would read the files.
    with _table_lock:
        versions: list[tuple[str, int, int, int, int] | None] = []
        for path in (Path(source.path).expanduser() for source in recipe.prompts):
            status = path.stat() if path.is_file() else None  # not of a hub data set
            times = status and (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
            versions.append(times and (str(path.resolve()), *times))
        return _prompt_table(recipe.model_dump_json(include={"prompts", "columns"}), tuple(versions))


@lru_cache(maxsize=16)
def _prompt_table(key: str, versions: tuple[tuple[str, int, int, int, int] | None, ...]) -> PromptTable:
    values = json.loads(key)
    recipe = TextTaskRecipe.model_validate(values)
    problems = Problems()
    used = [
        (row, source.use)
        for source in recipe.prompts
        for row in read_examples("prompt", [source], recipe.columns, problems)
        if isinstance(row, PromptExample)
    ]
    rows = [row for row, _ in used]
    if not rows:
        problems.require_any(", ".join(source.path for source in recipe.prompts))
    with_tools = next((row for row in rows if row.tools), None)
    if with_tools is not None:
        raise InputError(
            f"{with_tools.origin} has tools, which a single answer cannot use; remove that column, or set "
            "columns.tools to a column that does not exist"
        )
    tasks = [TaskRow(json.dumps(row.messages, sort_keys=True), use, origin=row.origin) for row, use in used]
    read = [_with_references(row.row, recipe.columns) for row in rows]
    columns = frozenset(parameter_of(name) for row in read for name, value in row.items() if value is not None)
    return PromptTable(rows, tasks, columns, problems)


@lru_cache(maxsize=16)
def _require_gym(key: str) -> None:
    """Check the data set of a `ReasoningGymRecipe` (as JSON) by making a task; InputError if that fails."""
    recipe = ReasoningGymRecipe.model_validate_json(key)
    known = require_module("reasoning_gym.factory", "environment.reasoning_gym").DATASETS
    if recipe.dataset not in known:
        raise InputError(
            f"environment.reasoning_gym.dataset: unknown data set {recipe.dataset!r}; "
            f"use one of {', '.join(sorted(name for name in known if name[0].isalpha()))}"
        )
    try:
        _gym_task(recipe, 0)
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"environment.reasoning_gym.config: {recipe.dataset} refuses {recipe.config} "
            f"({type(error).__name__}: {error})"
        ) from error


def _gym_task(recipe: ReasoningGymRecipe, seed: int) -> _Task:
    """The task of a seed. If its question is not of the part that is asked, further draws for the seed follow."""
    make = require_module("reasoning_gym", "environment.reasoning_gym").create_dataset
    for draw in range(_MAX_DRAWS):
        number = seed if draw == 0 else derive_seed("reasoning_gym", seed, draw) % 2**31
        # Some data sets draw from the global random state (list_functions) or seed it (pool_matrix).
        with GlobalRandom("reasoning_gym", number).active():
            dataset = make(recipe.dataset, seed=number, size=1, **recipe.config)
            item = dataset[0]
        # A fifth of the questions is held out, the same on every machine.
        held_out = derive_seed("held-out question", item["question"]) % 5 == 0
        if recipe.part in ("all", "held_out" if held_out else "training"):
            break
    else:
        raise InputError(
            f"environment.reasoning_gym.part: {_MAX_DRAWS} draws of {recipe.dataset} with {recipe.config} gave no question of the part "
            f"`{recipe.part}`; it has too few questions, so leave `part` out"
        )
    reference = item["answer"]
    messages = [{"role": "user", "content": item["question"]}]
    row = {**item, "label": reference}
    return _Task(
        messages, row, reference, f"{recipe.dataset} seed {seed}", lambda answer: dataset.score_answer(answer, item)
    )


def _with_references(row: Mapping[str, Any], columns: ColumnsRecipe) -> dict[str, Any]:
    """The row with `completion` and `label` under these names, even if `columns` renames them."""
    named = {name: row.get(getattr(columns, name)) for name in ("completion", "label")}
    return dict(row) | {name: value for name, value in named.items() if row.get(name) is None and value is not None}


def _reference(row: dict[str, Any]) -> str | None:
    """Return the row's `completion` or `label` as text; None if neither is text or a number."""
    for value in (row.get("completion"), row.get("label")):
        if isinstance(value, str) and value.strip():
            return value
        if isinstance(value, int | float) and not isinstance(value, bool):
            return str(value)
    return None
