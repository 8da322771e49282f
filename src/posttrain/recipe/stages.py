"""One typed document per stage: a recipe."""

from typing import Annotated, Any, Literal

from pydantic import Field, SerializeAsAny, field_validator, model_validator

from posttrain.recipe.base import Part
from posttrain.recipe.components import EnvironmentRecipe, environment_recipe
from posttrain.recipe.credit import CreditRecipe, GroupCredit
from posttrain.recipe.loss import KlRecipe, LossRecipe, PpoLoss
from posttrain.recipe.model import ModelRecipe
from posttrain.recipe.optimizer import LearnerRecipe, OptimizerRecipe
from posttrain.recipe.rollout import EngineRecipe, EvaluationRecipe, RolloutRecipe, SeedRange
from posttrain.recipe.run import CheckpointRecipe, GuardRecipe, SinkName


def _held_out(key: str, seeds: SeedRange, evaluation: EvaluationRecipe) -> None:
    """Refuse training seeds that are evaluated on."""
    for name, held_out in (("seeds", evaluation.seeds), ("final_seeds", evaluation.final_seeds)):
        if seeds.overlaps(held_out):
            raise ValueError(
                f"`{key}` ({seeds}) and the held-out `evaluation.{name}` ({held_out}) overlap; move one `start`"
            )


class _Stage(Part):
    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run: its directory is `<runs>/<name>`."""
    runs: str = "runs"
    """Directory that holds the runs."""
    seed: int = Field(0, ge=0)
    """The run seed; every random number is derived from it by name."""
    model: ModelRecipe = ModelRecipe()
    environment: SerializeAsAny[EnvironmentRecipe] = Field(
        default_factory=lambda: environment_recipe({"type": "bandit"})
    )
    """The task; its keys depend on `environment.type`."""
    sinks: list[SinkName] = []
    """Where metrics also go; `metrics.jsonl` is always written."""

    @field_validator("environment", mode="before")
    @classmethod
    def _environment_by_type(cls, value: Any) -> Any:
        return environment_recipe(value) if isinstance(value, dict) else value


class RlRecipe(_Stage):
    """Reinforcement learning of a policy in an environment."""

    stage: Literal["rl"] = "rl"
    """Which stage the recipe is for; `posttrain rl` takes this one."""
    steps: int = Field(100, ge=1)
    """Steps; each samples groups_per_step x episodes_per_group episodes and makes updates_per_step updates."""
    max_minutes: float | None = Field(None, gt=0)
    """Minutes after which no further step begins; the run then ends as after its last step. Null is no limit."""
    seeds: SeedRange = SeedRange(start=0, count=100_000)
    """Environment seeds to train on; each step takes the next ones, in an order shuffled once per pass."""
    engine: EngineRecipe = EngineRecipe()
    rollout: RolloutRecipe = RolloutRecipe()
    credit: CreditRecipe = GroupCredit(type="rloo")
    loss: LossRecipe = PpoLoss()
    kl: KlRecipe = KlRecipe()
    entropy: float = Field(0.0, ge=0)
    """Coefficient of the entropy bonus."""
    optimizer: OptimizerRecipe = OptimizerRecipe()
    learner: LearnerRecipe = LearnerRecipe()
    evaluation: EvaluationRecipe = EvaluationRecipe()
    guards: GuardRecipe = GuardRecipe()
    checkpoint: CheckpointRecipe = CheckpointRecipe()

    @model_validator(mode="after")
    def _parts_fit(self):
        _held_out("seeds", self.seeds, self.evaluation)
        if self.rollout.groups_per_step > self.seeds.count:
            raise ValueError(
                f"`rollout.groups_per_step` ({self.rollout.groups_per_step}) is more than `seeds.count` ({self.seeds.count})"
            )
        if (
            self.credit.type in ("grpo", "dr_grpo", "rloo", "opo", "reinforce_pp_baseline")
            and self.rollout.episodes_per_group < 2
        ):
            raise ValueError(
                f"`credit.type: {self.credit.type}` compares the episodes of a group; set `rollout.episodes_per_group` to 2 or more, or use brpo, arpo, reinforce or reinforce_pp"
            )
        if self.learner.updates_per_step > self.rollout.groups_per_step:
            raise ValueError(
                f"`learner.updates_per_step` ({self.learner.updates_per_step}) is more than the groups of a step ({self.rollout.groups_per_step})"
            )
        if self.rollout.filter.type != "none" and self.rollout.episodes_per_group < 2:
            raise ValueError(
                "`rollout.filter` looks at the spread inside a group; set `rollout.episodes_per_group` to 2 or more"
            )
        if self.learner.tokens_per_batch < self.rollout.tokens_per_episode:
            raise ValueError(
                f"one episode may have `rollout.tokens_per_episode` = {self.rollout.tokens_per_episode} tokens, more than "
                f"`learner.tokens_per_batch` = {self.learner.tokens_per_batch}; raise the latter or lower the former"
            )
        if self.loss.type == "reinforce" and (self.learner.updates_per_step > 1 or self.learner.passes > 1):
            raise ValueError(
                "`loss.type: reinforce` has no importance weights, so it takes one update per step; use ppo for more"
            )
        return self


class ExpertData(Part):
    """Traces of the environment's own expert, rendered exactly as RL renders episodes."""

    seeds: SeedRange = SeedRange(start=200_000, count=64)
    """Environment seeds of the traces; they may not overlap the held-out seeds."""
    expert: Literal["optimal", "random"] = "optimal"
    """`optimal` plays the optimal policy; `random` plays uniformly random valid actions, which teaches the answer format and nothing else."""


class SftRecipe(_Stage):
    """Supervised warm-up of a policy on an environment's expert traces."""

    stage: Literal["sft"] = "sft"
    """Which stage the recipe is for; `posttrain sft` takes this one."""
    data: ExpertData = ExpertData()
    epochs: int = Field(1, ge=1)
    """Passes over the traces."""
    episodes_per_update: int = Field(16, ge=1)
    """Traces in one optimizer step."""
    engine: EngineRecipe = EngineRecipe()
    rollout: RolloutRecipe = RolloutRecipe()
    """Limits of evaluation episodes."""
    optimizer: OptimizerRecipe = OptimizerRecipe()
    learner: LearnerRecipe = LearnerRecipe()
    evaluation: EvaluationRecipe = EvaluationRecipe()
    checkpoint: CheckpointRecipe = CheckpointRecipe()

    @model_validator(mode="after")
    def _traces_are_not_held_out(self):
        _held_out("data.seeds", self.data.seeds, self.evaluation)
        return self


class EvaluateRecipe(_Stage):
    """Evaluation of a model in an environment on held-out seeds."""

    stage: Literal["evaluate"] = "evaluate"
    """Which stage the recipe is for; `posttrain evaluate` takes this one."""
    engine: EngineRecipe = EngineRecipe()
    rollout: RolloutRecipe = RolloutRecipe()
    evaluation: EvaluationRecipe = EvaluationRecipe()


Recipe = Annotated[RlRecipe | SftRecipe | EvaluateRecipe, Field(discriminator="stage")]

STAGES: dict[str, type[RlRecipe] | type[SftRecipe] | type[EvaluateRecipe]] = {
    "rl": RlRecipe,
    "sft": SftRecipe,
    "evaluate": EvaluateRecipe,
}
"""Name of a stage -> schema of its recipe."""
