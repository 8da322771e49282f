"""Reinforcement learning: tasks, episodes, rewards, credit, updates, weights back to the engine.

The whole algorithm is `train`; every name in it is a word of the design.
"""

from collections.abc import Sequence

from rich.console import Console

from posttrain.credit.assign import assign
from posttrain.credit.types import Advantages
from posttrain.losses.kl import KlController
from posttrain.models.policy import Policy
from posttrain.recipe.stages import RlRecipe
from posttrain.rollout.store import write_episodes
from posttrain.runs.directory import RunDirectory
from posttrain.training.batches import Sample
from posttrain.training.collect import TaskOrder
from posttrain.training.critic import open_critic
from posttrain.training.forward import token_forward
from posttrain.training.guards import Guards
from posttrain.training.learner import means
from posttrain.training.playing import Playing
from posttrain.training.reward_scorer import RunningStatistics, open_scorer
from posttrain.training.rollouts import open_rollouts
from posttrain.training.scoring import greedy_returns, samples_of, score
from posttrain.training.statistics import StepCounters, rollout_metrics
from posttrain.training.table import finish, measure_start
from posttrain.training.tasks import check_tasks, too_long
from posttrain.training.trainer import Trainer
from posttrain.training.unit_credit import StepUnits, open_creditor
from posttrain.training.updates import TaughtRows, make_updates, reference_and_old, updates_of


def train(recipe: RlRecipe, run: RunDirectory, resume: bool, console: Console) -> None:
    """Train a policy in an environment; everything it produces is in `run`."""
    updates = updates_of(recipe)
    about_tasks = check_tasks(recipe)
    policy = Policy(recipe.model, recipe.seed)
    critic = open_critic(recipe, policy, updates)
    head = critic.head if critic is not None else None
    forward = token_forward(policy, recipe.learner, recipe.rollout.sampling.temperature, head)
    own_updates = updates - (recipe.critic.updates_before_policy if critic is not None else 0)
    trainer = Trainer(recipe, run, policy, forward, total_steps=recipe.steps, total_updates=own_updates)
    if critic is not None:
        critic.train_with(trainer.learner)
    scorer = open_scorer(recipe.reward, policy)
    playing = Playing(recipe, policy, run, scorer)
    playing.left_out, about_prompts = too_long(recipe, playing.renderer)
    creditor = open_creditor(recipe, scorer, policy)
    rows = TaughtRows(recipe.ptx, playing.renderer, recipe.seed) if recipe.ptx is not None else None
    about_rows = rows.data.problems.summary() if rows is not None else []
    trainer.measures = [playing]
    about_units = creditor.messages if creditor is not None else []
    trainer.messages = [*about_tasks, *about_prompts, *about_rows, *about_units, *playing.about_the_template()]
    trainer.choice = playing.choice(recipe.evaluation.metric)
    tasks = TaskOrder(recipe.seeds, recipe.seed, left_out=playing.left_out)
    kl, guards = KlController(recipe.kl), Guards(recipe.guards)
    running = RunningStatistics(recipe.reward)
    trainer.stateful = {"tasks": tasks, "kl": kl, "guards": guards, "reward": running}
    trainer.companions = {"critic": critic} if critic is not None else {}
    rollouts = open_rollouts(recipe, playing, tasks, trainer)
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
                    if creditor is not None:
                        units = creditor.credit(collected.episodes, samples, step, running)
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
                        totals = make_updates(trainer, recipe, collected, samples, kl.coefficient, critic, rows)
                    metrics = (
                        rollout_metrics(collected, recipe) | means(totals) | units.metrics | counters.metrics(collected)
                    )
                    if recipe.kl.coefficient > 0:
                        metrics["kl/coefficient"] = kl.coefficient
                    kl.update(metrics.get("policy/kl"), len(collected.episodes))
                    fired = guards.check(metrics)
                    trainer.finish_step(metrics)
                    rollouts.learned(step)
                    told = [*trainer.learner.take_messages(), *(critic.take_messages() if critic is not None else [])]
                    trainer.warn([*collected.messages, *units.messages, *told, *fired])
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
