"""Reinforcement learning: tasks, episodes, rewards, credit, updates, weights back to the engine.

The whole algorithm is `train`; every name in it is a word of the design.
"""

from collections.abc import Sequence

from rich.console import Console

from posttrain.credit.assign import assign
from posttrain.credit.types import Advantages
from posttrain.losses.kl import KlController
from posttrain.models.forward import TokenScores
from posttrain.models.policy import Policy
from posttrain.recipe.stages import RlRecipe
from posttrain.rollout.store import write_episodes
from posttrain.runs.directory import RunDirectory
from posttrain.training.batches import Sample
from posttrain.training.collect import Collected, TaskOrder, collect
from posttrain.training.forward import logprobs, token_forward
from posttrain.training.guards import Guards
from posttrain.training.learner import Learner, Totals, add_totals, means
from posttrain.training.objectives import PolicyObjective
from posttrain.training.playing import Playing
from posttrain.training.reward_scorer import RunningStatistics, open_scorer
from posttrain.training.scoring import samples_of, score
from posttrain.training.statistics import StepCounters, rollout_metrics
from posttrain.training.table import finish, measure_start
from posttrain.training.tasks import check_tasks, too_long
from posttrain.training.trainer import Trainer


def train(recipe: RlRecipe, run: RunDirectory, resume: bool, console: Console) -> None:
    """Train a policy in an environment; everything it produces is in `run`."""
    updates = recipe.steps * recipe.learner.updates_per_step * recipe.learner.passes
    about_tasks = check_tasks(recipe)
    policy = Policy(recipe.model, recipe.seed)
    forward = token_forward(policy, recipe.learner, recipe.rollout.sampling.temperature)
    trainer = Trainer(recipe, run, policy, forward, total_steps=recipe.steps, total_updates=updates)
    scorer = open_scorer(recipe.reward, policy)
    playing = Playing(recipe, policy, run, scorer)
    playing.left_out, about_prompts = too_long(recipe, playing.renderer)
    trainer.measures = [playing]
    trainer.messages = [*about_tasks, *about_prompts, *playing.about_the_template()]
    trainer.choice = playing.choice(recipe.evaluation.metric)
    tasks = TaskOrder(recipe.seeds, recipe.seed, left_out=playing.left_out)
    kl, guards = KlController(recipe.kl), Guards(recipe.guards)
    running = RunningStatistics(recipe.reward)
    trainer.stateful = {"tasks": tasks, "kl": kl, "guards": guards, "reward": running}
    if resume:
        trainer.resume()
    with trainer.working(f"rl {recipe.name}"):
        if trainer.evaluated < 0:
            measure_start(trainer)
        trainer.begin()
        while trainer.step < recipe.steps and not trainer.out_of_time(recipe.max_minutes):
            step, counters = trainer.step + 1, StepCounters(trainer, playing.engine)
            with trainer.phase("rollout"):
                collected = collect(playing.player(recipe.rollout.sampling), recipe, tasks, step)
            with trainer.phase("credit"):
                samples = samples_of(collected.episodes, step)
                _reference_and_old(trainer.learner, policy, recipe, samples)
                running.include(collected.episodes)
                rewards = score(collected.episodes, samples, recipe, kl.coefficient, running)
                credit = assign(collected.episodes, recipe.credit, rewards, collected.greedy_returns)
                give_credit(samples, credit)
            write_episodes(run.episodes, step, "train", collected.episodes, credit)
            with trainer.interrupts.critical():
                with trainer.phase("update"):
                    totals = _updates(trainer, recipe, collected, samples, kl.coefficient)
                metrics = rollout_metrics(collected, recipe) | means(totals) | counters.metrics()
                if recipe.kl.coefficient > 0:
                    metrics["kl/coefficient"] = kl.coefficient
                kl.update(metrics.get("policy/kl"), len(collected.episodes))
                fired = guards.check(metrics)
                trainer.finish_step(metrics)
                trainer.warn([*collected.messages, *trainer.learner.take_messages(), *fired])
            trainer.evaluate_and_save()
            if fired and recipe.guards.action == "stop":
                trainer.warn(["stopped by a guard; the best checkpoint is kept"])
                break
        trainer.conclude()
        finish(trainer, console)


def _reference_and_old(
    learner: Learner[TokenScores], policy: Policy, recipe: RlRecipe, samples: Sequence[Sample]
) -> None:
    """Log-probabilities that the losses compare with, where the recipe needs them."""
    if recipe.kl.coefficient > 0:
        with policy.as_reference():
            references = logprobs(learner, samples)
        for sample, reference in zip(samples, references, strict=True):
            sample.reference = reference
    if recipe.loss.correction is not None:
        for sample, old in zip(samples, logprobs(learner, samples), strict=True):
            sample.old = old


def give_credit(samples: Sequence[Sample], credit: Advantages) -> None:
    """Hand each sample the advantages of its sampled tokens."""
    values = [stream for episode in credit.values for stream in episode]
    for sample, advantages in zip(samples, values, strict=True):
        sample.advantages = advantages[sample.stream.sampled]


def _updates(trainer: Trainer, recipe: RlRecipe, collected: Collected, samples: Sequence[Sample], kl: float) -> Totals:
    """The step's optimizer steps: `passes` times over the episodes, whole groups divided among the updates."""
    objective = PolicyObjective(recipe, kl)
    groups = [e.group for e in collected.episodes for _ in e.streams]
    order = sorted(set(groups))
    count = min(recipe.learner.updates_per_step, len(order))
    totals: Totals = {}
    for number in range(recipe.learner.passes * count):
        chosen = set(order[number % count :: count])
        update = trainer.learner.update([s for s, g in zip(samples, groups, strict=True) if g in chosen], objective)
        if number > 0:
            # Only before the first update are the learner's weights those that sampled.
            update.pop("policy/mismatch", None)
        add_totals(totals, update)
    return totals
