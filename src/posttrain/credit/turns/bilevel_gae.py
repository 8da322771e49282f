"""Generalised advantage estimation over turns, and within each turn over its tokens: bilevel_gae."""

from collections.abc import Sequence

import numpy as np

from posttrain.credit.turns.turns import starts


def bilevel_gae(
    rewards: Sequence[np.ndarray],
    values: Sequence[np.ndarray],
    turns: Sequence[np.ndarray],
    discount: float,
    turn_discount: float,
    trace_decay: float,
    turn_trace_decay: float,
) -> list[np.ndarray]:
    """A return decays by `discount` g from token to token of a turn, and by `turn_discount` h from turn to turn.

    Turns, from the last: B_k = sum over the turn's tokens of g^(t - b) r_t + g^(e - b) C_k - V_b, where b and e are the
    first and last token of turn k, C_k = h (V_b' + turn_trace_decay x B_{k+1}) what is expected after it, b' the first
    token of turn k + 1; C is 0 after the last turn. Tokens of turn k, from its last: A_e = r_e + C_k - V_e and
    A_t = r_t + g V_{t+1} - V_t + g x trace_decay x A_{t+1}.

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
        _episode(r, v, starts(t).tolist(), discount, turn_discount, trace_decay, turn_trace_decay)
        for r, v, t in zip(rewards, values, turns, strict=True)
    ]


def _episode(
    rewards: np.ndarray,
    values: np.ndarray,
    begins: list[int],
    discount: float,
    turn_discount: float,
    trace_decay: float,
    turn_trace_decay: float,
) -> np.ndarray:
    found, expected, stop = np.zeros(len(rewards)), 0.0, len(rewards)
    for begin in reversed(begins):
        returned = after = expected
        running, decay = 0.0, 1.0
        for t in range(stop - 1, begin - 1, -1):
            reward, value = float(rewards[t]), float(values[t])
            # What follows the last token is the next turn's; neither a token discount nor a trace leads there.
            running = reward + decay * after - value + decay * trace_decay * running
            returned = reward + decay * returned
            found[t], after, decay = running, value, discount
        first = float(values[begin])
        expected = turn_discount * (first + turn_trace_decay * (returned - first))
        stop = begin
    return found
