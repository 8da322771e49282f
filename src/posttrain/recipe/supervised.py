"""The recipes of the stages that learn from rows: supervised fine-tuning, preference optimisation, reward models."""

from typing import Any, Literal

from pydantic import Field, SerializeAsAny, field_validator, model_validator

from posttrain.recipe.base import BaseConfig
from posttrain.recipe.components import EnvironmentRecipe, environment_recipe
from posttrain.recipe.data import DataRecipe
from posttrain.recipe.engines import PolicyEngineRecipe, refuse_lone_adapters
from posttrain.recipe.hardware import HardwareRecipe
from posttrain.recipe.loss import DpoLoss, PreferenceLossRecipe, RewardLossRecipe
from posttrain.recipe.model import LearnerRecipe, OptimizerRecipe
from posttrain.recipe.rollout import EngineRecipe, EvaluationRecipe, RolloutRecipe, SeedRange
from posttrain.recipe.run import CheckpointRecipe, StageRecipe, refuse_overlap
from posttrain.recipe.units import UnitRewardsRecipe


class ExpertsRecipe(BaseConfig):
    """Traces of the environment's own expert, rendered exactly as RL renders episodes."""

    seeds: SeedRange = SeedRange(start=200_000, count=64)
    """Environment seeds of the traces; they may not overlap the held-out seeds."""
    expert: Literal["optimal", "random"] = "optimal"
    """`optimal` plays the optimal policy; `random` plays uniformly random valid actions, which teaches the answer format and nothing else."""


class SftEvaluation(EvaluationRecipe):
    """Measurement before, during and after training: validation rows, and held-out episodes where there is an environment."""

    metric: Literal["loss", "success", "return"] | None = None  # type: ignore[assignment]
    """What chooses the best checkpoint. Null is `loss` where there are validation rows, else what RL would choose by."""


class PreferenceEvaluation(BaseConfig):
    """Measurement on validation rows before, during and after training."""

    every: int = Field(10, ge=0)
    """Steps between evaluations; 0 evaluates before and after only."""
    metric: Literal["accuracy", "loss"] = "accuracy"
    """What chooses the best checkpoint: the share of pairs ranked right, or the loss."""


class _Rows(StageRecipe):
    epochs: int = Field(1, ge=1)
    """Passes over the rows."""
    steps: int | None = Field(None, ge=1)
    """Updates after which the run ends, whatever `epochs` says; needed where rows are streamed."""
    rows_per_update: int = Field(16, ge=1)
    """Rows in one optimizer step."""
    optimizer: OptimizerRecipe = OptimizerRecipe()
    learner: LearnerRecipe = LearnerRecipe()
    checkpoint: CheckpointRecipe = CheckpointRecipe()
    hardware: HardwareRecipe = HardwareRecipe()


class SftRecipe(_Rows):
    """Supervised fine-tuning of a policy on rows, or on the traces of an environment's expert."""

    stage: Literal["sft"] = "sft"
    """Which stage the recipe is for; `posttrain sft` takes this one."""
    data: DataRecipe | None = None
    """Conversations to train on; null trains on the expert traces of `environment`."""
    environment: SerializeAsAny[EnvironmentRecipe] | None = None
    """The environment of the expert traces, in which the model is also evaluated; null where `data` is all there is."""
    experts: ExpertsRecipe = ExpertsRecipe()
    loss_on: Literal["assistant", "last_assistant", "all"] = "assistant"
    """Which tokens of a row are trained: all answers, the last one, or every token."""
    engine: PolicyEngineRecipe = EngineRecipe()
    """Who plays evaluation episodes: the weights in training themselves, or vLLM, which is sent them."""
    rollout: RolloutRecipe = RolloutRecipe()
    """Limits of evaluation episodes."""
    evaluation: SftEvaluation = SftEvaluation()

    @field_validator("environment", mode="before")
    @classmethod
    def _environment_by_type(cls, value: Any) -> Any:
        return environment_recipe(value) if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _parts_fit(self):
        refuse_lone_adapters(self.engine, self.model)
        if self.data is None and self.environment is None:
            raise ValueError(
                "there is nothing to train on; name rows in `data.train`, or in `environment.type` a task whose expert to copy"
            )
        if self.data is None:
            refuse_overlap("experts.seeds", self.experts.seeds, self.evaluation)
        else:
            _check_rows(self, self.data, 1)
        if self.evaluation.metric == "loss" and not _measured(self.data):
            raise ValueError(
                "`evaluation.metric: loss` needs validation rows; name `data.validation` or `data.held_out`"
            )
        if self.evaluation.metric in ("success", "return") and self.environment is None:
            raise ValueError(f"`evaluation.metric: {self.evaluation.metric}` needs an environment to play in")
        return self

    @property
    def chosen_by_loss(self) -> bool:
        """Whether the loss on validation rows chooses the best checkpoint."""
        return self.evaluation.metric == "loss" or (self.evaluation.metric is None and _measured(self.data))


class DpoRecipe(_Rows):
    """Preference optimisation of a policy on pairs of answers, or on judged answers for KTO."""

    stage: Literal["dpo"] = "dpo"
    """Which stage the recipe is for; `posttrain dpo` takes this one."""
    data: DataRecipe
    """Pairs; for `loss.type: kto` rows with `label`."""
    loss: PreferenceLossRecipe = DpoLoss()
    nll_coefficient: float = Field(0.0, ge=0)
    """Coefficient of the negative log-likelihood of the chosen answer, a mean over its tokens (Pang et al. 2024, arXiv 2404.19733)."""
    cache_ref_logprobs: bool = True
    """Keep the reference model's log-probabilities on disk, so that another run on the same rows need not compute them."""
    optimizer: OptimizerRecipe = OptimizerRecipe(learning_rate=1e-6)
    evaluation: PreferenceEvaluation = PreferenceEvaluation()

    @property
    def keeps_reference(self) -> bool:
        """Whether the start of the policy is asked while it trains: for rows that nobody could ask about before."""
        return self.loss.needs_reference and (self.loss.type == "kto" or self.data.streaming)

    @model_validator(mode="after")
    def _parts_fit(self):
        _check_rows(self, self.data, 1 if self.loss.type == "kto" else 2)
        if self.nll_coefficient and self.loss.type in ("kto", "orpo"):
            raise ValueError(f"`nll_coefficient` has no place in `loss.type: {self.loss.type}`; set it to 0")
        if self.loss.type == "kto" and self.rows_per_update < 2:
            raise ValueError("`loss.type: kto` compares the rows of an update; set `rows_per_update` to 2 or more")
        return self


class RewardRecipe(_Rows):
    """Training of a reward model on pairs of answers."""

    stage: Literal["reward"] = "reward"
    """Which stage the recipe is for; `posttrain reward` takes this one."""
    data: DataRecipe
    loss: RewardLossRecipe = RewardLossRecipe()
    units: UnitRewardsRecipe | None = None
    """Rewards of units in place of one reward at the end of the answer; null is the latter."""
    evaluation: PreferenceEvaluation = PreferenceEvaluation()

    @model_validator(mode="after")
    def _parts_fit(self):
        _check_rows(self, self.data, 2)
        return self


def _measured(data: DataRecipe | None) -> bool:
    return data is not None and bool(data.validation or data.held_out)


def _check_rows(recipe: _Rows, data: DataRecipe, answers: int) -> None:
    """`answers`: streams of a row that stay in one forward pass."""
    most = answers * data.max_tokens
    if most > recipe.learner.tokens_per_batch:
        row = "one row" if answers == 1 else "the two answers of a row"
        raise ValueError(
            f"{row} may have {most} tokens (`data.max_tokens` = {data.max_tokens}), more than "
            f"`learner.tokens_per_batch` = {recipe.learner.tokens_per_batch}; raise the latter or lower the former"
        )
    if data.streaming and recipe.steps is None:
        raise ValueError("`data.streaming` does not know how many rows there are; set `steps`")
    if data.streaming and data.held_out:
        raise ValueError("`data.held_out` cannot be taken from rows that are streamed; name `data.validation`")
