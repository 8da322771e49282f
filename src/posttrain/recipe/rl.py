"""The recipe of reinforcement learning."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from posttrain.recipe.agent import AgentRecipe, refuse_with_agent
from posttrain.recipe.components import environment_class
from posttrain.recipe.credit import CREDITS, Credit, CreditRecipe, CriticRecipe
from posttrain.recipe.data import PtxRecipe
from posttrain.recipe.engines import has_truncated_logprobs, refuse_lone_adapters
from posttrain.recipe.hardware import HardwareRecipe, refuse_unfit_hardware
from posttrain.recipe.loss import ADAPTERS_OFF, LOSSES, EntropyRecipe, KlRecipe, LossRecipe, PolicyLoss
from posttrain.recipe.metrics import Metric
from posttrain.recipe.model import LearnerRecipe, OptimizerRecipe, RewardSource
from posttrain.recipe.needs import needs
from posttrain.recipe.rollout import EvaluationRecipe, refuse_ahead, refuse_overlap
from posttrain.recipe.run import CheckpointRecipe, GuardRecipe, SampledRecipe
from posttrain.recipe.teacher import RewardTeacherRecipe, refuse_other_temperature
from posttrain.recipe.units import CausalCredit, EntropyUnits, UnitCreditRecipe


def _default_credit() -> Credit:
    return CREDITS.make("rloo")


def _default_loss() -> PolicyLoss:
    return LOSSES.make("ppo")


class RlRecipe(SampledRecipe):
    """Reinforcement learning in an environment."""

    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("rollout/restarted", "episodes restarted on new weights"),
        Metric("rollout/stale", "episodes dropped as stale"),
        Metric("policy/staleness_mean", "mean number of optimizer updates between sampling a token and training on it"),
        Metric("policy/staleness_max", "largest number of these updates"),
        Metric("tokens/discarded", "tokens of restarted episodes"),
        Metric("time/overlap_share", "share of the sampling time during which the learner did not wait"),
        Metric("time/sampling", "seconds of sampling the batch"),
        Metric("time/waited_for_learner", "seconds that sampling waited for weights"),
    )

    stage: Literal["rl"] = "rl"
    """Which stage the recipe is for; `posttrain rl` takes this one."""
    reward: RewardSource | None = None
    """Reward model whose score is added to the environment's reward. Null: none."""
    agent: AgentRecipe | None = None
    """Program that plays the episodes. Null: the environment is played turn by turn."""
    credit: CreditRecipe = Field(default_factory=_default_credit)
    """Credit assignment: from rewards to one advantage per sampled token."""
    teacher: RewardTeacherRecipe | None = None
    """Teacher whose distance from the policy is subtracted from the reward of each sampled token. Null: none."""
    unit_credit: UnitCreditRecipe | None = None
    """Unit-level credit from the reward model. Null: credit of episodes or turns only."""
    critic: Annotated[
        CriticRecipe,
        needs("has_critic", reason=lambda find: f"credit.type {find('credit.type')} uses no values", remedy=""),
    ] = CriticRecipe()
    loss: LossRecipe = Field(default_factory=_default_loss)
    """Loss of the policy on its sampled tokens."""
    kl: KlRecipe = KlRecipe()
    entropy: EntropyRecipe = EntropyRecipe()
    ptx: PtxRecipe | None = None
    """Supervised rows mixed into every policy update. Null: none."""
    optimizer: OptimizerRecipe = OptimizerRecipe()
    learner: LearnerRecipe = LearnerRecipe()
    evaluation: EvaluationRecipe = EvaluationRecipe()
    guards: GuardRecipe = GuardRecipe()
    checkpoint: CheckpointRecipe = CheckpointRecipe()
    hardware: HardwareRecipe = HardwareRecipe()

    @property
    def has_critic(self) -> bool:
        """Whether the credit type needs a critic."""
        return "values" in self.credit.inputs

    @property
    def compares_groups(self) -> bool:
        """Whether the credit type compares the episodes of a group, which then needs at least two."""
        return self.credit.compared_with == "group"

    def _penalties(self) -> list[str]:
        """Keys that subtract something from the environment's reward."""
        return [
            key
            for key, given in (
                ("kl.apply_to", self.kl.coefficient > 0 and self.kl.apply_to == "reward"),
                ("rollout.overlong_penalty", self.rollout.overlong_penalty is not None),
                ("rollout.missing_eos_penalty", self.rollout.missing_eos_penalty > 0),
                ("teacher", self.teacher is not None),
            )
            if given
        ]

    def negative_rewards(self) -> list[str]:
        """Keys that can make returns negative."""
        of_environment = environment_class(self.environment.type).negative_rewards(self.environment)
        return [*self._penalties(), *([of_environment] if of_environment else [])]

    @property
    def reports_scores(self) -> bool:
        """Whether the environment reports several scores of an episode."""
        return environment_class(self.environment.type).reports_scores(self.environment)

    @property
    def rewards_beside_scores(self) -> list[str]:
        """Keys of rewards that are part of the return but not of the scores that an environment reports."""
        return [*self._penalties(), *(["reward"] if self.reward is not None else [])]

    @property
    def needs_reference(self) -> bool:
        """Whether a reference model is needed: for the KL penalty, or for entropies that segment units."""
        segmenter = getattr(self.unit_credit, "segmenter", None)
        return self.kl.coefficient > 0 or isinstance(segmenter, EntropyUnits)

    @property
    def moves_reference(self) -> bool:
        """Whether the reference model of the KL penalty is updated during training."""
        return self.kl.coefficient > 0 and self.kl.reference.update_every is not None

    @model_validator(mode="after")
    def _agent_fits(self):
        if self.agent is not None:
            refuse_with_agent(self, self.agent)
        return self

    @model_validator(mode="after")
    def _units_fit(self):
        if self.unit_credit is None:
            return self
        if self.reward is None:
            raise ValueError("`unit_credit` needs a reward model; set `reward.path`, or remove it")
        if isinstance(self.unit_credit, CausalCredit) and self.credit.rewards_of != "token":
            what = "a turn" if self.credit.rewards_of == "turn" else "an episode"
            raise ValueError(
                f"`credit.type: {self.credit.type}` adds up the rewards of {what}, so the position of the rewards of "
                f"`unit_credit.type: {self.unit_credit.type}` has no effect; use gae, reinforce, "
                "reinforce_pp or optimal_token_baseline, or give units advantages with loo or trunc"
            )
        if self.loss.averages_advantages:
            raise ValueError(
                f"`loss.type: {self.loss.type}` gives every token the mean advantage of its stream, so `unit_credit` has no effect; "
                "use gspo_token or ppo"
            )
        longest = self.rollout.tokens_per_episode
        if self.reward.tokens_per_batch < longest:
            raise ValueError(
                f"one episode may have `rollout.tokens_per_episode` = {longest} tokens, more than the reward model's "
                f"limit `reward.tokens_per_batch` = {self.reward.tokens_per_batch}; raise the latter or lower the former"
            )
        return self

    @model_validator(mode="after")
    def _reference_fits(self):
        if not self.moves_reference:
            return self
        if self.model.lora is not None:
            raise ValueError(f"`kl.reference.update_every` {ADAPTERS_OFF}")
        if isinstance(getattr(self.unit_credit, "segmenter", None), EntropyUnits):
            raise ValueError(
                "`unit_credit.segmenter.type: entropy` needs a reference model that stays the initial model; remove "
                "`kl.reference.update_every`, or use another segmenter"
            )
        if self.teacher is not None and self.teacher.policy == "initial":
            raise ValueError(
                "`teacher.policy: initial` needs a reference model that stays the initial model; remove "
                "`kl.reference.update_every`, or use current"
            )
        return self

    @model_validator(mode="after")
    def _engine_fits(self):
        refuse_lone_adapters(self.engine, self.model)
        if has_truncated_logprobs(self.engine, self.rollout.sampling) and (key := self.loss.compares_streams):
            raise ValueError(
                "with `rollout.sampling.temperature` other than 1 and top_p, top_k or min_p, `engine.type: vllm` returns the "
                "log-probabilities of the truncated distribution, which are larger at every token, so "
                f"`{key}` would treat truncation as a change of the policy; use `loss.old: auto` and token corrections"
            )
        return self

    @model_validator(mode="after")
    def _teacher_fits(self):
        if self.teacher is None:
            return self
        refuse_other_temperature(self.teacher, self.rollout.sampling.temperature)
        if self.hardware.ray is not None:
            raise ValueError("`teacher` is not supported with `hardware.ray`; remove one of them")
        if self.teacher.tokens_per_batch < self.rollout.tokens_per_episode:
            raise ValueError(
                f"one episode may have `rollout.tokens_per_episode` = {self.rollout.tokens_per_episode} tokens, more than "
                f"`teacher.tokens_per_batch` = {self.teacher.tokens_per_batch}; raise the latter or lower the former"
            )
        return self

    @model_validator(mode="after")
    def _kinds_fit(self):
        for problem in [*self.credit.problems(self), *self.loss.problems(self)]:
            raise ValueError(problem)
        return self

    @model_validator(mode="after")
    def _parts_fit(self):
        refuse_overlap({"seeds": self.seeds}, self.environment, self.evaluation)
        if self.rollout.groups_per_step > (self.seeds.count or self.rollout.groups_per_step):
            raise ValueError(
                f"`rollout.groups_per_step` ({self.rollout.groups_per_step}) is more than `seeds.count` "
                f"({self.seeds.count}); lower it, or raise `seeds.count`"
            )
        if self.compares_groups and self.rollout.episodes_per_group < 2:
            raise ValueError(
                f"`credit.type: {self.credit.type}` compares the episodes of a group; set `rollout.episodes_per_group` to 2 or more, or use brpo, arpo, reinforce, reinforce_pp or gae"
            )
        if self.learner.updates_per_step > self.rollout.groups_per_step:
            raise ValueError(
                f"`learner.updates_per_step` ({self.learner.updates_per_step}) is more than the groups of a step "
                f"({self.rollout.groups_per_step}); lower it, or raise `rollout.groups_per_step`"
            )
        if self.rollout.filter.type != "none" and self.rollout.episodes_per_group < 2:
            raise ValueError(
                "`rollout.filter` uses the variance within a group; set `rollout.episodes_per_group` to 2 or more"
            )
        if self.learner.tokens_per_batch < self.rollout.tokens_per_episode:
            raise ValueError(
                f"one episode may have `rollout.tokens_per_episode` = {self.rollout.tokens_per_episode} tokens, more than "
                f"`learner.tokens_per_batch` = {self.learner.tokens_per_batch}; raise the latter or lower the former"
            )
        updates = self.steps * self.learner.updates_per_step * self.learner.epochs_per_step
        if self.has_critic and self.critic.updates_before_policy >= updates:
            raise ValueError(
                f"`critic.updates_before_policy` ({self.critic.updates_before_policy}) leaves the policy none of the run's "
                f"{updates} updates; lower it or raise `steps`"
            )
        optimizers = [self.optimizer, self.critic.optimizer] if self.has_critic else [self.optimizer]
        refuse_unfit_hardware(self.hardware, self.model, optimizers, self.engine)
        refuse_ahead(
            self.rollout,
            self.learner,
            self.hardware.processes,
            self.reward is not None,
            self.hardware.ray is not None,
        )
        if self.hardware.offload == "rollouts" and self.rollout.async_rollouts:
            raise ValueError(
                "`hardware.offload: rollouts` moves the optimizer's state away while episodes are sampled, and with "
                "`rollout.async_rollouts` updates are made meanwhile; use `optimizer`"
            )
        if self.ptx is not None and self.ptx.data.max_tokens > self.learner.tokens_per_batch:
            raise ValueError(
                f"one row may have `ptx.data.max_tokens` = {self.ptx.data.max_tokens} tokens, more than "
                f"`learner.tokens_per_batch` = {self.learner.tokens_per_batch}; raise the latter or lower the former"
            )
        return self
