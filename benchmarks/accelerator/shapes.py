"""Models of known shapes with random weights, made on the device."""

from dataclasses import asdict, dataclass
from typing import Any

import torch

from posttrain.models.adapters import add_adapters
from posttrain.models.cuda.four_bit import quantize
from posttrain.models.forward import ForwardPath
from posttrain.models.gate import use_path
from posttrain.models.policy import Policy, checkpoint_layers
from posttrain.planning.model_sizes import PUBLISHED
from posttrain.recipe.model import LoraRecipe, ModelRecipe
from posttrain.recipe.plan import ModelSizes


@dataclass(frozen=True)
class Shape(ModelSizes):
    """A decoder of transformers: `family` is its model type."""

    name: str = ""
    family: str = ""
    tokens_per_batch: int = 16_384
    """Tokens in one forward pass of training that fit beside weights, masters and moments on a GPU of 140 GB."""


SHAPES = {
    name: Shape(**asdict(PUBLISHED[published]), name=name, family=family, tokens_per_batch=tokens)
    for name, published, family, tokens in (
        ("0.5B", "Qwen2.5-0.5B", "qwen2", 32_768),
        ("1.5B", "Qwen2.5-1.5B", "qwen2", 16_384),
        ("1.7B", "Qwen3-1.7B", "qwen3", 16_384),
        ("4B", "Qwen3-4B", "qwen3", 4096),
        ("8B", "Qwen3-8B", "qwen3", 16_384),
    )
}
_TINY = {"intermediate": 64, "heads": 4, "key_value_heads": 2, "head_size": 8, "vocabulary": 512}
TINY = {
    shape.name: shape
    for shape in (
        Shape(40_000, 2, 32, **_TINY, name="0.5B", family="qwen2", tokens_per_batch=256),
        Shape(60_000, 2, 48, **_TINY | {"heads": 6}, name="1.5B", family="qwen2", tokens_per_batch=256),
        Shape(40_000, 2, 32, **_TINY, name="1.7B", family="qwen3", tokens_per_batch=256),
        Shape(50_000, 3, 32, **_TINY, name="4B", family="qwen3", tokens_per_batch=128),
        Shape(80_000, 4, 32, **_TINY, tied=False, name="8B", family="qwen3", tokens_per_batch=128),
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
        num_key_value_heads=shape.key_value_heads,
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
