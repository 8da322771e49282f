"""Reinforcement learning, from top to bottom: the loop, the credit of a step, its updates, and the components they use.

    tasks -> [engine <-> environment]* -> episodes -> rewards -> credit -> updates -> weights to the engine

`train` is the algorithm. `make_components` reads the recipe; nothing below this file does.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console

from posttrain.credit.assign import compute_advantages, mean_advantage, zero_groups
from posttrain.credit.critic import CriticCredit
from posttrain.environments.protocol import task_split
from posttrain.episode import Advantages, Episode, RewardStreams
from posttrain.models.forward import TokenScores
from posttrain.models.load import resolve_dtype
from posttrain.models.policy import Policy
from posttrain.recipe.credit import CreditRecipe
from posttrain.recipe.model import LearnerRecipe, ModelRecipe
from posttrain.recipe.stages import RlRecipe
from posttrain.recipe.warnings import recipe_warnings
from posttrain.rollout.store import write_episodes
from posttrain.runs.directory import RunDirectory
from posttrain.runs.evaluated import start_values
from posttrain.seeds import random_stream
from posttrain.training.async_rollouts import AsyncRollouts
from posttrain.training.controllers import (
    EntropyController,
    Guards,
    KlController,
    check_mismatch,
    mismatch_limit,
)
from posttrain.training.critic import CriticLearner
from posttrain.training.evaluators import EpisodeEvaluator
from posttrain.training.objectives import (
    MixedObjective,
    PolicyObjective,
    SharedObjective,
    energy_forward,
    logprobs,
    metrics_without_pass,
    scores,
    token_energies,
    token_forward,
)
from posttrain.training.optimizer import Optimizer
from posttrain.training.reference import MovingReference, ReferenceModel, open_reference
from posttrain.training.reward_scorer import RewardShaping, RunningStatistics, open_scorer
from posttrain.training.rollouts import (
    RolloutBatch,
    RolloutManager,
    Rollouts,
    SyncRollouts,
    TaskOrder,
    rollout_metrics,
)
from posttrain.training.rows import FixedRows
from posttrain.training.tasks import check_tasks, too_long
from posttrain.training.teacher import Teacher, open_teacher, reverse_kl
from posttrain.training.token_rules import set_bonus_tokens
from posttrain.training.trainer import Callback, Checkpointable, LoopSettings, Trainer
from posttrain.training.unit_credit import StepCredit, UnitCreditor
from posttrain.training.updater import Objective, Sample, Totals, Updater, add_totals, means, samples_of_episodes

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
    callbacks: Sequence[Callback] = (),
    make_rollouts: MakeRollouts = make_rollouts,
) -> None:
    """Train a policy in an environment. All results are in `run`."""
    c = make_components(recipe, run, callbacks, make_rollouts)
    trainer, learner, rollouts = c.trainer, c.learner, c.rollouts
    if resume:
        trainer.resume()
    rollouts.learned(trainer.step)
    with trainer.working(console):
        rollouts.manager.played = trainer.progress.sampled
        trainer.begin()
        with rollouts.running(trainer.step + 1):
            while trainer.step < recipe.steps and not c.guards.stopped and not trainer.out_of_time(recipe.max_minutes):
                step, tokens = trainer.step + 1, learner.trained_tokens
                with trainer.phase(rollouts.phase):
                    batch = rollouts.take(step)
                trainer.sampled(step, batch.sampled)
                with trainer.phase("credit"):
                    samples = c.samples(batch, step)
                    c.score(batch.episodes, samples)
                    credit = c.credit(batch, samples, step)
                    set_advantages(samples, credit.advantages)
                write_episodes(run.episodes, step, "train", batch.episodes, credit.advantages, credit.units)
                trainer.show_completions(step, batch.episodes, credit.advantages)
                with trainer.interrupts.critical():
                    with trainer.phase("update"):
                        totals = c.update(batch.episodes, samples, step)
                    metrics = rollout_metrics(batch) | means(totals) | credit.metrics
                    if recipe.credit.compared_with is not None:
                        metrics["credit/without_baseline"] = float(len(credit.advantages.without_baseline))
                    if (zero := zero_groups(batch.episodes, credit.advantages)) is not None:
                        metrics["credit/zero_groups"] = zero
                    by_episode = recipe.loss.aggregation == "sequence_mean"
                    metrics["credit/mean_advantage"] = mean_advantage(batch.episodes, credit.advantages, by_episode)
                    metrics["tokens/trained"] = float(learner.trained_tokens - tokens)
                    metrics["optimizer/learning_rate"] = learner.optimizer.learning_rate
                    if recipe.kl.coefficient > 0:
                        metrics["kl/coefficient"] = c.kl.coefficient
                    if c.reference is not None:
                        metrics["reference/updates"] = float(c.reference.updates)
                    c.kl.update(metrics.get("policy/kl"), len(batch.episodes))
                    if c.entropy.used:
                        metrics["entropy/coefficient"] = c.entropy.coefficient
                    c.entropy.update_from(metrics)
                    fired = c.guards.check(metrics, step)
                    trainer.finish_step(metrics)
                    rollouts.learned(step)
                    trainer.warn([*batch.warnings, *credit.warnings, *c.take_warnings(), *fired])
                check_mismatch(metrics, c.mismatch_limit, step)
                trainer.evaluate_and_save(metrics)
        if c.guards.stopped:
            trainer.warn(["stopped by a guard; the best checkpoint is kept"])
        trainer.finish()


@dataclass(frozen=True)
class Components:
    """The components of a run, and its settings. Components that the recipe does not use are None."""

    policy: Policy
    learner: Updater[TokenScores]
    critic: CriticLearner | None
    energies: Updater[torch.Tensor] | None
    """Computes the energies of tokens, for `optimal_token_baseline`."""
    rollouts: Rollouts
    rewards: RewardShaping
    unit_credit: UnitCreditor | None
    teacher: Teacher | None
    ptx: FixedRows | None
    kl: KlController
    reference_model: ReferenceModel | None
    """Of the KL penalty."""
    reference: MovingReference | None
    """Moves the reference model of the KL penalty."""
    entropy: EntropyController
    guards: Guards
    trainer: Trainer[TokenScores]
    credit_settings: CreditRecipe
    updates: LearnerRecipe
    objective: Callable[[bool], Objective[TokenScores]]
    """The objective of an update, given whether no update of the step came before it."""
    mismatch_limit: float
    """Largest `policy/mismatch`, in nats, that the precision of engine and learner explains."""
    needs_old_logprobs: bool
    """Whether old log-probabilities need an additional forward pass. The first update of a step uses its own pass."""
    scores_all: bool
    """Whether a pass before the updates scores every sample, or only those that need old log-probabilities."""

    def samples(self, batch: RolloutBatch, step: int) -> list[Sample]:
        """One sample per stream. A teacher scores them, and episodes that it cannot score leave the batch."""
        samples = samples_of_episodes(batch.episodes, step)
        if self.teacher is not None:
            batch.episodes, samples, warnings, metrics = self.teacher.score_episodes(batch.episodes, samples)
            batch.warnings += warnings
            batch.metrics |= metrics | reverse_kl(samples)
        return samples

    def score(self, episodes: Sequence[Episode], samples: Sequence[Sample]) -> None:
        """Set the fields of every sample that rewards, credit and losses need: the reference model's log-probabilities
        for KL and, with `scores_all`, the learner's own log-probabilities and entropies. The latter pass also computes
        the values of a critic on the policy's trunk."""
        if self.critic is not None and self.critic.head is None:
            self.critic.begin_values(samples)
        references = None if self.reference_model is None else self.reference_model.begin(samples)
        if self.scores_all:
            for sample, (old, entropies, values) in zip(samples, scores(self.learner, samples), strict=True):
                sample.old_logprobs = old if self.needs_old_logprobs else None
                sample.entropies, sample.values = entropies, values
        if references is not None:
            for sample, reference in zip(samples, references(), strict=True):
                sample.ref_logprobs = reference
        if self.entropy.recipe.tokens != "all":
            set_bonus_tokens(episodes, samples, self.entropy.recipe.tokens, self.policy)

    def credit(self, batch: RolloutBatch, samples: Sequence[Sample], step: int) -> StepCredit:
        """One advantage per sampled token: rewards, including those of units, go through the baseline or the critic."""
        episodes = batch.episodes
        self.rewards.running.include(episodes)
        energies = token_energies(self.energies, episodes, samples) if self.energies is not None else None

        def advantages(rewards: RewardStreams) -> Advantages:
            values = self.critic.estimate_values(episodes, samples, rewards) if self.critic is not None else None
            return compute_advantages(
                episodes, self.credit_settings, rewards, self.rewards.of_greedy(batch.greedy), values, energies
            )

        rewards = self.rewards.shape(episodes, samples, self.kl.coefficient)
        if self.unit_credit is None:
            return StepCredit(advantages(rewards))
        return self.unit_credit.credit(episodes, samples, step, rewards, advantages)

    def update(self, episodes: Sequence[Episode], samples: Sequence[Sample], step: int) -> Totals:
        """`epochs_per_step` passes over the episodes. Each divides the groups among `updates_per_step` optimizer
        steps.
        """
        epochs, per_epoch = self.updates.epochs_per_step, self.updates.updates_per_step
        critic, version = self.critic, self.policy.version
        groups = [episode.group for episode in episodes for _ in episode.streams]
        order = sorted(set(groups))
        count = min(per_epoch, len(order))
        if self.needs_old_logprobs and not self.scores_all:
            first_part = set(order[::count]) if epochs == 1 else set()
            self._set_old_logprobs([s for s, group in zip(samples, groups, strict=True) if group not in first_part])
        totals: Totals = {}
        for number in range(epochs * count):
            if number > 0:
                self.trainer.progress.updated(number, epochs * count)
            part = set(order[number % count :: count])
            chosen = [sample for sample, group in zip(samples, groups, strict=True) if group in part]
            warm_up = critic is not None and critic.policy_waits
            if critic is not None:
                learns_here = warm_up or critic.head is None
                values_step = critic.begin_update(chosen) if learns_here else critic.take_fit
            if warm_up:
                add_totals(totals, values_step())
                continue
            rows = self.ptx.batch((step - 1) * epochs * per_epoch + number) if self.ptx is not None else []
            first = self.policy.version == version
            objective = self.objective(first)
            update = self.learner.update([*chosen, *rows], objective)
            if critic is not None:
                add_totals(totals, values_step())
            if self.reference is not None:
                self.reference.follow()
            if not update["optimizer/skipped"][0]:
                add_totals(update, metrics_without_pass(objective, chosen))
            if not first:  # the weights have changed since sampling
                update.pop("policy/mismatch", None)
            if critic is not None and critic.head is not None:
                update["critic/skipped"] = update["optimizer/skipped"]
            add_totals(totals, update)
        return totals

    def _set_old_logprobs(self, samples: Sequence[Sample]) -> None:
        objective = self.objective(False)
        trained = [sample for sample in samples if objective.has_signal(sample)]
        for sample, old in zip(trained, logprobs(self.learner, trained), strict=True):
            sample.old_logprobs = old

    def take_warnings(self) -> list[str]:
        """Warnings about updates since the last call."""
        return [*self.learner.take_warnings(), *(self.critic.take_warnings() if self.critic is not None else [])]


def set_advantages(samples: Sequence[Sample], credit: Advantages) -> None:
    """Set `advantages` and `has_baseline` of each sample."""
    streams = [
        (stream, position not in credit.without_baseline)
        for position, episode in enumerate(credit.values)
        for stream in episode
    ]
    for sample, (advantages, has_baseline) in zip(samples, streams, strict=True):
        sample.advantages, sample.has_baseline = advantages[sample.stream.sampled], has_baseline


def rollouts_may_differ(recipe: RlRecipe, policy: Policy) -> bool:
    """Whether the rollouts' log-probabilities can differ from the learner's by more than the rounding of float32."""
    return (
        recipe.engine.type != "local"
        or recipe.rollout.async_rollouts > 0
        or rounds_or_drops(recipe.model, policy.device)
    )


def rounds_or_drops(model: ModelRecipe, device: torch.device) -> bool:
    """Whether the learner's log-probabilities have a precision below float32, or are affected by adapter dropout."""
    rounded = resolve_dtype(model.dtype, device) != torch.float32
    return rounded or (model.lora is not None and model.lora.dropout > 0)


def make_components(
    recipe: RlRecipe, run: RunDirectory, callbacks: Sequence[Callback], make_rollouts: MakeRollouts
) -> Components:
    """Create the components of `recipe`. InputError for settings that conflict with each other or with the model."""
    tasks = task_split(recipe.environment, recipe.evaluation, recipe.seeds)
    warnings = [
        *recipe_warnings(recipe),
        *check_tasks(
            recipe.environment,
            tasks,
            recipe.rollout,
            recipe.reward is not None or recipe.teacher is not None,
            recipe.evaluation.environment,
            recipe.agent,
        ),
    ]
    updates = recipe.steps * recipe.learner.updates_per_step * recipe.learner.epochs_per_step

    policy = Policy(recipe.model, recipe.seed)
    # An engine on the same GPU starts before the optimizers' state takes its memory.
    scorer = open_scorer(recipe.reward, policy)
    manager = RolloutManager(
        policy, recipe.engine, recipe.environment, recipe.rollout, scorer, logs=run.logs, agent=recipe.agent
    )
    critic = None
    if isinstance(recipe.credit, CriticCredit):
        stored = recipe.reward is not None and recipe.reward.normalize == "stored"
        critic = CriticLearner(
            recipe.critic, recipe.credit, policy, recipe.learner, updates, recipe.seed, stored_statistics=stored
        )
        updates -= recipe.critic.updates_before_policy
    head = critic.head if critic is not None else None
    optimizer = Optimizer(policy.trainable(), recipe.optimizer, updates)
    forward = token_forward(policy, recipe.learner, recipe.rollout.sampling.temperature, head)
    energies = None
    if "energies" in recipe.credit.inputs:
        of_energies = energy_forward(policy, recipe.learner, recipe.rollout.sampling.temperature)
        energies = Updater(policy, optimizer, recipe.learner, of_energies)
    manager.sleepers = [optimizer, *([] if critic is None else [critic.updater])]
    joint = {"critic": critic.updater.optimizer} if critic is not None and head is not None else {}
    learner = Updater(policy, optimizer, recipe.learner, forward, joint=joint)
    left_out, summary = too_long(
        recipe.environment, recipe.rollout, manager.renderer, tasks, recipe.evaluation.environment
    )
    running = RunningStatistics(recipe.reward)
    unit_credit = None
    if recipe.unit_credit is not None and scorer is not None:
        turns, budget = recipe.environment.max_turns, recipe.learner.tokens_per_batch
        unit_credit = UnitCreditor(recipe.unit_credit, scorer, policy, running, budget, turns)
    teacher = None
    if (settings := recipe.teacher) is not None:
        teacher, more = open_teacher(
            settings,
            policy,
            manager.renderer,
            recipe.environment,
            recipe.rollout.sampling.temperature,
            recipe.learner.logits_per_chunk,
            recipe.rollout.failures.max_share,
            next(seed for seed in tasks.training if seed not in left_out.training),
        )
        warnings += more
    ptx = None
    if (mixed := recipe.ptx) is not None:
        ptx = FixedRows(mixed.data, mixed.loss_on, mixed.rows_per_update, manager.renderer, recipe.seed)
    warnings += [*summary, *(ptx.warnings if ptx is not None else [])]
    warnings += [*(unit_credit.warnings if unit_credit is not None else []), *manager.template_warnings()]

    old = recipe.loss.old_source(rollouts_may_differ(recipe, policy))
    needs_old_logprobs = old == "learner" and recipe.learner.updates_per_step * recipe.learner.epochs_per_step > 1

    kl, entropy, guards = KlController(recipe.kl), EntropyController(recipe.entropy), Guards(recipe.guards)

    def objective(first_update: bool) -> Objective[TokenScores]:
        random = random_stream(recipe.seed, "clip_cov", policy.version)
        policy_objective = PolicyObjective(
            recipe.loss, recipe.kl, kl.coefficient, recipe.entropy, entropy.coefficient, old, first_update, random
        )
        with_values = SharedObjective(policy_objective, recipe.critic.coefficient, recipe.critic.clip)
        of_episodes = policy_objective if head is None else with_values
        return of_episodes if recipe.ptx is None else MixedObjective(of_episodes, recipe.ptx.coefficient)

    order = TaskOrder(tasks.training, recipe.seed, left_out=left_out.training)
    rollouts = make_rollouts(recipe, manager, order, run)
    evaluator = EpisodeEvaluator(
        manager, recipe.evaluation, tasks, recipe.seed, run.episodes, recipe.name, left_out.held_out
    )
    checkpointables: dict[str, Checkpointable] = {"critic": critic} if critic is not None else {}
    reference_model = open_reference(policy, learner) if recipe.kl.coefficient > 0 else None
    reference = MovingReference(recipe.kl.reference, policy, optimizer) if recipe.moves_reference else None
    if reference is not None:
        checkpointables["reference"] = reference
    if isinstance(rollouts, AsyncRollouts):
        checkpointables["async_rollouts"] = rollouts
        # Load the reference model now: while transformers loads a model, torch's default dtype changes in all threads.
        if reference_model is not None:
            reference_model.load()
        if recipe.teacher is not None and recipe.teacher.policy == "initial":
            ReferenceModel(policy, learner).load()
    trainer = Trainer(
        LoopSettings.of(recipe, recipe.steps),
        run,
        policy,
        learner,
        evaluators=[evaluator],
        best_by=evaluator.choice(recipe.evaluation.metric),
        stateful={"tasks": order, "kl": kl, "entropy": entropy, "guards": guards, "reward": running},
        checkpointables=checkpointables,
        remote={} if critic is None or critic.updater.remote_state is None else {"critic": critic.updater.remote_state},
        warnings=warnings,
        callbacks=callbacks,
        start=start_values(recipe),
    )
    return Components(
        policy=policy,
        learner=learner,
        critic=critic,
        energies=energies,
        rollouts=rollouts,
        rewards=RewardShaping(
            recipe.rollout, recipe.kl, running, recipe.teacher.coefficient if recipe.teacher is not None else 0.0
        ),
        unit_credit=unit_credit,
        teacher=teacher,
        ptx=ptx,
        kl=kl,
        reference_model=reference_model,
        reference=reference,
        entropy=entropy,
        guards=guards,
        trainer=trainer,
        credit_settings=recipe.credit,
        updates=recipe.learner,
        objective=objective,
        mismatch_limit=mismatch_limit(recipe, policy.device),
        needs_old_logprobs=needs_old_logprobs,
        scores_all=recipe.entropy.top_share < 1
        or (needs_old_logprobs and (head is not None or recipe.entropy.covariance is not None)),
    )
