"""The credit of units joins that of outcomes: in reward streams, or as advantages."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from posttrain.credit.baselines import standardize
from posttrain.credit.units.spans import Spans
from posttrain.episode import Advantages, Episode, PerToken, RewardStreams


@dataclass(frozen=True, eq=False)
class CreditedUnits:
    """K units of one episode and what each of them did for its outcome."""

    spans: Spans
    """Over the sampled tokens [n] of the episode."""
    credits: np.ndarray
    """[K] float64, in units of the normalized reward."""
    outcome: float
    """R: what the reward model paid for the episode, normalized; it sits on the last sampled token."""
    empty_value: float
    """Phi_0: its value of an empty answer; 0 for estimators that divide R itself."""

    def __post_init__(self) -> None:
        if len(self.credits) != len(self.spans):
            raise ValueError(f"{len(self.credits)} credits for {len(self.spans)} units")
        if not (np.isfinite(self.credits).all() and math.isfinite(self.outcome) and math.isfinite(self.empty_value)):
            raise ValueError(
                f"credits {self.credits} of outcome {self.outcome} over {self.empty_value} are not all finite"
            )

    @property
    def has_units(self) -> bool:
        """Whether the segmenter found units; where it did not, the outcome alone says what the episode gets."""
        return bool(self.spans.is_unit.any())

    @property
    def residual(self) -> float:
        """R - Phi_0 - sum of credits: 0 for credit that is conserved."""
        return self.outcome - self.empty_value - float(self.credits.sum())


class UnitRewards(CreditedUnits):
    """Causal credit: a reward that arrives with each unit, and goes through the return."""


class UnitAdvantages(CreditedUnits):
    """Hindsight credit: used as it is."""


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
    reward arrives. An episode without units earns as much at its last token: were it paid R there, the policy would be
    paid for what the segmenter finds. Episodes that were not scored, and all of them where beta is 0, keep their rewards
    to the bit. TypeError for units whose credit is an advantage.
    """
    found: PerToken = []
    for episode, streams, own in zip(episodes, rewards.values, units, strict=True):
        if own is not None and not isinstance(own, UnitRewards):
            raise TypeError(f"{type(own).__name__} is no reward: hindsight credit must not go through the return")
        if own is None or own.spans.tokens == 0 or beta == 0:
            found.append(streams)
            continue
        if own.has_units:
            paid = beta * placed(own.spans, own.credits, placement)
            paid[-1] -= beta * own.outcome
        else:
            paid = np.zeros(own.spans.tokens)
            paid[-1] = -beta * own.empty_value
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
    group, each unit once, then clipped to [-clip, clip]; exactly 0 where all are alike. Neither the order of episodes
    nor that of groups changes a bit. Biased, whatever the credit, since mean and spread come from the batch itself; as
    constants they would be a baseline and a factor. Episodes without units, and all of them where beta is 0, keep their
    advantages to the bit. TypeError for units whose credit is a reward.
    """
    for own in units:
        if own is not None and not isinstance(own, UnitAdvantages):
            raise TypeError(f"{type(own).__name__} is no advantage: causal credit must go through the return")
    if beta == 0:
        return advantages
    scores = _scores(episodes, units, statistics)
    found: PerToken = []
    for episode, streams, own, score in zip(episodes, advantages.values, units, scores, strict=True):
        if own is None or score is None:
            found.append(streams)
            continue
        outcome = [((1 - beta) * stream).astype(np.float32) for stream in streams]
        found.append(_added(episode, outcome, beta * np.clip(score, -clip, clip)[own.spans.unit_of_token]))
    return Advantages(found)


def _scores(
    episodes: Sequence[Episode], units: Sequence[UnitAdvantages | None], statistics: Literal["batch", "group"]
) -> list[np.ndarray | None]:
    """Per episode the standardised credits [K] of its units; None where there are none."""
    sharing: dict[int, list[int]] = {}
    for place, (episode, own) in enumerate(zip(episodes, units, strict=True)):
        if own is not None and own.has_units:
            sharing.setdefault(episode.group if statistics == "group" else 0, []).append(place)
    found: list[np.ndarray | None] = [None] * len(episodes)
    for places in sharing.values():
        credits = [own.credits for own in map(units.__getitem__, places) if own is not None]
        ends = np.cumsum([len(part) for part in credits])[:-1]
        for place, score in zip(
            places, np.split(standardize(np.concatenate(credits), correction=0), ends), strict=False
        ):
            found[place] = score
    return found


def _added(episode: Episode, streams: Sequence[np.ndarray], values: np.ndarray) -> list[np.ndarray]:
    """`streams` [T] each, with `values` [n] added at the sampled tokens."""
    masks = [stream.sampled for stream in episode.streams]
    if len(values) != episode.sampled_tokens:
        raise ValueError(f"units over {len(values)} tokens for an episode that sampled {episode.sampled_tokens}")
    found, start = [], 0
    for stream, mask in zip(streams, masks, strict=True):
        own = stream.astype(np.float32)
        stop = start + int(mask.sum())
        own[mask] += values[start:stop].astype(np.float32)
        found.append(own)
        start = stop
    return found
