"""Which model, in which precision, with or without adapters."""

from typing import Literal

from pydantic import Field

from posttrain.recipe.base import BaseConfig


class LoraRecipe(BaseConfig):
    """Low-rank adapters through peft; the base weights stay frozen and serve as the reference model."""

    rank: int = Field(16, ge=1)
    """Rank of the two factors."""
    alpha: int = Field(32, ge=1)
    """Scale: the adapter's output is multiplied by alpha / rank."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout before the adapter. Above 0 the engine and the learner see different policies; a warning says so."""
    targets: str | list[str] = "all-linear"
    """Module names to adapt, or `all-linear`."""
    export: Literal["merged", "adapter"] = "merged"
    """What the run exports at its end: a whole model with the adapters folded in, or the adapters alone for peft."""


class ModelRecipe(BaseConfig):
    """The policy's starting point."""

    path: str = "packaged:smollm2-135m"
    """A hub id, a directory, a `.gguf` file, or `packaged:smollm2-135m`."""
    dtype: Literal["float32", "bfloat16", "auto"] = "float32"
    """Precision of the weights in use; bfloat16 trains on float32 master weights. `auto` is bfloat16 where the processor or GPU multiplies it natively, float32 elsewhere; only float32 gives the same bits on every resume."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model computes; `auto` is `cuda` where torch sees such a GPU, else `cpu`. On a GPU give `dtype: auto` too: the fast attention is for bfloat16. The same bits on every resume are promised on `cpu` alone."""
    lora: LoraRecipe | None = None
    """Adapters; null trains all weights."""
    chat_template: str | None = None
    """A file with a Jinja chat template, for tokenizers that have none."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    threads: int | None = Field(None, ge=1)
    """Processor threads for torch; null leaves torch's choice."""


class RewardSource(BaseConfig):
    """A reward model scores the conversation at its end; its reward is added to the last turn's."""

    path: str
    """A hub id or directory of a reward model: `posttrain reward` exports one, and others load as
    `AutoModelForSequenceClassification(num_labels=1)`. In a pipeline, `stage:NAME`."""
    normalize: Literal["stored", "running", "none"] = "stored"
    """`stored`: (r - mean) / std with the statistics kept with the model. `running`: with those of all training
    rewards so far, for credit alone; what is shown and evaluated stays raw. `none`: as the model says."""
    clip: float | None = Field(10.0, gt=0)
    """Rewards are clipped to [-clip, clip] after normalization; null is off."""
    dtype: Literal["float32", "bfloat16", "auto"] = "float32"
    """Precision of its weights."""
    tokens_per_batch: int = Field(4096, ge=16)
    """Most tokens in one of its forward passes."""


class OptimizerRecipe(BaseConfig):
    """AdamW, its schedule, and gradient clipping."""

    learning_rate: float = Field(1e-5, gt=0)
    """Learning rate after warm-up, per update."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW: decay of the running mean of the gradient and of its square, per update."""
    epsilon: float = Field(1e-8, gt=0)
    """AdamW: added to the root of the running square."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW: share of a weight removed per update, times the learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls after warm-up, over all updates of the run."""
    warmup_updates: int = Field(0, ge=0)
    """Updates over which the learning rate rises linearly from 0."""
    final_fraction: float = Field(0.1, ge=0, le=1)
    """Share of the learning rate left at the end of `linear` and `cosine`."""
    max_gradient_norm: float = Field(1.0, gt=0)
    """The gradient is scaled down to this norm."""
    max_skipped_updates: int = Field(3, ge=0)
    """Updates in a row that may be skipped for a non-finite loss or gradient; one more stops the run."""


class LearnerRecipe(BaseConfig):
    """How a batch becomes optimizer steps."""

    tokens_per_batch: int = Field(4096, ge=16)
    """The memory dial: most tokens in one forward pass. A longer stream is an error, never cut."""
    updates_per_step: int = Field(1, ge=1)
    """Optimizer steps on each step's episodes; whole groups are divided among them."""
    epochs_per_step: int = Field(1, ge=1)
    """Times that each step's episodes are gone through (PPO epochs)."""
    logits_per_chunk: int = Field(512, ge=1)
    """Positions whose logits exist at one time when log-probabilities are computed."""
