"""On-policy distillation, from top to bottom: the loop, the teacher's scores of a step, its updates, and the
components.

    tasks -> [engine <-> environment]* -> episodes -> teacher's log-probabilities -> updates -> weights to the engine

Sources: Agarwal et al. 2023, "On-policy distillation of language models" (GKD), arXiv 2306.13649; Lu and Thinking
Machines Lab 2025, "On-policy distillation".
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from rich.console import Console

from posttrain.environments.protocol import Environment, task_split
from posttrain.models.forward import TokenScores
from posttrain.models.policy import Policy
from posttrain.recipe.components import environment_class
from posttrain.recipe.distill import DistillRecipe, JsdLoss
from posttrain.recipe.model import LearnerRecipe
from posttrain.recipe.warnings import recipe_warnings
from posttrain.rollout.store import write_episodes
from posttrain.runs.directory import RunDirectory
from posttrain.runs.evaluated import start_values
from posttrain.seeds import random_stream
from posttrain.training.controllers import Guards
from posttrain.training.distillation import DistillationObjective, distillation_forward
from posttrain.training.evaluators import EpisodeEvaluator
from posttrain.training.optimizer import Optimizer
from posttrain.training.rollouts import RolloutManager, SyncRollouts, TaskOrder, rollout_metrics
from posttrain.training.rows import FixedRows
from posttrain.training.tasks import check_tasks, too_long
from posttrain.training.teacher import WHOLE, Teacher, open_teacher
from posttrain.training.trainer import Callback, LoopSettings, Trainer
from posttrain.training.updater import Sample, Totals, Updater, add_totals, means, samples_of_episodes


def train(
    recipe: DistillRecipe, run: RunDirectory, resume: bool, console: Console, callbacks: Sequence[Callback] = ()
) -> None:
    """Train a policy towards a teacher on the policy's own episodes. All results are in `run`."""
    c = make_components(recipe, run, callbacks)
    trainer, learner = c.trainer, c.learner
    if resume:
        trainer.resume()
    with trainer.working(console):
        c.rollouts.manager.played = trainer.progress.sampled
        trainer.begin()
        while trainer.step < recipe.steps and not c.guards.stopped and not trainer.out_of_time(recipe.max_minutes):
            step, tokens = trainer.step + 1, learner.trained_tokens
            batch = c.rows(step) if c.is_off_policy(step) else c.sampled(step)
            with trainer.interrupts.critical():
                with trainer.phase("update"):
                    totals = c.update(batch)
                metrics = batch.metrics | means(totals)
                metrics["tokens/trained"] = float(learner.trained_tokens - tokens)
                metrics["optimizer/learning_rate"] = learner.optimizer.learning_rate
                fired = c.guards.check(metrics, step)
                trainer.finish_step(metrics)
                trainer.warn([*batch.warnings, *learner.take_warnings(), *fired])
            trainer.evaluate_and_save(metrics)
        if c.guards.stopped:
            trainer.warn(["stopped by a guard; the best checkpoint is kept"])
        trainer.finish()


@dataclass
class ScoredBatch:
    """The training data of a step: samples with the teacher's scores."""

    samples: list[Sample]
    parts: list[Hashable]
    """The group or row of each sample. Samples with the same value stay in one update."""
    metrics: dict[str, float]
    warnings: list[str]


@dataclass(frozen=True)
class Components:
    """The components of a run, and its settings."""

    run: RunDirectory
    learner: Updater[TokenScores]
    rollouts: SyncRollouts
    teacher: Teacher
    fixed_rows: FixedRows | None
    share: float
    """Probability that a step trains on fixed rows."""
    seed: int
    guards: Guards
    trainer: Trainer[TokenScores]
    updates: LearnerRecipe
    objective: DistillationObjective

    def is_off_policy(self, step: int) -> bool:
        """Whether `step` trains on fixed rows: a random draw that depends only on the run seed and the step."""
        return self.share > 0 and float(random_stream(self.seed, "off_policy", step).random()) < self.share

    def sampled(self, step: int) -> ScoredBatch:
        """Sample the episodes of `step`, and have the teacher score them."""
        with self.trainer.phase(self.rollouts.phase):
            batch = self.rollouts.take(step)
        self.trainer.sampled(step, batch.sampled)
        with self.trainer.phase("teacher"):
            samples = samples_of_episodes(batch.episodes, step)
            episodes, samples, warnings, metrics = self.teacher.score_episodes(batch.episodes, samples)
        write_episodes(self.run.episodes, step, "train", batch.episodes, None)
        self.trainer.show_completions(step, batch.episodes)
        groups = [episode.group for episode in episodes for _ in episode.streams]
        return ScoredBatch(samples, [*groups], rollout_metrics(batch) | metrics, [*batch.warnings, *warnings])

    def rows(self, step: int) -> ScoredBatch:
        """Take the fixed rows of `step`, and have the teacher score them."""
        assert self.fixed_rows is not None
        with self.trainer.phase("teacher"):
            samples = self.fixed_rows.batch(step - 1)
            self.teacher.score_rows(samples)
        return ScoredBatch(samples, [*range(len(samples))], {"teacher/off_policy": 1.0}, [])

    def update(self, batch: ScoredBatch) -> Totals:
        """`epochs_per_step` passes over the samples. Each divides them among `updates_per_step` optimizer steps."""
        order = list(dict.fromkeys(batch.parts))
        count = min(self.updates.updates_per_step, max(len(order), 1))
        totals: Totals = {}
        for number in range(self.updates.epochs_per_step * count):
            part = set(order[number % count :: count])
            chosen = [sample for sample, name in zip(batch.samples, batch.parts, strict=True) if name in part]
            update = self.learner.update(chosen, self.objective)
            if number > 0:  # the weights have changed since sampling
                update.pop("policy/mismatch", None)
            add_totals(totals, update)
        return totals


def make_components(recipe: DistillRecipe, run: RunDirectory, callbacks: Sequence[Callback]) -> Components:
    """Create the components of `recipe`. InputError for settings that conflict with each other or with the model."""
    tasks = task_split(recipe.environment, recipe.evaluation, recipe.seeds)
    # The training signal comes from the teacher, so an environment without rewards is allowed.
    warnings = [*recipe_warnings(recipe), *check_tasks(recipe.environment, tasks, True, recipe.evaluation.environment)]
    policy = Policy(recipe.model, recipe.seed)
    # An engine on the same GPU starts before the optimizer's state takes its memory.
    manager = RolloutManager(policy, recipe.engine, recipe.environment, recipe.rollout, logs=run.logs)
    updates = recipe.steps * recipe.learner.updates_per_step * recipe.learner.epochs_per_step
    optimizer = Optimizer(policy.trainable(), recipe.optimizer, updates)
    manager.sleepers = [optimizer]
    temperature = recipe.rollout.sampling.temperature
    learner = Updater(
        policy, optimizer, recipe.learner, distillation_forward(policy, recipe.learner, temperature, recipe.loss)
    )
    left_out, summary = too_long(
        recipe.environment, recipe.rollout, manager.renderer, tasks, recipe.evaluation.environment
    )
    order = TaskOrder(tasks.training, recipe.seed, left_out=left_out.training)
    teacher, teacher_warnings = open_teacher(
        recipe.teacher,
        policy,
        manager.renderer,
        recipe.environment,
        temperature,
        recipe.learner.logits_per_chunk,
        recipe.rollout.failures.max_share,
        order.seeds[0],
        (recipe.loss.top_k or WHOLE) if isinstance(recipe.loss, JsdLoss) else None,
    )
    rows = None
    if recipe.off_policy is not None:
        settings = recipe.off_policy
        rows = FixedRows(settings.data, settings.loss_on, settings.rows_per_step, manager.renderer, recipe.seed)
    warnings += [
        *summary,
        *teacher_warnings,
        *(rows.warnings if rows is not None else []),
        *manager.template_warnings(),
    ]
    guards = Guards(recipe.guards)
    evaluator = EpisodeEvaluator(
        manager, recipe.evaluation, tasks, recipe.seed, run.episodes, recipe.name, left_out.held_out
    )
    kind: type[Environment] = environment_class(evaluator.environment.type)
    # Without rewards, all checkpoints have the same return, so the last checkpoint is kept.
    rewarded = kind.has_reward(evaluator.environment)
    trainer = Trainer(
        LoopSettings.of(recipe, recipe.steps),
        run,
        policy,
        learner,
        evaluators=[evaluator] if rewarded else [],
        best_by=evaluator.choice(recipe.evaluation.metric) if rewarded else None,
        stateful={"tasks": order, "guards": guards},
        warnings=warnings,
        callbacks=callbacks,
        start=start_values(recipe) if rewarded else None,
    )
    return Components(
        run=run,
        learner=learner,
        rollouts=SyncRollouts(manager, order),
        teacher=teacher,
        fixed_rows=rows,
        share=recipe.off_policy.share if recipe.off_policy is not None else 0.0,
        seed=recipe.seed,
        guards=guards,
        trainer=trainer,
        updates=recipe.learner,
        objective=DistillationObjective(recipe.loss),
    )
