"""The vLLM engine: in this process's care, as servers that the run starts, or as servers that run elsewhere."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from posttrain.recipe.base import Part
from posttrain.recipe.model import ModelRecipe
from posttrain.recipe.rollout import EngineRecipe, SamplingRecipe


class VllmEngineRecipe(Part):
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
    memory_share: float = Field(0.5, gt=0, lt=1)
    """On a GPU: share of its memory for weights and cache together."""
    cache_gigabytes: float | None = Field(None, gt=0)
    """Size of the key/value cache in GiB; null is what `memory_share` leaves on a GPU, and 2 on a processor."""
    sequences: int = Field(256, ge=1)
    """Answers in flight at a time on each server."""
    tokens_per_forward: int = Field(8192, ge=16)
    """Most tokens (new prompts and decoding together) in one forward pass."""
    context: int | None = Field(None, ge=16)
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
    start_seconds: float = Field(600, gt=0)
    """Time that an engine has to become ready, in seconds."""
    hang_seconds: float = Field(600, gt=0)
    """Time in seconds without a sign of life, while something is asked of it, after which an engine is treated as dead; longer than any forward pass takes."""
    retries: int = Field(2, ge=0)
    """Further attempts at an answer, with the same seed, after the engine that was to give it died."""
    restarts: int = Field(3, ge=0)
    """Times that each engine of a run is started again after it died; one death more ends the run."""

    @property
    def slots(self) -> int:
        """Answers in flight at a time on all servers."""
        return self.sequences * self.replicas

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
