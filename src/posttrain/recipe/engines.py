"""Engines: the in-process engine, a vLLM engine, and a remote model behind an OpenAI-compatible server."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from posttrain.recipe.base import CONNECTS, BaseConfig, Connects, Executes, Mark, Text
from posttrain.recipe.components import EnvironmentRecipe
from posttrain.recipe.metrics import Metric
from posttrain.recipe.model import ModelRecipe
from posttrain.recipe.needs import unless
from posttrain.recipe.plan import CACHE, Items, Plan
from posttrain.recipe.rollout import SamplingRecipe

WeightTransfer = Literal["files", "ipc", "nccl"]

_ELSEWHERE = {
    "messages": "the environment",
    "model": "engine.model",
    "temperature": "the temperature of the recipe's sampling",
    "top_p": "the top_p of the recipe's sampling",
    "max_tokens": "rollout.tokens_per_turn",
    "max_completion_tokens": "rollout.tokens_per_turn",
    "stop": "rollout.stop_strings",
    "seed": "the run seed",
}
"""Field of a request -> the recipe key that sets it."""
REMOVABLE = ("temperature", "seed", "max_tokens")
"""Fields of a request that null in `extra_body` removes."""
_OTHER_SHAPE = ("stream", "n", "tools", "functions")
"""Fields of a request with which the reply is not a single text."""


class _Engine(BaseConfig):
    def check(self, model: ModelRecipe) -> None:
        """ValueError if the engine cannot sample from `model`."""

    def warnings(self, model: ModelRecipe) -> list[str]:
        """Sentences about settings that `model` makes unusual."""
        return []

    def truncated_logprobs(self, sampling: SamplingRecipe) -> bool:
        """Whether log-probabilities are those of the distribution that `sampling` truncates."""
        return False

    def memory_items(self, plan: Plan, model: ModelRecipe, tokens: int) -> Items:
        """The engine's weights, if it has its own, and its full KV cache, for contexts of `tokens` tokens."""
        return {}

    def refusal(self, plan: Plan, model: ModelRecipe, tokens: int) -> str | None:
        """Why the engine would not start on the plan's device, for contexts of `tokens` tokens; None if it would."""
        return None


class LocalEngineRecipe(_Engine):
    """The in-process engine: it uses the weights in training directly, with continuous batching and a prefix cache
    across turns and groups."""

    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("memory/key_value_cache", "largest size of the local engine's key/value cache so far, in bytes"),
        Metric("time/decoding", "seconds of the local engine's passes on sampled tokens, summed over processes"),
        Metric("time/prompts", "seconds of the local engine's passes on prompt tokens, summed over processes"),
    )

    type: Literal["local"] = "local"
    """`local`: in this process, on the weights in training. If no engine is given, `rl`, `distill` and `generate` use `vllm` on a GPU where vLLM is installed; the run prints which and why."""
    slots: int = Field(64, ge=1)
    """Number of sequences in the key/value cache, which is the largest number decoded at the same time."""
    tokens_per_forward: int = Field(2048, ge=16)
    """Token budget of one forward pass, prefill and decoding together. Longer prompts are prefilled in chunks."""
    cache_bytes: int | None = Field(None, ge=1)
    """Largest size of the key/value cache in bytes, at least that of one sequence of `rollout.tokens_per_episode` tokens.
    Null: as much as `slots` sequences need. On a CPU, requests wait until their prompt and longest answer fit; memory is
    taken page by page as sequences grow, and returned when new weights arrive if it was not used since the last ones. On
    a GPU, only as many sequences are decoded at the same time as fit with `rollout.tokens_per_episode` tokens each."""

    def memory_items(self, plan: Plan, model: ModelRecipe, tokens: int) -> Items:
        items, width = {}, model.weight_bytes
        if plan.placement.engines:
            items = _own_weights(plan, model, plan.placement.tensor)
        each = plan.sizes.cache_bytes(width, plan.placement.tensor)
        size = self.slots * tokens * each
        if self.cache_bytes is not None and self.cache_bytes < size:
            return items | {CACHE: (self.cache_bytes, f"engine.cache_bytes {self.cache_bytes:,}")}
        how = f"engine.slots {self.slots} x rollout.tokens_per_episode {tokens} x {each:,} bytes"
        return items | {CACHE: (size, how)}


def _own_weights(plan: Plan, model: ModelRecipe, devices: int) -> Items:
    """The weights of an engine that does not use those of the learner, on one of its devices."""
    count = -(-model.weight_bytes * plan.sizes.parameters // devices)
    how = f"{model.weight_bytes} bytes a parameter over {devices} devices"
    return {"weights of the engine": (count, how)}


class OpenAIEngineRecipe(_Engine):
    """A remote model behind the server at `url`; no model is loaded in this process."""

    type: Literal["openai"] = "openai"
    """`openai`: chat completions of any OpenAI-compatible server."""
    url: Connects = Field(pattern=r"^https?://\S+$")
    """Base URL of the server, for example `http://localhost:8000/v1`."""
    model: Text = Field(min_length=1)
    """Model name to send to the server."""
    api_key_variable: Annotated[str | None, Mark("connects", "url")] = None
    """Name of the environment variable that holds the API key. Null: send a placeholder key."""
    max_concurrent: int = Field(8, ge=1)
    """Maximum number of concurrent episodes; each has at most one request open."""
    timeout: float = Field(120, gt=0)
    """Timeout of one request in seconds, to the end of the response. Redirects to another server are not followed."""
    retries: int = Field(3, ge=0)
    """Retries after a timeout, a lost connection, or status 429 or 5xx, with exponential backoff."""
    extra_body: Annotated[dict[str, Any], CONNECTS] = {}
    """Additional JSON fields of every request, for example `top_k: 20`. Null removes a field that a server or model
    rejects: `temperature`, `seed`, or `max_tokens`, whose number is then sent as `max_completion_tokens`. Do not put
    secrets here: the recipe is stored in the run directory."""

    @property
    def sends_seed(self) -> bool:
        """Whether requests have a seed."""
        return "seed" not in self.extra_body

    @field_validator("extra_body")
    @classmethod
    def _only_what_has_no_key(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name, given in value.items():
            if given is None and name in REMOVABLE:
                continue
            if given is None:
                raise ValueError(f"null removes {', '.join(REMOVABLE)}, not `{name}`; remove it")
            if name in _ELSEWHERE:
                raise ValueError(f"`{name}` is set by {_ELSEWHERE[name]}; remove it")
            if name in _OTHER_SHAPE:
                raise ValueError(f"`{name}` is not supported: a response must be a single text; remove it")
        return value


def refuse_unknown_sampling(sampling: SamplingRecipe, key: str) -> None:
    """ValueError for sampling that the protocol of chat completions has no field for. `key`: its section."""
    for name in ("top_k", "min_p"):
        value = getattr(sampling, name)
        if value != SamplingRecipe.model_fields[name].default:
            instead = f"if the server supports it, set `engine.extra_body.{name}={value:g}` instead"
            raise ValueError(f"`{key}.{name}` is not a field of the OpenAI protocol; {instead}")


def has_thinking(environment: EnvironmentRecipe) -> bool:
    """Whether the environment's format has a `<think>` block in the text of an answer."""
    return any(getattr(one, "thinking", False) for one in (environment, getattr(environment, "format", None)))


def no_primer(environment: EnvironmentRecipe, primer: str) -> str:
    """Why an environment with the primer `primer` cannot be played remotely, and the setting to change."""
    remedy = f"{environment.type} has to leave its `primer` empty"
    if hasattr(environment, "opened_by"):
        remedy = "set environment.opened_by=policy"
    elif hasattr(getattr(environment, "format", None), "prime"):
        remedy = "set environment.format.prime=false"
    begun = "a chat server cannot continue an answer that has begun"
    return f"{environment.type} begins every answer with {primer}, and {begun}; {remedy}"


AT_START = unless("urls", remedy="start the servers with it")


class VllmEngineRecipe(_Engine):
    """vLLM. It receives the policy's weights before each rollout."""

    type: Literal["vllm"] = "vllm"
    """`vllm`: a separate vLLM engine."""
    servers: Annotated[int, unless("urls", refused=True)] = Field(1, ge=1)
    """Number of servers to start on this machine."""
    urls: list[Connects] = []
    """Addresses of running servers (`python -m posttrain.engines.vllm.server`) to use instead of new ones, for example
    `http://10.0.0.2:8700`. The environment variable `POSTTRAIN_VLLM_TOKEN` holds their access token."""
    python: Annotated[Executes | None, AT_START] = None
    """Python interpreter with vLLM, which pins other package versions than training uses. Null: this interpreter."""
    tensor_parallel: Annotated[int, AT_START] = Field(1, ge=1)
    """Tensor-parallel size: devices per server."""
    first_device: Annotated[int, AT_START] = Field(0, ge=0)
    """Index of the first server's GPU among the visible GPUs; each server takes the next `tensor_parallel` GPUs."""
    threads: Annotated[int | None, AT_START] = Field(None, ge=1)
    """CPU only: threads per engine, not bound to cores. Null: one bound to each core, fastest if nothing else runs."""
    gpu_memory_utilization: Annotated[float, AT_START] = Field(0.5, gt=0, lt=1)
    """GPU only: share of GPU memory for weights and key/value cache."""
    cache_gigabytes: Annotated[float | None, AT_START] = Field(None, gt=0)
    """Size of the key/value cache in GiB. Null: what `gpu_memory_utilization` leaves on a GPU, 2 on a CPU."""
    max_num_seqs: int = Field(256, ge=1)
    """Maximum number of concurrent sequences per server."""
    tokens_per_forward: Annotated[int, AT_START] = Field(8192, ge=16)
    """Maximum number of tokens (prefill and decoding) in one forward pass."""
    max_model_len: Annotated[int | None, AT_START] = Field(None, ge=16)
    """Longest context in tokens. Null: `rollout.tokens_per_episode`."""
    dtype: Annotated[Literal["auto", "float32", "bfloat16"], AT_START] = "auto"
    """Precision of the engine's weights and cache. `auto`: that of the policy."""
    enforce_eager: Annotated[bool | None, AT_START] = None
    """Run without compilation and CUDA graphs. Null: false on a GPU, true on a CPU."""
    weight_transfer: WeightTransfer = "files"
    """How weights are sent. `files`: through shared memory of the CPU; works everywhere. `ipc`: each server opens the memory of the learner processes on its GPUs. `nccl`: a broadcast to servers on GPUs of their own (gloo between CPUs). The last two need `adapters: merged` and no Ray."""
    adapters: Literal["auto", "merged", "adapter_only"] = "auto"
    """With `model.lora`. `merged`: send full weights with the adapters merged. `adapter_only`: send only the adapters; the engine keeps the frozen base weights. `auto`: `adapter_only` where vLLM has the learner's base weights and can apply the adapters: with `weight_transfer: files`, servers that the run starts, a whole model that is not in 4 bits, and adapters of the layers' linear modules."""
    retries: int = Field(2, ge=0)
    """Retries of a request, with the same seed, after its engine died."""
    max_restarts: int = Field(3, ge=0)
    """Restarts allowed per engine; one more failure stops the run."""

    @property
    def slots(self) -> int:
        """Maximum number of concurrent sequences on all servers."""
        return self.max_num_seqs * self.replicas

    @property
    def replicas(self) -> int:
        """Number of engines."""
        return len(self.urls) or self.servers

    def _check(self) -> None:
        if self.weight_transfer != "files" and self.adapters == "adapter_only":
            raise ValueError(
                "`adapters: adapter_only` sends files; remove `weight_transfer`, or set `adapters: merged`"
            )
        if self.weight_transfer == "ipc" and self.urls:
            raise ValueError("`weight_transfer: ipc` is for servers that the run starts; set `weight_transfer: nccl`")
        for url in self.urls:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"`urls` contains {url}; it must begin with http:// or https://")

    def check(self, model: ModelRecipe) -> None:
        """ValueError if only adapters would be sent but `model` has none."""
        if self.adapters == "adapter_only" and model.lora is None:
            raise ValueError("`engine.adapters: adapter_only` needs adapters; set `model.lora`, or use merged")

    def warnings(self, model: ModelRecipe) -> list[str]:
        """A sentence if the engine does not support a setting of `model`."""
        if model.head_dtype == "model" or model.dtype == "float32" or (model.dtype is None and model.device == "cpu"):
            return []
        return [
            "model.head_dtype=float32 applies to the learner alone: vLLM computes the output projection in the model's "
            "dtype, so policy/mismatch keeps the rounding of its logits"
        ]

    def truncated_logprobs(self, sampling: SamplingRecipe) -> bool:
        """Whether log-probabilities are those of the distribution that `sampling` truncates: vLLM reports them either
        before temperature and truncation or after both."""
        truncated = sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0
        return truncated and sampling.temperature not in (0, 1)

    def memory_items(self, plan: Plan, model: ModelRecipe, tokens: int) -> Items:
        """The engine's weights and its full KV cache, for contexts of `tokens` tokens; none for servers at `urls`.

        vLLM takes its share of the memory of the device for both, and answers that do not fit are queued.
        """
        if self.urls:
            return {}
        devices, device = self._devices(plan), plan.device
        items = _own_weights(plan, model, devices)
        if self.cache_gigabytes is not None:
            size = int(self.cache_gigabytes * 2**30)
            return items | {"key/value cache": (size, f"engine.cache_gigabytes {self.cache_gigabytes:g}")}
        if device is not None:
            share, (weights, _) = self.gpu_memory_utilization, items["weights of the engine"]
            how = f"engine.gpu_memory_utilization {share:g} of {device.name}, less the weights of the engine"
            return items | {"key/value cache": (max(0, round(share * device.memory) - weights), how)}
        each = plan.sizes.cache_bytes(model.weight_bytes, devices)
        how = (
            f"answers in flight {self.slots} x rollout.tokens_per_episode {tokens} x {each:,} bytes; less where "
            "engine.gpu_memory_utilization, or 2 GiB, is less"
        )
        return items | {CACHE: (self.slots * tokens * each, how)}

    def refusal(self, plan: Plan, model: ModelRecipe, tokens: int) -> str | None:
        if self.urls or plan.device is None or self.cache_gigabytes is not None:
            return None
        devices, share = self._devices(plan), round(self.gpu_memory_utilization * plan.device.memory)
        ((weights, _),) = _own_weights(plan, model, devices).values()
        context = plan.sizes.cache_bytes(model.weight_bytes, devices) * (self.max_model_len or tokens)
        if weights + context <= share:
            return None
        needed, has = (f"{count / 2**30:.1f} GiB" for count in (weights + context, share))
        return (
            f"vLLM's weights and a context need {needed} of each GPU, and engine.gpu_memory_utilization "
            f"{self.gpu_memory_utilization:g} of {plan.device.name} is {has}; raise it, or divide the engine "
            "(engine.tensor_parallel, or hardware.engines.devices with Ray)"
        )

    def _devices(self, plan: Plan) -> int:
        """GPUs of one server. Workers of Ray have those of the placement."""
        return plan.placement.tensor if plan.placement.engines else self.tensor_parallel


PolicyEngineRecipe = Annotated[LocalEngineRecipe | VllmEngineRecipe, Field(discriminator="type")]
"""An engine that samples with the weights of the policy in this process."""
AnyEngineRecipe = Annotated[LocalEngineRecipe | VllmEngineRecipe | OpenAIEngineRecipe, Field(discriminator="type")]
"""Any engine that answers."""
