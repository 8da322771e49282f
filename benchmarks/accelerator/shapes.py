"""Models of known shapes with random weights, made on the device, and the work that they are."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from posttrain.models.adapters import add_adapters
from posttrain.models.cuda.four_bit import quantize
from posttrain.models.forward import ForwardPath
from posttrain.models.gate import use_path
from posttrain.models.policy import Policy, checkpoint_layers
from posttrain.recipe.model import LoraRecipe, ModelRecipe


@dataclass(frozen=True)
class Shape:
    """A decoder of transformers: `family` is its model type."""

    name: str
    family: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_heads: int
    head_size: int
    vocabulary: int = 151_936
    tied: bool = True
    """Whether the output projection is the embedding."""
    tokens_per_batch: int = 16_384
    """Tokens in one forward pass of training that fit beside weights, masters and moments on a GPU of 140 GB."""

    @property
    def body(self) -> int:
        """Parameters in the products of the layers: projections and the gated network; norms and biases left out."""
        attention = self.hidden * self.head_size * (2 * self.heads + 2 * self.key_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def head(self) -> int:
        """Parameters of the output projection."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """All parameters of matrices, the embedding included."""
        return self.body + self.head * (1 if self.tied else 2)

    def training_flops(self, lengths: Sequence[int], trained: int, frozen: bool = False) -> float:
        """Floating-point operations of a forward and backward pass over streams of `lengths` tokens.

        6 per parameter of the layers and token (2 forward, 4 backward), 6 per parameter of the output projection and
        *trained* token, and 12 x heads x head size per layer and pair of a token and one that it sees (two products
        of 2 forward, twice that backward). Embedding, norms, softmax and whatever is computed twice do not count. `frozen`
        weights, beside which adapters are trained, have no gradient: 4 in place of 6.
        """
        pairs = sum(length * (length + 1) / 2 for length in lengths)
        attention = 12 * self.layers * self.heads * self.head_size * pairs
        return (4.0 if frozen else 6.0) * (self.body * sum(lengths) + self.head * trained) + attention

    def decoding_bytes(self, contexts: Sequence[float]) -> float:
        """Bytes that one decoding step must read in bfloat16: all weights once, and each sequence's keys and values."""
        per_token = 2 * 2 * self.layers * self.key_heads * self.head_size
        return 2.0 * (self.body + self.head) + per_token * sum(contexts)

    def decoding_flops(self, contexts: Sequence[float]) -> float:
        """Floating-point operations of one decoding step: 2 per parameter and sequence, and attention to the cache."""
        attention = 4.0 * self.layers * self.heads * self.head_size * sum(contexts)
        return 2.0 * (self.body + self.head) * len(contexts) + attention


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("0.5B", "qwen2", 896, 4864, 24, 14, 2, 64, tokens_per_batch=32_768),
        Shape("1.5B", "qwen2", 1536, 8960, 28, 12, 2, 128),
        Shape("1.7B", "qwen3", 2048, 6144, 28, 16, 8, 128),
        Shape("4B", "qwen3", 2560, 9728, 36, 32, 8, 128, tokens_per_batch=4096),
        Shape("8B", "qwen3", 4096, 12_288, 36, 32, 8, 128, tied=False),
    )
}
"""As Qwen2.5-0.5B, Qwen2.5-1.5B, Qwen3-1.7B, Qwen3-4B and Qwen3-8B."""
TINY = {
    shape.name: shape
    for shape in (
        Shape("0.5B", "qwen2", 32, 64, 2, 4, 2, 8, vocabulary=512, tokens_per_batch=256),
        Shape("1.5B", "qwen2", 48, 64, 2, 6, 2, 8, vocabulary=512, tokens_per_batch=256),
        Shape("1.7B", "qwen3", 32, 64, 2, 4, 2, 8, vocabulary=512, tokens_per_batch=256),
        Shape("4B", "qwen3", 32, 64, 3, 4, 2, 8, vocabulary=512, tokens_per_batch=128),
        Shape("8B", "qwen3", 32, 64, 4, 4, 2, 8, vocabulary=512, tied=False, tokens_per_batch=128),
    )
}
"""The same code in no time."""


def random_model(shape: Shape, device: torch.device, packed: bool = True, attention: str = "sdpa") -> Any:
    """A causal language model in bfloat16 (float32 on a processor); `packed`: it attends through layouts."""
    from transformers import AutoModelForCausalLM

    model = _random(AutoModelForCausalLM, shape, device, attention)
    if packed:
        use_path(model, ForwardPath())
    return model


def random_scorer(shape: Shape, device: torch.device) -> Any:
    """A reward model, which makes one number of a sequence."""
    from transformers import AutoModelForSequenceClassification

    return _random(AutoModelForSequenceClassification, shape, device, "sdpa", num_labels=1)


def _random(kind: Any, shape: Shape, device: torch.device, attention: str, **more: Any) -> Any:
    from transformers import AutoConfig

    config = AutoConfig.for_model(
        shape.family,
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_heads,
        head_dim=shape.head_size,
        max_position_embeddings=8192,
        tie_word_embeddings=shape.tied,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **more,
    )
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:
        model = kind.from_config(config, dtype=dtype, attn_implementation=attention)
    return model.to(device).eval()


class RandomPolicy(Policy):
    """A policy without files: random weights, no tokenizer, no token that ends an answer."""

    def __init__(
        self,
        shape: Shape,
        device: torch.device,
        checkpointing: bool = False,
        lora: bool = False,
        four_bit: bool = False,
    ) -> None:
        """`lora`: adapters of rank 16 are trained. `four_bit`: the layers' weights have 4 bits, on a GPU."""
        self.recipe = ModelRecipe(gradient_checkpointing=checkpointing, lora=LoraRecipe() if lora else None)
        self.seed = 0
        self.tokenizer = None
        self.end_tokens = frozenset()
        self.model = random_model(shape, device)
        if four_bit:  # drawn on the GPU, where that takes no minute
            self.model = self.model.cpu()
            quantize(self.model, device)
            self.model = self.model.to(device)
        if lora:
            self.model = add_adapters(self.model, self.recipe.lora, self.task).eval()
        if checkpointing:
            checkpoint_layers(self.model)
        self.version = 0
        self.sharded = None
        self._reference = None
        if lora:
            for _, parameter in self.trainable():
                parameter.data = parameter.data.to(self.model.get_input_embeddings().weight.dtype)
