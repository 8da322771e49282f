"""The recipes of the supervised stages: sft, dpo and reward."""

import math
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from posttrain.recipe.audit import AuditRecipe
from posttrain.recipe.base import BaseConfig
from posttrain.recipe.components import AnyEnvironment
from posttrain.recipe.data import DataRecipe
from posttrain.recipe.engines import LocalEngineRecipe, PolicyEngineRecipe
from posttrain.recipe.guards import AlarmRecipe
from posttrain.recipe.hardware import HardwareRecipe
from posttrain.recipe.loss import (
    ADAPTERS_OFF,
    BcoLoss,
    DpoLoss,
    PreferenceLossRecipe,
    ReferenceRecipe,
    RewardLossRecipe,
    SftLossRecipe,
)
from posttrain.recipe.metrics import BETTER, HELD_OUT, TRAINING, WORSE, Metric, Panel
from posttrain.recipe.model import LearnerRecipe, OptimizerRecipe
from posttrain.recipe.needs import Needs, needs, unless
from posttrain.recipe.plan import Items, Plan, TaskSplit, counted, named_tasks
from posttrain.recipe.rollout import (
    MOST_EPISODES,
    EvaluationRecipe,
    RolloutRecipe,
    SeedRange,
    evaluated_environment,
    refuse_overlap,
)
from posttrain.recipe.run import ENTROPY, CheckpointRecipe, ExportedStep, TrainedRecipe, refuse_longer
from posttrain.recipe.units import EntropyUnits, UnitRewardsRecipe

RowsKind = Literal["conversation", "pair", "unpaired"]
"""What the rows of a stage are."""

_SHARE: dict[str, Any] = {"percent": True, "whole": True, "reference": (0.5, "guessing, 50%")}
ACCURACY = Panel("Accuracy", "ranking accuracy", smoothed=True, figure="rows", **_SHARE)
REWARDS = Panel("Rewards of chosen and rejected answers", "reward", smoothed=True, figure="preference")
MARGIN = Panel("Reward margin, chosen minus rejected", "reward", smoothed=True, figure="preference")
_LIKELY = "Log-probability of chosen and rejected answers, training rows"
LOGPROBS = Panel(_LIKELY, "nats per token", smoothed=True, figure="preference")
KTO_POINT = Panel("KTO's reference point", "nats per answer", figure="preference")
HELD_OUT_LOSS = Metric("validation/loss", "loss of the validation rows")
PREFERENCES = (
    Metric("loss/preference", "preference loss, per row"),
    Metric("preference/accuracy", "training rows", ACCURACY, TRAINING),
    Metric("preference/chosen", "chosen, training", REWARDS, "#7FCEB9"),
    Metric("preference/rejected", "rejected, training", REWARDS, "#EDB28A"),
    Metric("preference/margin", "training rows", MARGIN, TRAINING),
    HELD_OUT_LOSS,
    Metric("validation/accuracy", "validation rows", ACCURACY, HELD_OUT),
    Metric("validation/chosen", "chosen, validation", REWARDS, BETTER),
    Metric("validation/rejected", "rejected, validation", REWARDS, WORSE),
    Metric("validation/margin", "validation rows", MARGIN, HELD_OUT),
    Metric("validation/reward_mean", "mean reward of the answers of the validation rows"),
    Metric("validation/reward_std", "standard deviation of these rewards"),
    Metric("test/accuracy", "share of test pairs ranked correctly"),
    Metric("test/margin", "mean margin of the test pairs"),
    Metric("test/*", "another held-out metric, on the test rows"),
)
"""Metrics of stages that train on pairs."""


VARIED = Needs(
    lambda find: find("expert") == "random" or find("random_share") > 0,
    "the optimal policy repeats its trace",
    "set `random_share` or `expert: random`",
    refused=True,
)


class ExpertsRecipe(BaseConfig):
    """Expert traces of an environment, rendered exactly as episodes of RL."""

    seeds: SeedRange = SeedRange()
    """Environment seeds of the traces. They must not overlap the held-out seeds. Usual for generated tasks: 64 from 200,000 on; for rows of a file: all that are not held out."""
    expert: Literal["optimal", "random"] = "optimal"
    """Baseline policy that plays. `optimal`: the optimal policy. `random`: uniformly random valid actions, from which only the answer format is learned."""
    random_share: Annotated[float, needs("expert", "optimal", refused=True)] = Field(0.0, ge=0, lt=1)
    """Probability that a turn of the optimal policy is a uniformly random valid action instead. The model learns this probability, which keeps exploration for RL. 0: none."""
    per_seed: Annotated[int, VARIED] = Field(1, ge=1, le=MOST_EPISODES)
    """Traces of each seed. The random draws of a seed's traces are spread evenly over [0, 1), so as many traces as there are actions play each action once in the first turn."""
    held_out: int = Field(0, ge=0)
    """Seeds, the last ones of `seeds`, whose traces are not trained on. Their loss is measured before, during and after training. 0: none."""


class SftEvaluation(EvaluationRecipe):
    """Evaluation before, during and after training: on validation rows, and on held-out episodes if there is an environment."""

    metric: Literal["loss", "success", "return"] | None = None  # type: ignore[assignment]
    """Metric that selects the best checkpoint. Null: `loss` if there are validation rows, else `success` or `return` as in RL."""


class PreferenceEvaluation(BaseConfig):
    """Evaluation on validation rows before, during and after training."""

    every: int = Field(10, ge=0)
    """Steps between evaluations, which are also made before the first step and after the last. 0: none."""
    metric: Literal["accuracy", "loss"] = "accuracy"
    """Metric that selects the best checkpoint: the share of correctly ranked pairs, or the loss."""


class SupervisedRecipe(TrainedRecipe):
    """A stage that trains on rows of files."""

    epochs: Annotated[int, unless("steps")] = Field(1, ge=1)
    """Passes over the rows."""
    steps: int | None = Field(None, ge=1)
    """Number of updates; overrides `epochs`. Required with `data.streaming`."""
    rows_per_update: int = Field(16, ge=1)
    """Rows per optimizer update (batch size)."""
    optimizer: OptimizerRecipe = OptimizerRecipe()
    learner: LearnerRecipe = LearnerRecipe()
    checkpoint: CheckpointRecipe = CheckpointRecipe()
    export: ExportedStep = "best"
    """Which checkpoint becomes `model/`, and is measured for the final table: the best one of the evaluations, the last one, or the one with the best mean score of `audit`. Of evaluations with the same value of `evaluation.metric`, the one with the lower `validation/loss` is the best, then the later one."""
    hardware: HardwareRecipe = HardwareRecipe()

    if TYPE_CHECKING:
        data: Any
        loss: Any

    what: ClassVar[str] = "pairs"
    """The rows in messages."""

    @property
    def kind(self) -> RowsKind:
        """What the rows are."""
        return "pair"

    @property
    def row_loss(self) -> Literal["assistant", "last_assistant", "all"]:
        """Which tokens of a row carry loss."""
        return "assistant"

    def warnings(self) -> list[str]:
        """Weights of streamed rows, and a sentence if nothing selects the best checkpoint."""
        data, warnings = self.data, list[str]()
        if data is not None and data.streaming and any(source.weight != 1 for source in data.train):
            warnings.append("data.train weight has no effect: streamed rows are read once, in order")
        if data is not None and not measured(data) and evaluated_environment(self) is None:
            warnings.append(
                "there are no validation rows (data.validation, data.held_out), so the last checkpoint is kept"
            )
        return warnings

    def batch_lines(self, tasks: TaskSplit | None) -> list[str]:
        """Rows, updates and forward passes."""
        return [*self.row_lines(tasks), *self.pass_lines(), *self.process_lines()]

    def row_lines(self, tasks: TaskSplit | None) -> list[str]:
        """The rows in training and in evaluations."""
        paths = ", ".join(source.path for source in self.data.train)
        end = counted(self.steps, "update") if self.steps else counted(self.epochs, "epoch")
        lines = [
            f"{self.what} from {paths}, {self.rows_per_update} per update, {end}",
            f"rows of at most {self.data.max_tokens} tokens",
        ]
        for name in ("validation", "test"):
            paths = ", ".join(source.path for source in getattr(self.data, name))
            lines += [f"{name} on {paths}"] if paths else []
        if held := self.data.held_out:
            share = f"{100 * held:g}% of the" if isinstance(held, float) else str(held)
            use = "for validation" if self.data.test or held == 1 else "half for validation, half for the final table"
            lines.append(f"{share} rows held out of the training rows, {use}")
        return lines

    def pass_lines(self) -> list[str]:
        """The size of forward passes."""
        return [f"forward passes of at most {self.learner.tokens_per_batch} tokens, without padding"]


PLAYED = Needs(
    lambda find: bool(find("environment") or find("evaluation.environment")), "the recipe has no environment"
)


class SftRecipe(SupervisedRecipe):
    """Supervised fine-tuning on rows, or on expert traces of an environment."""

    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("loss/nll", "negative log-likelihood, nats per token"),
        Metric("loss/dft", "loss of dynamic fine-tuning, per token"),
        Metric("policy/entropy", "entropy of the policy", ENTROPY),
        HELD_OUT_LOSS,
        Metric("validation/perplexity", "perplexity of the validation rows"),
    )

    stage: Literal["sft"] = "sft"
    """Which stage the recipe is for; `posttrain sft` takes this one."""
    data: DataRecipe | None = None
    """Conversations to train on. Null: train on expert traces of `environment`."""
    environment: AnyEnvironment | None = None
    """Environment of the expert traces and of held-out evaluation. Null: train and evaluate on `data` only."""
    experts: Annotated[ExpertsRecipe, unless("data")] = ExpertsRecipe()
    loss_on: Literal["assistant", "last_assistant", "all"] = "assistant"
    """Which tokens carry loss: those of all assistant messages, of the last one, or all tokens."""
    loss: SftLossRecipe = SftLossRecipe()
    engine: Annotated[PolicyEngineRecipe, PLAYED] = LocalEngineRecipe()
    """Engine of evaluation episodes: in this process on the weights in training, or vLLM."""
    rollout: Annotated[RolloutRecipe, PLAYED] = RolloutRecipe()
    """Limits of evaluation episodes."""
    evaluation: SftEvaluation = SftEvaluation()

    def _check(self) -> None:
        self.engine.check(self.model)
        if self.data is None and self.environment is None:
            raise ValueError("no training data; set `data.train`, or set `environment.type` to train on expert traces")
        if (held_out := evaluated_environment(self)) is not None:
            experts = {"experts.seeds": self.experts.seeds} if self.data is None else {}
            refuse_overlap(experts, self.environment or held_out, self.evaluation)
        if self.data is not None:
            _check_rows(self, self.data, 1)
        traces, metric = self.data is None and self.experts.held_out > 0, self.evaluation.metric
        if metric == "loss" and not (measured(self.data) or traces):
            rows = "`data.validation` or `data.held_out`, or `experts.held_out` for expert traces"
            raise ValueError(f"`evaluation.metric: loss` needs validation rows; set {rows}")
        if metric in ("success", "return") and evaluated_environment(self) is None:
            raise ValueError(f"`evaluation.metric: {metric}` needs an environment; set `environment.type`")

    @property
    def chosen_by_loss(self) -> bool:
        """Whether the loss on validation rows selects the best checkpoint."""
        return self.evaluation.metric == "loss" or (self.evaluation.metric is None and measured(self.data))

    run_by: ClassVar[str] = "posttrain.training.sft:train"
    what: ClassVar[str] = "rows"

    @property
    def kind(self) -> RowsKind:
        return "conversation"

    @property
    def row_loss(self) -> Literal["assistant", "last_assistant", "all"]:
        return self.loss_on

    @property
    def sampler(self) -> Any:
        return self.engine if self.environment is not None else None

    @property
    def training_seeds(self) -> tuple[SeedRange | None, str]:
        return self.experts.seeds, "experts.seeds"

    @property
    def is_scored(self) -> bool:
        return True  # learns from the rows or traces

    def warnings(self) -> list[str]:
        """Limits of evaluation episodes, besides the sentences of all stages with rows."""
        warnings, evaluated = super().warnings(), evaluated_environment(self)
        if evaluated is not None:
            warnings += self.rollout.warnings((self.environment or evaluated).max_turns, evaluated.max_turns)
        return warnings

    def row_lines(self, tasks: TaskSplit | None) -> list[str]:
        if self.data is not None:
            return super().row_lines(tasks)
        experts, held_out = self.experts, self.experts.held_out
        updates = self._updates(tasks)
        return [
            f"{self._traces(tasks)} traces of the {experts.expert} policy, {counted(self.epochs, 'epoch')}, "
            f"{self.rows_per_update} traces per update: {updates} updates",
            f"traces on {named_tasks(tasks, 0)}" + (f", the last {held_out} for their loss alone" if held_out else ""),
        ]

    def batch_lines(self, tasks: TaskSplit | None) -> list[str]:
        if evaluated_environment(self) is None:
            return super().batch_lines(tasks)
        evaluated = self.evaluation.batch_lines(tasks, self._updates(tasks))
        return [*self.row_lines(tasks), *self.pass_lines(), *evaluated, *self.process_lines()]

    def _traces(self, tasks: TaskSplit | None) -> int:
        """Number of traces to train on."""
        seeds = tasks.training if tasks is not None else self.experts.seeds.of_generated("experts.seeds")
        return (len(seeds) - self.experts.held_out) * self.experts.per_seed

    def _updates(self, tasks: TaskSplit | None) -> int:
        """Number of updates; 0 if it depends on the number of rows."""
        if self.steps or self.data is not None:
            return self.steps or 0
        return self.epochs * math.ceil(self._traces(tasks) / self.rows_per_update)


class DpoRecipe(SupervisedRecipe):
    """Preference optimization on pairs of answers, or on labeled answers (KTO)."""

    metrics: ClassVar[tuple[Metric, ...]] = (
        *PREFERENCES,
        Metric("policy/chosen_logprob", "chosen", LOGPROBS, BETTER),
        Metric("policy/rejected_logprob", "rejected", LOGPROBS, WORSE),
        Metric("preference/kl", "estimated KL divergence from the reference model", KTO_POINT),
        Metric("preference/mismatched", "mismatched pairs behind KTO's KL estimate"),
        Metric("preference/shift", "shift of BCO"),
        Metric("loss/nll", "negative log-likelihood of chosen answers, nats per token"),
    )

    stage: Literal["dpo"] = "dpo"
    """Which stage the recipe is for; `posttrain dpo` takes this one."""
    data: DataRecipe
    """Pairs of answers; for `loss.type: kto`, rows with `label`, or pairs, which are two rows each."""
    loss: PreferenceLossRecipe = DpoLoss()
    nll_coefficient: Annotated[float, unless("loss.type", "kto", "orpo", refused=True)] = Field(0.0, ge=0)
    """Weight of the negative log-likelihood of the chosen answer, averaged over its tokens (RPO; Pang et al. 2024, arXiv 2404.19733)."""
    reference: ReferenceRecipe = ReferenceRecipe()
    cache_ref_logprobs: bool = True
    """Cache the initial model's log-probabilities on disk for later runs on the same rows. With `reference.update_every`, those of held-out rows alone."""
    optimizer: OptimizerRecipe = OptimizerRecipe(learning_rate=1e-6)
    evaluation: PreferenceEvaluation = PreferenceEvaluation()
    audit: AuditRecipe | None = None
    """Reward model that scores the policy's answers to the prompts of the validation rows, which training never sees. Null: none."""
    guards: AlarmRecipe = AlarmRecipe()
    """What an alarm of `audit` does."""

    run_by: ClassVar[str] = "posttrain.training.dpo:train"

    @property
    def kind(self) -> RowsKind:
        return "unpaired" if self.loss.type == "kto" else "pair"

    def model_items(self, plan: Plan) -> Items:
        if not self.keeps_reference:
            return super().model_items(plan)
        return super().model_items(plan) | self.reference_items(plan, self.moves_reference, self.reference.mix < 1)

    @property
    def keeps_reference(self) -> bool:
        """Whether the reference model stays loaded during training, because its log-probabilities cannot be computed beforehand."""
        computed_later = self.loss.type == "kto" or self.data.streaming or self.moves_reference
        return self.loss.needs_reference and computed_later

    @property
    def moves_reference(self) -> bool:
        """Whether the reference model is updated during training."""
        return self.reference.update_every is not None

    def _check(self) -> None:
        _check_rows(self, self.data, 1 if self.loss.type == "kto" else 2)
        if self.moves_reference and not self.loss.needs_reference:
            raise ValueError(f"`loss.type: {self.loss.type}` has no reference model; remove `reference.update_every`")
        if self.moves_reference and isinstance(self.loss, BcoLoss) and self.loss.shift:
            raise ValueError(
                "`loss.type: bco` subtracts a mean of rewards of earlier updates, which `reference.update_every` would measure "
                "against other references; remove it, or set `loss.shift: false`"
            )
        if self.moves_reference and self.model.lora is not None:
            raise ValueError(f"`reference.update_every` {ADAPTERS_OFF}")
        if self.audit is not None and (self.audit.path is None or self.loss.type == "kto" or not measured(self.data)):
            raise ValueError(
                "`audit` of `dpo` compares the margins of validation pairs with a reward model; set `audit.path` and "
                "`data.validation` or `data.held_out`, and no `loss.type: kto`"
            )
        if self.loss.type == "kto" and self.rows_per_update < 2:
            raise ValueError("`loss.type: kto` compares the rows of an update; set `rows_per_update` to 2 or more")


class RewardRecipe(SupervisedRecipe):
    """Reward model training on pairs of answers."""

    metrics: ClassVar[tuple[Metric, ...]] = PREFERENCES

    stage: Literal["reward"] = "reward"
    """Which stage the recipe is for; `posttrain reward` takes this one."""
    data: DataRecipe
    loss: RewardLossRecipe = RewardLossRecipe()
    units: UnitRewardsRecipe | None = None
    """Unit-level rewards. Null: one reward at the end of the answer."""
    evaluation: PreferenceEvaluation = PreferenceEvaluation()

    run_by: ClassVar[str] = "posttrain.training.reward:train"
    scores: ClassVar[bool] = True

    def _check(self) -> None:
        _check_rows(self, self.data, 2)

    def model_items(self, plan: Plan) -> Items:
        if self.units is None or not isinstance(self.units.segmenter, EntropyUnits):
            return {}
        size = self.model.weight_bytes * plan.sizes.parameters
        return {"language model for entropies": (size, "the model at model.path, used to segment answers")}


def measured(data: DataRecipe | None) -> bool:
    return data is not None and bool(data.validation or data.held_out)


def _check_rows(recipe: SupervisedRecipe, data: DataRecipe, answers: int) -> None:
    """`answers`: streams of a row that stay in one forward pass."""
    row = "one row" if answers == 1 else "the two answers of a row"
    refuse_longer(recipe, "learner", "data.max_tokens", data.max_tokens, row, answers)
    if data.streaming and recipe.steps is None:
        raise ValueError("with `data.streaming` the number of rows is unknown; set `steps`")
    if data.streaming and data.held_out:
        raise ValueError("`data.held_out` cannot be taken from streamed rows; set `data.validation`")
