"""Advantages of a step's episodes: one number per sampled token, from rewards and the recipe's credit type."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from posttrain.credit.baselines import OUTCOME_BASELINES, gdpo, pass_at_k
from posttrain.credit.returns import (
    gae,
    length_adaptive_lambda,
    optimal_token_baseline,
    reinforce,
    reinforce_pp,
    reinforce_pp_baseline,
    whiten,
)
from posttrain.credit.turns import TurnCredit, bilevel_gae, state_keys, turn_advantages, turn_indices
from posttrain.episode import Advantages, Episode, PerToken, RewardStreams
from posttrain.errors import RunError
from posttrain.recipe.credit import (
    BatchCredit,
    Credit,
    CreditRecipe,
    CriticCredit,
    GdpoCredit,
    GigpoCredit,
    GroupCredit,
    PassAtKCredit,
    TokenBaselineCredit,
    TokenCredit,
    ValueCredit,
)

SCORE = "score"
"""The name of the reward itself among the scores that a reward function reports."""
RETURN = "return"
"""The name of the return in the weights of `gdpo`."""


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
    masks = [[stream.sampled for stream in episode.streams] for episode in episodes]
    token_rewards = sampled_rewards(episodes, rewards)
    if isinstance(recipe, CriticCredit):
        if values is None:
            raise ValueError(f"{recipe.type} needs the values of a critic")
        advantages = critic_advantages(recipe, episodes, token_rewards, sampled_values(episodes, values))
        advantages = whiten(advantages) if recipe.whiten else advantages
    elif isinstance(recipe, TokenBaselineCredit):
        if energies is None:
            raise ValueError(f"{recipe.type} needs the energies of the tokens")
        groups = np.array([episode.group for episode in episodes], dtype=np.int64)
        advantages = optimal_token_baseline(token_rewards, sampled_values(episodes, energies), groups)
    elif isinstance(recipe, TurnCredit):
        advantages = turn_advantages(recipe, episodes, token_rewards)
    elif isinstance(recipe, GroupCredit | PassAtKCredit | GdpoCredit | BatchCredit | TokenCredit):
        advantages = _without_critic(recipe, episodes, token_rewards, greedy_returns or {})
    else:
        advantages = registered_credit(recipe, episodes, token_rewards)
    values = [_to_streams(of_tokens, m) for of_tokens, m in zip(advantages, masks, strict=True)]
    return Advantages(values, without_baseline(recipe, episodes))


def without_baseline(recipe: CreditRecipe, episodes: Sequence[Episode]) -> frozenset[int]:
    """Positions of the episodes that `recipe` compares with others of their group or batch, where there are none.

    With `gigpo`, an episode that visits a state twice compares its turns there, so it has a baseline in any group.
    """
    if recipe.compared_with is None:
        return frozenset()
    sets = [episode.group if recipe.compared_with == "group" else 0 for episode in episodes]
    sizes = Counter(sets)
    single = {position for position, name in enumerate(sets) if sizes[name] == 1}
    if isinstance(recipe, GigpoCredit):
        keys = {position: state_keys(episodes[position]) for position in single}
        single = {position for position in single if len(set(keys[position])) == len(keys[position])}
    return frozenset(single)


def reward_streams(episodes: Sequence[Episode]) -> RewardStreams:
    """The rewards of the episodes, as float32 copies."""
    return RewardStreams([[stream.rewards.astype(np.float32) for stream in episode.streams] for episode in episodes])


def critic_advantages(
    recipe: CriticCredit, episodes: Sequence[Episode], rewards: Sequence[np.ndarray], values: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Advantages before whitening. `rewards`, `values` and the result: per episode [n] float64, sampled tokens only."""
    if isinstance(recipe, ValueCredit):
        lambdas_of = recipe.gae_lambda if recipe.length_alpha is None else _adaptive(recipe.length_alpha, rewards)
        return gae(rewards, values, recipe.discount, lambdas_of)
    turns = [turn_indices(episode) for episode in episodes]
    lambdas = (recipe.gae_lambda, recipe.turn_gae_lambda)
    return bilevel_gae(rewards, values, turns, recipe.discount, recipe.turn_discount, *lambdas)


def value_targets(
    recipe: CriticCredit, episodes: Sequence[Episode], rewards: Sequence[np.ndarray], values: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Targets of the critic, A + V with the advantages before whitening: per episode [n] float64.

    With `critic_lambda`, A has that lambda instead of the policy's (decoupled GAE). At 1 the targets are the Monte
    Carlo returns, so errors of the values do not bias them, while a smaller `gae_lambda` still reduces the variance of
    the policy gradient. Source: Yuan et al. 2025, "What's behind PPO's collapse in long-CoT? Value optimization holds
    the secret", arXiv 2503.01491; used in Yue et al. 2025, "VAPO", arXiv 2504.05118.
    """
    if isinstance(recipe, ValueCredit) and recipe.critic_lambda is not None:
        advantages = gae(rewards, values, recipe.discount, recipe.critic_lambda)
    else:
        advantages = critic_advantages(recipe, episodes, rewards, values)
    return [a + v for a, v in zip(advantages, values, strict=True)]


def discounted_returns(
    recipe: CriticCredit, episodes: Sequence[Episode], rewards: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Monte Carlo returns from each sampled token on, with the recipe's discounts: per episode [n] float64."""
    zeros = [np.zeros(len(of_tokens)) for of_tokens in rewards]
    if isinstance(recipe, ValueCredit):
        return gae(rewards, zeros, recipe.discount, 1.0)
    turns = [turn_indices(episode) for episode in episodes]
    return bilevel_gae(rewards, zeros, turns, recipe.discount, recipe.turn_discount, 1.0, 1.0)


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


def registered_credit(recipe: Credit, episodes: Sequence[Episode], rewards: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Advantages from a function registered with `register_credit`: per episode [n] float64, over its sampled tokens.

    Raises:
        RunError: the function returns another shape or a value that is not finite.
    """
    given = {
        "returns": np.array([math.fsum(values.tolist()) for values in rewards], dtype=np.float64),
        "groups": np.array([episode.group for episode in episodes], dtype=np.int64),
        "lengths": np.array([len(values) for values in rewards], dtype=np.int64),
        "rewards": list(rewards),
        "episodes": list(episodes),
    }
    result = recipe.call(**given)
    if len(result) != len(rewards):
        raise RunError(f"credit.type {recipe.type} returned {len(result)} advantages for {len(rewards)} episodes")
    credit = []
    for episode, values, given_rewards in zip(episodes, result, rewards, strict=True):
        values = np.asarray(values, dtype=np.float64)
        if values.shape not in ((), given_rewards.shape) or not np.isfinite(values).all():
            raise RunError(
                f"credit.type {recipe.type}: the advantages of group {episode.group} episode {episode.index} must be one "
                f"finite number or {len(given_rewards)}, one per sampled token; they have the shape {values.shape}"
            )
        credit.append(np.broadcast_to(values, given_rewards.shape))
    return credit


def sampled_rewards(episodes: Sequence[Episode], rewards: RewardStreams) -> list[np.ndarray]:
    """Per episode [n] float64: the rewards of its sampled tokens. RunError as for `compute_advantages`."""
    return [_checked_rewards(episode, streams) for episode, streams in zip(episodes, rewards.values, strict=True)]


def sampled_values(episodes: Sequence[Episode], values: PerToken) -> list[np.ndarray]:
    """Per episode [n] float64: the entries of `values` at its sampled tokens, in order, across its streams."""
    return [
        np.concatenate([np.zeros(0), *(v[s.sampled] for v, s in zip(streams, episode.streams, strict=True))])
        for episode, streams in zip(episodes, values, strict=True)
    ]


def _without_critic(
    recipe: GroupCredit | PassAtKCredit | GdpoCredit | BatchCredit | TokenCredit,
    episodes: Sequence[Episode],
    rewards: list[np.ndarray],
    greedy: Mapping[int, float],
) -> list[np.ndarray]:
    """Per episode [n] float64 over its sampled tokens."""
    if isinstance(recipe, TokenCredit):
        return (reinforce if recipe.type == "reinforce" else reinforce_pp)(rewards, recipe.discount)
    groups = np.array([episode.group for episode in episodes], dtype=np.int64)
    returns = np.array([math.fsum(of_tokens.tolist()) for of_tokens in rewards], dtype=np.float64)
    lengths = np.array([len(of_tokens) for of_tokens in rewards], dtype=np.int64)
    if recipe.type == "reinforce_pp_baseline":
        return reinforce_pp_baseline(returns, groups, lengths)
    if isinstance(recipe, PassAtKCredit):
        advantages = pass_at_k(returns, groups, recipe.k)
    elif isinstance(recipe, GdpoCredit):
        advantages = gdpo(*weighted_scores(episodes, returns, recipe.weights), groups)
    else:
        advantages = OUTCOME_BASELINES[recipe.type](returns, groups, lengths, greedy)
    return [np.full(length, a) for a, length in zip(advantages, lengths.tolist(), strict=True)]


def weighted_scores(
    episodes: Sequence[Episode], returns: np.ndarray, weights: Mapping[str, float] | None
) -> tuple[np.ndarray, np.ndarray]:
    """The scores [N, K] of the episodes, NaN if an episode does not report a score or reports None, and their weights [K], float64.

    Scores come from `info["scores"]` of the last turn; the name `return` stands for the returns [N]. `weights`: score
    name -> weight; None gives every reported score except `score` the weight 1. RunError if no episode reports a
    weighted score, or if there are no weights.
    """
    reported = [dict(episode.turns[-1].info.get("scores", {})) if episode.turns else {} for episode in episodes]
    names = {name for scores in reported for name in scores}
    if weights is None:
        weights = dict.fromkeys(sorted(names - {SCORE}), 1.0)
    missing = sorted(set(weights) - names - {RETURN})
    if episodes and (missing or not weights):
        wanted = f"no episode of the step has the score {missing[0]!r}" if missing else "no episode reports scores"
        raise RunError(
            f"credit.type gdpo: {wanted}; return a mapping of names to numbers from the reward function, or set "
            f"credit.weights to the names that it reports ({', '.join(sorted(names | {RETURN}))})"
        )
    columns = [
        returns if name == RETURN else np.array([scores.get(name) for scores in reported], dtype=np.float64)
        for name in weights
    ]
    return np.stack(columns, axis=1) if columns else np.zeros((len(episodes), 0)), np.array(list(weights.values()))


def _adaptive(alpha: float, rewards: Sequence[np.ndarray]) -> list[float]:
    return [length_adaptive_lambda(len(of_tokens), alpha) for of_tokens in rewards]


def _checked_rewards(episode: Episode, streams: Sequence[np.ndarray]) -> np.ndarray:
    """The rewards [n] float64 of an episode's sampled tokens, across its streams."""
    rewards = np.concatenate([np.zeros(0), *streams])
    mask = np.concatenate([np.zeros(0, dtype=bool), *(stream.sampled for stream in episode.streams)])
    name = f"group {episode.group} episode {episode.index} (environment seed {episode.seed})"
    if not np.isfinite(rewards).all():
        raise RunError(f"{name} has a reward that is not finite; correct the reward of its environment")
    if rewards[~mask].any():
        raise RunError(
            f"{name} has a reward at a token that the policy did not sample; put it on the turn's last sampled token"
        )
    return rewards[mask].astype(np.float64)


def _to_streams(values: np.ndarray, masks: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Values [n] of sampled tokens as one array [T] float32 per stream, zero elsewhere."""
    streams, start = [], 0
    for mask in masks:
        stop = start + int(mask.sum())
        full = np.zeros(len(mask), dtype=np.float32)
        full[mask] = values[start:stop]
        streams.append(full)
        start = stop
    return streams
