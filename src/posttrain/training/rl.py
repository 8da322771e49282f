"""Reinforcement learning, from top to bottom: the loop, the credit of a step, its updates, and the components they use.

    tasks -> [engine <-> environment]* -> episodes -> rewards -> credit -> updates -> weights to the engine

`train` is the algorithm: `run_steps`, which distillation shares, with the `Components` of `rl`. The functions `make_*` read
the recipe and return a component with its warnings.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console

from posttrain.credit.assign import compute_advantages, mean_advantage, zero_groups
from posttrain.credit.critic import CriticCredit
from posttrain.data.held_out import TaskSplit
from posttrain.environments.protocol import task_split
from posttrain.episode import Advantages, Episode, RewardStreams
from posttrain.errors import InputError
from posttrain.models.forward import TokenScores
from posttrain.models.load import require_reward_model
from posttrain.models.policy import Policy
from posttrain.recipe.model import LearnerRecipe
from posttrain.recipe.rl import RlRecipe
from posttrain.recipe.run import SampledRecipe
from posttrain.recipe.warnings import recipe_warnings
from posttrain.rollout.store import write_episodes
from posttrain.runs.directory import RunDirectory
from posttrain.runs.evaluated import start_values
from posttrain.training.async_rollouts import AsyncRollouts
from posttrain.training.auditor import Auditor
from posttrain.training.controllers import (
    Guards,
    PolicyLearner,
    RewardShaping,
    RunningStatistics,
    check_mismatch,
    mismatch_limit,
    rounds_or_drops,
    set_advantages,
)
from posttrain.training.critic import CriticLearner, open_critic
from posttrain.training.evaluators import EpisodeEvaluator, choice_of
from posttrain.training.objectives import (
    MixedObjective,
    PolicyObjective,
    SharedObjective,
    energy_forward,
    logprobs,
    scores,
    token_energies,
    token_forward,
)
from posttrain.training.optimizer import Optimizer
from posttrain.training.reference import ReferenceModel, open_reference
from posttrain.training.reward_scorer import RewardScorer, open_scorer
from posttrain.training.rollouts import RolloutBatch, RolloutManager, SyncRollouts, TaskOrder, rollout_metrics
from posttrain.training.rows import DataSet, fixed_rows
from posttrain.training.tasks import LeftOut, check_tasks, first_episodes, too_long
from posttrain.training.teacher import Teacher, open_teacher, reverse_kl
from posttrain.training.token_rules import set_bonus_tokens
from posttrain.training.trainer import Callbacks, Checkpointable, Trainer
from posttrain.training.unit_credit import StepCredit, UnitCreditor
from posttrain.training.updater import (
    Objective,
    Sample,
    Samples,
    Totals,
    Updater,
    add_totals,
    means,
    samples_of_episodes,
)

Rollouts = SyncRollouts | AsyncRollouts
MakeRollouts = Callable[[RlRecipe, RolloutManager, TaskOrder, RunDirectory], Rollouts]


def make_rollouts(recipe: RlRecipe, manager: RolloutManager, tasks: TaskOrder, run: RunDirectory) -> Rollouts:
    """Rollouts in the step, or in a thread that is up to `rollout.async_rollouts` steps ahead."""
    greedy = "greedy" in recipe.credit.inputs
    if recipe.rollout.async_rollouts == 0:
        return SyncRollouts(manager, tasks, greedy)
    return AsyncRollouts(manager, tasks, run, recipe.steps, greedy)


def train(
    recipe: RlRecipe,
    run: RunDirectory,
    resume: bool,
    console: Console,
    callbacks: Callbacks = (),
    make_rollouts: MakeRollouts = make_rollouts,
) -> None:
    """Train a policy in an environment. All results are in `run`."""
    run_steps(make_components(recipe, run, callbacks, make_rollouts), recipe, resume, console)


# -- the loop ----------------------------------------------------------------------------------------------------------


@dataclass
class StepBatch:
    """What a step learns from."""

    samples: list[Sample]
    groups: list[Hashable]
    """The group or row of each sample. Samples with the same value stay in one update."""
    metrics: dict[str, float]
    warnings: list[str]
    episodes: int = 0
    """Number of episodes that the samples are from."""
    returns: Sequence[float] = ()
    """Return of every sampled episode that has one."""

    def parts(self, settings: LearnerRecipe) -> list[list[Sample]]:
        """The samples of each update: `epochs_per_step` passes, each divided among `updates_per_step` updates."""
        order = sorted(set(self.groups))  # type: ignore[type-var]
        count = min(settings.updates_per_step, len(order))
        chosen = [set(order[number::count]) for number in range(count)]
        parts = [[s for s, group in zip(self.samples, self.groups, strict=True) if group in part] for part in chosen]
        return parts * settings.epochs_per_step


@dataclass(frozen=True)
class StepComponents(ABC):
    """What the loop uses of the components of a stage."""

    trainer: Trainer[TokenScores]
    rollouts: Rollouts
    guards: Guards

    @abstractmethod
    def batch(self, step: int) -> StepBatch:
        """What `step` learns from: sampled, scored and with credit."""

    @abstractmethod
    def update(self, batch: StepBatch, step: int) -> Totals:
        """Make the optimizer steps of `step`."""

    def observe(self, metrics: dict[str, float], batch: StepBatch) -> list[str]:
        """Add to the metrics of a step and adapt coefficients to them. Returns warnings about its updates."""
        return self.trainer.learner.take_warnings()


def run_steps(c: StepComponents, recipe: SampledRecipe, resume: bool, console: Console) -> None:
    """Make the steps of the run, evaluate and save on schedule, and finish."""
    trainer, rollouts, learner = c.trainer, c.rollouts, c.trainer.learner
    limit = mismatch_limit(recipe, trainer.model.device)
    if resume:
        trainer.resume()
    rollouts.learned(trainer.step)
    with trainer.working(console):
        rollouts.manager.played = trainer.progress.sampled
        trainer.begin()
        with rollouts.running(trainer.step + 1):
            while trainer.step < recipe.steps and not (c.guards.stopped or trainer.audit_stops):
                if trainer.out_of_time(recipe.max_minutes):
                    break
                step, tokens = trainer.step + 1, learner.trained_tokens
                batch = c.batch(step)
                if step == 1 and "rollout/episodes" in batch.metrics:
                    random = trainer.baseline("random")
                    message, no_signal = first_episodes(recipe, batch.metrics, random, batch.returns)
                    trainer.preflight(step, message)
                    batch.warnings += no_signal
                with trainer.interrupts.critical():
                    with trainer.phase("update"):
                        totals = c.update(batch, step)
                    metrics = batch.metrics | means(totals)
                    metrics["tokens/trained"] = float(learner.trained_tokens - tokens)
                    metrics["optimizer/learning_rate"] = learner.optimizer.learning_rate
                    warnings = c.observe(metrics, batch)
                    fired = c.guards.check(metrics, step)
                    trainer.finish_step(metrics)
                    rollouts.learned(step)
                    trainer.warn([*batch.warnings, *warnings, *fired])
                check_mismatch(metrics, limit, step)
                trainer.evaluate_and_save(metrics)
        if c.guards.stopped:
            trainer.warn(["stopped by a guard; the best checkpoint is kept"])
        trainer.finish()


# -- the credit of a step and its updates ------------------------------------------------------------------------------


class CreditMaker:
    """Computes the advantages of a step from its rewards."""

    def __init__(
        self, recipe: RlRecipe, learner: PolicyLearner, critic: CriticLearner | None, scorer: RewardScorer | None
    ) -> None:
        policy, running = learner.policy, RunningStatistics(recipe.reward)
        coefficient = recipe.teacher.coefficient if recipe.teacher is not None else 0.0
        self.settings, self.critic = recipe.credit, critic
        self.rewards = RewardShaping(recipe.rollout, recipe.kl, running, coefficient)
        self.energies: Updater[torch.Tensor] | None = None
        """Computes the energies of tokens, for `optimal_token_baseline`."""
        if "energies" in recipe.credit.inputs:
            forward = energy_forward(policy, recipe.learner, recipe.rollout.sampling.temperature)
            self.energies = Updater(policy, learner.updater.optimizer, recipe.learner, forward)
        self.units: UnitCreditor | None = None
        if recipe.unit_credit is not None and scorer is not None:
            self.units = UnitCreditor(recipe, scorer, policy, running)
        self.by_episode = recipe.loss.aggregation == "sequence_mean"
        """Whether the loss is a mean over episodes, for the mean of advantages."""

    def credit(self, batch: RolloutBatch, samples: Samples, step: int, kl_coefficient: float) -> StepCredit:
        """One advantage per sampled token: rewards, including those of units, go through the baseline or the critic."""
        episodes, running = batch.episodes, self.rewards.running
        running.include(episodes)
        energies = token_energies(self.energies, episodes, samples) if self.energies is not None else None

        def advantages(rewards: RewardStreams) -> Advantages:
            values = self.critic.estimate_values(episodes, samples, rewards) if self.critic is not None else None
            greedy = {g: e.total_reward + running.correction(e.turns[-1].info) for g, e in batch.greedy.items()}
            return compute_advantages(episodes, self.settings, rewards, greedy, values, energies)

        rewards = self.rewards.shape(episodes, samples, kl_coefficient)
        if self.units is None:
            credit = StepCredit(advantages(rewards))
        else:
            credit = self.units.credit(episodes, samples, step, rewards, advantages)
        if self.settings.compared_with is not None:
            credit.metrics["credit/without_baseline"] = float(len(credit.advantages.without_baseline))
        if (zero := zero_groups(episodes, credit.advantages)) is not None:
            credit.metrics["credit/zero_groups"] = zero
        credit.metrics["credit/mean_advantage"] = mean_advantage(episodes, credit.advantages, self.by_episode)
        return credit


@dataclass(frozen=True)
class Components(StepComponents):
    """The components of a run. Those that the recipe does not use are None."""

    learner: PolicyLearner
    credit: CreditMaker
    critic: CriticLearner | None
    teacher: Teacher | None
    reference_model: ReferenceModel | None
    """Of the KL penalty."""
    ptx: DataSet | None

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether old log-probabilities need an additional forward pass. The first update of a step uses its own pass."""
        settings = self.learner.updater.settings
        return self.learner.old == "learner" and settings.updates_per_step * settings.epochs_per_step > 1

    @property
    def scores_all(self) -> bool:
        """Whether a pass before the updates scores every sample, or only those that need old log-probabilities."""
        entropy, shared = self.learner.entropy.recipe, self.critic is not None and self.critic.head is not None
        return entropy.top_share < 1 or (self.needs_old_logprobs and (shared or entropy.covariance is not None))

    def batch(self, step: int) -> StepBatch:
        """Sample the episodes of `step`, and compute the credit of their tokens."""
        trainer = self.trainer
        with trainer.phase(self.rollouts.phase):
            batch = self.rollouts.take(step)
        trainer.sampled(step, batch.sampled)
        with trainer.phase("credit"):
            samples = samples_of_episodes(batch.episodes, step)
            if self.teacher is not None:  # episodes that it cannot score leave the batch
                batch.episodes, samples, warnings, metrics = self.teacher.score_episodes(batch.episodes, samples)
                batch.warnings += warnings
                batch.metrics |= metrics | reverse_kl(samples)
            self.score(batch.episodes, samples)
            credit = self.credit.credit(batch, samples, step, self.learner.kl.coefficient)
            set_advantages(samples, credit.advantages)
        write_episodes(trainer.run.episodes, step, "train", batch.episodes, credit.advantages, credit.units)
        trainer.show_completions(step, batch.episodes, credit.advantages)
        groups = [episode.group for episode in batch.episodes for _ in episode.streams]
        metrics = rollout_metrics(batch) | credit.metrics
        returns = [episode.total_reward for episode in batch.sampled if episode.has_return]
        return StepBatch(samples, [*groups], metrics, [*batch.warnings, *credit.warnings], len(batch.episodes), returns)

    def score(self, episodes: Sequence[Episode], samples: Samples) -> None:
        """Set the fields of every sample that rewards, credit and losses need: the reference model's log-probabilities
        for KL and, with `scores_all`, the learner's own log-probabilities and entropies. The latter pass also computes
        the values of a critic on the policy's trunk."""
        if self.critic is not None and self.critic.head is None:
            self.critic.begin_values(samples)
        references = None if self.reference_model is None else self.reference_model.begin(samples)
        if self.scores_all:
            for sample, (old, entropies, values) in zip(samples, scores(self.learner.updater, samples), strict=True):
                sample.old_logprobs = old if self.needs_old_logprobs else None
                sample.entropies, sample.values = entropies, values
        if references is not None:
            for sample, reference in zip(samples, references(), strict=True):
                sample.ref_logprobs = reference
        if (tokens := self.learner.entropy.recipe.tokens) != "all":
            set_bonus_tokens(episodes, samples, tokens, self.learner.policy)

    def update(self, batch: StepBatch, step: int) -> Totals:
        """Make the updates of the policy, the critic or both on each part of the batch."""
        learner, critic, version = self.learner, self.critic, self.learner.policy.version
        settings = learner.updater.settings
        parts = batch.parts(settings)
        if parts and self.needs_old_logprobs and not self.scores_all:
            first_part = {id(sample) for sample in parts[0]} if settings.epochs_per_step == 1 else set()
            objective = learner.objective(False)
            later = [s for s in batch.samples if id(s) not in first_part and objective.has_signal(s)]
            for sample, old in zip(later, logprobs(learner.updater, later), strict=True):
                sample.old_logprobs = old
        totals: Totals = {}
        for number, chosen in enumerate(parts):
            if number > 0:
                self.trainer.progress.updated(number, len(parts))
            # In the value warm-up, only the critic learns.
            warm_up = critic is not None and critic.updater.updates < critic.settings.updates_before_policy
            if critic is not None:
                learns_here = warm_up or critic.head is None
                values_step = critic.begin_update(chosen) if learns_here else critic.take_fit
            if warm_up:
                add_totals(totals, values_step())
                continue
            update_number = (step - 1) * settings.epochs_per_step * settings.updates_per_step + number
            rows = self.ptx.batch(update_number) if self.ptx is not None else []
            first = learner.policy.version == version
            update = learner.step(chosen, first, rows)
            if critic is not None:
                add_totals(totals, values_step())
            if not first:  # the weights have changed since sampling
                update.pop("policy/mismatch", None)
            if critic is not None and critic.head is not None:
                update["critic/skipped"] = update["optimizer/skipped"]
            add_totals(totals, update)
        return totals

    def observe(self, metrics: dict[str, float], batch: StepBatch) -> list[str]:
        """Adapt the coefficients of KL and entropy. Returns warnings about updates."""
        self.learner.observe(metrics, batch.episodes)
        return super().observe(metrics, batch) + (self.critic.take_warnings() if self.critic is not None else [])


# -- the components ----------------------------------------------------------------------------------------------------


def rollouts_may_differ(recipe: RlRecipe, policy: Policy) -> bool:
    """Whether the rollouts' log-probabilities can differ from the learner's by more than the rounding of float32."""
    elsewhere = recipe.engine.type != "local" or recipe.rollout.async_rollouts > 0
    return elsewhere or rounds_or_drops(recipe.model, policy.device)


def make_tasks(recipe: SampledRecipe) -> tuple[TaskSplit, list[str]]:
    """The tasks of the run, and all warnings about the recipe. InputError for tasks that cannot be played."""
    models = recipe.models()
    for key in models.keys() & {"reward", "audit"}:
        require_reward_model(models[key].path, f"{key}.path")
    tasks = task_split(recipe.environment, recipe.evaluation, recipe.seeds)
    return tasks, [*recipe_warnings(recipe), *check_tasks(recipe, tasks)]


def make_order(
    recipe: SampledRecipe, manager: RolloutManager, tasks: TaskSplit
) -> tuple[TaskOrder, LeftOut, list[str]]:
    """The order of the training tasks, and the tasks that are left out because their prompts are too long."""
    evaluated = recipe.evaluation.environment
    left_out, summary = too_long(recipe.environment, recipe.rollout, manager.renderer, tasks, evaluated)
    return TaskOrder(tasks.training, recipe.seed, left_out=left_out.training), left_out, summary


def make_critic(recipe: RlRecipe, policy: Policy) -> CriticLearner | None:
    """The critic of credit types that use one."""
    if not isinstance(recipe.credit, CriticCredit):
        return None
    return CriticLearner(recipe.critic, recipe.credit, open_critic(recipe, policy))


def make_learner(recipe: RlRecipe, policy: Policy, critic: CriticLearner | None) -> PolicyLearner:
    """The optimizer of the policy and its objective, with the values of a critic on the policy's trunk, and `ptx`."""
    waits = recipe.critic.updates_before_policy if critic is not None else 0
    optimizer = Optimizer(policy.trainable(), recipe.optimizer, recipe.steps * recipe.updates - waits)
    head = critic.head if critic is not None else None
    forward = token_forward(policy, recipe.learner, recipe.rollout.sampling.temperature, head)
    joint = {"critic": critic.updater.optimizer} if critic is not None and head is not None else {}

    def extend(objective: PolicyObjective) -> Objective[TokenScores]:
        shared = SharedObjective(objective, recipe.critic.coefficient, recipe.critic.clip)
        episodes = objective if head is None else shared
        return episodes if recipe.ptx is None else MixedObjective(episodes, recipe.ptx.coefficient)

    updater = Updater(policy, optimizer, recipe.learner, forward, joint=joint)
    old = recipe.loss.old_source(rollouts_may_differ(recipe, policy))
    return PolicyLearner(policy, updater, recipe.loss, recipe.kl, recipe.entropy, old, extend)


def make_trainer(
    recipe: SampledRecipe,
    run: RunDirectory,
    learner: Updater[TokenScores],
    manager: RolloutManager,
    tasks: TaskSplit,
    left_out: LeftOut,
    rewarded: bool = True,
    **parts: Any,
) -> Trainer[TokenScores]:
    """The trainer, with the evaluation on held-out tasks if episodes are `rewarded`. `parts`: arguments of `Trainer`."""
    evaluator = EpisodeEvaluator(manager, recipe, tasks, run.episodes, left_out.held_out)
    auditor, audit = None, recipe.audit  # type: ignore[attr-defined]
    if audit is not None and not rewarded:
        raise InputError(
            "audit: nothing scores the answers, so there is no reward to compare with; set environment.reward"
        )
    parts["warnings"] = [*parts["warnings"], *recipe.too_few(len(set(tasks.test) - left_out.held_out))]
    if audit is not None:
        auditor = Auditor(recipe, manager.policy, run, recipe.steps)
    return Trainer(
        recipe,
        recipe.steps,
        run,
        manager.policy,
        learner,
        # Without rewards, all checkpoints have the same return, so the last checkpoint is kept.
        evaluators=[evaluator] if rewarded else [],
        best_by=choice_of(recipe.evaluation.metric) if rewarded else None,
        start=start_values(recipe) if rewarded else None,
        auditor=auditor,
        **parts,
    )


def make_components(
    recipe: RlRecipe, run: RunDirectory, callbacks: Callbacks, make_rollouts: MakeRollouts
) -> Components:
    """Create the components of `recipe`. InputError for settings that conflict with each other or with the model."""
    tasks, warnings = make_tasks(recipe)
    policy = Policy(recipe.model, recipe.seed)
    # An engine on the same GPU starts before the optimizers' state takes its memory.
    scorer = open_scorer(recipe.reward, policy)
    manager = RolloutManager(
        policy, recipe.engine, recipe.environment, recipe.rollout, scorer, logs=run.logs, agent=recipe.agent
    )
    critic = make_critic(recipe, policy)
    learner = make_learner(recipe, policy, critic)
    manager.sleepers = [learner.updater.optimizer, *([] if critic is None else critic.updater.sleepers)]
    order, left_out, too_long_tasks = make_order(recipe, manager, tasks)
    credit = CreditMaker(recipe, learner, critic, scorer)
    teacher, teacher_warnings = open_teacher(recipe, policy, manager.renderer, order.seeds[0])
    ptx = fixed_rows(recipe.ptx, recipe.ptx.rows_per_update if recipe.ptx else 0, manager.renderer, recipe.seed)
    row_warnings = ptx.problems.summary() if ptx is not None else []
    unit_warnings = credit.units.warnings if credit.units is not None else []
    warnings += [*teacher_warnings, *too_long_tasks, *row_warnings, *unit_warnings, *manager.template_warnings()]
    rollouts, guards = make_rollouts(recipe, manager, order, run), Guards(recipe)
    reference_model = open_reference(policy, learner.updater) if recipe.kl.coefficient > 0 else None
    checkpointables: dict[str, Checkpointable] = {}
    if critic is not None:
        checkpointables["critic"] = critic.updater
    if learner.moving is not None:
        checkpointables["reference"] = learner.moving
    if isinstance(rollouts, AsyncRollouts):
        checkpointables["async_rollouts"] = rollouts
        # Load the reference model now: while transformers loads a model, torch's default dtype changes in all threads.
        if reference_model is not None:
            reference_model.load()
        if recipe.teacher is not None and recipe.teacher.policy == "initial":
            ReferenceModel(policy, learner.updater).load()
    state = {"tasks": order, "kl": learner.kl, "entropy": learner.entropy, "guards": guards}
    trainer = make_trainer(
        recipe,
        run,
        learner.updater,
        manager,
        tasks,
        left_out,
        stateful=state | {"reward": credit.rewards.running},
        checkpointables=checkpointables,
        warnings=warnings,
        callbacks=callbacks,
    )
    return Components(trainer, rollouts, guards, learner, credit, critic, teacher, reference_model, ptx)
