"""Reinforcement learning: tasks, episodes, rewards, credit, updates, weights back to the engine.

The whole algorithm is `train`; every name in it is a word of the design. What it works with is made in `parts.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Console

from posttrain.credit.assign import compute_advantages, reward_streams
from posttrain.data.rendering import Renderer
from posttrain.episode import CUT_OFF, Advantages, Episode, PerToken, RewardStreams
from posttrain.losses.kl import KlController, apply_kl_penalty, estimate_kl
from posttrain.models.forward import TokenScores
from posttrain.models.policy import Policy
from posttrain.recipe.data import PtxRecipe
from posttrain.recipe.stages import RlRecipe
from posttrain.rollout.filters import overlong_penalty
from posttrain.rollout.store import write_episodes
from posttrain.runs.directory import RunDirectory
from posttrain.training.async_rollouts import open_rollouts
from posttrain.training.batches import Sample
from posttrain.training.critic import CriticLearner, open_critic
from posttrain.training.guards import Guards
from posttrain.training.objectives import (
    MixedObjective,
    PolicyObjective,
    SharedObjective,
    logprobs,
    scores,
    token_forward,
)
from posttrain.training.results import finish, measure_start
from posttrain.training.reward_scorer import RunningStatistics, open_scorer
from posttrain.training.rollout_manager import RolloutManager
from posttrain.training.rollouts import RolloutBatch, StepCounters, TaskOrder, check_tasks, rollout_metrics, too_long
from posttrain.training.rows import DataSet, load_data, samples_of_row
from posttrain.training.trainer import Trainer
from posttrain.training.unit_credit import StepUnits, UnitCreditor, open_creditor
from posttrain.training.updater import Objective, Totals, Updater, add_totals, means


class PtxRows:
    """Rows of text that join every update of the policy."""

    def __init__(self, recipe: PtxRecipe, renderer: Renderer, seed: int) -> None:
        self.recipe = recipe
        self.data: DataSet = load_data(
            "conversation", recipe.data, renderer, recipe.loss_on, recipe.rows_per_update, seed
        )

    def batch(self, update: int) -> list[Sample]:
        """The rows of the run's update `update`, counted from 0."""
        samples = [sample for row in self.data.train.batch(update) for sample in samples_of_row(row)]
        for sample in samples:
            sample.ptx = True
        return samples


def updates_of(recipe: RlRecipe) -> int:
    """Optimizer steps of the whole run, where no step has fewer groups than updates."""
    return recipe.steps * recipe.learner.updates_per_step * recipe.learner.epochs_per_step


def reference_and_old(
    learner: Updater[TokenScores], policy: Policy, recipe: RlRecipe, samples: Sequence[Sample]
) -> None:
    """Log-probabilities that the losses compare with, where the recipe needs them; with them the values before the
    updates, where the policy's trunk carries them."""
    if recipe.kl.coefficient > 0:
        with policy.as_reference():
            references = logprobs(learner, samples)
        for sample, reference in zip(samples, references, strict=True):
            sample.ref_logprobs = reference
    if recipe.loss.correction is not None:
        for sample, (old, values) in zip(samples, scores(learner, samples), strict=True):
            sample.old_logprobs, sample.values = old, values


def make_updates(
    trainer: Trainer[TokenScores],
    recipe: RlRecipe,
    collected: RolloutBatch,
    samples: Sequence[Sample],
    kl: float,
    critic: CriticLearner | None,
    rows: PtxRows | None,
) -> Totals:
    """`passes` times over the episodes, whole groups divided among the updates; the critic learns from the same ones."""
    shared = critic is not None and critic.head is not None
    objective = _objective(recipe, kl, shared, rows)
    groups = [e.group for e in collected.episodes for _ in e.streams]
    order = sorted(set(groups))
    count = min(recipe.learner.updates_per_step, len(order))
    first = trainer.step * recipe.learner.updates_per_step * recipe.learner.epochs_per_step
    totals: Totals = {}
    for number in range(recipe.learner.epochs_per_step * count):
        part = set(order[number % count :: count])
        chosen = [s for s, g in zip(samples, groups, strict=True) if g in part]
        alone = critic is not None and critic.learns_alone
        if critic is not None:
            add_totals(totals, critic.update(chosen) if alone or not shared else critic.take_fit())
        if alone:
            continue
        taught = rows.batch(first + number) if rows is not None else []
        update = trainer.learner.update([*chosen, *taught], objective)
        if number > 0:
            # Only before the first update are the learner's weights those that sampled.
            update.pop("policy/mismatch", None)
        if shared:
            update["critic/skipped"] = update["optimizer/skipped"]
        add_totals(totals, update)
    return totals


def _objective(recipe: RlRecipe, kl: float, shared: bool, rows: PtxRows | None) -> Objective[TokenScores]:
    """What an update of the policy minimises; `shared`: with the loss of the values that its trunk carries."""
    policy, critic = PolicyObjective(recipe, kl), recipe.critic
    objective = SharedObjective(policy, critic.coefficient, critic.clip) if shared else policy
    return objective if rows is None else MixedObjective(objective, rows.recipe.coefficient)


@dataclass(frozen=True)
class Components:
    """The parts of a run; those that a recipe does not ask for are None."""

    policy: Policy
    critic: CriticLearner | None
    trainer: Trainer[TokenScores]
    """It checkpoints all of them that have state."""
    playing: RolloutManager
    creditor: UnitCreditor | None
    rows: PtxRows | None
    tasks: TaskOrder
    kl: KlController
    guards: Guards
    running: RunningStatistics

    def take_messages(self) -> list[str]:
        """What there was to say of updates since the last call."""
        about_critic = self.critic.take_messages() if self.critic is not None else []
        return [*self.trainer.learner.take_messages(), *about_critic]


def open_parts(recipe: RlRecipe, run: RunDirectory) -> Components:
    """All that `recipe` asks for; `InputError` where something of it does not fit together."""
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
    playing = RolloutManager(recipe, policy, run, scorer)
    playing.left_out, about_prompts = too_long(recipe, playing.renderer)
    creditor = open_creditor(recipe, scorer, policy)
    rows = PtxRows(recipe.ptx, playing.renderer, recipe.seed) if recipe.ptx is not None else None
    about_rows = rows.data.problems.summary() if rows is not None else []
    about_units = creditor.messages if creditor is not None else []
    trainer.messages = [*about_tasks, *about_prompts, *about_rows, *about_units, *playing.about_the_template()]
    trainer.evaluators = [playing]
    trainer.choice = playing.choice(recipe.evaluation.metric)
    tasks = TaskOrder(recipe.seeds, recipe.seed, left_out=playing.left_out)
    kl, guards, running = KlController(recipe.kl), Guards(recipe.guards), RunningStatistics(recipe.reward)
    trainer.stateful = {"tasks": tasks, "kl": kl, "guards": guards, "reward": running}
    trainer.checkpointables = {"critic": critic} if critic is not None else {}
    return Components(policy, critic, trainer, playing, creditor, rows, tasks, kl, guards, running)


def samples_of(episodes: Sequence[Episode], step: int) -> list[Sample]:
    """One sample per stream, without credit yet, in the order of episodes and their streams."""
    return [
        Sample(
            stream=stream,
            label=f"step {step} group {episode.group} episode {episode.index} (environment seed {episode.seed})",
            advantages=np.zeros(int(stream.sampled.sum()), dtype=np.float32),
        )
        for episode in episodes
        for stream in episode.streams
    ]


def score(
    episodes: Sequence[Episode],
    samples: Sequence[Sample],
    recipe: RlRecipe,
    kl_coefficient: float,
    running: RunningStatistics,
) -> RewardStreams:
    """Reward streams of `episodes`; `samples` are theirs, with `reference` where a reference model is needed."""
    rewards = reward_streams(episodes)
    for episode, streams in zip(episodes, rewards.values, strict=True):
        last = episode.turns[-1]
        streams[last.stream][last.stop - 1] += running.correction(last.info)
        if last.stop_reason in CUT_OFF:
            streams[last.stream][last.stop - 1] -= recipe.rollout.missing_eos_penalty
    if recipe.rollout.overlong_penalty is not None:
        for episode, streams in zip(episodes, rewards.values, strict=True):
            last = episode.turns[-1]
            streams[last.stream][last.stop - 1] += overlong_penalty(
                episode.sampled_tokens, recipe.rollout.overlong_penalty
            )
    if kl_coefficient > 0 and recipe.kl.apply_to == "reward":
        rewards = apply_kl_penalty(rewards, _kl_per_token(episodes, samples, recipe), kl_coefficient)
    return rewards


def greedy_returns(collected: RolloutBatch, running: RunningStatistics) -> dict[int, float]:
    """Group -> return of its greedy episode, in the units of the other episodes' rewards."""
    return {
        group: episode.total_reward + running.correction(episode.turns[-1].info)
        for group, episode in collected.greedy.items()
    }


def _kl_per_token(episodes: Sequence[Episode], samples: Sequence[Sample], recipe: RlRecipe) -> PerToken:
    """KL estimate at each sampled token, zero elsewhere."""
    left = iter(samples)
    found: PerToken = []
    for episode in episodes:
        found.append([])
        for stream in episode.streams:
            sample = next(left)
            assert sample.ref_logprobs is not None
            kl = np.zeros(len(stream), dtype=np.float32)
            kl[stream.sampled] = estimate_kl(
                recipe.kl.estimator, stream.rollout_logprobs[stream.sampled] - sample.ref_logprobs
            )
            found[-1].append(kl)
    return found


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
                    credit = compute_advantages(
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
