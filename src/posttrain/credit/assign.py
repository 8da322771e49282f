"""Advantages of a step's episodes: one number per sampled token, from rewards and the recipe's credit type."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from posttrain.episode import Advantages, Episode, PerToken, RewardStreams
from posttrain.errors import RunError
from posttrain.recipe.credit import CreditRecipe


def compute_advantages(
    episodes: Sequence[Episode],
    recipe: CreditRecipe,
    rewards: RewardStreams,
    greedy_returns: Mapping[int, float] | None = None,
    values: PerToken | None = None,
    energies: PerToken | None = None,
) -> Advantages:
    """One advantage per sampled token: per episode and stream [T] float32, zero where nothing was sampled.

    `rewards`: per token, such as `reward_streams(episodes)`. `greedy_returns`: group id -> return of the greedy
    episode, for `remax`. `values`: the critic's value before each sampled token, for `gae` and `bilevel_gae`.
    `energies`: the energy of each sampled token, for `optimal_token_baseline`.

    The return of an episode is the sum of all its rewards. The result is the same to the bit for any order of episodes
    and groups. RunError for a reward that is not finite, or that is placed on a token that was not sampled, where it
    cannot be credited. ValueError for missing `values` or `energies`. Episodes without a baseline are named in the result.
    """
    token_rewards = sampled_rewards(episodes, rewards)
    given: dict[str, Any] = {
        "returns": np.array([math.fsum(one.tolist()) for one in token_rewards], dtype=np.float64),
        "groups": np.array([episode.group for episode in episodes], dtype=np.int64),
        "lengths": np.array([len(one) for one in token_rewards], dtype=np.int64),
        "rewards": token_rewards,
        "episodes": list(episodes),
        "greedy": greedy_returns or {},
    }
    for name, computed, what in (("values", values, "a critic"), ("energies", energies, "the tokens")):
        if computed is not None:
            given[name] = sampled_values(episodes, computed)
        elif name in recipe.inputs:
            raise ValueError(f"{recipe.type} needs the {name} of {what}")
    result = recipe.compute(**{name: given[name] for name in given if name in recipe.inputs})
    advantages = per_token(recipe, episodes, token_rewards, result)
    streams = [to_streams(episode, values) for episode, values in zip(episodes, advantages, strict=True)]
    return Advantages(streams, without_baseline(recipe, episodes))


def without_baseline(recipe: CreditRecipe, episodes: Sequence[Episode]) -> frozenset[int]:
    """Positions of the episodes that `recipe` compares with others of their group or batch, where there are none."""
    if recipe.compared_with is None:
        return frozenset()
    sets = [episode.group if recipe.compared_with == "group" else 0 for episode in episodes]
    sizes = Counter(sets)
    single = {position for position, name in enumerate(sets) if sizes[name] == 1}
    return frozenset(position for position in single if not recipe.has_baseline_alone(episodes[position]))


def reward_streams(episodes: Sequence[Episode]) -> RewardStreams:
    """The rewards of the episodes, as float32 copies."""
    return RewardStreams([[stream.rewards.astype(np.float32) for stream in episode.streams] for episode in episodes])


def zero_groups(episodes: Sequence[Episode], advantages: Advantages) -> float | None:
    """The share of groups whose advantages are all 0, for example because all returns are equal. None without groups.
    Episodes without a baseline do not count."""
    nonzero: dict[int, bool] = {}
    for episode, streams in _compared(episodes, advantages):
        nonzero[episode.group] = nonzero.get(episode.group, False) or any(stream.any() for stream in streams)
    return 1 - sum(nonzero.values()) / len(nonzero) if nonzero else None


def mean_advantage(episodes: Sequence[Episode], advantages: Advantages, by_episode: bool) -> float:
    """The mean advantage of a sampled token, divided by their root mean square: from -1 to 1, 0 if all are 0. Episodes
    without a baseline do not count.

    Below 0, updates make sampled tokens less likely on average, including those that all answers have, such as tags and the
    end. With one credit per episode, this happens where failed episodes are longer than others. `by_episode`: every episode
    counts the same, as with `loss.aggregation: sequence_mean`; otherwise every token.
    """
    first = second = total = 0.0
    for episode, streams in _compared(episodes, advantages):
        sampled = [values[stream.sampled] for values, stream in zip(streams, episode.streams, strict=True)]
        weight = 1 / max(1, sum(map(len, sampled))) if by_episode else 1.0
        for values in sampled:
            total += weight * len(values)
            first += weight * float(values.sum())
            second += weight * float(np.square(values).sum())
    return first / math.sqrt(total * second) if second else 0.0


def _compared(episodes: Sequence[Episode], advantages: Advantages) -> Iterator[tuple[Episode, Sequence[np.ndarray]]]:
    """The episodes that have a baseline, with their advantages."""
    for position, pair in enumerate(zip(episodes, advantages.values, strict=True)):
        if position not in advantages.without_baseline:
            yield pair


def per_token(
    recipe: CreditRecipe, episodes: Sequence[Episode], rewards: Sequence[np.ndarray], result: Sequence[Any]
) -> list[np.ndarray]:
    """What `recipe` computed, one number per episode or one per sampled token, as per episode [n] float64.

    Raises:
        RunError: it has another shape, or a value that is not finite.
    """
    if len(result) != len(rewards):
        raise RunError(f"credit.type {recipe.type} returned {len(result)} advantages for {len(rewards)} episodes")
    credit = []
    computed = recipe.inputs & {"values", "energies"}  # by models; an update whose gradient is not finite is skipped
    for episode, values, given_rewards in zip(episodes, result, rewards, strict=True):
        values = np.asarray(values, dtype=np.float64)
        if values.shape not in ((), given_rewards.shape) or not (computed or np.isfinite(values).all()):
            raise RunError(
                f"credit.type {recipe.type}: the advantages of group {episode.group} episode {episode.index} must be one "
                f"finite number or {len(given_rewards)}, one per sampled token; they have the shape {values.shape}"
            )
        credit.append(np.broadcast_to(values, given_rewards.shape))
    return credit


def sampled_rewards(episodes: Sequence[Episode], rewards: RewardStreams) -> list[np.ndarray]:
    """Per episode [n] float64: the rewards of its sampled tokens. RunError as for `compute_advantages`."""
    for episode, streams in zip(episodes, rewards.values, strict=True):
        name = f"group {episode.group} episode {episode.index} (environment seed {episode.seed})"
        if not all(np.isfinite(values).all() for values in streams):
            raise RunError(f"{name} has a reward that is not finite; correct the reward of its environment")
        if any(values[~stream.sampled].any() for values, stream in zip(streams, episode.streams, strict=True)):
            raise RunError(
                f"{name} has a reward at a token that the policy did not sample; put it on the turn's last sampled token"
            )
    return sampled_values(episodes, rewards.values)


def sampled_values(episodes: Sequence[Episode], values: PerToken) -> list[np.ndarray]:
    """Per episode [n] float64: the entries of `values` at its sampled tokens, in order, across its streams."""
    return [
        np.concatenate([np.zeros(0), *(v[s.sampled] for v, s in zip(streams, episode.streams, strict=True))])
        for episode, streams in zip(episodes, values, strict=True)
    ]


def to_streams(episode: Episode, values: np.ndarray) -> list[np.ndarray]:
    """Values [n] of the episode's sampled tokens as one array [T] float32 per stream, zero elsewhere."""
    streams, start = [], 0
    for stream in episode.streams:
        stop = start + int(stream.sampled.sum())
        full = np.zeros(len(stream), dtype=np.float32)
        full[stream.sampled] = values[start:stop]
        streams.append(full)
        start = stop
    return streams
