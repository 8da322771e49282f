"""The recipe of on-policy distillation."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from posttrain.recipe.audit import AuditRecipe
from posttrain.recipe.components import environment_class
from posttrain.recipe.data import FixedRowsRecipe
from posttrain.recipe.guards import TaughtGuardRecipe
from posttrain.recipe.hardware import HardwareRecipe
from posttrain.recipe.loss import Aggregation
from posttrain.recipe.metrics import Metric
from posttrain.recipe.model import MISMATCH, LearnerRecipe, OptimizerRecipe
from posttrain.recipe.needs import Needs, several_updates
from posttrain.recipe.plan import Items, Plan
from posttrain.recipe.rollout import EvaluationRecipe, evaluated_environment
from posttrain.recipe.run import CheckpointRecipe, SampledRecipe, refuse_longer
from posttrain.recipe.teacher import TeacherRecipe, refuse_other_temperature


class _DistillationLoss(Aggregation):
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("loss/distillation", "distillation loss per token; of `reverse_kl`, the value has no meaning"),
        MISMATCH,
    )


class ReverseKlLoss(_DistillationLoss):
    """Policy gradient on the reverse KL divergence, from the teacher's log-probability of each sampled token."""

    type: Literal["reverse_kl"] = "reverse_kl"
    """`reverse_kl`: the advantage of a token is log teacher - log policy."""
    discount: float = Field(0.0, ge=0, le=1)
    """Weight of the next token's advantage in that of a token. 0: each token alone. 1: the divergence of whole sequences, unbiased with more variance."""
    cap: Annotated[
        float | None,
        Needs(
            lambda find: several_updates(find) or find("engine.type") != "local",
            "with one update per step the importance weight is always 1",
        ),
    ] = Field(2.0, gt=1)
    """Largest importance weight of a token, policy / rollout policy; it matters after the first update of a step. Null: no limit."""


class JsdLoss(_DistillationLoss):
    """Generalized Jensen-Shannon divergence of the next-token distributions (GKD)."""

    type: Literal["jsd"]
    """`jsd`: the divergence over the vocabulary, or over the teacher's `top_k` tokens and the rest."""
    beta: float = Field(1.0, ge=0, le=1)
    """Interpolation: 0 is the forward KL(teacher, policy), 1 the reverse KL(policy, teacher), between them the generalized Jensen-Shannon divergence."""
    top_k: int | None = Field(100, ge=1)
    """Compare the probabilities of the teacher's `top_k` most probable tokens, and of all other tokens as one. Null: the whole vocabulary, which keeps vocabulary x 4 bytes per sampled token in memory."""


class OffPolicyRecipe(FixedRowsRecipe):
    """Steps that train on fixed rows in place of sampled episodes. Rows may be answers of the teacher (`posttrain generate`)."""

    metrics: ClassVar[tuple[Metric, ...]] = (Metric("teacher/off_policy", "1 on steps that train on fixed rows"),)

    share: float = Field(0.5, gt=0, le=1)
    """Probability that a step trains on rows, drawn for each step from the run seed. It is 1 - lambda of GKD (Agarwal et al. 2023, arXiv 2306.13649), whose lambda is the share of sampled episodes."""
    rows_per_step: int = Field(32, ge=1)
    """Rows of such a step, divided among its `learner.updates_per_step` updates."""
    loss_on: Literal["assistant", "last_assistant", "all"] = "assistant"
    """Which tokens carry loss: those of all assistant messages, of the last one, or all tokens."""


class DistillRecipe(SampledRecipe):
    """On-policy distillation: the policy samples episodes, and a teacher scores each sampled token."""

    stage: Literal["distill"] = "distill"
    """Which stage the recipe is for; `posttrain distill` takes this one."""
    teacher: TeacherRecipe
    loss: Annotated[ReverseKlLoss | JsdLoss, Field(discriminator="type")] = ReverseKlLoss()
    off_policy: OffPolicyRecipe | None = None
    """Fixed rows that replace the sampled episodes of a share of the steps. Null: none."""
    optimizer: OptimizerRecipe = OptimizerRecipe()
    learner: LearnerRecipe = LearnerRecipe()
    evaluation: EvaluationRecipe = EvaluationRecipe()
    audit: AuditRecipe | None = None
    """Second scorer of the held-out episodes, which training never sees. Null: none."""
    guards: TaughtGuardRecipe = TaughtGuardRecipe()
    checkpoint: CheckpointRecipe = CheckpointRecipe()
    hardware: HardwareRecipe = HardwareRecipe()

    run_by: ClassVar[str] = "posttrain.training.distill:train"
    on_cluster: ClassVar[bool] = False

    @property
    def is_scored(self) -> bool:
        return True  # by the teacher

    @property
    def logit_bytes(self) -> int:
        # A divergence over the vocabulary also keeps the log-probabilities, their exponentials and the gradients of both.
        return 24 if self.loss.type == "jsd" else 12

    def untested(self) -> str | None:
        played = evaluated_environment(self)
        if played is not None and not environment_class(played.type).has_reward(played):
            return "the environment gives no reward to measure; set environment.reward or environment.judge"
        return super().untested()

    def models(self) -> dict[str, Any]:
        return super().models() | ({} if self.teacher.path is None else {"teacher": self.teacher})

    def model_items(self, plan: Plan) -> Items:
        return super().model_items(plan) | self.teacher.memory_items(plan, self.model)

    def pass_items(self, plan: Plan) -> Items:
        items = super().pass_items(plan)
        if not isinstance(self.loss, JsdLoss):
            return items
        rollout, sizes, top_k = self.rollout, plan.sizes, self.loss.top_k
        answer = min(self.environment.max_turns * rollout.tokens_per_turn, rollout.tokens_per_episode)
        tokens = rollout.groups_per_step * rollout.episodes_per_group * answer
        count, width = (top_k, 8) if top_k else (sizes.vocabulary, 4)
        how = f"{tokens:,} sampled tokens of a step x {'loss.top_k ' if top_k else ''}{count:,} x {width} bytes"
        return {"teacher's distributions, at most": (tokens * count * width, how), **items}

    def work_lines(self) -> list[str]:
        """The teacher, and steps on fixed rows."""
        teacher, off = self.teacher, self.off_policy
        who = teacher.path or f"the policy with its {teacher.policy} weights and the text of teacher.context"
        if teacher.urls:
            model, urls = teacher.model or "the first model", ", ".join(teacher.urls)
            who = f"{model} at {urls}, {teacher.max_concurrent} requests in flight"
        lines = [f"teacher: {who}"]
        if off is not None:
            paths = ", ".join(source.path for source in off.data.train)
            rows = f"each step trains on {off.rows_per_step} rows from {paths} with probability {off.share:g}"
            about = f"about {self.steps * off.share:,.0f} of {self.steps:,} steps"
            lines.append(f"{rows} in place of episodes: {about}")
        return lines

    def warnings(self) -> list[str]:
        """Nothing to evaluate, or no episodes to sample, besides those of all sampled stages."""
        warnings, environment = super().warnings(), evaluated_environment(self)
        assert environment is not None
        if not environment_class(environment.type).has_reward(environment):
            warnings.append("nothing scores the answers, so nothing is evaluated and the last checkpoint is kept")
        if self.off_policy is not None and self.off_policy.share == 1:
            warnings.append(
                "off_policy.share is 1, so no step samples episodes and `rollout` and `seeds` have no effect"
            )
        return warnings

    def _check(self) -> None:
        rollout, off = self.rollout, self.off_policy
        refuse_other_temperature(self.teacher, rollout.sampling.temperature)
        if rollout.sampling.temperature == 0:
            raise ValueError(
                "`rollout.sampling.temperature: 0` samples greedily and estimates no divergence; set it to 1"
            )
        if rollout.async_rollouts:
            raise ValueError("`rollout.async_rollouts` is not supported by the distill stage; set it to 0")
        if self.hardware.ray is not None:
            instead = "use `hardware.processes` or servers in `teacher.urls`"
            raise ValueError(f"`hardware.ray` is not supported by the distill stage; {instead}")
        refuse_longer(self, "teacher", "rollout.tokens_per_episode", rollout.tokens_per_episode)
        if off is None:
            return
        if self.loss.type == "reverse_kl":
            raise ValueError(
                "`loss.type: reverse_kl` is a policy gradient on sampled tokens, which rows of `off_policy` are not; use jsd, or "
                "remove off_policy"
            )
        if self.teacher.context is not None:
            raise ValueError(
                "`teacher.context` is for the tasks of episodes, which rows of `off_policy` lack; remove one"
            )
        if off.rows_per_step < self.learner.updates_per_step:
            raise ValueError("`off_policy.rows_per_step` is less than `learner.updates_per_step`; raise it")
        for key in ("learner", "teacher"):
            refuse_longer(self, key, "off_policy.data.max_tokens", off.data.max_tokens, "one row")
