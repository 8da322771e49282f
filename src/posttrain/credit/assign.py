"""From reward streams to advantages: what each credit recipe does with an episode's rewards."""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from posttrain.credit.baselines import arpo, brpo, dr_grpo, grpo, opo, remax, rloo
from posttrain.credit.returns import gae, reinforce, reinforce_pp, reinforce_pp_baseline, whitened
from posttrain.credit.turns import TurnCredit, bilevel_gae, turn_credit, turn_indices
from posttrain.episode import Advantages, Episode, PerToken, RewardStreams
from posttrain.errors import RunError
from posttrain.recipe.credit import BatchCredit, CreditRecipe, CriticCredit, GroupCredit, TokenCredit, ValueCredit


def critic_advantages(
    recipe: CriticCredit, episodes: Sequence[Episode], paid: Sequence[np.ndarray], values: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Advantages before whitening, per episode [n] float64 over its sampled tokens, as `paid` and `values` are."""
    if isinstance(recipe, ValueCredit):
        return gae(paid, values, recipe.discount, recipe.gae_lambda)
    turns = [turn_indices(episode) for episode in episodes]
    decays = (recipe.gae_lambda, recipe.turn_gae_lambda)
    return bilevel_gae(paid, values, turns, recipe.discount, recipe.turn_discount, *decays)


def discounted_returns(
    recipe: CriticCredit, episodes: Sequence[Episode], paid: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """The rewards that came from each token on, discounted as the recipe's values are: per episode [n] float64."""
    nothing = [np.zeros(len(own)) for own in paid]
    if isinstance(recipe, ValueCredit):
        return gae(paid, nothing, recipe.discount, 1.0)
    turns = [turn_indices(episode) for episode in episodes]
    return bilevel_gae(paid, nothing, turns, recipe.discount, recipe.turn_discount, 1.0, 1.0)


OutcomeBaseline = Callable[[np.ndarray, np.ndarray, np.ndarray, Mapping[int, float]], np.ndarray]

OUTCOME_BASELINES: dict[str, OutcomeBaseline] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "opo": opo,
    "remax": remax,
    "brpo": brpo,
    "arpo": arpo,
}
"""Recipe name -> (returns [N], groups [N], lengths [N], greedy returns by group) -> advantages [N]."""


def reward_streams(episodes: Sequence[Episode]) -> RewardStreams:
    """The rewards that the environment paid, as copies that may be added to. Where they sit is the driver's choice."""
    return RewardStreams([[stream.rewards.astype(np.float32) for stream in episode.streams] for episode in episodes])


def compute_advantages(
    episodes: Sequence[Episode],
    recipe: CreditRecipe,
    rewards: RewardStreams,
    greedy_returns: Mapping[int, float] | None = None,
    values: PerToken | None = None,
) -> Advantages:
    """One advantage per sampled token: per episode and stream [T] float32, zero where nothing was sampled.

    The return of an episode is the sum of all its rewards. `greedy_returns`: group id -> return of the greedy episode
    (`remax`). `values`: the critic's, before each sampled token (`gae`, `bilevel_gae`). Neither the order of episodes
    nor that of groups changes a bit of the result. RunError for a reward that is not finite or that sits where nothing
    was sampled, since no token could be credited with it.
    """
    sampled = [[stream.sampled for stream in episode.streams] for episode in episodes]
    paid = sampled_rewards(episodes, rewards)
    if isinstance(recipe, CriticCredit):
        if values is None:
            raise ValueError(f"{recipe.type} needs the values of a critic")
        credit = critic_advantages(recipe, episodes, paid, sampled_values(episodes, values))
        credit = whitened(credit) if recipe.whiten else credit
    elif isinstance(recipe, TurnCredit):
        credit = turn_credit(recipe, episodes, paid)
    else:
        credit = _per_token(recipe, paid, np.array([e.group for e in episodes], dtype=np.int64), greedy_returns or {})
    return Advantages([_spread(own, masks) for own, masks in zip(credit, sampled, strict=True)])


def sampled_rewards(episodes: Sequence[Episode], rewards: RewardStreams) -> list[np.ndarray]:
    """Per episode [n] float64; RunError as `assign` says."""
    return [_paid(episode, streams) for episode, streams in zip(episodes, rewards.values, strict=True)]


def sampled_values(episodes: Sequence[Episode], numbers: PerToken) -> list[np.ndarray]:
    """Per episode [n] float64: the numbers of its sampled tokens, in order, across its streams."""
    return [
        np.concatenate([np.zeros(0), *(own[s.sampled] for own, s in zip(streams, episode.streams, strict=True))])
        for episode, streams in zip(episodes, numbers, strict=True)
    ]


def _per_token(
    recipe: GroupCredit | BatchCredit | TokenCredit,
    paid: list[np.ndarray],
    groups: np.ndarray,
    greedy: Mapping[int, float],
) -> list[np.ndarray]:
    """Per episode [n] float64 over its sampled tokens."""
    if isinstance(recipe, TokenCredit):
        return (reinforce if recipe.type == "reinforce" else reinforce_pp)(paid, recipe.discount)
    returns = np.array([math.fsum(values.tolist()) for values in paid], dtype=np.float64)
    lengths = np.array([len(values) for values in paid], dtype=np.int64)
    if recipe.type == "reinforce_pp_baseline":
        return reinforce_pp_baseline(returns, groups, lengths)
    advantages = OUTCOME_BASELINES[recipe.type](returns, groups, lengths, greedy)
    return [np.full(length, a) for a, length in zip(advantages, lengths.tolist(), strict=True)]


def _paid(episode: Episode, streams: Sequence[np.ndarray]) -> np.ndarray:
    """The rewards [n] float64 of an episode's sampled tokens, across its streams."""
    rewards = np.concatenate([np.zeros(0), *streams])
    mask = np.concatenate([np.zeros(0, dtype=bool), *(stream.sampled for stream in episode.streams)])
    name = f"group {episode.group} episode {episode.index} (environment seed {episode.seed})"
    if not np.isfinite(rewards).all():
        raise RunError(f"{name} has a reward that is not finite; mend the reward of its environment")
    if rewards[~mask].any():
        raise RunError(
            f"{name} has a reward at a token that the policy did not sample; put it on the turn's last sampled token"
        )
    return rewards[mask].astype(np.float64)


def _spread(values: np.ndarray, masks: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Give the sampled tokens of each stream their values."""
    streams, start = [], 0
    for mask in masks:
        stop = start + int(mask.sum())
        full = np.zeros(len(mask), dtype=np.float32)
        full[mask] = values[start:stop]
        streams.append(full)
        start = stop
    return streams
