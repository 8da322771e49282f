"""A model behind an OpenAI-compatible server, as a player that is evaluated."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from posttrain.recipe.base import BaseConfig
from posttrain.recipe.components import EnvironmentRecipe
from posttrain.recipe.model import ModelRecipe
from posttrain.recipe.rollout import EngineRecipe, SamplingRecipe

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


class OpenAIEngineRecipe(BaseConfig):
    """A remote model: the server of `url` answers, and no model is loaded here."""

    type: Literal["openai"] = "openai"
    """`openai`: chat completions of any OpenAI-compatible server."""
    url: str = Field(pattern=r"^https?://\S+$")
    """Base URL of the server, for example `http://localhost:8000/v1`."""
    model: str = Field(min_length=1)
    """Name of the model, as the server knows it."""
    api_key_variable: str | None = None
    """Name of the environment variable that holds the server's key; null sends none that means anything."""
    max_concurrent: int = Field(8, ge=1)
    """Episodes in flight, each with at most one request."""
    timeout: float = Field(120, gt=0)
    """Time-out of one request, in seconds."""
    retries: int = Field(3, ge=0)
    """Further requests after a time-out, a lost connection, or an answer of status 429 or 5xx; each waits longer."""
    stop_at: Literal["here", "server"] = "here"
    """Who ends an answer at rollout.stop_strings. `here`: it is asked for whole and cut after the first of them, which any server allows. `server`: they are sent, so nothing is written after them; for servers that say which one they stopped at (vLLM, SGLang)."""
    token_limit_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
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


class VllmEngineRecipe(BaseConfig):
    """vLLM samples, with weights that are sent to it before each rollout."""

    type: Literal["vllm"] = "vllm"
    """`vllm`: an engine of its own, which gets the policy's weights before each rollout."""
    mode: Literal["servers", "in_process"] = "servers"
    """`servers`: processes that speak HTTP, under any interpreter. `in_process`: under this interpreter, which then needs vLLM."""
    servers: int = Field(1, ge=1)
    """Servers to start on this machine."""
    urls: list[str] = []
    """Addresses of servers that run already (`python -m posttrain.engines.vllm.server`), for example `http://10.0.0.2:8700`; none are started then."""
    token_variable: str | None = None
    """Name of the environment variable with the token of the servers at `urls`; servers started here get one made up for the run."""
    python: str | None = None
    """The interpreter that has vLLM, which pins other versions than training wants; null is this one."""
    tensor_parallel: int = Field(1, ge=1)
    """Devices over which each server divides its weights."""
    first_device: int = Field(0, ge=0)
    """GPU of the first server, counted among those that this process sees; each server takes the next `tensor_parallel`."""
    threads: int | None = Field(None, ge=1)
    """On a processor: threads of each engine, wherever there is room; null is one bound to each core, which is fastest where nothing else computes at the same time."""
    gpu_memory_utilization: float = Field(0.5, gt=0, lt=1)
    """On a GPU: share of its memory for weights and cache together."""
    cache_gigabytes: float | None = Field(None, gt=0)
    """Size of the key/value cache in GiB; null is what `gpu_memory_utilization` leaves on a GPU, and 2 on a processor."""
    max_num_seqs: int = Field(256, ge=1)
    """Answers in flight at a time on each server."""
    tokens_per_forward: int = Field(8192, ge=16)
    """Most tokens (new prompts and decoding together) in one forward pass."""
    max_model_len: int | None = Field(None, ge=16)
    """Longest context in tokens; null is rollout.tokens_per_episode."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the engine's weights and cache; `auto` is that of the policy."""
    prefix_caching: bool = True
    """Keep what was computed for prompts and earlier turns until the weights change."""
    enforce_eager: bool | None = None
    """Start every kernel from Python; false compiles and captures graphs first. Null is false on a GPU and true on a processor."""
    bucket_megabytes: int = Field(512, ge=1)
    """Most MiB of weights on their way at a time, but never less than one tensor."""
    adapters: Literal["merged", "adapter_only"] = "merged"
    """For model.lora: `merged` sends whole weights with the adapters folded in; `adapter_only` sends the adapters to an engine that keeps the frozen weights."""
    start_timeout: float = Field(600, gt=0)
    """Time that an engine has to become ready, in seconds."""
    hang_timeout: float = Field(600, gt=0)
    """Time in seconds without a sign of life, while something is asked of it, after which an engine is treated as dead; longer than any forward pass takes."""
    retries: int = Field(2, ge=0)
    """Further attempts at an answer, with the same seed, after the engine that was to give it died."""
    max_restarts: int = Field(3, ge=0)
    """Times that each engine of a run is started again after it died; one death more ends the run."""

    @property
    def slots(self) -> int:
        """Answers in flight at a time on all servers."""
        return self.max_num_seqs * self.replicas

    @property
    def replicas(self) -> int:
        """How many engines answer."""
        if self.mode == "in_process":
            return 1
        return len(self.urls) or self.servers

    @model_validator(mode="after")
    def _mode_fits(self):
        if self.mode == "in_process":
            for key in ("servers", "urls", "python", "token_variable"):
                if getattr(self, key) != type(self).model_fields[key].default:
                    raise ValueError(f"`{key}` is about servers, and `mode` is in_process; set `mode: servers`")
        if self.urls and self.servers != 1:
            raise ValueError("`urls` names servers that run already and `servers` starts some; give one of the two")
        if self.token_variable is not None and not self.urls:
            raise ValueError("`token_variable` is for servers at `urls`; servers that are started here need none")
        for url in self.urls:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"`urls` holds {url}, which should begin with http:// or https://")
        return self


PolicyEngineRecipe = Annotated[EngineRecipe | VllmEngineRecipe, Field(discriminator="type")]
"""An engine that samples with the weights of a policy loaded here."""


def refuse_unknown_logprobs(engine: EngineRecipe | VllmEngineRecipe, sampling: SamplingRecipe) -> None:
    """ValueError for rollout sampling whose log-probabilities over the whole vocabulary vLLM does not tell."""
    cut = sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0
    if isinstance(engine, VllmEngineRecipe) and cut and sampling.temperature not in (0, 1):
        raise ValueError(
            "`engine.type: vllm` tells log-probabilities before temperature and truncation or after both, and training needs "
            "those after the temperature alone; set `rollout.sampling.temperature: 1`, or remove top_p, top_k and min_p"
        )


def refuse_lone_adapters(engine: object, model: ModelRecipe) -> None:
    """ValueError where adapters alone are to be sent and there are none."""
    if isinstance(engine, VllmEngineRecipe) and engine.adapters == "adapter_only" and model.lora is None:
        raise ValueError("`engine.adapters: adapter_only` needs adapters; set `model.lora`, or use merged")
