"""Which model, in which precision, with or without adapters."""

from typing import Literal

from pydantic import Field

from posttrain.recipe.base import Part


class LoraRecipe(Part):
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


class ModelRecipe(Part):
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
