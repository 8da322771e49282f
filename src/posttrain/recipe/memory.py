"""What a run keeps in memory, from the sizes of its model and the keys of its recipe.

Not covered: what torch and the operating system take besides (about 0.5 GiB), and fragmentation.
"""

from dataclasses import dataclass

from posttrain.recipe.model import ModelRecipe
from posttrain.recipe.rollout import EngineRecipe
from posttrain.recipe.stages import DpoRecipe, EvaluateRecipe, GenerateRecipe, Recipe, RewardRecipe, RlRecipe
from posttrain.recipe.units import EntropyUnits


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a decoder. `parameters` counts tied weights once; `linear` those in the layers' matrices."""

    parameters: int
    layers: int
    hidden: int
    intermediate: int
    heads: int
    key_value_heads: int
    head_size: int
    vocabulary: int

    @property
    def linear_sizes(self) -> list[tuple[int, int]]:
        """(inputs, outputs) of the seven matrices of one layer, which is what `all-linear` adapters sit on."""
        queries, keys = self.heads * self.head_size, self.key_value_heads * self.head_size
        attention = [(self.hidden, queries), (self.hidden, keys), (self.hidden, keys), (queries, self.hidden)]
        return [*attention, *[(self.hidden, self.intermediate)] * 2, (self.intermediate, self.hidden)]

    @property
    def computed_parameters(self) -> int:
        """Parameters by formula, for files that do not say: matrices, norms, and an embedding tied to the output."""
        layer = sum(inputs * outputs for inputs, outputs in self.linear_sizes) + 2 * self.hidden
        return self.vocabulary * self.hidden + self.layers * layer + self.hidden


_MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Names of the seven matrices in the order of `ModelSizes.linear_sizes`."""


def memory_estimate(recipe: Recipe, sizes: ModelSizes) -> dict[str, tuple[int, str]]:
    """What -> (bytes, how it is counted). Activations are a rough figure, the others are sums of tensor sizes.

    `dtype: auto` is counted as float32, the larger of the two it may become.
    """
    width = 2 if recipe.model.dtype == "bfloat16" else 4
    rows = {"weights": (width * sizes.parameters, f"{sizes.parameters:,} parameters of {width} bytes")}
    if not isinstance(recipe, EvaluateRecipe | GenerateRecipe):
        rows |= _training(recipe, sizes, width)
    if isinstance(recipe, DpoRecipe | RewardRecipe):
        return rows
    if not isinstance(recipe, GenerateRecipe) and recipe.environment is None:
        return rows
    assert isinstance(recipe.engine, EngineRecipe), "a remote model takes no memory here"
    slots, tokens = recipe.engine.slots, recipe.rollout.tokens_per_episode
    cache = 2 * sizes.layers * sizes.key_value_heads * sizes.head_size * width
    rows["key/value cache, at most"] = (
        slots * tokens * cache,
        f"engine.slots {slots} x rollout.tokens_per_episode {tokens} x {cache:,} bytes",
    )
    return rows


def _training(recipe: Recipe, sizes: ModelSizes, width: int) -> dict[str, tuple[int, str]]:
    assert not isinstance(recipe, EvaluateRecipe | GenerateRecipe)
    trained = trained_parameters(recipe.model, sizes)
    rows = {"gradients": (width * trained, f"{trained:,} trained parameters of {width} bytes")}
    if width == 2:
        rows["float32 masters and their gradients"] = (8 * trained, "trained parameters x 8 bytes")
    rows["AdamW state"] = (8 * trained, "two float32 numbers for each trained parameter")
    needed = isinstance(recipe, DpoRecipe) and recipe.loss.needs_reference
    if needed or (isinstance(recipe, RlRecipe) and recipe.needs_reference):
        if recipe.model.lora is None:
            rows["reference model"] = (width * sizes.parameters, "a second copy of the model as it starts")
        else:
            rows["reference model"] = (0, "the policy with its adapters off")
    if (
        isinstance(recipe, RewardRecipe)
        and recipe.units is not None
        and isinstance(recipe.units.segmenter, EntropyUnits)
    ):
        rows["language model for entropies"] = (width * sizes.parameters, "the model at model.path, which cuts units")
    if isinstance(recipe, RlRecipe) and recipe.reward is not None:
        size = (2 if recipe.reward.dtype == "bfloat16" else 4) * sizes.parameters
        rows["reward model"] = (size, "if it is as large as the policy")
    if isinstance(recipe, RlRecipe) and recipe.has_critic:
        rows["critic"] = _critic(recipe, sizes)
    tokens, chunk = recipe.learner.tokens_per_batch, recipe.learner.logits_per_chunk
    if isinstance(recipe, RlRecipe) and recipe.has_critic and recipe.critic.trunk == "own":
        # Those of policy and critic do not exist at the same time.
        width = max(width, _critic_width(recipe))
    if recipe.model.gradient_checkpointing:
        per_token = width * (sizes.layers * sizes.hidden + _layer_activations(sizes))
        how = "one layer whole, of the others their inputs"
    else:
        per_token, how = width * sizes.layers * _layer_activations(sizes), "every layer"
    rows["activations, roughly"] = (tokens * per_token, f"learner.tokens_per_batch {tokens}, {how}")
    if isinstance(recipe, RewardRecipe):
        return rows
    rows["logits"] = (
        3 * 4 * chunk * sizes.vocabulary,
        f"learner.logits_per_chunk {chunk} x {sizes.vocabulary:,} x 12 bytes",
    )
    return rows


def _critic(recipe: RlRecipe, sizes: ModelSizes) -> tuple[int, str]:
    """Bytes without activations, and how they are counted."""
    if recipe.critic.trunk == "shared":
        return 16 * sizes.hidden, f"a head of {sizes.hidden:,} float32 weights, with gradients and AdamW state"
    own = _critic_width(recipe)
    trained = trained_parameters(recipe.critic.model(recipe.model), sizes)
    count = own * sizes.parameters + (own + 8 + (8 if own == 2 else 0)) * trained
    return count, "weights, gradients and AdamW state, if it is as large as the policy"


def _critic_width(recipe: RlRecipe) -> int:
    return 2 if recipe.critic.dtype == "bfloat16" else 4


def trained_parameters(model: ModelRecipe, sizes: ModelSizes) -> int:
    """Parameters that an update changes: all, or those of the adapters."""
    if model.lora is None:
        return sizes.parameters
    wanted = model.lora.targets
    adapted = [
        inputs + outputs
        for name, (inputs, outputs) in zip(_MATRICES, sizes.linear_sizes, strict=True)
        if wanted == "all-linear" or name in ([wanted] if isinstance(wanted, str) else wanted)
    ]
    return sizes.layers * model.lora.rank * sum(adapted)


def _layer_activations(sizes: ModelSizes) -> int:
    """Numbers kept per token for the backward pass of one layer: inputs of norms, matrices, attention and gate."""
    queries, keys = sizes.heads * sizes.head_size, sizes.key_value_heads * sizes.head_size
    return 6 * sizes.hidden + 3 * queries + 4 * keys + 4 * sizes.intermediate
