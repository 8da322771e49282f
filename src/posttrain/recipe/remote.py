"""A model behind an OpenAI-compatible server, as a player that is evaluated."""

from typing import Any, Literal

from pydantic import Field, field_validator

from posttrain.recipe.base import Part
from posttrain.recipe.components import EnvironmentRecipe
from posttrain.recipe.rollout import SamplingRecipe

_ELSEWHERE = {
    "messages": "the environment",
    "model": "engine.model",
    "temperature": "the temperature of the recipe's sampling",
    "top_p": "the top_p of the recipe's sampling",
    "max_tokens": "rollout.tokens_per_turn",
    "max_completion_tokens": "rollout.tokens_per_turn",
    "stop": "rollout.stop_strings",
    "seed": "the run seed (engine.send_seed)",
}
"""Fields of a request -> what says them in a recipe."""
_OTHER_SHAPE = ("stream", "n", "tools", "functions")
"""Fields after which an answer is something else than one text."""


class OpenAIEngineRecipe(Part):
    """A remote model: the server of `url` answers, and no model is loaded here."""

    type: Literal["openai"] = "openai"
    """`openai`: chat completions of any OpenAI-compatible server."""
    url: str = Field(pattern=r"^https?://\S+$")
    """Base URL of the server, for example `http://localhost:8000/v1`."""
    model: str = Field(min_length=1)
    """Name of the model, as the server knows it."""
    api_key_variable: str | None = None
    """Name of the environment variable that holds the server's key; null sends none that means anything."""
    workers: int = Field(8, ge=1)
    """Episodes in flight, each with at most one request."""
    seconds: float = Field(120, gt=0)
    """Time-out of one request, in seconds."""
    retries: int = Field(3, ge=0)
    """Further requests after a time-out, a lost connection, or an answer of status 429 or 5xx; each waits longer."""
    stop_at: Literal["here", "server"] = "here"
    """Who ends an answer at rollout.stop_strings. `here`: it is asked for whole and cut after the first of them, which any server allows. `server`: they are sent, so nothing is written after them; for servers that say which one they stopped at (vLLM, SGLang)."""
    token_limit: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """The field that carries rollout.tokens_per_turn; some models know the second alone."""
    send_seed: bool = True
    """Each request has a seed of its own where sampling is not greedy; false for servers that refuse one."""
    extra_body: dict[str, Any] = {}
    """Further fields of every request, as JSON, for example `top_k: 20` where the server knows it. No place for secrets: it is kept in the run directory."""

    @field_validator("extra_body")
    @classmethod
    def _only_what_has_no_key(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name in value:
            if name in _ELSEWHERE:
                raise ValueError(f"`{name}` is set by {_ELSEWHERE[name]}; remove it")
            if name in _OTHER_SHAPE:
                raise ValueError(f"with `{name}` an answer would be no single text; remove it")
        return value


def refuse_unknown_sampling(sampling: SamplingRecipe, key: str) -> None:
    """ValueError for sampling that the protocol of chat completions has no field for. `key`: its section."""
    for name in ("top_k", "min_p"):
        value = getattr(sampling, name)
        if value != SamplingRecipe.model_fields[name].default:
            raise ValueError(
                f"`{key}.{name}` is no field of the OpenAI protocol; where the server knows it, give "
                f"`engine.extra_body.{name}={value:g}` instead"
            )


def has_thinking(environment: EnvironmentRecipe) -> bool:
    """Whether the environment's format has a `<think>` block in the text of an answer."""
    return bool(getattr(environment, "thinking", False) or getattr(_format(environment), "thinking", False))


def no_primer(environment: EnvironmentRecipe, primer: str) -> str:
    """Why an environment that begins every answer with `primer` cannot be played remotely, and what to set."""
    if hasattr(environment, "opened_by"):
        remedy = "set environment.opened_by=policy"
    elif hasattr(_format(environment), "prime"):
        remedy = "set environment.format.prime=false"
    else:
        remedy = f"{environment.type} has to leave its `primer` empty"
    return (
        f"{environment.type} begins every answer with {primer}, and a chat server lets nobody write in its model's name; "
        f"{remedy}"
    )


def _format(environment: EnvironmentRecipe) -> Any:
    return getattr(environment, "format", None)
