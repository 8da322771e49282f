"""The recipe of reinforcement learning."""

import math
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from posttrain.recipe.agent import AgentRecipe, refuse_with_agent
from posttrain.recipe.audit import AuditRecipe
from posttrain.recipe.components import environment_class
from posttrain.recipe.credit import CREDITS, CreditRecipe, CriticRecipe
from posttrain.recipe.data import PtxRecipe
from posttrain.recipe.guards import GuardRecipe
from posttrain.recipe.hardware import HardwareRecipe
from posttrain.recipe.loss import ADAPTERS_OFF, KL_STEP, LOSSES, EntropyRecipe, KlRecipe, LossRecipe
from posttrain.recipe.metrics import Metric
from posttrain.recipe.model import LearnerRecipe, OptimizerRecipe, RewardSource, dtype_bytes
from posttrain.recipe.needs import is_given, needs
from posttrain.recipe.plan import CACHE, Items, Plan, counted, plural
from posttrain.recipe.rollout import EvaluationRecipe
from posttrain.recipe.run import CheckpointRecipe, SampledRecipe, refuse_longer
from posttrain.recipe.teacher import RewardTeacherRecipe, refuse_other_temperature
from posttrain.recipe.units import CausalCredit, EntropyUnits, HindsightCredit, UnitCreditRecipe

_MOST_UPDATES = 32
"""Maximum number of optimizer steps on the same episodes in published long runs."""
_STEEP = 0.95
_NEW_WEIGHTS = {
    "finish": "finish with the old weights",
    "continue": "continue with the new weights from the next token",
}


class RlRecipe(SampledRecipe):
    """Reinforcement learning in an environment."""

    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("rollout/stale", "episodes dropped as stale"),
        Metric("policy/staleness_mean", "mean number of optimizer updates between sampling a token and training on it"),
        Metric("policy/staleness_max", "largest number of these updates"),
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
    credit: CreditRecipe = Field(default_factory=lambda: CREDITS.make("rloo"))
    """Credit assignment: from rewards to one advantage per sampled token."""
    teacher: RewardTeacherRecipe | None = None
    """Teacher whose distance from the policy is subtracted from the reward of each sampled token. Null: none."""
    unit_credit: Annotated[UnitCreditRecipe | None, needs("reward", remedy="set `reward.path`", refused=True)] = None
    """Unit-level credit from the reward model. Null: credit of episodes or turns only."""
    critic: Annotated[
        CriticRecipe,
        needs("has_critic", reason=lambda find: f"credit.type {find('credit.type')} uses no values", remedy=""),
    ] = CriticRecipe()
    loss: LossRecipe = Field(default_factory=lambda: LOSSES.make("ppo"))
    """Loss of the policy on its sampled tokens."""
    kl: KlRecipe = KlRecipe()
    entropy: EntropyRecipe = EntropyRecipe()
    ptx: PtxRecipe | None = None
    """Supervised rows mixed into every policy update. Null: none."""
    optimizer: OptimizerRecipe = OptimizerRecipe()
    learner: LearnerRecipe = LearnerRecipe()
    evaluation: EvaluationRecipe = EvaluationRecipe()
    audit: AuditRecipe | None = None
    """Second scorer of the held-out episodes, which training never sees. Null: none."""
    guards: GuardRecipe = GuardRecipe()
    checkpoint: CheckpointRecipe = CheckpointRecipe()
    hardware: HardwareRecipe = HardwareRecipe()

    run_by: ClassVar[str] = "posttrain.training.rl:train"

    @property
    def has_critic(self) -> bool:
        """Whether the credit type needs a critic."""
        return "values" in self.credit.inputs

    @property
    def separate_critic(self) -> bool:
        """Whether the run has a critic with weights of its own."""
        return self.has_critic and self.critic.backbone == "separate"

    @property
    def optimizers(self) -> list[OptimizerRecipe]:
        return [self.optimizer, *([self.critic.optimizer] if self.has_critic else [])]

    @property
    def updates_behind(self) -> int:
        """Maximum number of updates between the weights with which a step's episodes start and the update on them."""
        return self.rollout.async_rollouts * self.updates

    @property
    def ahead(self) -> int:
        return self.rollout.async_rollouts

    @property
    def is_scored(self) -> bool:
        return self.reward is not None or self.teacher is not None

    @property
    def separable(self) -> list[str]:
        fixed = self.kl.coefficient > 0 and not self.moves_reference
        return [*(["critic"] if self.separate_critic else []), *(["reference"] if fixed else [])]

    def models(self) -> dict[str, Any]:
        teacher = self.teacher if self.teacher is not None and self.teacher.path is not None else None
        critic = self.critic if self.separate_critic else None
        loaded = {"reward": self.reward, "critic": critic, "teacher": teacher}
        return super().models() | {key: one for key, one in loaded.items() if one is not None}

    def _penalties(self) -> list[str]:
        """Keys that subtract something from the environment's reward."""
        given = {
            "kl.apply_to": self.kl.coefficient > 0 and self.kl.apply_to == "reward",
            "rollout.overlong_penalty": self.rollout.overlong_penalty is not None,
            "rollout.missing_eos_penalty": self.rollout.missing_eos_penalty > 0,
            "teacher": self.teacher is not None,
        }
        return [key for key, is_given in given.items() if is_given]

    def negative_rewards(self) -> list[str]:
        """Keys that can make returns negative."""
        key = environment_class(self.environment.type).negative_rewards(self.environment)
        return [*self._penalties(), *([key] if key else [])]

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

    def _check(self) -> None:
        self._check_units()
        self._check_reference()
        if self.agent is not None:
            refuse_with_agent(self, self.agent)
        for problem in [*self.credit.problems(self), *self.loss.problems(self)]:
            raise ValueError(problem)
        if self.engine.truncated_logprobs(self.rollout.sampling) and (key := self.loss.compares_streams):
            raise ValueError(
                "with `rollout.sampling.temperature` other than 1, `engine.type: vllm` returns log-probabilities after truncation, so "
                f"`{key}` would treat truncation as a change of the policy; use `loss.old: auto` and token corrections"
            )
        if self.teacher is not None:
            refuse_other_temperature(self.teacher, self.rollout.sampling.temperature)
            if self.hardware.ray is not None:
                raise ValueError("`teacher` is not supported with `hardware.ray`; remove one of them")
            refuse_longer(self, "teacher", "rollout.tokens_per_episode", self.rollout.tokens_per_episode)
        rollout, updates = self.rollout, self.steps * self.updates
        compares, single = f"`credit.type: {self.credit.type}` compares the episodes", rollout.episodes_per_group < 2
        if self.credit.compared_with == "group" and single:
            others = "use brpo, arpo, reinforce, reinforce_pp or gae"
            raise ValueError(f"{compares} of a group; set `rollout.episodes_per_group` to 2 or more, or {others}")
        if rollout.filter.type != "none" and single:
            raise ValueError(
                "`rollout.filter` uses the variance within a group; set `rollout.episodes_per_group` to 2 or more"
            )
        if self.has_critic and (warmup := self.critic.updates_before_policy) >= updates:
            left = f"leaves the policy none of the run's {updates} updates"
            raise ValueError(f"`critic.updates_before_policy` ({warmup}) {left}; lower it or raise `steps`")
        if self.ptx is not None:
            refuse_longer(self, "learner", "ptx.data.max_tokens", self.ptx.data.max_tokens, "one row")
        self._check_async_rollouts()

    def _check_units(self) -> None:
        if self.unit_credit is None:
            return
        if isinstance(self.unit_credit, CausalCredit) and self.credit.rewards_of != "token":
            what = "a turn" if self.credit.rewards_of == "turn" else "an episode"
            raise ValueError(
                f"`credit.type: {self.credit.type}` adds up the rewards of {what}, so the position of the rewards of "
                f"`unit_credit.type: {self.unit_credit.type}` has no effect; use gae, reinforce, "
                "reinforce_pp or optimal_token_baseline, or give units advantages with loo"
            )
        if self.loss.averages_advantages:
            mean = f"`loss.type: {self.loss.type}` gives every token the mean advantage of its stream"
            raise ValueError(f"{mean}, so `unit_credit` has no effect; use gspo_token or ppo")
        refuse_longer(self, "reward", "rollout.tokens_per_episode", self.rollout.tokens_per_episode)

    def _check_reference(self) -> None:
        if not self.moves_reference:
            return
        if self.model.lora is not None:
            raise ValueError(f"`kl.reference.update_every` {ADAPTERS_OFF}")
        needed = "needs a reference model that stays the initial model; remove `kl.reference.update_every`"
        if isinstance(getattr(self.unit_credit, "segmenter", None), EntropyUnits):
            raise ValueError(f"`unit_credit.segmenter.type: entropy` {needed}, or use another segmenter")
        if self.teacher is not None and self.teacher.policy == "initial":
            raise ValueError(f"`teacher.policy: initial` {needed}, or use current")

    def _check_async_rollouts(self) -> None:
        rollout, hardware, behind = self.rollout, self.hardware, self.updates_behind
        if not rollout.async_rollouts:
            return
        when, most = rollout.on_new_weights, rollout.max_staleness
        if hardware.learners > 1 and self.reward is not None:
            raise ValueError(
                "with `rollout.async_rollouts` only the first process samples and scores, but `hardware.processes` shards the "
                "reward model of `reward.path` over all; change one of the three"
            )
        if when != "finish" and hardware.ray is not None:
            why = "engines on a Ray cluster load new weights only between rollouts"
            raise ValueError(f"{why}, so `rollout.on_new_weights: {when}` is not supported; set it to finish")
        if when == "finish" and most is not None and most < behind:
            raise ValueError(
                f"with `rollout.on_new_weights: finish` every episode is {behind} updates old when it is trained on "
                f"(`rollout.async_rollouts` {rollout.async_rollouts} x updates per step), so `rollout.max_staleness` = {most} would "
                "drop them all; raise it, or use continue"
            )
        if hardware.offload == "rollouts":
            why = "moves the optimizer's state away during rollouts, in which `rollout.async_rollouts` makes updates"
            raise ValueError(f"`hardware.offload: rollouts` {why}; use `optimizer`")

    # -- batches and memory

    def work_lines(self) -> list[str]:
        """Limits of asynchronous rollouts, work of the optimizer steps besides the policy, and the cost of unit credit."""
        lines, rollout, updates = [], self.rollout, self.steps * self.updates
        if rollout.async_rollouts:
            behind = self.updates_behind
            lines.append(
                f"episodes start at most {counted(rollout.async_rollouts, 'step')} ahead of the learner, with weights at "
                f"most {behind} optimizer {plural('step', behind)} old; when new weights arrive, episodes in flight "
                f"{_NEW_WEIGHTS[rollout.on_new_weights]}"
            )
            if (most := rollout.max_staleness) is not None:
                lines.append(f"an episode with a token older than {most} optimizer {plural('step', most)} is dropped")
        if self.has_critic:
            warmup = self.critic.updates_before_policy
            first = f"; the first {warmup} without the policy, which makes {updates - warmup:,}" if warmup else ""
            who, how = "the value head", "in the forward and backward passes of the policy"
            if self.separate_critic:
                who, how = "the critic", "on the same episodes, in separate forward and backward passes"
            lines.append(f"{who} makes {updates:,} optimizer {plural('step', updates)} {how}{first}")
        if self.ptx is not None:
            paths = ", ".join(source.path for source in self.ptx.data.train)
            rows, longest = self.ptx.rows_per_update, self.ptx.data.max_tokens
            more = math.ceil(rows / (self.learner.tokens_per_batch // longest))
            lines.append(
                f"each optimizer step of the policy also uses {counted(rows, 'row')} from {paths}, at most {more} "
                f"additional forward {plural('pass', more)} with rows of {longest} tokens"
            )
        if (credit := self.unit_credit) is not None:
            what = f"{credit.type} {'advantages' if isinstance(credit, HindsightCredit) else 'rewards'}"
            lines.append(f"{what} for K units per answer, weight {credit.beta:g}: {credit.cost} more per episode")
        return lines

    @property
    def activation_bytes(self) -> int:
        # Activations of policy and critic do not exist at the same time.
        width = self.model.weight_bytes
        return max(width, dtype_bytes(self.critic.dtype)) if self.separate_critic else width

    def model_items(self, plan: Plan) -> Items:
        items = super().model_items(plan)
        if self.needs_reference:
            items |= self.reference_items(plan, self.moves_reference, self.kl.reference.mix < 1)
        if self.reward is not None:
            items |= self.reward.memory_items(plan)
        if self.teacher is not None:
            items |= self.teacher.memory_items(plan, self.model)
        if self.has_critic:
            items["critic"] = self.critic.memory(plan.sizes, self.model, self.hardware.offload == "optimizer")
        return items

    def memory_items(self, plan: Plan) -> Items:
        items, rollout, width = super().memory_items(plan), self.rollout, self.model.weight_bytes
        if not rollout.async_rollouts:
            return items
        copies = 2 + (rollout.async_rollouts if rollout.on_new_weights == "finish" else 0)
        how = f"{copies} copies of the trained weights: in use and pending"
        if plan.device is not None and plan.placement.shard > 1:  # which are gathered in the CPU memory of rank 0
            how = f"the trained weights in use on rank 0, which has {copies - 1} pending copies in CPU memory"
            copies = 1
        count = copies * width * self.model.trained_parameters(plan.sizes)
        if plan.placement.shard > 1 and self.model.lora is not None:
            count, how = count + width * plan.sizes.parameters, f"{how}; frozen weights unsharded"
        items["weights of asynchronous rollouts"] = (count, how)
        if self.engine.type == "local" and plan.placement.colocated and not plan.placement.engines:
            cache, _ = self.engine_items(plan)[CACHE]
            how = "as large as the evaluation cache, in addition to it"
            items["key/value cache of asynchronous rollouts, at most"] = (cache, how)
        return items

    # -- warnings

    def warnings(self) -> list[str]:
        """Unusual values of the loss, the credit, the rollouts and the optimizers."""
        warnings = [*super().warnings(), *self._sampling_warnings(), *self._update_warnings()]
        loss, credit = self.loss, self.credit
        if isinstance(self.unit_credit, CausalCredit) and getattr(credit, "discount", 1.0) < 1:
            changes = (
                f"unit_credit.type {self.unit_credit.type} changes the objective, because earlier rewards count more"
            )
            warnings.append(f"with credit.discount below 1, {changes}")
        warnings += [*loss.warnings(self), *credit.warnings(self)]
        if self.evaluation.every > self.steps:
            warnings.append(f"evaluation.every has no effect: the run ends after {counted(self.steps, 'step')}")
        if self.rollout.async_rollouts > 0 and loss.correction is None and not loss.compares_with_rollout:
            warnings.append(
                f"with rollout.async_rollouts above 0, loss.type {loss.type} treats episodes of older weights as "
                "on-policy, because it has no ratio to the policy that sampled; set loss.correction"
            )
        vllm = self.engine.type == "vllm"
        if vllm and loss.correction is None and loss.ratio_to != "rollout":
            warnings.append(
                "engine.type vllm computes other log-probabilities than the learner (policy/mismatch), without a correction; set "
                "loss.correction.weights or loss.correction.reject"
            )
        if loss.ratio_to == "old" and loss.old == "rollout" and (vllm or self.model.dtype not in ("float32", None)):
            warnings.append(
                "loss.old rollout puts the difference between engine and learner into the ratio, about 0.04 nats per "
                "token in bfloat16: gspo with its default clip loses most of its gradient before any update "
                "(policy/clipped_before_update); use auto"
            )
        return warnings

    def _sampling_warnings(self) -> list[str]:
        """Sampling from a distribution that differs from that in the loss, or the same answer every time."""
        sampling, warnings = self.rollout.sampling, []
        truncating = [key for key in ("top_p", "top_k", "min_p") if is_given(sampling, key)]
        if truncating and sampling.temperature > 0:
            warnings.append(
                f"{' and '.join(f'rollout.sampling.{key}' for key in truncating)} truncate the sampling distribution, but the loss is "
                "that of the full vocabulary: the gradient also moves probability between kept and left-out tokens, and "
                "policy/entropy and policy/kl are biased; set top_p 1, top_k 0 and min_p 0"
            )
        if self.engine.truncated_logprobs(sampling):
            warnings.append(
                "engine.type vllm returns the log-probabilities of the truncated distribution at temperatures other than 1, so "
                "policy/mismatch includes -log of the probability that truncation keeps, at most -log(top_p) with top_p alone"
            )
        if sampling.temperature == 0 and self.rollout.episodes_per_group > 1:
            warnings.append("rollout.sampling.temperature 0 makes all episodes of a group identical")
        return warnings

    def _update_warnings(self) -> list[str]:
        """Many updates per step, long warm-ups, and a KL coefficient that moves fast."""
        kl, learner, warnings = self.kl, self.learner, []
        if self.updates > _MOST_UPDATES:
            product = f"learner.updates_per_step {learner.updates_per_step} x learner.epochs_per_step {learner.epochs_per_step}"
            warnings.append(
                f"a step makes {self.updates} updates on the same episodes ({product}). Late updates are far off-policy, which can "
                f"make a run collapse; use {_MOST_UPDATES} or fewer"
            )
        # The adaptive coefficient moves by at most KL_STEP x episodes / horizon in a step (Ziegler et al. 2019).
        episodes = self.rollout.groups_per_step * self.rollout.episodes_per_group
        factor = 1 - KL_STEP * min(1, episodes / kl.horizon)
        if kl.target is not None and factor <= _STEEP:
            warnings.append(
                f"kl.horizon {kl.horizon:g} is short for {episodes} episodes per step: while the KL is above kl.target, the coefficient is "
                f"multiplied by {2 - factor:.2g} each step, until it undoes what was learned, and below by {factor:.2g}; raise kl.horizon"
            )
        if self.model.lora is not None and self.model.lora.dropout > 0:
            warnings.append("model.lora.dropout above 0 makes the policies of engine and learner differ")
        updates = self.steps * self.updates
        waits = self.critic.updates_before_policy if self.has_critic else 0
        warmups = {"optimizer": (self.optimizer.warmup_updates, updates - waits)}
        if self.has_critic:
            warmups["critic.optimizer"] = (self.critic.optimizer.warmup_updates, updates)
        return warnings + [
            f"{key}.warmup_updates {warmup} is not below the {count} updates of the run"
            for key, (warmup, count) in warmups.items()
            if warmup >= count
        ]
