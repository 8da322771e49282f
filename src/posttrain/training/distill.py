"""On-policy distillation, from top to bottom: the teacher's scores of a step, its updates, and the components. The
loop is `rl.run_steps`.

    tasks -> [engine <-> environment]* -> episodes -> teacher's log-probabilities -> updates -> weights to the engine

Sources: Agarwal et al. 2023, "On-policy distillation of language models" (GKD), arXiv 2306.13649; Lu and Thinking
Machines Lab 2025, "On-policy distillation".
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

from posttrain.models.forward import TokenScores
from posttrain.models.policy import Policy
from posttrain.recipe.components import environment_class
from posttrain.recipe.distill import DistillRecipe, JsdLoss
from posttrain.rollout.store import write_episodes
from posttrain.runs.directory import RunDirectory
from posttrain.seeds import random_stream
from posttrain.training.controllers import Guards
from posttrain.training.distillation import DistillationObjective, distillation_forward
from posttrain.training.optimizer import Optimizer
from posttrain.training.rl import StepBatch, make_order, make_rows, make_tasks, make_teacher, make_trainer, run_steps
from posttrain.training.rollouts import RolloutManager, SyncRollouts, rollout_metrics
from posttrain.training.rows import FixedRows
from posttrain.training.teacher import WHOLE, Teacher
from posttrain.training.trainer import Callback, Trainer
from posttrain.training.updater import Totals, Updater, add_totals, samples_of_episodes


def train(
    recipe: DistillRecipe, run: RunDirectory, resume: bool, console: Console, callbacks: Sequence[Callback] = ()
) -> None:
    """Train a policy towards a teacher on the policy's own episodes. All results are in `run`."""
    run_steps(make_components(recipe, run, callbacks), recipe, resume, console)


@dataclass(frozen=True)
class Components:
    """The components of a run."""

    trainer: Trainer[TokenScores]
    rollouts: SyncRollouts
    guards: Guards
    teacher: Teacher
    fixed_rows: FixedRows | None
    share: float
    """Probability that a step trains on fixed rows."""
    objective: DistillationObjective

    def batch(self, step: int) -> StepBatch:
        """What `step` learns from, with the teacher's scores. A random draw that depends only on the run seed and the step
        chooses between episodes and fixed rows.
        """
        draw = random_stream(self.trainer.settings.seed, "off_policy", step)
        if self.fixed_rows is not None and float(draw.random()) < self.share:
            return self.rows(self.fixed_rows, step)
        return self.sampled(step)

    def sampled(self, step: int) -> StepBatch:
        """Sample the episodes of `step`, and have the teacher score them."""
        trainer = self.trainer
        with trainer.phase(self.rollouts.phase):
            batch = self.rollouts.take(step)
        trainer.sampled(step, batch.sampled)
        with trainer.phase("teacher"):
            samples = samples_of_episodes(batch.episodes, step)
            episodes, samples, warnings, metrics = self.teacher.score_episodes(batch.episodes, samples)
        write_episodes(trainer.run.episodes, step, "train", batch.episodes, None)
        trainer.show_completions(step, batch.episodes)
        groups = [episode.group for episode in episodes for _ in episode.streams]
        return StepBatch(samples, [*groups], rollout_metrics(batch) | metrics, [*batch.warnings, *warnings])

    def rows(self, fixed: FixedRows, step: int) -> StepBatch:
        """Take the fixed rows of `step`, and have the teacher score them."""
        with self.trainer.phase("teacher"):
            samples = fixed.batch(step - 1)
            self.teacher.score_rows(samples)
        return StepBatch(samples, [*range(len(samples))], {"teacher/off_policy": 1.0}, [])

    def update(self, batch: StepBatch, step: int) -> Totals:
        """One optimizer step on each part of the batch."""
        totals: Totals = {}
        learner = self.trainer.learner
        for number, chosen in enumerate(batch.parts(learner.settings) or [[]]):
            update = learner.update(chosen, self.objective)
            if number > 0:  # the weights have changed since sampling
                update.pop("policy/mismatch", None)
            add_totals(totals, update)
        return totals

    def observe(self, metrics: dict[str, float], batch: StepBatch) -> list[str]:
        """Warnings about updates; no coefficient adapts to the metrics."""
        return self.trainer.learner.take_warnings()


def make_components(recipe: DistillRecipe, run: RunDirectory, callbacks: Sequence[Callback]) -> Components:
    """Create the components of `recipe`. InputError for settings that conflict with each other or with the model."""
    tasks, warnings = make_tasks(recipe)
    policy = Policy(recipe.model, recipe.seed)
    # An engine on the same GPU starts before the optimizer's state takes its memory.
    manager = RolloutManager(policy, recipe.engine, recipe.environment, recipe.rollout, logs=run.logs)
    optimizer = Optimizer(policy.trainable(), recipe.optimizer, recipe.steps * recipe.updates)
    manager.sleepers = [optimizer]
    forward = distillation_forward(policy, recipe.learner, recipe.rollout.sampling.temperature, recipe.loss)
    learner = Updater(policy, optimizer, recipe.learner, forward)
    order, left_out, too_long_tasks = make_order(recipe, manager, tasks)
    top_k = (recipe.loss.top_k or WHOLE) if isinstance(recipe.loss, JsdLoss) else None
    teacher, teacher_warnings = make_teacher(recipe, manager, order, top_k)
    assert teacher is not None
    off = recipe.off_policy
    rows, row_warnings = make_rows(off, off.rows_per_step if off is not None else 0, manager, recipe.seed)
    guards = Guards(recipe.guards)
    environment = recipe.evaluation.environment or recipe.environment
    trainer = make_trainer(
        recipe,
        run,
        learner,
        manager,
        tasks,
        left_out,
        rewarded=environment_class(environment.type).has_reward(environment),
        stateful={"tasks": order, "guards": guards},
        warnings=[*warnings, *too_long_tasks, *teacher_warnings, *row_warnings, *manager.template_warnings()],
        callbacks=callbacks,
    )
    share = off.share if off is not None else 0.0
    return Components(
        trainer, SyncRollouts(manager, order), guards, teacher, rows, share, DistillationObjective(recipe.loss)
    )
