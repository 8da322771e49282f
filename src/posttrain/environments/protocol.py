"""The environment protocol: the state machine of one task. It uses neither tokens nor models.

Methods of environments and rewards are called in daemon threads, so that time-outs and signals hold also for a call that
never returns. A thread cannot be ended from outside. A call that takes too long is given up: its result is ignored,
SystemExit is raised in its thread the next time that it runs Python code, and neither the event loop nor the interpreter
waits for it.
"""

import asyncio
import ctypes
import inspect
import json
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Real
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, ClassVar, TypeVar
from weakref import WeakKeyDictionary

import numpy as np

from posttrain.data.held_out import TaskRow, TaskSplit, split_tasks, training_tasks
from posttrain.data.messages import UnusableRow, content_text, read_parts
from posttrain.data.tools import ParsedAnswer
from posttrain.errors import InputError, PosttrainError, RunError
from posttrain.images import EDGE, MARK, Pictured
from posttrain.recipe.components import EnvironmentRecipe, Factory, environment_class
from posttrain.recipe.rollout import EvaluationRecipe, SeedRange, same_tasks

Message = dict[str, str]
"""A chat message: `{"role": "system" | "user", "content": text}`, or the result of a tool, see `ToolEnvironment`. An
environment may return a list of parts as content, such as `{"type": "image", "bytes": png}` and `{"type": "text", "text": text}`."""

_ROLES = ("system", "user", "assistant", "tool")

LARGEST_REWARD = float(np.finfo(np.float32).max)
"""Rewards are stored as float32."""

Action = str | ParsedAnswer
"""An action of the policy: the text of its answer or, if it has tools, the parsed text and calls of the answer."""

Cells = list[list[str]]
"""A grid by rows. A cell has the name of the symbol that displays it: `wall`, `floor`, `player_on_goal`."""


@dataclass(frozen=True)
class Observation:
    """The state before the first action: messages to the policy, and optional tools."""

    messages: list[Message]
    state: str | None = None
    """A name of the state, for credit that compares actions taken in the same state (`gigpo`). Two episodes of a task
    must have the same name exactly when they are in the same state. None: states are compared by their observation
    tokens."""
    tools: list[dict[str, Any]] = field(default_factory=list)
    """The tools that the policy may call in this episode, in OpenAI's format. With tools, answers are passed to
    `act`."""


@dataclass(frozen=True)
class Step:
    """The result of one action."""

    messages: list[Message]
    """Messages shown to the policy if the episode continues."""
    reward: float
    terminated: bool
    """Whether the task ended by its own rules."""
    truncated: bool
    """Whether a limit ended the episode."""
    info: dict[str, Any] = field(default_factory=dict)
    """The last step has `info["success"]` (bool). `info["rejected"]` (text) is the reason why an action was invalid."""
    state: str | None = None
    """The name of the new state, as in `Observation`."""
    new_conversation: bool = False
    """Whether `messages` start a new conversation, in which the policy no longer sees the earlier one."""
    scored: bool = True
    """Whether a reward applies to the episode. False, in the last step: it is left out of updates and of means."""


_T = TypeVar("_T")


class ProtocolError(TypeError):
    """An environment returned something that the protocol does not allow."""


def require_observation(returned: object) -> Observation:
    """`returned` if `reset` may return it; ProtocolError otherwise."""
    if not isinstance(returned, Observation):
        raise ProtocolError(f"`reset` returned {_kind(returned)}, not an Observation")
    returned = replace(returned, messages=_require_messages(returned.messages, "reset"))
    if not returned.messages:
        raise ProtocolError("`reset` returned an Observation without messages")
    if not isinstance(returned.tools, list) or not all(isinstance(tool, dict) for tool in returned.tools):
        raise ProtocolError(f"`tools` is {short(returned.tools)}, not a list of dicts")
    _require_json([returned.tools, returned.state], "the tools and the state of `reset`")
    return returned


def require_step(returned: object) -> Step:
    """`returned` with plain numbers if `step` may return it; ProtocolError otherwise. Its reward may be infinite."""
    if not isinstance(returned, Step):
        raise ProtocolError(f"`step` returned {_kind(returned)}, not a Step")
    messages = _require_messages(returned.messages, "step")
    _require_json(returned.state, "the state of `step`")
    names = ("terminated", "truncated", "new_conversation", "scored")
    flags = {name: _flag(getattr(returned, name), f"`{name}`") for name in names}
    if not isinstance(returned.reward, Real):
        raise ProtocolError(f"the reward is {short(returned.reward)}, not a number")
    if not isinstance(returned.info, Mapping):
        raise ProtocolError(f"`info` is {short(returned.info)}, not a dict")
    info = dict(returned.info)
    if "success" in info:
        info["success"] = _flag(info["success"], "`success` in `info`")
    if not isinstance(info.get("rejected"), str | bool | None):
        raise ProtocolError(f"`rejected` in `info` is {short(info['rejected'])}, not text")
    if "scores" in info:
        info["scores"] = _scores(info["scores"])
    _require_json(info, "`info`", default=str)
    return replace(returned, messages=messages, reward=number(returned.reward), info=info, **flags)


def allowed(check: Callable[[object], _T], returned: object, environment: EnvironmentRecipe, seed: int) -> _T:
    """`check(returned)`, of `require_observation` or `require_step`, with InputError instead of ProtocolError."""
    try:
        return check(returned)
    except ProtocolError as error:
        raise InputError(f"{environment.type}, seed {seed}: {error}; correct the environment") from error


def number(value: object) -> float:
    """`value` as a float. NaN for anything that is not a number, text included; infinite if a float cannot hold it."""
    try:
        return math.nan if isinstance(value, str | bytes) else float(value)  # type: ignore[arg-type]
    except OverflowError:
        return math.inf
    except Exception:
        return math.nan


def _flag(value: object, name: str) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise ProtocolError(f"{name} is {short(value)}, not True or False")
    return bool(value)


def _scores(scores: object) -> dict[str, float | None]:
    """The scores as finite numbers; None for those that do not apply."""
    if not isinstance(scores, Mapping):
        raise ProtocolError(f"`scores` in `info` is {short(scores)}, not a dict")
    for name, value in scores.items():
        if not isinstance(name, str) or (value is not None and not abs(number(value)) <= LARGEST_REWARD):
            raise ProtocolError(f"the score {short(name)} in `info` is {short(value)}, not a number of float32")
        if name.endswith(("_low", "_high")):
            raise ProtocolError(f"the score {short(name)} in `info` is named as a limit of an interval; rename it")
    return {name: None if value is None else number(value) for name, value in scores.items()}


def _require_messages(messages: object, method: str) -> list[Message]:
    """The messages, in which contents are text; ProtocolError for anything else."""
    if not isinstance(messages, list | tuple):
        raise ProtocolError(f"the messages of `{method}` are {short(messages)}, not a list")
    read: list[Any] = []
    for message in messages:
        if isinstance(message, Mapping) and isinstance(parts := message.get("content"), list):
            try:
                where = f"a message of `{method}`"
                message = {**message, "content": content_text(read_parts(parts, where), False, where)}
            except UnusableRow as error:
                raise ProtocolError(str(error)) from error
        read.append(message)
        if not isinstance(message, Mapping) or not isinstance(message.get("content"), str):
            raise ProtocolError(
                f"a message of `{method}` is {short(message)}, not a dict with `role` and the text `content`"
            )
        if not (isinstance(message.get("role"), str) and message["role"] in _ROLES):
            raise ProtocolError(
                f"a message of `{method}` has the role {short(message.get('role'))}; use {', '.join(_ROLES)}"
            )
    plain = [
        {**one, "content": MARK.sub("", text) if isinstance(text := one["content"], Pictured) else text} for one in read
    ]
    _require_json(plain, f"a message of `{method}`")
    return read


def _require_json(value: object, name: str, default: Callable[[object], str] | None = None) -> None:
    """Raise ProtocolError unless the renderer and the episode store can read the value, of which `default` makes text."""
    try:
        json.dumps(value, ensure_ascii=False, default=default).encode()
    except UnicodeEncodeError as error:
        at = error.object[max(0, error.start - 20) : error.start + 1]
        image = (
            "; only an unchanged content keeps its image, so put other text in another message" if EDGE in at else ""
        )
        raise ProtocolError(f"{name} has a lone surrogate, which is no text, in {short(at)}{image}") from error
    except Exception as error:
        raise ProtocolError(f"{name} cannot be written as JSON ({described(error)})") from error


def _kind(value: object) -> str:
    if value is None:
        return "nothing"
    if inspect.iscoroutine(value):
        value.close()
        return "a coroutine (remove `async`)"
    return f"a {type(value).__name__}"


def short(value: object) -> str:
    """`value` as it is shown in messages."""
    try:
        text = " ".join(repr(value).split())
    except Exception:
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."


@dataclass(frozen=True)
class Baseline:
    """The success of a baseline policy on given seeds."""

    success: float
    """Mean success in [0, 1]."""
    mean_return: float
    """Mean undiscounted return."""
    n: int
    """Number of seeds."""
    interval: tuple[float, float] | None = None
    """95% interval of the success; None if the value is exact for these seeds."""
    scores: Mapping[str, tuple[float, float, float]] = field(default_factory=dict)
    """Further scores by name: the mean and its 95% interval."""


class Environment(ABC):
    """One attempt at a task. Each episode gets a new instance.

    A subclass implements `reset` and `step`; the other methods are optional. To add keys to the recipe, nest a `Recipe`
    class; its values are in `self.recipe`.
    """

    Recipe: ClassVar[type[EnvironmentRecipe]] = EnvironmentRecipe
    """Keys of the `environment` section of a recipe."""
    self_contained: ClassVar[bool] = True
    """Whether the default recipe is a complete task. False if a recipe has to name data."""
    scripted_baselines: ClassVar[tuple[str, ...]] = ()
    """Names of the scripted policies that `baselines` measures besides random and optimal, in the order of tables."""
    score_order: ClassVar[tuple[str, ...]] = ()
    """Names of scores in the order of tables. Other scores follow in the order in which episodes report them."""
    blocking: bool = False
    """Whether methods block, for example on another process. If true, they are called in threads."""
    primer: str = ""
    """Text that starts every answer of the policy. `step` receives it before the sampled text."""

    def __init__(self, recipe: EnvironmentRecipe) -> None:
        self.recipe: Any = recipe

    @abstractmethod
    def reset(self, seed: int) -> Observation:
        """Start the task of `seed`. The same seed gives the same task and the same chance events."""

    @abstractmethod
    def step(self, action: str) -> Step:
        """Apply an action: the text of the policy's answer, as sampled. RuntimeError after the last step."""

    def act(self, answer: ParsedAnswer) -> Step:
        """Apply an answer that was parsed with the syntax of the policy's chat template. Called instead of `step` if
        the observation has tools."""
        raise NotImplementedError(
            f"{type(self).__name__} offers tools but has no `act`; derive it from ToolEnvironment"
        )

    def take(self, action: Action) -> Step:
        """Apply an action of either kind."""
        return self.step(action) if isinstance(action, str) else self.act(action)

    @classmethod
    def task_rows(cls, recipe: Any) -> Sequence[TaskRow] | None:
        """Return the rows of files that are the tasks of seeds 0, 1, ...; None if every seed is a task."""
        return None

    @classmethod
    def check_tasks(cls, recipe: Any, training: Sequence[int], held_out: Sequence[Sequence[int]]) -> list[str]:
        """Return warnings about the tasks of these seeds before a run; InputError if one cannot be played or scored."""
        return []

    @classmethod
    def has_reward(cls, recipe: Any) -> bool:
        """Whether the environment computes rewards. Otherwise a recipe needs a reward model."""
        return True

    @classmethod
    def negative_rewards(cls, recipe: Any) -> str | None:
        """Return the dotted key that makes rewards below 0 possible, which `credit.type: maxrl` refuses; None if none
        is known."""
        return None

    @classmethod
    def return_range(cls, recipe: Any) -> tuple[float, float] | None:
        """Return the least and the greatest return of an episode; None if unknown. With it, the mean return of few
        tasks has an interval, which accounts for returns that none of them had."""
        return None

    @classmethod
    def reports_scores(cls, recipe: Any) -> bool:
        """Whether episodes can report `info["scores"]`, from which `credit.type: gdpo` learns."""
        return True

    @classmethod
    def task_name(cls, recipe: Any, seed: int) -> str:
        """Return the name of the task of `seed` for messages."""
        return f"environment seed {seed}"

    @classmethod
    def variants(cls) -> Sequence[Mapping[str, Any]]:
        """Return the keys of every complete task that this environment offers, for `posttrain env list TYPE` and `env
        audit --all`."""
        return [{}] if cls.self_contained else []

    def try_reward(self, seed: int) -> list[str]:
        """Score an answer to the task of `seed` before a run. Return warnings; InputError if no answer can be scored."""
        return []

    def expert(self) -> str:
        """Return an optimal action in the current state; NotImplementedError if none is known."""
        raise NotImplementedError(f"{type(self).__name__} has no expert")

    def cells(self) -> Cells | None:
        """Return the grid of the current state, for pictures; None for environments without one."""
        return None

    def row(self) -> Mapping[str, Any]:
        """Return the data row of the current task, by column; empty for tasks that are not rows."""
        return {}

    def random_answer(self, draw: float) -> str:
        """Return a valid action, uniformly random, selected by `draw` in [0, 1)."""
        raise NotImplementedError(f"{type(self).__name__} has no random policy")

    @classmethod
    def baselines(cls, recipe: Any, seeds: Sequence[int]) -> dict[str, Baseline]:
        """Return `random`, `optimal` and the `scripted_baselines` on these seeds, where they can be computed."""
        return {}

    @classmethod
    def validate(cls, recipe: Any, seeds: Sequence[int]) -> None:
        """Check without a model that a reference solution earns full reward and that a wrong answer does not.

        Raises:
            AssertionError: a check failed. The message names the seed.
        """
        raise NotImplementedError(f"{cls.__name__} does not implement validate")


@Factory
def environment_maker(recipe: EnvironmentRecipe) -> Callable[[EnvironmentRecipe], Environment]:
    """Return the function that creates environments of the recipe's type. It is called once per episode."""
    return environment_class(recipe.type)


class EnvironmentFactory:
    """Creates environments of one kind with the same settings. Every call returns a new instance, which plays one
    episode."""

    def __init__(self, recipe: EnvironmentRecipe) -> None:
        """InputError if there is no environment of the type `recipe.type`."""
        self.recipe = recipe
        self._make = environment_maker(recipe)

    def __call__(self) -> Environment:
        return self._make(self.recipe)


def return_range(recipe: EnvironmentRecipe) -> tuple[float, float] | None:
    """The `Environment.return_range` of a recipe. InputError unless it is None, or two finite numbers in order."""
    name = f"`return_range` of {recipe.type}"
    bounds = completed(partial(environment_class(recipe.type).return_range, recipe), name)
    if bounds is None:
        return None
    low, high = map(number, bounds) if isinstance(bounds, Sequence) and len(bounds) == 2 else (math.nan, math.nan)
    if not -math.inf < low <= high < math.inf:
        raise InputError(f"{name} is {short(bounds)}; return the least and the greatest return of an episode, or None")
    return low, high


def task_split(
    environment: EnvironmentRecipe,
    evaluation: EvaluationRecipe,
    training: SeedRange | None,
    training_key: str = "seeds",
) -> TaskSplit:
    """The tasks of a run, split by purpose. Arguments and errors as for `posttrain.data.held_out.split_tasks`.

    Held-out tasks are those of `evaluation.environment`. If its rows come from another source, all rows of that source
    are held out.
    """
    rows = environment_class(environment.type).task_rows(environment)
    source, other = environment.rows_key or "the environment", evaluation.environment
    if other is None or same_tasks(environment, other):
        return split_tasks(rows, source, evaluation, training, training_key)
    # Tasks of two sources: all tasks of the first are for training, and all of the second are held out.
    held_out_rows = environment_class(other.type).task_rows(other)
    other_source = None if other.rows_key is None else f"evaluation.{other.rows_key}"
    if held_out_rows is not None and evaluation.held_out is None:
        evaluation = evaluation.model_copy(update={"held_out": len(held_out_rows)})
    held_out = split_tasks(held_out_rows, other_source or "evaluation.environment", evaluation, None)
    left_out = {row.key for row in held_out_rows or ()}
    used = () if training is None else training_tasks(rows, source, training, training_key, left_out)
    return replace(held_out, training=used, source=environment.rows_key)


# -- calls of environments and rewards ---------------------------------------------------------------------------------


MOST_GIVEN_UP = 256
"""Calls of a process that were given up and still run. One more ends the run."""
_MOST_IDLE = 64
"""Threads that wait for the next call."""
_QUICK = 0.002
"""Seconds for which the event loop itself waits for a call that others have to wait for, which saves switching."""
_SLOW = 0.1
"""Share of the time-out after which calls that are made one at a time no longer wait for each other."""

Ended = tuple[Any, BaseException | None]
"""How a call ended: its result, or what it raised."""


class CallTimeout(Exception):
    """A call took longer than its time-out."""


class Call:
    """A call that runs in a daemon thread. A thread runs calls one after the other until one of them is given up."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function
        self.future: Future[Ended] = Future()
        """Its end. It never raises what the call raised: asyncio does not return from a SystemExit."""
        self.future.set_running_or_notify_cancel()
        self.ended = Lock()
        """Acquired once, by the thread after the call or by `give_up`."""
        try:
            self.thread = _idle.pop()
        except IndexError:
            self.thread = _CallThread()
        self.thread.calls.put(self)

    def give_up(self) -> None:
        """Ignore the call from now on. RunError if too many ignored calls still run."""
        if not self.ended.acquire(blocking=False):
            return
        raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
        raise_in(ctypes.c_ulong(self.thread.ident or 0), ctypes.py_object(SystemExit))
        _given_up.difference_update([thread for thread in _given_up if not thread.is_alive()])
        _given_up.add(self.thread)
        if len(_given_up) > MOST_GIVEN_UP:
            raise RunError(
                f"{len(_given_up)} calls of environments or rewards took longer than rollout.environment_timeout and have "
                "not returned since; give them time-outs of their own, then resume the run"
            )


class _CallThread(Thread):
    def __init__(self) -> None:
        super().__init__(name="environment", daemon=True)
        self.calls: SimpleQueue[Call] = SimpleQueue()
        self.start()

    def run(self) -> None:
        lives = True
        while lives:
            call = self.calls.get()
            try:
                end: Ended = call.function(), None
            except BaseException as error:
                end = None, error
            lives = call.ended.acquire(blocking=False) and len(_idle) < _MOST_IDLE
            if lives:
                _idle.append(self)  # before the caller continues with its next call
            call.future.set_result(end)
            del call, end


_given_up: set[Thread] = set()
_idle: list[_CallThread] = []
os.register_at_fork(after_in_child=_idle.clear)


@dataclass
class _Queue:
    """The calls of an event loop that are made one at a time."""

    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    overlap: bool = False
    """Whether a slow call ended the order."""


_queues: WeakKeyDictionary[asyncio.AbstractEventLoop, _Queue] = WeakKeyDictionary()


def described(error: BaseException, where: str = "") -> str:
    """Type and message of what a call raised, without lone surrogates, which cannot be printed."""
    try:
        return f"{type(error).__name__}{where}: {error}".encode("utf-8", "replace").decode()
    except Exception:
        return type(error).__name__


def ended_in(function: Callable[[], Any], seconds: float | None) -> Ended:
    """As `ended_within`, outside an event loop."""
    call = Call(function)
    try:
        return call.future.result(seconds)
    except TimeoutError:
        call.give_up()
        return None, CallTimeout(f"took longer than {seconds:g} s")


def completed(function: Callable[[], Any], name: str, seconds: float | None = None) -> Any:
    """The result of `ended_in`. InputError, which names the call, if it raised; CallTimeout."""
    result, error = ended_in(function, seconds)
    if isinstance(error, PosttrainError | CallTimeout):
        raise error
    if error is not None:
        raise InputError(f"{name} raised {described(error)}; correct it") from error
    return result


async def ended_within(function: Callable[[], Any], seconds: float | None, one_at_a_time: bool) -> Ended:
    """Call `function` in a daemon thread. The call ends with CallTimeout after `seconds`, although its thread may go on;
    None: no limit.

    Calls that are made `one_at_a_time` in an event loop do not overlap, until one of them takes longer than a tenth of
    `seconds`. RunError if too many calls that were given up still run.
    """
    queue = _queues.setdefault(asyncio.get_running_loop(), _Queue())
    call: Call | None = None
    left = seconds
    if one_at_a_time and not queue.overlap:
        async with queue.turn:
            if not queue.overlap:
                call = Call(function)
                with suppress(TimeoutError):
                    return call.future.result(_QUICK if seconds is None else min(_QUICK, seconds))
                if seconds is not None:
                    left = (1 - _SLOW) * seconds
                await _wait(call, None if seconds is None else _SLOW * seconds)
                queue.overlap = not call.future.done()
    call = call or Call(function)
    await _wait(call, left)
    if not call.future.done():
        call.give_up()
        return None, CallTimeout(f"took longer than {seconds:g} s")
    return call.future.result()


async def _wait(call: Call, seconds: float | None) -> None:
    """Wait until a call ends, at most `seconds`."""
    with suppress(TimeoutError):
        await asyncio.wait_for(asyncio.wrap_future(call.future), seconds)
