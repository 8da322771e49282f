"""Tools for environments: a tool is a typed Python function, and a `ToolEnvironment` runs the calls of the policy."""

import inspect
import json
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from pydantic import ConfigDict, Field, ValidationError, create_model

from posttrain.data.tools import ParsedAnswer, ToolCall, call_id, hermes_text, parse_hermes, schema
from posttrain.environments.protocol import Environment, Message, Observation, Step
from posttrain.errors import InputError
from posttrain.recipe.components import EnvironmentRecipe


class ToolFailure(Exception):
    """A call that fails. The policy sees the message, and the turn counts as rejected."""


@dataclass(frozen=True)
class Tool:
    """A tool that the policy may call."""

    schema: dict[str, Any]
    """Name, description and parameters in OpenAI's format."""
    call: Callable[[Mapping[str, Any]], str]
    """Arguments -> result as text. Raises ToolFailure."""

    @property
    def name(self) -> str:
        """The name by which the policy calls it."""
        return str(self.schema["function"]["name"])


def tool(function: Callable[..., Any]) -> Tool:
    """Make a tool from a function's name, the first paragraph of its docstring, and its typed parameters.

        def price(item: Annotated[str, "singular, as in the question"]) -> int:
            '''The price of an item.'''

    Arguments are checked against the types. A result that is not text becomes JSON. If the function raises ValueError,
    the call fails and the policy sees the message; any other exception fails the episode. InputError for a parameter
    without a type, and for `*args` and `**kwargs`.
    """
    name = getattr(function, "__name__", type(function).__name__)
    # A bound method has the schema of its function, which is computed once for all episodes.
    model, description = _parameters(getattr(function, "__func__", function), name)

    def call(arguments: Mapping[str, Any]) -> str:
        try:
            given = model(**arguments)
        except ValidationError as error:
            faults = ("`{}`: {}".format(".".join(map(str, e["loc"])) or name, e["msg"]) for e in error.errors())
            raise ToolFailure("; ".join(faults)) from error
        except TypeError as error:  # a key that is not text cannot be a keyword
            raise ToolFailure(str(error)) from error
        try:
            result = function(**{key: getattr(given, key) for key in type(given).model_fields})
        except ValueError as error:
            raise ToolFailure(str(error)) from error
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)

    return Tool(schema(name, description, short_schema(model.model_json_schema())), call)


@lru_cache(maxsize=1024)
def _parameters(function: Any, name: str) -> tuple[Any, str]:
    """The parameters as a pydantic model, and the description."""
    fields: dict[str, Any] = {}
    parameters = list(inspect.signature(function, eval_str=True).parameters.values())
    for parameter in parameters[1:] if parameters and parameters[0].name == "self" else parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise InputError(f"the tool {name} has the parameter {parameter}; give it named parameters only")
        if parameter.annotation is parameter.empty:
            raise InputError(f"the parameter `{parameter.name}` of the tool {name} has no type; annotate it")
        annotation = parameter.annotation
        notes = [note for note in getattr(annotation, "__metadata__", ()) if isinstance(note, str)]
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[parameter.name] = (annotation, Field(default, description=notes[0] if notes else None))
    model = create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
    return model, (inspect.getdoc(function) or "").split("\n\n")[0].replace("\n", " ")


def short_schema(value: Any) -> Any:
    """A JSON schema without titles and `additionalProperties`, which would lengthen the prompt."""
    if isinstance(value, dict):
        return {
            key: {name: short_schema(one) for name, one in item.items()} if key == "properties" else short_schema(item)
            for key, item in value.items()
            if key not in ("title", "additionalProperties")
        }
    return [short_schema(item) for item in value] if isinstance(value, list) else value


def calling(*calls: tuple[str, dict[str, Any]], text: str = "") -> str:
    """The answer that makes these calls, in the form that `expert` and `random_answer` return."""
    return hermes_text(ParsedAnswer(text, [ToolCall(name, arguments) for name, arguments in calls]))


class ToolCalls:
    """Runs the calls of the answers of one episode."""

    def __init__(self, tools: Sequence[Tool | Callable[..., Any]], max_turns: int, penalty: float) -> None:
        """`max_turns`: maximum number of answers. `penalty`: reward of a turn with a malformed or failed call."""
        made = [one if isinstance(one, Tool) else tool(one) for one in tools]
        self.tools = {one.name: one for one in made}
        self.max_turns = max_turns
        self.penalty = penalty
        self.ended = False
        self._turn = 0

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The tools in OpenAI's format, for `Observation.tools`."""
        return [one.schema for one in self.tools.values()]

    def step(self, answer: ParsedAnswer) -> Step | None:
        """Run the calls of an answer; None for an answer without calls, which ends the episode. RuntimeError after the
        end."""
        if self.ended:
            raise RuntimeError("the episode has ended; call reset")
        turn, self._turn = self._turn, self._turn + 1
        self.ended = self._turn == self.max_turns
        info: dict[str, Any] = {"success": False} if self.ended else {}
        if answer.errors:
            info["rejected"] = "; ".join(answer.errors)
            content = f"No tool was called: {info['rejected']}."
            return Step([{"role": "user", "content": content}], self.penalty, False, self.ended, info)
        if not answer.calls:
            self.ended = True
            return None
        messages, failures = [], []
        for index, call in enumerate(answer.calls):
            result, failed = self._result(call)
            failures += [result] if failed else []
            id = call.id or call_id(turn, index)
            messages.append({"role": "tool", "name": call.name, "tool_call_id": id, "content": result})
        info["failed_calls"] = len(failures)
        if failures:
            info["rejected"] = "; ".join(failures)
        return Step(messages, self.penalty if failures else 0.0, False, self.ended, info)

    def _result(self, call: ToolCall) -> tuple[str, bool]:
        """The result of a call as text, and whether it failed."""
        made = self.tools.get(call.name)
        if made is None:
            return f"Error: there is no tool {call.name!r}; use {', '.join(self.tools)}", True
        try:
            # Tokenizers reject lone surrogates, which the JSON of a server may contain.
            return made.call(call.arguments).encode("utf-8", "replace").decode(), False
        except ToolFailure as error:
            return f"Error: {error}", True


class ToolEnvironmentRecipe(EnvironmentRecipe):
    """Keys of environments with tools."""

    max_turns: int = Field(6, ge=1)
    """Maximum number of answers, those that call tools included."""
    penalty: float = Field(-0.1, le=0)
    """Added to the reward of a turn with a malformed or failed call."""


class ToolEnvironment(Environment):
    """An environment whose policy may call tools before it answers.

    A subclass sets up a task in `begin`, lists its `tools`, and scores the answer in `finish`. After an answer with
    calls, the policy gets their results with the role `tool`. After an answer with a malformed call, it gets a message
    that describes the error, and no call of the answer is run. An answer without calls ends the episode.
    """

    Recipe = ToolEnvironmentRecipe

    @abstractmethod
    def begin(self, seed: int) -> list[Message]:
        """Set up the task of `seed`; returns the first messages."""

    @abstractmethod
    def tools(self) -> Sequence[Tool | Callable[..., Any]]:
        """The tools of this task: functions, or `Tool` objects from `tool` or an MCP server."""

    @abstractmethod
    def finish(self, answer: str) -> tuple[float, dict[str, Any]]:
        """The reward of an answer without calls, and the `info` of the last step, with `success`."""

    def reset(self, seed: int) -> Observation:
        messages = self.begin(seed)
        self._calls = ToolCalls(self.tools(), self.recipe.max_turns, self.recipe.penalty)
        return Observation(messages, tools=self._calls.schemas)

    def step(self, action: str) -> Step:
        """Apply an answer whose calls are in Hermes syntax: `<tool_call>{"name": ..., "arguments":
        {...}}</tool_call>`."""
        return self.act(parse_hermes(action))

    def act(self, answer: ParsedAnswer) -> Step:
        step = self._calls.step(answer)
        if step is not None:
            return step
        reward, info = self.finish(answer.text)
        return Step([], reward, True, False, info)
