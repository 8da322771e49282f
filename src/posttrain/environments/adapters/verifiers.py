"""Tasksets of verifiers 1 (`verifiers.v1`): one prompt, one answer, scored by the rewards of the task."""

import asyncio
import inspect
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import Annotated, Any

from pydantic import Field

from posttrain.data.held_out import TaskRow
from posttrain.environments.protocol import Environment, Message, Observation, Step
from posttrain.environments.rewards import SCORE, RewardFailure, finite_scores
from posttrain.errors import InputError
from posttrain.plugins import require_module
from posttrain.recipe.base import Executes, Mark, Text
from posttrain.recipe.components import EnvironmentRecipe

_OWNER = "environment.type verifiers"


class VerifiersRecipe(EnvironmentRecipe):
    """Keys of `verifiers`."""

    type: Text = "verifiers"
    """A taskset of verifiers 1."""
    max_turns: int = Field(1, ge=1, le=1)
    """One answer ends an episode."""
    taskset: Executes = Field(min_length=1)
    """Its id: the installed module that exports it in `__all__`."""
    keys: Annotated[dict[str, Any], Mark("executes", "taskset")] = {}
    """Keys of its config."""
    tasks: int | None = Field(None, ge=1)
    """Number of tasks to read, from the first. Required for an infinite taskset. null: all."""
    success_reward: float | None = 1.0
    """Success is a reward of at least this. null: report no success."""

    @property
    def rows_key(self) -> str:
        """Tasks are rows: the seed is the position in the taskset."""
        return "environment.taskset"


class Verifiers(Environment):
    """A taskset of verifiers whose tasks are one prompt, one answer. The seed is the position in the taskset.

    Refused: tasksets with tools, with an `Env` or a `Harness`, and tasks or rewards that run in a
    sandbox. Judges are called as the taskset configures them.
    """

    Recipe = VerifiersRecipe
    self_contained = False
    blocking = True

    def __init__(self, recipe: EnvironmentRecipe) -> None:
        """Raises InputError if verifiers or the taskset is not installed, or if the taskset needs more than one
        answer."""
        super().__init__(recipe)
        self._tasks = _tasks(self.recipe)
        self._task: Any = None

    @classmethod
    def task_rows(cls, recipe: VerifiersRecipe) -> Sequence[TaskRow]:
        """Return the prompts, which are read once per process."""
        return [TaskRow(json.dumps(_messages(task), sort_keys=True)) for task in _tasks(recipe)]

    @classmethod
    def task_name(cls, recipe: VerifiersRecipe, seed: int) -> str:
        """Return the taskset and the task's position or name."""
        return f"task {seed} of {recipe.taskset}"

    def reset(self, seed: int) -> Observation:
        """Return the prompt of task `seed`; InputError for a seed beyond the last task."""
        if not 0 <= seed < len(self._tasks):
            raise InputError(
                f"environment seed {seed} is not a task of {self.recipe.taskset}, which has {len(self._tasks)}; change "
                "`seeds`, `evaluation.seeds` or `environment.tasks`"
            )
        self._task, self._name = self._tasks[seed], self.task_name(self.recipe, seed)
        return Observation(_messages(self._task))

    def step(self, action: str) -> Step:
        """Score the answer. Raises RewardFailure if a reward of the task fails or is missing."""
        task, self._task = self._task, None
        if task is None:
            raise RuntimeError("the episode is over; call reset")
        trace = _trace(task, action)
        try:
            asyncio.run(task.score(trace))
        except Exception as error:
            raise RewardFailure(f"{self._name} cannot be scored ({type(error).__name__}: {error})") from error
        rewards = {name: None if reward is None else reward.value for name, reward in trace.rewards.items()}
        if missing := [name for name, value in rewards.items() if value is None]:
            raise RewardFailure(f"{self._name}: its reward {missing[0]} was not computed")
        metrics = {name: value for name, value in trace.metrics.items() if value is not None}
        scores = finite_scores({**rewards, **metrics, SCORE: trace.reward}, self.recipe.taskset, self._name)
        reward = scores.pop(SCORE)
        threshold = self.recipe.success_reward
        info: dict[str, Any] = {} if threshold is None else {"success": reward >= threshold - 1e-9}
        if len(scores) > 1:
            info["scores"] = scores
        return Step([], reward, terminated=True, truncated=False, info=info)

    def row(self) -> Mapping[str, Any]:
        """Return the data of the task."""
        if self._task is None:
            raise RuntimeError("the episode is over; call reset")
        data: Mapping[str, Any] = self._task.data.model_dump(mode="json", exclude_defaults=True)
        return data


def _tasks(recipe: VerifiersRecipe) -> Sequence[Any]:
    return _read(recipe.taskset, json.dumps(recipe.keys, sort_keys=True), recipe.tasks)


@lru_cache(maxsize=16)
def _read(name: str, keys: str, limit: int | None) -> Sequence[Any]:
    """The tasks of a taskset. Raises InputError if they cannot be read or need more than one answer."""
    require_module("verifiers.v1", _OWNER)
    loaders = require_module("verifiers.v1.utils.loaders", _OWNER)
    try:
        kind = loaders.taskset_class(name)
        config = loaders.taskset_config_type(name).model_validate({"id": name, **json.loads(keys)})
        taskset = loaders.load_taskset(config)
    except Exception as error:
        raise InputError(f"environment.taskset: {name!r} cannot be loaded ({type(error).__name__}: {error})") from error
    if reason := _needs_more(name, kind, config, loaders):
        raise InputError(f"environment.taskset: {name} {reason}, and this environment gives one answer to one prompt")
    if limit is None and not taskset.bounded:
        raise InputError(
            f"environment.taskset: {name} is infinite; set environment.tasks to the number of tasks to read"
        )
    try:
        tasks = list(islice(taskset, limit))
    except Exception as error:
        raise InputError(
            f"environment.taskset: the tasks of {name} cannot be read ({type(error).__name__}: {error})"
        ) from error
    if not tasks:
        raise InputError(f"environment.taskset: {name} has no tasks")
    for task in tasks:
        _check_task(name, task)
    return tasks


def _needs_more(name: str, kind: Any, config: Any, loaders: Any) -> str | None:
    """The reason why one answer does not complete a task of the taskset; None if it does."""
    base = require_module("verifiers.v1.task", _OWNER).Task
    task = kind.task_type()
    if loaders.environment_class(name) is not loaders.environment_class(""):
        return "exports an Env"
    if loaders.default_harness_id(name) == name:
        return "exports a Harness"
    if kind.toolsets(config) or task.toolsets(config.task):
        return "has tools that run as servers"
    if task.NEEDS_CONTAINER or task.setup is not base.setup or task.finalize is not base.finalize:
        return "needs a sandbox"
    return None


def _check_task(name: str, task: Any) -> None:
    """Raises InputError for a task without a text prompt or rewards, or with a reward that needs a sandbox."""
    place = f"environment.taskset: task {task.data.idx} of {name}"
    try:
        messages = _messages(task)
    except ValueError as error:
        raise InputError(f"{place} {error}") from error
    if not any(message["role"] == "user" for message in messages):
        raise InputError(f"{place} has no prompt")
    rewards = task.hooks("reward")
    for reward in rewards:
        runtime = inspect.signature(reward).parameters.get("runtime")
        if runtime is not None and runtime.default is inspect.Parameter.empty:
            raise InputError(f"{place} has the reward {reward.__name__}, which runs in a sandbox")
    if not rewards and not task.config.judges:
        raise InputError(f"{place} has no reward")


def _messages(task: Any) -> list[Message]:
    """The prompt. Raises ValueError if it has anything but text from the system, the user and the assistant."""
    data = task.data
    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    if data.prompt is None or isinstance(data.prompt, str):
        return [*system, *([{"role": "user", "content": data.prompt}] if data.prompt else [])]
    messages = []
    for message in data.prompt:
        parts = message.content
        if isinstance(parts, list):
            if any(part.type != "text" for part in parts):
                raise ValueError("has an image in its prompt")
            parts = "\n".join(part.text for part in parts)
        if message.role == "tool" or getattr(message, "tool_calls", None):
            raise ValueError("has tool calls in its prompt")
        messages.append({"role": message.role, "content": parts or ""})
    return [*system, *messages]


def _trace(task: Any, answer: str) -> Any:
    """The record that the rewards of a task read: the prompt, and the answer as the only sampled message."""
    v1 = require_module("verifiers.v1", _OWNER)
    kinds = {"system": v1.SystemMessage, "user": v1.UserMessage, "assistant": v1.AssistantMessage}
    state = require_module("verifiers.v1.state", _OWNER).state_cls(type(task))
    messages = [kinds[message["role"]](content=message["content"]) for message in _messages(task)]
    nodes = [
        v1.MessageNode(message=message, parent=position - 1 if position else None, sampled=position == len(messages))
        for position, message in enumerate([*messages, v1.AssistantMessage(content=answer)])
    ]
    trace = v1.Trace(
        task=v1.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
        agent=v1.AgentInfo(config=v1.AgentConfig()),
        nodes=nodes,
        state=state(),
        ok=True,
    )
    trace.stop("agent_completed")
    return trace
