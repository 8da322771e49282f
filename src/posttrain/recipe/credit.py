"""Credit assignment: from rewards to one advantage per sampled token."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, SerializeAsAny

from posttrain.recipe.base import BaseConfig, Reads
from posttrain.recipe.metrics import HELD_OUT, TRAINING, Metric, Panel
from posttrain.recipe.model import Dtype, LoraRecipe, ModelRecipe, OptimizerRecipe, dtype_bytes
from posttrain.recipe.needs import Needs, needs, several_updates
from posttrain.recipe.plan import ModelSizes
from posttrain.recipe.registry import F, Registry, Section

if TYPE_CHECKING:
    from posttrain.episode import Episode

Comparison = Literal["group", "batch"] | None
"""The episodes that one is compared with: those of its group, or all of the step. None: no others."""


class Credit(Section):
    """Keys that every credit has."""

    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric(
            "credit/zero_groups", "share of groups whose episodes have equal returns; with a group baseline, of several"
        ),
        Metric("credit/without_baseline", "episodes left out because there is no other episode to compare them with"),
        Metric("credit/mean_advantage", "mean advantage of tokens, weighted as in the loss, over its root mean square"),
    )

    compared_with: ClassVar[Comparison] = None
    """Where the baseline needs at least one other episode: in the episode's group, or in the batch. None: nowhere."""
    nonnegative: ClassVar[bool] = False
    """Whether returns below 0 are refused."""

    @property
    def rewards_of(self) -> Literal["token", "turn", "episode"]:
        """What rewards are summed over. With `token`, their positions within a turn have an effect."""
        return "token" if "rewards" in self.inputs else "episode"

    def problems(self, recipe: Any) -> list[str]:
        """Returns that can be negative, where they are refused."""
        return [
            f"`credit.type: {self.type}` needs returns of 0 or more, and `{key}` can make returns negative; remove or change "
            "it, or use rloo"
            for key in (recipe.negative_rewards()[:1] if self.nonnegative else [])
        ]

    def has_baseline_alone(self, episode: "Episode") -> bool:
        """Whether `episode` has a baseline even without the others of `compared_with`."""
        return False


CREDITS = Registry(
    "credit",
    "posttrain.credits",
    Credit,
    ("posttrain.credit.baselines", "posttrain.credit.returns", "posttrain.credit.turns", "posttrain.credit.critic"),
)
"""Credits by `type`."""
CreditRecipe = Annotated[SerializeAsAny[Credit], BeforeValidator(CREDITS.validate)]


def register_credit(
    *names: str, compared_with: Comparison = None, nonnegative: bool = False, metrics: tuple[Metric, ...] = ()
) -> Callable[[F], F]:
    """Decorator that adds a credit, which recipes choose with `credit.type: name`.

        @posttrain.register_credit("best_of_group")
        def best_of_group(returns, groups, *, scale: float = 1.0):
            best = {group: returns[groups == group].max() for group in groups}
            return scale * (returns - [best[group] for group in groups])

    Arguments are passed by the names of the function's parameters. For the N episodes of a step:

    - `returns` [N] float64: sum of each episode's rewards;
    - `groups` [N] int64: the group of each episode;
    - `lengths` [N] int64: its sampled tokens;
    - `rewards`: list of N arrays [n] float64, the rewards of its sampled tokens;
    - `episodes`: list of N `Episode`;
    - `greedy`: group -> return of an additional greedy episode, which is then played for each group;
    - `energies`: list of N arrays [n] float64, the energy of each sampled token, which costs a forward pass.

    It returns one advantage per episode, [N], or a list of N arrays [n], one advantage per sampled token. Its keyword-only
    parameters, which need type annotations, become keys of the `credit` section. The built-in credits are registered in
    the same way, as such functions or as classes of that section with the function as their method `compute`.

    `compared_with`: where an episode needs others to be compared with; without them it has no baseline, and is left out of
    the loss. `nonnegative`: refuse recipes whose returns can be below 0. `metrics`: the meaning of each metric, for the documentation, studies and figures.

    Raises:
        ValueError: `names` has the name of a built-in credit, or a parameter has a name that is not listed above.
    """
    return CREDITS.register(*names, compared_with=compared_with, nonnegative=nonnegative, metrics=metrics)


EXPLAINED = Panel(
    "Values against observed returns", "explained variance", from_zero=False, smoothed=True, figure="critic"
)
VALUES = Panel("Mean over sampled tokens", "reward", from_zero=False, smoothed=True, figure="critic")


class CriticRecipe(BaseConfig):
    """The critic: estimates the remaining return before each sampled token. Used by `gae` and `bilevel_gae`."""

    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("critic/explained_variance", "explained variance, training episodes", EXPLAINED, TRAINING),
        Metric("critic/value", "value", VALUES, TRAINING),
        Metric("critic/return", "return from the token onward", VALUES, HELD_OUT),
        Metric("critic/loss", "value loss", Panel("Value loss", "reward squared", logarithmic=True, figure="critic")),
        Metric("critic/clipped", "share of values outside of the clip of the value loss"),
        Metric("critic/skipped", "critic updates skipped because of a gradient that is not finite"),
        Metric("critic/*", "a metric of the critic's optimizer, as `optimizer/`"),
    )

    backbone: Literal["separate", "shared"] = "separate"
    """`separate`: a separate model with its own optimizer. `shared`: a value head, initialized to 0, on the policy's last hidden states; policy and value loss share one forward and backward pass and both change the backbone."""
    coefficient: Annotated[float, needs("backbone", "shared", refused=True)] = Field(0.1, gt=0)
    """With `backbone: shared`: weight of the value loss. 0.1 is common for language models, 0.5 for control tasks."""
    path: Annotated[Reads | None, needs("backbone", "separate", refused=True)] = None
    """With `backbone: separate`: initial weights. A language model (the value head is initialized to 0), or a reward model with its head, such as an export of `posttrain reward` (values are scaled as `reward.normalize: stored` scales rewards). It must have the policy's tokenizer. Null: `model.path`. In a pipeline, `stage:NAME`."""
    dtype: Annotated[Dtype, needs("backbone", "separate", refused=True)] = None
    """With `backbone: separate`: precision of the critic. The value head always uses float32. Null: bfloat16 on a GPU, float32 on a CPU."""
    lora: Annotated[
        LoraRecipe | None,
        needs("backbone", "separate", refused=True),
        Needs(lambda find: False, "the critic is not exported", inside="export", only=bool),
    ] = None
    """With `backbone: separate`: LoRA adapters of the critic. Null: train all of its weights."""
    optimizer: OptimizerRecipe = OptimizerRecipe()
    """Optimizer of the critic; with `backbone: shared`, of the value head only."""
    updates_before_policy: int = Field(0, ge=0)
    """Critic warm-up: updates of the critic before the policy's first update. With `backbone: shared` only the value head is trained in them."""
    clip: Annotated[
        float | None,
        Needs(
            lambda find: several_updates(find) or find("rollout.async_rollouts") > 0,
            "with one update per step the values are unchanged",
        ),
    ] = Field(0.2, gt=0)
    """Clip range of the value loss, in units of reward, around the values before the step's updates. Null: off."""

    def model(self, policy: ModelRecipe) -> ModelRecipe:
        """The model section of a separate critic. Keys that it does not have come from the policy's `model`."""
        keys = {"path": self.path or policy.path, "dtype": self.dtype, "lora": self.lora, "load_in_4bit": False}
        return policy.model_copy(update=keys)

    def memory(self, sizes: ModelSizes, policy: ModelRecipe, offloads: bool) -> tuple[int, str]:
        """Bytes of the critic without activations, and how they are counted. `offloads`: AdamW state is in CPU memory."""
        if self.backbone == "shared":
            return 16 * sizes.hidden, f"a head of {sizes.hidden:,} float32 weights, with gradients and AdamW state"
        trained, width = self.model(policy).trained_parameters(sizes, scorer=True), dtype_bytes(self.dtype)
        if offloads:
            how = "weights and gradients, assuming the size of the policy; the rest is in CPU memory"
            return width * (sizes.scorer_parameters + trained), how
        count = width * sizes.scorer_parameters + (width + 8 + (6 if width == 2 else 0)) * trained
        return count, "weights, gradients and AdamW state, assuming the size of the policy"
