"""Turn-level advantages: one number per turn.

Arrays run over the sampled tokens of one episode, in order, across its streams. Turn boundaries come from
`Stream.turn`, so a turn without reward counts like any other. K is the number of turns with at least one sampled token.
"""

import math
from collections.abc import Hashable, Sequence
from typing import Literal

import numpy as np
from pydantic import Field

from posttrain.credit.baselines import all_equal, by_group, center, group_indices, standardize
from posttrain.credit.returns import reinforce
from posttrain.episode import Episode
from posttrain.errors import RunError
from posttrain.recipe.credit import Comparison, Credit, register_credit

Arrays = Sequence[np.ndarray]
"""One array per episode."""


class TurnCredit(Credit):
    """Credits whose advantage is the same for all tokens of a turn."""

    @property
    def rewards_of(self) -> Literal["token", "turn", "episode"]:
        """Rewards are summed over turns."""
        return "turn"

    def compute(self, episodes: Sequence[Episode], rewards: Arrays, groups: np.ndarray) -> list[np.ndarray]:
        """Per episode [n] float64. `rewards`: per episode [n] float64, those of its sampled tokens."""
        turns = [turn_indices(episode) for episode in episodes]
        by_turn = [turn_rewards(one, t) for one, t in zip(rewards, turns, strict=True)]
        advantages = self.turn_advantages(episodes, by_turn, groups)
        lengths = [np.diff(turn_starts(t), append=len(t)) for t in turns]
        return [np.repeat(one, tokens) for one, tokens in zip(advantages, lengths, strict=True)]

    def turn_advantages(self, episodes: Sequence[Episode], rewards: Arrays, groups: np.ndarray) -> Arrays:
        """Per episode [K] float64. `rewards`: per episode [K] float64, the sum of each turn's rewards."""
        raise NotImplementedError


@register_credit("turn_returns")
class TurnReturnsCredit(TurnCredit):
    """Reward-to-go per turn."""

    type: Literal["turn_returns"] = "turn_returns"
    """`turn_returns`: discounted reward from the turn on, the same for all of its tokens."""
    discount: float = Field(1.0, gt=0, le=1)
    """Discount factor per turn, independent of the length of answers."""
    baseline: Literal["others", "none"] = "others"
    """`others`: subtract the mean reward-to-go of the group's other episodes at that turn (0 after their end); unbiased. `none`: no baseline."""

    @property
    def compared_with(self) -> Comparison:  # type: ignore[override]
        """The group, if there is a baseline."""
        return "group" if self.baseline == "others" else None

    def turn_advantages(self, episodes: Sequence[Episode], rewards: Arrays, groups: np.ndarray) -> Arrays:
        """`turn_returns`, minus the baseline if there is one."""
        advantages = turn_returns(rewards, self.discount)
        return leave_one_out(advantages, groups) if self.baseline == "others" else advantages


@register_credit("mt_grpo", compared_with="group")
class MtGrpoCredit(TurnCredit):
    """Group-normalized turn rewards and outcome; the outcome is the reward of the last turn."""

    type: Literal["mt_grpo"] = "mt_grpo"
    """`mt_grpo`: (o - mean) / std of the group's outcomes, in turns before the last plus `turn_weight` times the same of the group's rewards of that turn. For groups whose episodes all have the same number of turns."""
    turn_weight: float = Field(1.0, ge=0)
    """Weight of a turn's own reward relative to the outcome, in turns before the last."""

    def turn_advantages(self, episodes: Sequence[Episode], rewards: Arrays, groups: np.ndarray) -> Arrays:
        """`mt_grpo`."""
        return mt_grpo(rewards, groups, self.turn_weight)


@register_credit("gigpo", compared_with="group")
class GigpoCredit(TurnCredit):
    """Episodes compared within their group, and turns with the group's turns in the same state."""

    type: Literal["gigpo"] = "gigpo"
    """`gigpo`: (R - mean) / std of the group's returns, plus `step_weight` times the same of the returns from the turn on among the group's turns in one state. States are distinguished by the environment's state key or, without one, by the tokens of the observation."""
    discount: float = Field(0.95, gt=0, le=1)
    """Discount factor per turn of the returns compared within a state."""
    step_weight: float = Field(1.0, ge=0)
    """Weight (omega) of the comparison within states."""
    divide_by_std: bool = True
    """Divide both comparisons by their standard deviation. The default of the authors' code is false."""

    def turn_advantages(self, episodes: Sequence[Episode], rewards: Arrays, groups: np.ndarray) -> Arrays:
        """`gigpo`."""
        states = [state_keys(episode) for episode in episodes]
        return gigpo(rewards, states, groups, self.discount, self.step_weight, self.divide_by_std)

    def has_baseline_alone(self, episode: Episode) -> bool:
        """An episode that visits a state twice compares its turns there."""
        keys = state_keys(episode)
        return len(set(keys)) < len(keys)


def turn_returns(rewards: Sequence[np.ndarray], discount: float) -> list[np.ndarray]:
    """G_k = sum over j >= k of discount^(j - k) r_j, the same for every token of turn k, with j and k counting turns.

    Unbiased for discount 1: rewards before a turn do not depend on it. A smaller discount is deliberately biased
    towards rewards that follow soon. It applies per turn, so the length of answers has no effect.
    Source: Williams 1992; Sutton et al. 2000, "Policy gradient methods with function approximation", with a turn as the
    action.

    `rewards`: per episode [K] float64, the sum of each turn's rewards; `discount` in (0, 1]. Returns per episode [K]
    float64.
    """
    return reinforce(rewards, discount=discount)


def leave_one_out(returns: Sequence[np.ndarray], groups: np.ndarray) -> list[np.ndarray]:
    """A_ik = G_ik - mean over the other episodes j of the group of G_jk, with G_jk = 0 if j ended before turn k.

    Keeps `turn_returns` unbiased, even if the policy chooses when to stop: every other episode counts at every turn, so
    the baseline does not depend on episode i. A mean over only those other episodes that reached turn k is undefined if
    there are none. A group of one has no others and gets 0.
    Source: the leave-one-out baseline of Kool et al. 2019, at each turn.

    `returns`: per episode [K] float64; `groups` [N] int. Returns per episode [K] float64.
    """
    advantages = [np.zeros(len(episode)) for episode in returns]
    for index in group_indices(groups):
        longest = max(len(returns[i]) for i in index)
        table = np.zeros((len(index), longest))
        for row, i in enumerate(index):
            table[row, : len(returns[i])] = returns[i]
        for turn in range(longest if len(index) > 1 else 0):
            column = table[:, turn]
            total = math.fsum(column.tolist())
            for row, i in enumerate(index):
                if turn < len(returns[i]) and not all_equal(column):
                    advantages[i][turn] = (len(index) * column[row] - total) / (len(index) - 1)
    return advantages


def mt_grpo(rewards: Sequence[np.ndarray], groups: np.ndarray, turn_weight: float) -> list[np.ndarray]:
    """A_ik = S_g(o_i) + turn_weight x S_g(r_ik) for turns before the last, and A_iK = S_g(o_i) for the last turn.

    r_ik is the reward of turn k, and o_i that of the last turn (the outcome). S_g(x) = (x - mean) / (std + 1e-6) with
    the sample standard deviation (n - 1) over the episodes of the group; for r_ik over the episodes in which turn k is
    not the last. S_g is 0 for a single episode and for equal values.
    Source: Zeng et al. 2025, "Reinforcing multi-turn reasoning in LLM agents", arXiv 2505.11821, with the weight placed
    as in its code (turn_advantage_coef). Deliberate differences: the paper has two turns, separated by the first tool
    result, and here every turn before the last is treated like its first turn. An episode of one turn gets S_g of its
    outcome instead of S_g of both rewards summed, and does not enter the statistics of a turn that it did not play. The
    epsilon is 1e-6, not 1e-4.

    Assumes that the reward of the last turn is the outcome, and that all episodes of a group have the same number of
    turns. Biased even then: it divides by the group's own standard deviation, and a turn gets no credit for the rewards
    of later turns except the last. If the policy chooses when to stop, a turn is compared only with episodes that
    continued, which rewards or punishes stopping. `turn_returns` with a baseline has none of these biases.

    `rewards`: per episode [K] float64; `groups` [N] int. Returns per episode [K] float64.
    """
    advantages = [np.zeros(len(episode)) for episode in rewards]
    for index in group_indices(groups):
        nonempty = [int(i) for i in index if len(rewards[i])]
        outcomes = standardize(np.array([rewards[i][-1] for i in nonempty]), correction=1)
        for i, outcome in zip(nonempty, outcomes.tolist(), strict=True):
            advantages[i][:] = outcome
        for turn in range(max((len(rewards[i]) for i in nonempty), default=1) - 1):
            continuing = [i for i in nonempty if len(rewards[i]) > turn + 1]
            scores = standardize(np.array([rewards[i][turn] for i in continuing]), correction=1)
            for i, score in zip(continuing, scores.tolist(), strict=True):
                advantages[i][turn] += turn_weight * score
    return advantages


def gigpo(
    rewards: Sequence[np.ndarray],
    states: Sequence[Sequence[Hashable]],
    groups: np.ndarray,
    discount: float,
    step_weight: float,
    divide_by_std: bool,
) -> list[np.ndarray]:
    """A_ik = S(R_i; episodes of the group) + step_weight x S(G_ik; turns of the group in the same state).

    R_i is the sum of the turns' rewards, and G_ik = sum over j >= k of discount^(j - k) r_ij. S(x; set) is x minus the
    mean of the set, over (std + 1e-6) with the sample standard deviation (n - 1) if `divide_by_std`. It is 0 for a set
    of one and for equal values, so only the first term remains for a state that is visited once. Two visits to a state
    within one episode are both in the set.
    Source: Feng et al. 2025, "Group-in-group policy optimization", arXiv 2505.10978: R undiscounted, G discounted per
    turn, `step_weight` its omega; `divide_by_std` false is its normalizer of 1, the default of its code. Deliberate
    differences: a group of one episode gets 0 instead of its return, and G includes what R includes, such as a KL
    penalty, whereas the code counts only the environment's rewards.

    Biased: it divides by the standard deviation. Without this division, states that repeat more often have more weight.
    It assumes that equal keys mean equal states, including the remaining number of turns: if time matters and the key
    omits it, turns with different expected returns are compared. Without repeated states it is `grpo` (or `dr_grpo`).

    `rewards`: per episode [K] float64; `states`: per episode K keys; `groups` [N] int. Returns per episode [K] float64.
    """
    counts = [len(episode) for episode in rewards]
    for keys, count in zip(states, counts, strict=True):
        if len(keys) != count:
            raise ValueError(f"{len(keys)} state keys for {count} turns")
    owners = np.repeat(np.arange(len(rewards)), counts)
    returns = np.concatenate([np.zeros(0), *turn_returns(rewards, discount)])
    visits = [(int(group), key) for group, keys in zip(groups, states, strict=True) for key in keys]
    numbers = {visit: number for number, visit in enumerate(dict.fromkeys(visits))}
    state_numbers = np.array([numbers[visit] for visit in visits], dtype=np.int64)
    totals = np.array([episode.sum() for episode in rewards], dtype=np.float64)

    def relative(values: np.ndarray, sets: np.ndarray) -> np.ndarray:
        return by_group(sets, lambda i: standardize(values[i], correction=1) if divide_by_std else center(values[i]))

    advantages = relative(totals, groups)[owners] + step_weight * relative(returns, state_numbers)
    return np.split(advantages, np.cumsum(counts)[:-1]) if counts else []


def turn_indices(episode: Episode) -> np.ndarray:
    """[n] int64: the turn of each sampled token, non-decreasing. RunError if it would decrease."""
    empty = np.zeros(0, dtype=np.int64)
    indices = np.concatenate([empty, *(stream.turn[stream.sampled] for stream in episode.streams)]).astype(np.int64)
    if len(indices) and (indices[0] < 0 or (np.diff(indices) < 0).any()):
        raise RunError(
            f"group {episode.group} episode {episode.index} (environment seed {episode.seed}) has turns out of order; "
            "`Stream.turn` must increase in the order in which tokens were sampled"
        )
    return indices


def turn_starts(turns: np.ndarray) -> np.ndarray:
    """[K] int64: the position in `turns` [n] of each turn's first token."""
    return np.flatnonzero(np.diff(turns, prepend=-1))


def turn_rewards(rewards: np.ndarray, turns: np.ndarray) -> np.ndarray:
    """[K] float64: the sum of the rewards [n] of each turn's tokens, including a KL penalty."""
    return np.add.reduceat(rewards, turn_starts(turns)) if len(turns) else np.zeros(0)


def state_keys(episode: Episode) -> list[Hashable]:
    """[K] keys: the state in which each turn was played. Equal keys mean equal states.

    The key is `Turn.state` if the environment names its states. Otherwise the key is the token ids between this turn
    and the previous turn of the same stream: the observation, or the whole prompt at the start of a stream. Text is
    never compared. In a stream that starts with a rewritten history, a state repeats only if that history is identical.
    """
    keys: list[Hashable] = []
    for stream in episode.streams:
        observation_start = 0
        positions = np.flatnonzero(stream.sampled)
        starts = turn_starts(stream.turn[stream.sampled])
        for first, stop in zip(starts.tolist(), np.append(starts, len(positions))[1:].tolist(), strict=True):
            number = int(stream.turn[positions[first]])
            name = episode.turns[number].state if number < len(episode.turns) else None
            observation = stream.ids[observation_start : positions[first]].astype("<i8").tobytes()
            keys.append(("tokens", observation) if name is None else ("named", name))
            observation_start = int(positions[stop - 1]) + 1
    return keys
