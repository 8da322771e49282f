"""On-policy distillation, from top to bottom: the teacher's scores of a step, its updates, and the components. The
loop is `rl.run_steps`.

    tasks -> [engine <-> environment]* -> episodes -> teacher's log-probabilities -> updates -> weights to the engine

Sources: Agarwal et al. 2023, "On-policy distillation of language models" (GKD), arXiv 2306.13649; Lu and Thinking
Machines Lab 2025, "On-policy distillation".
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from rich.console import Console

from posttrain.losses.distillation import candidate_logprobs, generalized_jsd, reverse_kl_losses
from posttrain.losses.policy import number, token_weights
from posttrain.models.forward import TokenMetric, TokenScores, upload
from posttrain.models.policy import Policy
from posttrain.recipe.components import environment_class
from posttrain.recipe.distill import DistillRecipe, JsdLoss, ReverseKlLoss
from posttrain.recipe.model import LearnerRecipe
from posttrain.rollout.store import write_episodes
from posttrain.runs.directory import RunDirectory
from posttrain.seeds import random_stream
from posttrain.training.controllers import Guards
from posttrain.training.objectives import episode_ids, token_batch, token_forward
from posttrain.training.optimizer import Optimizer
from posttrain.training.rl import (
    StepBatch,
    StepComponents,
    make_order,
    make_tasks,
    make_trainer,
    run_steps,
)
from posttrain.training.rollouts import RolloutManager, SyncRollouts, rollout_metrics
from posttrain.training.rows import DataSet, fixed_rows
from posttrain.training.teacher import WHOLE, Teacher, open_teacher
from posttrain.training.trainer import Callbacks
from posttrain.training.updater import (
    Forward,
    Loss,
    Sample,
    Samples,
    Totals,
    Updater,
    add_totals,
    computed,
    samples_of_episodes,
)


def train(recipe: DistillRecipe, run: RunDirectory, resume: bool, console: Console, callbacks: Callbacks = ()) -> None:
    """Train a policy towards a teacher on the policy's own episodes. All results are in `run`."""
    run_steps(make_components(recipe, run, callbacks), recipe, resume, console)


def distillation_forward(
    policy: Policy, settings: LearnerRecipe, temperature: float, loss: ReverseKlLoss | JsdLoss
) -> Forward[TokenScores]:
    """A forward pass that returns the scores of the sampled tokens and, for `jsd`, their divergences from the teacher.

    The divergence is computed beside the output projection, so that the policy's full distributions exist for
    `learner.logits_per_chunk` tokens at a time. Policy and teacher are compared at the sampling `temperature`, also on
    fixed rows, so that all steps minimize one divergence.
    """
    if isinstance(loss, ReverseKlLoss):
        return token_forward(policy, settings, temperature)

    def forward(samples: Samples) -> TokenScores:
        ids, sampled = [s.stream.ids for s in samples], [s.stream.sampled for s in samples]
        measure = divergence(samples, loss.beta, policy.device)
        experts = [s.stream.experts for s in samples]
        return policy.score(ids, sampled, temperature, settings.logits_per_chunk, measure=measure, experts=experts)

    return forward


def divergence(samples: Samples, beta: float, device: torch.device) -> TokenMetric:
    """The generalized Jensen-Shannon divergence of the policy from the teacher of `samples`, per sampled token."""
    teachers = [computed(sample.teacher) for sample in samples]
    distribution = torch.from_numpy(np.concatenate([computed(each.distribution) for each in teachers]))
    chosen = [each.candidates for each in teachers if each.candidates is not None]
    candidates = torch.from_numpy(np.concatenate(chosen)).long() if chosen else None

    def measure(logprobs: torch.Tensor, places: slice) -> torch.Tensor:
        target = upload(distribution[places], device)
        if candidates is not None:
            return generalized_jsd(candidate_logprobs(logprobs, upload(candidates[places], device)), target, beta)
        shared = logprobs[:, : target.shape[1]]
        if shared.shape[1] < logprobs.shape[1]:  # without padding, like the teacher's
            shared = torch.log_softmax(shared, dim=1)
        return generalized_jsd(shared, target, beta)

    return measure


@dataclass
class DistillationObjective:
    """A distillation loss, averaged over the sampled tokens of the optimizer step. The samples need `teacher`."""

    loss: ReverseKlLoss | JsdLoss

    def weigh(self, samples: Samples) -> tuple[list[float], float]:
        lengths = [sample.sampled_tokens for sample in samples]
        return token_weights(self.loss.aggregation, lengths, self.loss.constant, episode_ids(samples))

    def has_signal(self, sample: Sample) -> bool:
        return sample.sampled_tokens > 0

    def __call__(self, output: TokenScores, samples: Samples, weights: Sequence[float]) -> Loss:
        batch = token_batch(samples, weights, output.logprobs.device)
        teacher = upload(
            np.concatenate([computed(sample.teacher).logprobs for sample in samples]), output.logprobs.device
        )
        if isinstance(self.loss, ReverseKlLoss):
            losses = reverse_kl_losses(output.logprobs, teacher, batch, self.loss.discount, self.loss.cap)
        else:
            assert output.measured is not None
            losses = output.measured
        loss = (batch.weights * losses).sum()
        logprobs, count = output.logprobs.detach(), float(len(teacher))
        # Trained tokens that are the teacher's most probable token, where that is known.
        agreed, known = 0, 0
        for sample in samples:
            scores = computed(sample.teacher)
            if scores.distribution is not None:
                best = scores.distribution.argmax(1) if scores.candidates is None else scores.candidates[:, 0]
                agreed += int((best == sample.stream.ids[sample.stream.sampled]).sum())
                known += sample.sampled_tokens
        metrics: Totals = {
            "loss/distillation": (number(loss), number(batch.weights.sum())),
            "policy/entropy": (number(output.entropies.detach().sum()), count),
            "teacher/logprob": (number(teacher.sum()), count),
            "teacher/agreement": (float(agreed), float(known)),
        }
        if not any(sample.ptx for sample in samples):
            # At tokens that the policy sampled, the mean of log policy - log teacher estimates KL(policy, teacher).
            metrics["teacher/reverse_kl"] = (number((logprobs - teacher).sum()), count)
            metrics["policy/mismatch"] = (number((logprobs - batch.rollout_logprobs).abs().sum()), count)
        return loss, metrics


@dataclass(frozen=True)
class Components(StepComponents):
    """The components of a run."""

    teacher: Teacher
    rows: DataSet | None
    share: float
    """Probability that a step trains on fixed rows."""
    objective: DistillationObjective

    def batch(self, step: int) -> StepBatch:
        """What `step` learns from, with the teacher's scores. A random draw that depends only on the run seed and the
        step chooses between episodes and fixed rows."""
        draw = random_stream(self.trainer.recipe.seed, "off_policy", step)
        trainer = self.trainer
        if self.rows is not None and float(draw.random()) < self.share:
            with trainer.phase("teacher"):
                samples = self.rows.batch(step - 1)
                self.teacher.score_rows(samples)
            return StepBatch(samples, [*range(len(samples))], {"teacher/off_policy": 1.0}, [])
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

    def update(self, batch: StepBatch, step: int) -> Totals:
        """One optimizer step on each part of the batch."""
        totals: Totals = {}
        learner = self.trainer.learner
        for place, chosen in enumerate(batch.parts(learner.settings) or [[]]):
            update = learner.update(chosen, self.objective)
            if place > 0:  # the weights have changed since sampling
                update.pop("policy/mismatch", None)
            add_totals(totals, update)
        return totals


def make_components(recipe: DistillRecipe, run: RunDirectory, callbacks: Callbacks) -> Components:
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
    teacher, teacher_warnings = open_teacher(recipe, policy, manager.renderer, order.seeds[0], top_k)
    assert teacher is not None
    off = recipe.off_policy
    rows = fixed_rows(off, off.rows_per_step if off is not None else 0, manager.renderer, recipe.seed)
    row_warnings = rows.problems.summary() if rows is not None else []
    guards = Guards(recipe)
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
