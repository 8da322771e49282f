"""From played episodes to reward streams: what the environment paid, the overlong penalty, and KL in the reward."""

from collections.abc import Sequence

import numpy as np

from posttrain.credit.assign import reward_streams
from posttrain.credit.types import PerToken, RewardStreams
from posttrain.losses.kl import estimate_kl, penalise
from posttrain.recipe.stages import RlRecipe
from posttrain.rollout.filters import overlong_penalty
from posttrain.rollout.streams import CUT_OFF, Episode
from posttrain.training.batches import Sample
from posttrain.training.collect import Collected
from posttrain.training.reward_scorer import RunningStatistics


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
            streams[last.stream][last.stop - 1] -= recipe.rollout.missing_end_penalty
    if recipe.rollout.overlong is not None:
        for episode, streams in zip(episodes, rewards.values, strict=True):
            last = episode.turns[-1]
            streams[last.stream][last.stop - 1] += overlong_penalty(episode.sampled_tokens, recipe.rollout.overlong)
    if kl_coefficient > 0 and recipe.kl.place == "reward":
        rewards = penalise(rewards, _kl_per_token(episodes, samples, recipe), kl_coefficient)
    return rewards


def greedy_returns(collected: Collected, running: RunningStatistics) -> dict[int, float]:
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
            assert sample.reference is not None
            kl = np.zeros(len(stream), dtype=np.float32)
            kl[stream.sampled] = estimate_kl(recipe.kl.estimator, stream.logprobs[stream.sampled] - sample.reference)
            found[-1].append(kl)
    return found
