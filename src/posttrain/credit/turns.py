"""The turns of an episode as its tokens tell them: which turn sampled a token, what it paid, what it was shown.

Arrays run over the sampled tokens of an episode alone, in order, across its streams. Where turns end is known from
`Stream.turn`, so a turn that paid nothing is a turn like any other.
"""

import math
from collections.abc import Hashable, Sequence

import numpy as np

from posttrain.credit.baselines import alike, centred, members, standardised
from posttrain.credit.returns import reinforce
from posttrain.episode import Episode
from posttrain.errors import RunError
from posttrain.recipe.credit import GigpoCredit, MtGrpoCredit, TurnReturnsCredit


def turn_indices(episode: Episode) -> np.ndarray:
    """[n] int64: for each sampled token the index of its turn, never falling. RunError where it would fall."""
    empty = np.zeros(0, dtype=np.int64)
    numbers = np.concatenate([empty, *(stream.turn[stream.sampled] for stream in episode.streams)]).astype(np.int64)
    if len(numbers) and (numbers[0] < 0 or (np.diff(numbers) < 0).any()):
        raise RunError(
            f"group {episode.group} episode {episode.index} (environment seed {episode.seed}) has turns out of order; "
            "give its sampled tokens the index of their turn, in the order in which they were played"
        )
    return numbers


def starts(turns: np.ndarray) -> np.ndarray:
    """[K] int64: where each turn's first token is in `turns` [n]; K is the number of turns that sampled a token."""
    return np.flatnonzero(np.diff(turns, prepend=-1))


def turn_rewards(rewards: np.ndarray, turns: np.ndarray) -> np.ndarray:
    """[K] float64: what each turn paid: the sum of the rewards [n] of its tokens, a KL penalty in them included."""
    return np.add.reduceat(rewards, starts(turns)) if len(turns) else np.zeros(0)


def to_tokens(of_turns: np.ndarray, turns: np.ndarray) -> np.ndarray:
    """[n] float64: each token gets the number of its turn; `of_turns` [K], `turns` [n]."""
    return np.repeat(of_turns, np.diff(starts(turns), append=len(turns)))


def state_keys(episode: Episode) -> list[Hashable]:
    """One key per turn that sampled a token: what the state was in which it was played. Equal keys are one state.

    The key is `Turn.state` where the environment named it. Otherwise it is the ids of the tokens that the policy was
    shown since it last sampled in that stream: the observation, or the whole prompt at the start of a stream. No text
    is compared. A stream that begins with a rewritten history therefore repeats a state only with the same history.
    """
    keys: list[Hashable] = []
    for stream in episode.streams:
        begun = 0
        own = np.flatnonzero(stream.sampled)
        places = starts(stream.turn[stream.sampled])
        for first, stop in zip(places.tolist(), np.append(places, len(own))[1:].tolist(), strict=True):
            number = int(stream.turn[own[first]])
            named = episode.turns[number].state if number < len(episode.turns) else None
            shown = stream.ids[begun : own[first]].astype("<i8").tobytes()
            keys.append(("tokens", shown) if named is None else ("named", named))
            begun = int(own[stop - 1]) + 1
    return keys


def split_by(counts: Sequence[int], values: np.ndarray) -> list[np.ndarray]:
    """`values` [sum of counts] as one array per count."""
    return np.split(values, np.cumsum(counts)[:-1]) if len(counts) else []


def turn_returns(rewards: Sequence[np.ndarray], discount: float) -> list[np.ndarray]:
    """G_k = sum over j >= k of discount^(j - k) r_j, the same for every token of turn k; j and k count turns.

    Unbiased for discount 1: what was earned before a turn does not depend on it. A smaller discount is biased towards
    early rewards, by choice; however long the answers are, they do not decay it.
    Source: Williams 1992; Sutton et al. 2000, "Policy gradient methods with function approximation", a turn being the
    action.

    `rewards`: per episode [K] float64, what each turn paid; `discount` in (0, 1]. Returns per episode [K] float64.
    """
    return reinforce(rewards, discount)


def leave_one_out(returns: Sequence[np.ndarray], groups: np.ndarray) -> list[np.ndarray]:
    """A_ik = G_ik - mean over the other episodes j of the group of G_jk, with G_jk = 0 where j had ended before k.

    Keeps `turn_returns` unbiased, also where the policy chooses when to stop: every other episode counts at every
    turn, so the baseline does not depend on episode i. A mean over those alone that came as far would not either, but
    it is missing where nobody else came. A group of one has no others and gets 0.
    Source: the leave-one-out baseline of Kool et al. 2019, at each turn.

    `returns`: per episode [K] float64; `groups` [N] int. Returns per episode [K] float64.
    """
    found = [np.zeros(len(own)) for own in returns]
    for index in members(groups):
        longest = max(len(returns[i]) for i in index)
        table = np.zeros((len(index), longest))
        for row, i in enumerate(index):
            table[row, : len(returns[i])] = returns[i]
        for turn in range(longest if len(index) > 1 else 0):
            column = table[:, turn]
            total = math.fsum(column.tolist())
            for row, i in enumerate(index):
                if turn < len(returns[i]) and not alike(column):
                    found[i][turn] = (len(index) * column[row] - total) / (len(index) - 1)
    return found


def mt_grpo(rewards: Sequence[np.ndarray], groups: np.ndarray, turn_weight: float) -> list[np.ndarray]:
    """A_ik = S_g(o_i) + turn_weight x S_g(r_ik) for turns before the last, A_iK = S_g(o_i) for the last one.

    r_ik is what turn k paid, o_i what the last turn paid (the outcome), and S_g(x) = (x - mean) / (std + 1e-6) with
    the sample standard deviation (n - 1) over the episodes of the group: for r_ik over those for which turn k is not
    the last. Where only one such episode is left, or all are equal, S_g is 0.
    Source: Zeng et al. 2025, "Reinforcing multi-turn reasoning in LLM agents", arXiv 2505.11821, with the weight where
    its code has it (turn_advantage_coef). Different on purpose: it has two turns, told apart by the first result of a
    tool, and here every turn before the last is treated as its first; an episode of one turn, where no tool was asked,
    has S_g of its outcome, not of the sum of both rewards, and is not in the statistics of a turn that it did not
    play; the small number beside std is 1e-6 as elsewhere, not 1e-4.

    It assumes that the last turn pays the outcome and every episode of a group has the same number of turns. Biased in
    any case: the group's own spread divides; a turn gets no credit for the rewards of later turns but the last; and
    where the policy chooses when to stop, a turn is compared with those that went on, which rewards or punishes
    stopping itself. `turn_returns` with a baseline does none of this.

    `rewards`: per episode [K] float64; `groups` [N] int. Returns per episode [K] float64.
    """
    found = [np.zeros(len(own)) for own in rewards]
    for index in members(groups):
        played = [int(i) for i in index if len(rewards[i])]
        outcomes = standardised(np.array([rewards[i][-1] for i in played]), correction=1)
        for i, outcome in zip(played, outcomes.tolist(), strict=True):
            found[i][:] = outcome
        for turn in range(max((len(rewards[i]) for i in played), default=1) - 1):
            going_on = [i for i in played if len(rewards[i]) > turn + 1]
            scores = standardised(np.array([rewards[i][turn] for i in going_on]), correction=1)
            for i, score in zip(going_on, scores.tolist(), strict=True):
                found[i][turn] += turn_weight * score
    return found


def gigpo(
    rewards: Sequence[np.ndarray],
    states: Sequence[Sequence[Hashable]],
    groups: np.ndarray,
    discount: float,
    step_weight: float,
    divide: bool,
) -> list[np.ndarray]:
    """A_ik = S(R_i; episodes of the group) + step_weight x S(G_ik; turns of the group in the same state).

    R_i is the sum of the turns' rewards, G_ik = sum over j >= k of discount^(j - k) r_ij. S(x; set) is x - mean of the
    set, over (std + 1e-6) with the sample standard deviation (n - 1) where `divide`; 0 for a set of one or of equal
    values, so a state that nobody came back to leaves the first part alone. One episode may visit a state twice; both
    turns are in the set.
    Source: Feng et al. 2025, "Group-in-group policy optimization", arXiv 2505.10978: R undiscounted, G discounted per
    turn, `step_weight` its omega; `divide` false is its normalizer of 1, the default of its code. Different on purpose:
    a group of one episode has no comparison and gets 0, not its return, and G counts what R counts, such as a KL
    penalty in the rewards, where the code counts the environment's rewards alone.

    Biased: the spread divides; without it, a state counts the more the oftener it repeats, which tilts the direction.
    It assumes that equal keys are equal states, the turns left included: where time matters and the key leaves it
    out, turns are compared that could not have earned the same. Without repeated states it is grpo (or dr_grpo).

    `rewards`: per episode [K] float64; `states`: per episode K keys; `groups` [N] int. Returns per episode [K] float64.
    """
    counts = [len(own) for own in rewards]
    owners = np.repeat(np.arange(len(rewards)), counts)
    turns = np.concatenate([np.zeros(0), *turn_returns(rewards, discount)])
    numbers: dict[Hashable, int] = {}
    anchors = np.array(
        [
            numbers.setdefault((int(group), key), len(numbers))
            for group, keys, count in zip(groups, states, counts, strict=True)
            for key in _as_many(keys, count)
        ],
        dtype=np.int64,
    )
    totals = np.array([own.sum() for own in rewards], dtype=np.float64)
    of_episodes = _relative(totals, groups, divide)[owners]
    return split_by(counts, of_episodes + step_weight * _relative(turns, anchors, divide))


def _relative(values: np.ndarray, sets: np.ndarray, divide: bool) -> np.ndarray:
    found = np.zeros(len(values))
    for index in members(sets):
        found[index] = standardised(values[index], correction=1) if divide else centred(values[index])
    return found


def _as_many(keys: Sequence[Hashable], count: int) -> Sequence[Hashable]:
    if len(keys) != count:
        raise ValueError(f"{len(keys)} state keys for {count} turns")
    return keys


def bilevel_gae(
    rewards: Sequence[np.ndarray],
    values: Sequence[np.ndarray],
    turns: Sequence[np.ndarray],
    discount: float,
    turn_discount: float,
    gae_lambda: float,
    turn_gae_lambda: float,
) -> list[np.ndarray]:
    """A return decays by `discount` g from token to token of a turn, and by `turn_discount` h from turn to turn.

    Turns, from the last: B_k = sum over the turn's tokens of g^(t - b) r_t + g^(e - b) C_k - V_b, where b and e are the
    first and last token of turn k, C_k = h (V_b' + turn_gae_lambda x B_{k+1}) what is expected after it, b' the first
    token of turn k + 1; C is 0 after the last turn. Tokens of turn k, from its last: A_e = r_e + C_k - V_e and
    A_t = r_t + g V_{t+1} - V_t + g x gae_lambda x A_{t+1}.

    Source: bi-level GAE of RAGEN (Wang et al. 2025, arXiv 2504.20073, algorithm.bi_level_gae), with three differences.
    Turns end where they end, not where a reward is not zero. Rewards inside a turn (a KL penalty) count once. The
    turn level rests on the value before a turn's first token; the published one rests on that before its last token,
    which is known to be the last only after it was sampled, so that it is biased even with exact values. With both
    trace decays and g 1 and rewards at turn ends, the two are the same: A_t = sum of h^(j - k) r_j - V_t.

    With all four numbers 1 unbiased whatever the values are; with discounts 1 and the exact values of the policy, for
    any trace decays. Otherwise errors of the values bias it, and discounts do by choice. One turn alone is `gae`.

    `rewards`, `values`: per episode [n] float64, of each sampled token and of the state before it; `turns`: per
    episode [n] int, the index of each token's turn, never falling; the numbers lie in [0, 1]. Returns per episode
    [n] float64.
    """
    return [
        _episode(r, v, starts(t).tolist(), discount, turn_discount, gae_lambda, turn_gae_lambda)
        for r, v, t in zip(rewards, values, turns, strict=True)
    ]


def _episode(
    rewards: np.ndarray,
    values: np.ndarray,
    begins: list[int],
    discount: float,
    turn_discount: float,
    gae_lambda: float,
    turn_gae_lambda: float,
) -> np.ndarray:
    found, expected, stop = np.zeros(len(rewards)), 0.0, len(rewards)
    for begin in reversed(begins):
        returned = after = expected
        running, decay = 0.0, 1.0
        for t in range(stop - 1, begin - 1, -1):
            reward, value = float(rewards[t]), float(values[t])
            # What follows the last token is the next turn's; neither a token discount nor a trace leads there.
            running = reward + decay * after - value + decay * gae_lambda * running
            returned = reward + decay * returned
            found[t], after, decay = running, value, discount
        first = float(values[begin])
        expected = turn_discount * (first + turn_gae_lambda * (returned - first))
        stop = begin
    return found


TurnCredit = TurnReturnsCredit | MtGrpoCredit | GigpoCredit
"""Recipes whose credit is the same for all tokens of a turn."""


def turn_credit(recipe: TurnCredit, episodes: Sequence[Episode], paid: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Per episode [n] float64 over its sampled tokens; `paid` per episode [n] float64, their rewards."""
    turns = [turn_indices(episode) for episode in episodes]
    groups = np.array([episode.group for episode in episodes], dtype=np.int64)
    rewards = [turn_rewards(own, numbers) for own, numbers in zip(paid, turns, strict=True)]
    if isinstance(recipe, TurnReturnsCredit):
        found = turn_returns(rewards, recipe.discount)
        if recipe.baseline == "others":
            found = leave_one_out(found, groups)
    elif isinstance(recipe, MtGrpoCredit):
        found = mt_grpo(rewards, groups, recipe.turn_weight)
    else:
        states = [state_keys(episode) for episode in episodes]
        found = gigpo(rewards, states, groups, recipe.discount, recipe.step_weight, recipe.divide_by_std)
    return [to_tokens(own, numbers) for own, numbers in zip(found, turns, strict=True)]
