"""Reward functions score an answer to a prompt with a number. They are built in or written by the user.

    def reward(prompt, answer, **row):
        return float(answer.strip() == row["label"])

It returns a number, or a mapping of names to numbers of which `score` is the reward. The others are reported, and
`credit.type: gdpo` trains on them. None means that the function, or that name, does not apply to the row: it is left
out of the reward and of the means. The function may be `async`. It should raise if it cannot score an answer: the episode then
fails, which is different from a reward of 0.
"""

import asyncio
import copy
import difflib
import importlib
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from threading import Event, Thread, current_thread, main_thread
from typing import Any

from posttrain.environments.protocol import LARGEST_REWARD, Ended, Message, described, number, short
from posttrain.errors import InputError
from posttrain.images import readable
from posttrain.recipe.components import module_of_file, place_of

SCORE = "score"
"""The name of the reward among the numbers that a reward function returns."""
Scores = Mapping[str, float | None]
"""Scores by name; None for one that does not apply to the row."""
_ANY_ANSWER = "?"
_BLOCKED = 1.0
"""Seconds without an answer after which the event loop of `async` rewards counts as blocked."""
_PIECE = 1.0
"""Longest wait for an `async` reward in seconds, after which it goes on if its call was not given up."""
_GIVEN = ("prompt", "answer", "messages")
"""Parameters that are not columns of the row. A column with such a name is passed as `row_prompt` and so on."""
_OTHER_NAMES = ("completion", "completions", "reply", "response")
"""What other programs call the answer. A row may have such a column, so a function with `answer` may have them as well."""

_MARKER = re.compile(r"####|^[ \t]*A:", re.MULTILINE)
_NUMBER = re.compile(
    r"""(?<![0-9.])                           # not inside a number
        (?P<sign>(?<![\w)\]])[-−+])?          # a sign, unless it follows something that it could be subtracted from
        [$€£¥]?(?P<late>(?<=[$€£¥])[-−])?     # $5, -$5 and $-5
        (?P<digits>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?|\.[0-9]+)
        (?P<power>[eE][-+]?[0-9]{1,3}(?![0-9]))?""",
    re.VERBOSE,
)


def exact(answer: str, label: Any) -> float:
    """1 if the answer is the row's `label`, apart from white space at both ends, else 0."""
    return float(answer.strip() == _text(label))


def contains(answer: str, label: Any) -> float:
    """1 if the row's `label` occurs in the answer (case-sensitive), else 0. Note that long answers may contain many
    labels."""
    return float(_text(label) in answer)


def final_number(answer: str, row_answer: Any = None, completion: Any = None, label: Any = None) -> float:
    """1 if the answer ends in the number that the reference ends in, as GSM8K is scored, else 0.

    The reference is the first of the row's columns `answer`, `completion` and `label` that is not null. Numbers are
    compared by value: 1,234.50 is 1234.5, and currency signs do not count.
    """
    for name, reference in (("answer", row_answer), ("completion", completion), ("label", label)):
        if reference is not None:
            expected = last_number(str(reference))
            if expected is None:
                raise ValueError(f"final_number finds no number in the row's {name!r}: {str(reference)[:80]!r}")
            return float(last_number(answer) == expected)
    raise ValueError("final_number needs a row with `answer`, `completion` or `label`")


BUILT_IN: dict[str, Callable[..., float]] = {"exact": exact, "contains": contains, "final_number": final_number}
"""Reward functions that recipes choose by a short name."""


def last_number(text: str) -> Decimal | None:
    """The number that `text` concludes with; None if there is none.

    After the last `####`, or `A:` at the start of a line, it is the last number of the first non-empty line. Without
    such a marker, it is the last number of the text.
    """
    markers = list(_MARKER.finditer(text))
    if markers:
        lines = text[markers[-1].end() :].strip().splitlines()
        text = lines[0] if lines else ""
    numbers = list(_NUMBER.finditer(text))
    if not numbers:
        return None
    number = numbers[-1]
    size = Decimal(number["digits"].replace(",", "") + (number["power"] or ""))
    return -size if number["sign"] in ("-", "−") or number["late"] else size


class RewardFailure(Exception):
    """A reward function or a verifier raised, or returned something other than finite numbers."""


def parameter_of(column: str) -> str:
    """The parameter of a reward function that gets the value of `column`."""
    return f"row_{column}" if column in _GIVEN else column


class RewardFunction:
    """Wraps a reward function for an environment: passes the parameters that the function accepts, and checks its
    result."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        """`name`: its name in messages. InputError if it has no parameter `answer`."""
        parameters = [*inspect.signature(function).parameters.values()]
        self.name = name
        self.function = function
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self._names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        needed = {p.name for p in parameters if p.name in self._names and p.default is p.empty}
        self.columns = frozenset(needed - {*_GIVEN})
        """The columns that a row must have: the function's parameters without a default."""
        other = next((word for word in _OTHER_NAMES if word in self._names), None)
        if "answer" not in self._names and (other or not self._takes_all):
            remedy = (
                f"the model's reply is the parameter `answer`, one text per call, so rename `{other}`, or add `answer`"
            )
            remedy = remedy if other else "write `def reward(prompt, answer, **row)`"
            raise InputError(f"the reward {name} has no parameter `answer`; {remedy}")
        call = function if inspect.isroutine(function) else getattr(function, "__call__", function)  # noqa: B004
        self.blocking = inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(
            getattr(function, "func", None)
        )
        """Whether the function is `async`, so that it must be called outside the thread of an event loop."""

    def __call__(self, messages: Sequence[Message], answer: str, row: Mapping[str, Any], origin: str) -> Scores:
        """The scores of `answer` as finite numbers by name, including `score`; None for those that do not apply.

        Args:
            messages: the conversation that the policy was shown.
            answer: the policy's answer as text, without its end token.
            row: the row that the prompt comes from.
            origin: name of the row in messages.

        Raises:
            RewardFailure: the function raised, or returned something else.
        """
        # A copy, so that a function that modifies its row does not affect later episodes.
        columns = {parameter_of(column): value for column, value in copy.deepcopy(dict(row)).items()}
        shown = [{**message, "content": readable(message["content"])} for message in messages]
        text = shown[-1]["content"] if shown else ""
        if missing := sorted(self.columns - columns.keys()):
            raise RewardFailure(f"{self.name} needs the column `{missing[0]}`, which {origin} does not have")
        given = columns | {"prompt": text, "answer": answer, "messages": shown}
        if not self._takes_all:
            given = {key: value for key, value in given.items() if key in self._names}
        try:
            result = self.function(**given)
            if inspect.isawaitable(result):
                result = _waited_for(result)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and current_thread() is main_thread():
                raise  # by the user
            raise RewardFailure(f"{self.name} raised {described(error, f' on {origin}')}") from error
        returned: Mapping[Any, Any] = result if isinstance(result, Mapping) else {SCORE: result}
        absent = [name for name, value in returned.items() if value is None]
        applicable = {**returned, **dict.fromkeys(absent, 0.0)} if absent else result
        scores = finite_scores(applicable, self.name, origin)
        return scores | {_printable(name): None for name in absent}


class WeightedRewards:
    """Combines several reward functions: the score is the sum of weight x score over those that apply, and every score
    is reported by name."""

    def __init__(self, parts: Sequence[tuple[RewardFunction, float]]) -> None:
        """`parts`: functions and their weights. Functions with the same name are numbered."""
        self.name = " + ".join(function.name for function, _ in parts)
        self.columns = frozenset().union(*(function.columns for function, _ in parts))
        self.blocking = any(function.blocking for function, _ in parts)
        self._parts: dict[str, tuple[RewardFunction, float]] = {}
        for function, weight in parts:
            base = name = function.name.rpartition(":")[2]
            number = 1
            while name in self._parts or name == SCORE:
                number += 1
                name = f"{base}_{number}"
            self._parts[name] = function, weight

    def __call__(self, messages: Sequence[Message], answer: str, row: Mapping[str, Any], origin: str) -> Scores:
        """As `RewardFunction`. Numbers of a function besides its score are reported as `<function>_<name>`."""
        scores: dict[str, float | None] = {SCORE: None}
        for name, (function, weight) in self._parts.items():
            for key, value in function(messages, answer, row, origin).items():
                scores[name if key == SCORE else f"{name}_{key}"] = value
            if (value := scores[name]) is not None:
                scores[SCORE] = (scores[SCORE] or 0.0) + weight * value
        return scores


def try_reward(
    reward: RewardFunction | WeightedRewards,
    messages: Sequence[Message],
    reference: str | None,
    row: Mapping[str, Any],
    origin: str,
) -> list[str]:
    """Call `reward` once on a row before a run, with the row's reference or `?` as the answer.

    InputError if the function or the row is wrong. Returns a warning if the function may only be unable to score this
    answer, which would fail an episode but not the run.
    """
    answer = _ANY_ANSWER if reference is None else reference
    try:
        scores = reward(messages, answer, row, origin)
    except RewardFailure as error:
        cause = error.__cause__
        if cause is None or isinstance(cause, KeyError | NameError | ImportError) or reward.name in BUILT_IN:
            raise InputError(f"environment.reward: {error}; correct the function, or the row") from error
        return [f"environment.reward: {error}; the answer was {answer[:80]!r}, and episodes that it cannot score fail"]
    if scores[SCORE] is None:
        return [f"environment.reward: {reward.name} returned None on {origin}, so no reward applies to that row"]
    return []


def finite_scores(result: Any, name: str, origin: str) -> dict[str, float]:
    """The scores by name in `result`, which `name` returned. RewardFailure unless all are finite as float32 and one is
    `score`."""
    scores = {
        _printable(key): number(value)
        for key, value in (result.items() if isinstance(result, Mapping) else [(SCORE, result)])
    }
    if SCORE not in scores or not all(abs(score) <= LARGEST_REWARD for score in scores.values()):
        expected = f"a finite number, or a mapping of names to finite numbers with the key {SCORE!r}"
        raise RewardFailure(f"{name} returned {short(result)} on {origin}; it must return {expected}")
    return scores


def _printable(name: object) -> str:
    return str(name).encode("utf-8", "replace").decode()


def load_reward(where: str, key: str = "environment.reward") -> RewardFunction:
    """The reward function that `where` names: a built-in name, `module:function`, `path/to/file.py:function`, or one
    that `register_reward` returned. InputError, which names the `key`, if there is none."""
    if where in _registered:
        return RewardFunction(where, _registered[where])
    if where in BUILT_IN:
        return RewardFunction(where, BUILT_IN[where])
    try:
        return RewardFunction(where, load_function(named_reward(where), key))
    except ValueError as error:
        raise InputError(f"{key}: {error}") from None


def named_reward(where: str) -> str:
    """`where`; ValueError unless it is a built-in name or the place of a function. Nothing is imported."""
    if where.endswith(".py"):
        raise ValueError(f"{where} needs the name of a function; write {where}:FUNCTION")
    if ":" not in where and where not in BUILT_IN:
        near = difflib.get_close_matches(where, BUILT_IN, 1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise ValueError(
            f"there is no reward {where!r}{hint}; use one of {', '.join(BUILT_IN)}, `module:function` or "
            "`path/to/file.py:function`"
        )
    return where


def load_function(where: str, key: str) -> Callable[..., Any]:
    """The function at `module:function` or `path/to/file.py:function`. InputError, which names the `key`, if there is
    none."""
    place, _, name = where.rpartition(":")
    if not place:
        raise InputError(f"{key}: {where!r} is not a function; write `module:function` or `path/to/file.py:function`")
    if not name.isidentifier():
        raise InputError(f"{key}: {where} was registered in another process; pass the function to posttrain.rl again")
    if place.endswith(".py") and not Path(place).is_file():
        raise InputError(f"{key}: there is no file {place}; correct the path")
    try:
        module = module_of_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        remedy = f"write {place}.py:{name}" if Path(f"{place}.py").is_file() else "correct that file, or the name"
        raise InputError(f"{key}: {place} cannot be imported ({type(error).__name__}: {error}); {remedy}") from error
    function = getattr(module, name, None)
    if not callable(function):
        near = difflib.get_close_matches(name, [known for known, value in vars(module).items() if callable(value)], 1)
        hint = f"did you mean {place}:{near[0]}?" if near else "write `module:function`"
        raise InputError(f"{key}: {place} has no function {name!r}; {hint}")
    return function


_registered: dict[str, Callable[..., Any]] = {}


def register_reward(function: Callable[..., Any]) -> str:
    """Make a function available to recipes in this process. Returns the value of `environment.reward` that names it.

    If the function can be imported, the same value also works in other processes.
    """
    named = hasattr(function, "__qualname__") and hasattr(function, "__module__")
    name = base = place_of(function) if named else f"python:<{type(function).__name__}>"
    number = 1
    while _registered.get(name, function) is not function:
        number += 1
        name = f"{base}<{number}>"
    _registered[name] = function
    return name


@lru_cache(maxsize=1)
def _event_loop() -> asyncio.AbstractEventLoop:
    """One event loop for all `async` rewards, in its own thread, so that they can share clients."""
    loop = asyncio.new_event_loop()
    Thread(target=loop.run_forever, daemon=True, name="rewards").start()
    return loop


def replace_blocked_loop() -> None:
    """Give later `async` rewards another event loop if a reward blocks this one instead of awaiting."""
    if _event_loop.cache_info().currsize:
        runs = Event()
        _event_loop().call_soon_threadsafe(runs.set)
        if not runs.wait(_BLOCKED):
            _event_loop.cache_clear()


def _waited_for(awaitable: Any) -> Any:
    async def end() -> Ended:
        try:
            return await awaitable, None
        except BaseException as error:  # a SystemExit would end the event loop
            return None, error

    future = asyncio.run_coroutine_threadsafe(end(), _event_loop())
    try:
        # In pieces, so that a thread whose call was given up ends, and the coroutine with it.
        while not future.done():
            with suppress(TimeoutError):
                future.result(_PIECE)
    finally:
        future.cancel()
    result, error = future.result()
    if error is not None:
        raise error
    return result


def _text(label: Any) -> str:
    if label is None or not str(label).strip():
        raise ValueError("the row has no `label` to compare with")
    return str(label).strip()
