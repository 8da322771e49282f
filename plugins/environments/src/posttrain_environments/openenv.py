"""Environments of OpenEnv: sessions of a running server, or instances in this process."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from posttrain.engines.http import bounded
from posttrain.environments.global_random import GlobalRandom
from posttrain.errors import InputError
from posttrain.plugins import require_module
from posttrain.recipe.base import EXECUTES, Connects, Executes, Mark, Text
from posttrain.recipe.components import EnvironmentRecipe
from posttrain_environments.base import Adapter, AdapterRecipe, Outcome

_NOT_SHOWN = ("done", "reward", "metadata")
"""Fields of an observation that are not text for the policy."""
_SECONDS = 10.0
"""Time-out of a connection."""


class OpenEnvRecipe(AdapterRecipe):
    """Keys of `openenv`."""

    type: Text = "openenv"
    """An environment of OpenEnv."""
    url: Connects | None = None
    """Base URL of a running server, for example `http://localhost:8000`. Every episode has its own session."""
    in_process: Executes | None = None
    """`module:Class` of an environment that runs in this process, instead of `url`."""
    keys: Annotated[dict[str, bool | int | float | str], Mark("executes", "in_process")] = {}
    """Arguments of the class of `in_process`."""
    reset: Annotated[dict[str, bool | int | float | str], EXECUTES] = {}
    """Arguments of `reset` besides the seed, for example `{split: train}`."""
    action_field: Text | None = None
    """The field of an action that takes the answer. Default: the only field without a default, or the only one. Without
    one, answers are JSON objects.
    """
    observation_field: Text | None = None
    """The field of an observation that the policy sees. Default: the only field of text, else all of them as JSON."""

    def _check(self) -> None:
        if (self.url is None) == (self.in_process is None):
            raise ValueError("give exactly one of `url` (a running server) and `in_process` (`module:Class`)")
        if self.url is not None and self.keys:
            raise ValueError("`keys` are arguments of the class of `in_process`, so they have no effect with `url`")


class OpenEnv(Adapter):
    """An environment of OpenEnv. Success is a return of at least `success_return`."""

    Recipe = OpenEnvRecipe

    def __init__(self, recipe: EnvironmentRecipe) -> None:
        """InputError if openenv is not installed, the class does not exist, or the server does not answer."""
        super().__init__(recipe)
        require_module("openenv.core", "environment.type openenv")
        self._session: _Server | _Local | None = None

    def _start(self, seed: int) -> tuple[str, str]:
        recipe = self.recipe
        self._session = _Server(recipe.url) if recipe.url is not None else _Local(recipe.in_process, recipe.keys, seed)
        schema = self._session.action_schema()
        self._field, self._type = _action_field(schema, recipe.action_field)
        observation, _, over = self._session.reset(seed, recipe.reset)
        if over:
            raise RuntimeError(f"{recipe.url or recipe.in_process} ended the episode of seed {seed} in its reset")
        if self._field is not None:
            return self._shown(observation), f"Answer with {_ARTICLES.get(self._type, 'the action')} only."
        fields = {name: facts.get("type", "any") for name, facts in schema.get("properties", {}).items()}
        fields.pop("metadata", None)
        return self._shown(observation), f"Answer only with a JSON object with these keys: {json.dumps(fields)}"

    def _apply(self, action: str) -> Outcome:
        assert self._session is not None
        try:
            values = _action(action, self._field, self._type)
        except ValueError as error:
            return Outcome(f"Rejected: {error}.", 0.0, False, rejected=str(error))
        try:
            observation, reward, over = self._session.step(values)
        except _InvalidAction as error:
            return Outcome(f"Rejected: {error}.", 0.0, False, rejected=str(error))
        # A missing reward counts as 0: OpenEnv environments omit it before the end of an episode.
        return Outcome(self._shown(observation), float(reward or 0.0), over)

    def _shown(self, observation: Mapping[str, Any]) -> str:
        name = self.recipe.observation_field
        if name is not None:
            if name not in observation:
                raise InputError(
                    f"environment.observation_field: observations have {', '.join(observation)}, not {name!r}"
                )
            value = observation[name]
            return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        shown = {key: value for key, value in observation.items() if key not in _NOT_SHOWN}
        texts = [value for value in shown.values() if isinstance(value, str)]
        return texts[0] if len(texts) == 1 == len(shown) else json.dumps(shown, ensure_ascii=False, default=str)

    def _close(self) -> None:
        if getattr(self, "_session", None) is not None:
            assert self._session is not None
            self._session.close()
            self._session = None


_ARTICLES = {"string": "the action", "integer": "a whole number", "number": "a number", "boolean": "true or false"}

Observed = tuple[Mapping[str, Any], float | None, bool]
"""Fields of an observation, reward and end."""


class _InvalidAction(Exception):
    """The environment rejected the action."""


def _served_schema(url: str) -> Mapping[str, Any]:
    """The action schema of the server at `url`, which has `_SECONDS` for the whole reply and may not redirect to another."""
    httpx = require_module("httpx", "environment.url")
    try:
        with bounded(httpx.Client(timeout=_SECONDS, follow_redirects=True)) as client:
            schema: Mapping[str, Any] = client.get(f"{url}/schema").raise_for_status().json()["action"]
    except (OSError, httpx.HTTPError, ValueError, KeyError, TypeError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise InputError(f"environment.url: no server of OpenEnv answers at {url} ({reason}); start it") from error
    return schema


class _Server:
    """A session of a running server."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        client = require_module("openenv", "environment.url").GenericEnvClient
        self._client = client(base_url=self._url).sync()

    def action_schema(self) -> Mapping[str, Any]:
        return _served_schema(self._url)

    def reset(self, seed: int, arguments: Mapping[str, Any]) -> Observed:
        return self._observed(self._client.reset(seed=seed, **arguments))

    def step(self, action: Mapping[str, Any]) -> Observed:
        try:
            return self._observed(self._client.step(dict(action)))
        except RuntimeError as error:
            if "VALIDATION_ERROR" in str(error):
                raise _InvalidAction(" ".join(str(error).split())[:200]) from error
            raise

    @staticmethod
    def _observed(result: Any) -> Observed:
        return result.observation, result.reward, bool(result.done)

    def close(self) -> None:
        self._client.close()


class _Local:
    """An instance in this process."""

    def __init__(self, place: str, keys: Mapping[str, Any], seed: int) -> None:
        module, _, name = place.partition(":")
        kind = getattr(require_module(module, "environment.in_process"), name, None)
        if kind is None:
            raise InputError(f"environment.in_process: {module} has no class {name!r}; give `module:Class`")
        self._random = GlobalRandom("openenv", place, seed)
        self._action = _action_class(kind, place)
        with self._random.active():
            self._environment = kind(**keys)

    def action_schema(self) -> Mapping[str, Any]:
        schema: Mapping[str, Any] = self._action.model_json_schema()
        return schema

    def reset(self, seed: int, arguments: Mapping[str, Any]) -> Observed:
        with self._random.active():
            return self._observed(self._environment.reset(seed=seed, **arguments))

    def step(self, action: Mapping[str, Any]) -> Observed:
        try:
            typed = self._action(**action)
        except ValueError as error:
            raise _InvalidAction(" ".join(str(error).split())[:200]) from error
        with self._random.active():
            return self._observed(self._environment.step(typed))

    @staticmethod
    def _observed(observation: Any) -> Observed:
        return observation.model_dump(mode="json"), observation.reward, bool(observation.done)

    def close(self) -> None:
        close = getattr(self._environment, "close", None)
        if close is not None:
            close()


def _action_class(kind: type, place: str) -> Any:
    """The class of the actions of an environment: its first type argument, else the annotation of `step`."""
    base = require_module("openenv.core.env_server.types", "environment.in_process").Action
    for parent in kind.__mro__:
        for generic in getattr(parent, "__orig_bases__", ()):
            for argument in get_args(generic) if get_origin(generic) else ():
                if isinstance(argument, type) and issubclass(argument, base):
                    return argument
    hint = get_type_hints(kind.step).get("action")  # type: ignore[attr-defined]
    if isinstance(hint, type) and issubclass(hint, base):
        return hint
    raise InputError(f"environment.in_process: {place} does not declare the type of its actions; annotate `step`")


def _action_field(schema: Mapping[str, Any], wanted: str | None) -> tuple[str | None, str]:
    """The field of an action that contains the answer, and its JSON type; None if an answer is a JSON object."""
    fields = {name: facts for name, facts in schema.get("properties", {}).items() if name != "metadata"}
    if wanted is not None and wanted not in fields:
        raise InputError(f"environment.action_field: actions have {', '.join(fields) or 'no fields'}, not {wanted!r}")
    required = [name for name in schema.get("required", ()) if name in fields]
    candidates = [wanted] if wanted is not None else required if len(required) == 1 else list(fields)
    if len(candidates) != 1:
        return None, "object"
    kind = fields[candidates[0]].get("type", "string")
    return candidates[0], kind if kind in _ARTICLES else "string"


def _action(answer: str, field: str | None, kind: str) -> dict[str, Any]:
    """The fields of an action. ValueError with the expected form."""
    text = answer.strip()
    if field is None:
        try:
            values = json.loads(text)
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict):
            raise ValueError("the answer is not a JSON object")
        return values
    if kind == "string":
        return {field: text}
    try:
        value = json.loads(text.lower())
    except (ValueError, RecursionError):
        value = None
    fits = {"integer": int, "number": (int, float), "boolean": bool}[kind]
    if not isinstance(value, fits) or (kind != "boolean" and isinstance(value, bool)):  # type: ignore[arg-type]
        raise ValueError(f"the answer is not {_ARTICLES[kind]}")
    return {field: value}
