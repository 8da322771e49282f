"""Reinforcement learning: tasks, episodes, rewards, credit, updates, weights back to the engine.

The whole algorithm is `train`; every name in it is a word of the design. What it works with is made in `parts.py`.
"""

from collections.abc import Sequence

from rich.console import Console

from posttrain.credit.assign import assign
from posttrain.credit.types import Advantages
from posttrain.recipe.stages import RlRecipe
from posttrain.rollout.store import write_episodes
from posttrain.runs.directory import RunDirectory
from posttrain.training.batches import Sample
from posttrain.training.learner import means
from posttrain.training.parts import open_parts
from posttrain.training.rollouts import open_rollouts
from posttrain.training.scoring import greedy_returns, samples_of, score
from posttrain.training.statistics import StepCounters, rollout_metrics
from posttrain.training.table import finish, measure_start
from posttrain.training.unit_credit import StepUnits
from posttrain.training.updates import make_updates, reference_and_old


def train(recipe: RlRecipe, run: RunDirectory, resume: bool, console: Console) -> None:
    """Train a policy in an environment; everything it produces is in `run`."""
    parts = open_parts(recipe, run)
    policy, critic, trainer = parts.policy, parts.critic, parts.trainer
    kl, running = parts.kl, parts.running
    rollouts = open_rollouts(recipe, parts.playing, parts.tasks, trainer)
    if resume:
        trainer.resume()
    rollouts.learned(trainer.step)
    with trainer.working(f"rl {recipe.name}"):
        if trainer.evaluated < 0:
            measure_start(trainer)
        trainer.begin()
        with rollouts:
            while trainer.step < recipe.steps and not trainer.out_of_time(recipe.max_minutes):
                step, counters = trainer.step + 1, StepCounters(trainer)
                with trainer.phase(rollouts.phase):
                    collected = rollouts.take(step)
                with trainer.phase("credit"):
                    samples = samples_of(collected.episodes, step)
                    reference_and_old(trainer.learner, policy, recipe, samples)
                    running.include(collected.episodes)
                    units = StepUnits()
                    if parts.creditor is not None:
                        units = parts.creditor.credit(collected.episodes, samples, step, running)
                    rewards = score(collected.episodes, samples, recipe, kl.coefficient, running)
                    rewards = units.in_rewards(collected.episodes, rewards)
                    values = critic.judge(collected.episodes, samples, rewards) if critic is not None else None
                    credit = assign(
                        collected.episodes, recipe.credit, rewards, greedy_returns(collected, running), values
                    )
                    credit = units.in_advantages(collected.episodes, credit)
                    give_credit(samples, credit)
                write_episodes(run.episodes, step, "train", collected.episodes, credit, units.units)
                with trainer.interrupts.critical():
                    with trainer.phase("update"):
                        totals = make_updates(trainer, recipe, collected, samples, kl.coefficient, critic, parts.rows)
                    metrics = (
                        rollout_metrics(collected, recipe) | means(totals) | units.metrics | counters.metrics(collected)
                    )
                    if recipe.kl.coefficient > 0:
                        metrics["kl/coefficient"] = kl.coefficient
                    kl.update(metrics.get("policy/kl"), len(collected.episodes))
                    fired = parts.guards.check(metrics)
                    trainer.finish_step(metrics)
                    rollouts.learned(step)
                    trainer.warn([*collected.messages, *units.messages, *parts.take_messages(), *fired])
                trainer.evaluate_and_save()
                if fired and recipe.guards.action == "stop":
                    trainer.warn(["stopped by a guard; the best checkpoint is kept"])
                    break
        trainer.conclude()
        finish(trainer, console)


def give_credit(samples: Sequence[Sample], credit: Advantages) -> None:
    """Hand each sample the advantages of its sampled tokens."""
    values = [stream for episode in credit.values for stream in episode]
    for sample, advantages in zip(samples, values, strict=True):
        sample.advantages = advantages[sample.stream.sampled]
