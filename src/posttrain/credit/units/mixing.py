"""The credit of units joins that of outcomes: in reward streams, or as advantages."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from posttrain.credit.types import Advantages, PerToken, RewardStreams
from posttrain.credit.units.credited import UnitAdvantages, UnitRewards
from posttrain.credit.units.spans import Spans
from posttrain.rollout.streams import Episode

Placement = Literal["end", "even"]


def placed(spans: Spans, credits: np.ndarray, placement: Placement) -> np.ndarray:
    """[n] float64: credits [K] of units on their tokens; each unit's tokens sum to its credit.

    `end`: on the last token, so that every token of the unit sees all of it in its return. `even`: credit / length on
    each, as published; a unit's token then sees only what is paid from it on.
    """
    if placement == "even":
        return np.repeat(credits / spans.lengths, spans.lengths)
    values = np.zeros(spans.tokens)
    values[spans.cuts[1:] - 1] = credits
    return values


def with_unit_rewards(
    episodes: Sequence[Episode],
    rewards: RewardStreams,
    units: Sequence[UnitRewards | None],
    beta: float,
    placement: Placement,
) -> RewardStreams:
    """beta d_k g_t on the tokens of unit k, (1 - beta) R on the last token, and all other rewards as they are.

    g_t sums to 1 over a unit's tokens. With `prefix` an episode earns R - beta Phi_0 in all, so beta moves only when the
    reward arrives. Episodes without units, and all of them where beta is 0, keep their rewards to the bit. TypeError
    for units whose credit is an advantage.
    """
    found: PerToken = []
    for episode, streams, own in zip(episodes, rewards.values, units, strict=True):
        if own is not None and not isinstance(own, UnitRewards):
            raise TypeError(f"{type(own).__name__} is no reward: hindsight credit must not go through the return")
        if own is None or not own.any or beta == 0:
            found.append(streams)
            continue
        paid = beta * placed(own.spans, own.credits, placement)
        paid[-1] -= beta * own.outcome
        found.append(_added(episode, streams, paid))
    return RewardStreams(found)


def with_unit_advantages(
    episodes: Sequence[Episode],
    advantages: Advantages,
    units: Sequence[UnitAdvantages | None],
    beta: float,
    statistics: Literal["batch", "group"],
    clip: float,
) -> Advantages:
    """A_t = (1 - beta) A_t + beta z(d_u(t)): credits of units as they are, without a return and without a discount.

    z: minus the mean, over the population's standard deviation + 1e-6, over all units of the step or of the episode's
    group, each unit once, then clipped to [-clip, clip]. Episodes without units, and all of them where beta is 0, keep
    their advantages to the bit. TypeError for units whose credit is a reward.
    """
    for own in units:
        if own is not None and not isinstance(own, UnitAdvantages):
            raise TypeError(f"{type(own).__name__} is no advantage: causal credit must go through the return")
    if beta == 0:
        return advantages
    known: dict[int, list[np.ndarray]] = {}
    for episode, own in zip(episodes, units, strict=True):
        if own is not None and own.any:
            known.setdefault(episode.group if statistics == "group" else 0, []).append(own.credits)
    scales = {key: (float(np.mean(all_)), float(np.std(all_))) for key, all_ in _joined(known).items()}
    found: PerToken = []
    for episode, streams, own in zip(episodes, advantages.values, units, strict=True):
        if own is None or not own.any:
            found.append(streams)
            continue
        mean, std = scales[episode.group if statistics == "group" else 0]
        scores = np.clip((own.credits - mean) / (std + 1e-6), -clip, clip)
        outcome = [((1 - beta) * stream).astype(np.float32) for stream in streams]
        found.append(_added(episode, outcome, beta * scores[own.spans.unit_of_token]))
    return Advantages(found)


def _joined(known: dict[int, list[np.ndarray]]) -> dict[int, np.ndarray]:
    return {key: np.concatenate(parts) for key, parts in known.items()}


def _added(episode: Episode, streams: Sequence[np.ndarray], values: np.ndarray) -> list[np.ndarray]:
    """`streams` [T] each, with `values` [n] added at the sampled tokens."""
    masks = [stream.sampled for stream in episode.streams]
    found, start = [], 0
    for stream, mask in zip(streams, masks, strict=True):
        own = stream.astype(np.float32)
        stop = start + int(mask.sum())
        own[mask] += values[start:stop].astype(np.float32)
        found.append(own)
        start = stop
    return found
