"""Mixing unit credit with outcome credit, as rewards or as advantages."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from posttrain.credit.assign import to_streams
from posttrain.credit.baselines import standardize
from posttrain.credit.units.spans import Spans
from posttrain.episode import Advantages, Episode, PerToken, RewardStreams


@dataclass(frozen=True, eq=False)
class CreditedUnits:
    """K units of one episode with their credit."""

    spans: Spans
    """Over the sampled tokens [n] of the episode."""
    credits: np.ndarray
    """[K] float64, in units of the normalized reward; 0 for spans that are not units, except with `prefix`, `outcome`
    and `unit_rewards`."""
    outcome: float
    """R: the normalized reward-model score of the episode, placed on its last sampled token."""
    empty_value: float
    """Phi_0: the normalized value of an empty answer; 0 for estimators that divide R."""

    def __post_init__(self) -> None:
        if len(self.credits) != len(self.spans):
            raise ValueError(f"{len(self.credits)} credits for {len(self.spans)} units")
        if not (np.isfinite(self.credits).all() and math.isfinite(self.outcome) and math.isfinite(self.empty_value)):
            raise ValueError(
                f"credits {self.credits} of outcome {self.outcome} over {self.empty_value} are not all finite"
            )

    @property
    def has_units(self) -> bool:
        """Whether the segmenter found units. Otherwise the episode gets the credit of its outcome."""
        return bool(self.spans.is_unit.any())

    @property
    def residual(self) -> float:
        """R - Phi_0 - sum of credits; 0 for credit that is conserved."""
        return self.outcome - self.empty_value - float(self.credits.sum())


class UnitRewards(CreditedUnits):
    """Causal credit: a reward per unit, which goes through the return."""


class UnitAdvantages(CreditedUnits):
    """Hindsight credit: an advantage per unit, used as is."""


Placement = Literal["end", "even"]
CLIP = 5.0
"""Bound of standardized unit credit, in standard deviations."""


def distribute(spans: Spans, credits: np.ndarray, placement: Placement) -> np.ndarray:
    """[n] float64: credits [K] distributed over the tokens of their units; each unit's tokens sum to its credit.

    `end`: on the last token, so the return of every token of the unit includes all of it. `even`: credit / length on
    each token, as published; the return of a token then includes only the shares from that token on.
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
    """beta d_k g_t on the tokens of unit k, (1 - beta) R on the last token, and all other rewards unchanged.

    g_t sums to 1 over a unit's tokens. With `prefix`, an episode gets R - beta Phi_0 in total, so beta only changes
    when the reward arrives. An episode without units gets the same total at its last token; with R instead, the policy
    would be rewarded for avoiding units (or for producing them). Episodes that were not scored, and all episodes if
    beta is 0, keep their rewards bit for bit. TypeError for units whose credit is an advantage.
    """
    mixed: PerToken = []
    for episode, streams, credited in zip(episodes, rewards.values, units, strict=True):
        if credited is not None and not isinstance(credited, UnitRewards):
            raise TypeError(
                f"{type(credited).__name__} is not a reward: hindsight credit must not go through the return"
            )
        if credited is None or credited.spans.tokens == 0 or beta == 0:
            mixed.append(streams)
            continue
        if credited.has_units:
            extra = beta * distribute(credited.spans, credited.credits, placement)
            extra[-1] -= beta * credited.outcome
        else:
            extra = np.zeros(credited.spans.tokens)
            extra[-1] = -beta * credited.empty_value
        mixed.append(_added(episode, streams, extra))
    return RewardStreams(mixed)


def with_unit_advantages(
    episodes: Sequence[Episode], advantages: Advantages, units: Sequence[UnitAdvantages | None], beta: float
) -> Advantages:
    """A_t = (1 - beta) A_t + beta z(d_u(t)): unit credit used as is, without return or discount.

    z subtracts the mean and divides by the population standard deviation + 1e-6, over all units of the step, each unit
    once, and clips to [-`CLIP`, `CLIP`]. It is exactly 0 if all credits are equal, and in spans
    that are not units, such as a thinking block, which have no part in the statistics either. The result is
    bit-identical for any order of episodes and groups. Biased for any credit, because mean and deviation come from the
    batch itself. Episodes without units, and all episodes if beta is 0, keep their advantages bit for bit. TypeError
    for units whose credit is a reward.
    """
    for credited in units:
        if credited is not None and not isinstance(credited, UnitAdvantages):
            raise TypeError(f"{type(credited).__name__} is not an advantage: causal credit must go through the return")
    if beta == 0:
        return advantages
    scores = _scores(units)
    mixed: PerToken = []
    for episode, streams, credited, score in zip(episodes, advantages.values, units, scores, strict=True):
        if credited is None or score is None:
            mixed.append(streams)
            continue
        outcome = [((1 - beta) * stream).astype(np.float32) for stream in streams]
        mixed.append(_added(episode, outcome, beta * np.clip(score, -CLIP, CLIP)[credited.spans.unit_of_token]))
    scored = {position for position, score in enumerate(scores) if score is not None}
    return Advantages(mixed, advantages.without_baseline - scored)


def _scores(units: Sequence[UnitAdvantages | None]) -> list[np.ndarray | None]:
    """Per episode [K] the standardized credits of its units, 0 for other spans; None without units."""
    scores: list[np.ndarray | None] = [None] * len(units)
    having = {place: credited for place, credited in enumerate(units) if credited is not None and credited.has_units}
    if not having:
        return scores
    is_unit = np.concatenate([credited.spans.is_unit for credited in having.values()])
    credits = np.concatenate([credited.credits for credited in having.values()])
    standardized = np.zeros(len(is_unit))
    standardized[is_unit] = standardize(credits[is_unit], correction=0)
    ends = np.cumsum([len(credited.spans) for credited in having.values()])[:-1]
    for place, score in zip(having, np.split(standardized, ends), strict=True):
        scores[place] = score
    return scores


def _added(episode: Episode, streams: Sequence[np.ndarray], values: np.ndarray) -> list[np.ndarray]:
    """Copies of `streams` [T] with `values` [n] added at the sampled tokens."""
    if len(values) != episode.sampled_tokens:
        raise ValueError(f"units over {len(values)} tokens for an episode that sampled {episode.sampled_tokens}")
    added = to_streams(episode, values)
    return [stream.astype(np.float32) + extra for stream, extra in zip(streams, added, strict=True)]
