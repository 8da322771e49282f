"""Tasksets of verifiers 1 (`verifiers.v1`), scored by the rewards of the task: one answer to a prompt, or an exchange with
an `Env` of one agent.

An `Env` is a coroutine that asks its agent for turns, and an environment is stepped from outside. So each episode runs
its `Env` in a thread, which waits in `Interaction.turn` for the next answer.
"""

import asyncio
import inspect
import json
import queue
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import lru_cache
from itertools import islice
from types import SimpleNamespace
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
    max_turns: int = Field(1, ge=1)
    """Answers after which an exchange with an `Env` is truncated. Other tasks end with the first answer."""
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
    """A taskset of verifiers: one answer to a prompt, or turns with its `Env`. The seed is the position in the taskset.

    Refused: tasksets with tools, with a `Harness` or an `Env` of several agents, and tasks or rewards that run in a
    sandbox. Judges are called as the taskset configures them.
    """

    Recipe = VerifiersRecipe
    self_contained = False
    blocking = True

    def __init__(self, recipe: EnvironmentRecipe) -> None:
        """Raises InputError if verifiers or the taskset is not installed, or if the taskset needs more than
        answers in turns."""
        super().__init__(recipe)
        self._env, self._tasks = _loaded(self.recipe)
        self._task: Any = None
        self._exchange: _Exchange | None = None

    @classmethod
    def task_rows(cls, recipe: VerifiersRecipe) -> Sequence[TaskRow]:
        """Return the prompts, or the data of tasks that an `Env` plays, which are read once per process."""
        env, tasks = _loaded(recipe)
        if list(env._agent_specs) == ["agent"]:
            return [TaskRow(json.dumps(_messages(task), sort_keys=True)) for task in tasks]
        return [TaskRow(task.data.model_dump_json(exclude={"idx", "name"})) for task in tasks]

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
        self.close()
        self._task, self._name = self._tasks[seed], self.task_name(self.recipe, seed)
        self._turns_left = self.recipe.max_turns
        self._exchange = _Exchange(self._env, self._task)
        return Observation([*_messages(self._task), *self._received()])

    def step(self, action: str) -> Step:
        """Give the answer to the task. Raises RewardFailure if a reward of the task fails or is missing."""
        if self._exchange is None or self._exchange.over:
            raise RuntimeError("the episode is over; call reset")
        self._turns_left -= 1
        self._exchange.answers.put((action, self._turns_left == 0))
        messages = self._received()
        if not self._exchange.over:
            return Step(messages, 0.0, terminated=False, truncated=False)
        trace = self._exchange.trace
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
        cut = trace.stop_condition == "max_turns"
        return Step([], reward, terminated=not cut, truncated=cut, info=info)

    def close(self) -> None:
        """End the episode that is being played, if there is one."""
        if self._exchange is not None:
            self._exchange.answers.put(None)
            self._exchange = None

    def _received(self) -> list[Message]:
        """What the task shows next; nothing at the end of the episode."""
        assert self._exchange is not None
        message = self._exchange.messages.get()
        if isinstance(message, Exception):
            raise RewardFailure(f"{self._name} cannot be scored ({type(message).__name__}: {message})") from message
        return [] if message is None else [{"role": "user", "content": message}]

    def row(self) -> Mapping[str, Any]:
        """Return the data of the task."""
        if self._exchange is None or self._exchange.over:
            raise RuntimeError("the episode is over; call reset")
        data: Mapping[str, Any] = self._task.data.model_dump(mode="json", exclude_defaults=True)
        return data


class _Exchange:
    """An episode of an `Env`, in a thread."""

    def __init__(self, env: Any, task: Any) -> None:
        self.trace: Any = None
        self.over = False
        self.messages: queue.Queue[str | Exception | None] = queue.Queue()
        """What the task says next; None at the end of the episode, an exception if it fails."""
        self.answers: queue.Queue[tuple[str, bool] | None] = queue.Queue()
        """The next answer and whether it is the last one allowed; None: nobody plays on."""
        self._env, self._task = env, task
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            asyncio.run(self._env.run(self._task, SimpleNamespace(**dict.fromkeys(self._env._agent_specs, self))))
            self.over = True
            self.messages.put(None)
        except asyncio.CancelledError:
            return
        except Exception as error:
            self.over = True
            self.messages.put(error)

    # What an `Env` calls on its agent.

    @asynccontextmanager
    async def interaction(self, task: Any, **_: Any) -> AsyncIterator[Any]:
        """The agent's side of an exchange, scored at its end."""
        self.trace = _trace(task)
        self._spoke, self._ended = False, False
        yield self
        self.trace.stop("user_closed")
        await task.score(self.trace)

    async def run(self, task: Any, **_: Any) -> Any:
        """One answer to the task."""
        async with self.interaction(task) as interaction:
            await interaction.turn()
            self.trace.stop("agent_completed")
        return self.trace

    async def turn(self, message: str | None = None) -> Any:
        """Show `message`, and wait for the answer; a terminated segment when no answer may follow."""
        v1 = require_module("verifiers.v1", _OWNER)
        segment = require_module("verifiers.v1.agent", _OWNER).Segment
        if self._ended:
            self.trace.stop("max_turns")  # if no `stop` of the task came first
            return segment([], terminated=True)
        if message is not None:
            _add(self.trace, v1.UserMessage(content=message))
        if message is not None or self._spoke:
            self.messages.put(message or "")
        elif not self._spoke:
            self.messages.put(None)  # the prompt is all there is to show
        self._spoke = True
        answer = await asyncio.to_thread(self.answers.get)
        if answer is None:
            raise asyncio.CancelledError
        text, last = answer
        reply = v1.AssistantMessage(content=text)
        _add(self.trace, reply, sampled=True)
        stops = self._task.hooks("stop")
        invoke = require_module("verifiers.v1.utils.decorators", _OWNER).invoke
        facts = {"task": self._task.data, "trace": self.trace}
        asked = []
        for stop in stops:
            reply = invoke(stop, facts)
            asked.append(await reply if inspect.isawaitable(reply) else reply)
        if any(asked):
            self.trace.stop(stops[asked.index(True)].__name__)
        self._ended = last or any(asked)
        return segment([reply], root_reply=text)


def _loaded(recipe: VerifiersRecipe) -> tuple[Any, Sequence[Any]]:
    """The `Env` and the tasks of the taskset, which are read once per process."""
    return _read(recipe.taskset, json.dumps(recipe.keys, sort_keys=True), recipe.tasks)


@lru_cache(maxsize=16)
def _read(name: str, keys: str, limit: int | None) -> tuple[Any, Sequence[Any]]:
    """The `Env` and the tasks of a taskset. Raises InputError if they cannot be read or need more than answers."""
    require_module("verifiers.v1", _OWNER)
    loaders = require_module("verifiers.v1.utils.loaders", _OWNER)
    try:
        env = loaders.load_environment(loaders.resolve_env_config({"taskset": {"id": name, **json.loads(keys)}}))
    except Exception as error:
        raise InputError(f"environment.taskset: {name!r} cannot be loaded ({type(error).__name__}: {error})") from error
    taskset = env.taskset
    if reason := _needs_more(name, env, loaders):
        raise InputError(f"environment.taskset: {name} {reason}, and this environment plays with answers alone")
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
        _check_task(name, task, type(env) is loaders.environment_class(""))
    return env, tasks


def _needs_more(name: str, env: Any, loaders: Any) -> str | None:
    """The reason why answers do not complete a task of the taskset; None if they do."""
    base = require_module("verifiers.v1.task", _OWNER).Task
    plain = require_module("verifiers.v1.env", _OWNER).Env
    kind, config = type(env.taskset), env.taskset.config
    task = kind.task_type()
    if len(env._agent_specs) != 1:
        return f"has an Env of {len(env._agent_specs)} agents"
    if any(getattr(type(env), hook) is not getattr(plain, hook) for hook in ("setup", "finalize", "start", "stop")):
        return "has an Env with hooks around its run"
    if loaders.default_harness_id(name) == name:
        return "exports a Harness"
    if kind.toolsets(config) or task.toolsets(config.task):
        return "has tools that run as servers"
    if task.NEEDS_CONTAINER or task.setup is not base.setup or task.finalize is not base.finalize:
        return "needs a sandbox"
    return None


def _check_task(name: str, task: Any, alone: bool) -> None:
    """Raises InputError for a task with anything but text in its prompt, or with a reward that needs a sandbox; and if
    the task is `alone`, without an `Env` that asks and rewards, for one without a prompt or a reward.
    """
    place = f"environment.taskset: task {task.data.idx} of {name}"
    try:
        messages = _messages(task)
    except ValueError as error:
        raise InputError(f"{place} {error}") from error
    if alone and not any(message["role"] == "user" for message in messages):
        raise InputError(f"{place} has no prompt")
    rewards = task.hooks("reward")
    for reward in rewards:
        runtime = inspect.signature(reward).parameters.get("runtime")
        if runtime is not None and runtime.default is inspect.Parameter.empty:
            raise InputError(f"{place} has the reward {reward.__name__}, which runs in a sandbox")
    if alone and not rewards and not task.config.judges:
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


def _trace(task: Any) -> Any:
    """The record that the rewards of a task read, with the prompt."""
    v1 = require_module("verifiers.v1", _OWNER)
    kinds = {"system": v1.SystemMessage, "user": v1.UserMessage, "assistant": v1.AssistantMessage}
    state = require_module("verifiers.v1.state", _OWNER).state_cls(type(task))
    trace = v1.Trace(
        task=v1.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
        agent=v1.AgentInfo(config=v1.AgentConfig()),
        nodes=[],
        state=state(),
        ok=True,
    )
    for message in _messages(task):
        _add(trace, kinds[message["role"]](content=message["content"]))
    return trace


def _add(trace: Any, message: Any, sampled: bool = False) -> None:
    node = require_module("verifiers.v1", _OWNER).MessageNode
    parent = len(trace.nodes) - 1 if trace.nodes else None
    trace.nodes.append(node(message=message, parent=parent, sampled=sampled))
