"""The credit of an answer's units, of two kinds that do not mix: rewards of units, and advantages of units."""

import math
from dataclasses import dataclass

import numpy as np

from posttrain.credit.units.spans import Spans


@dataclass(frozen=True, eq=False)
class CreditedUnits:
    """K units of one episode and what each of them did for its outcome."""

    spans: Spans
    """Over the sampled tokens [n] of the episode."""
    credits: np.ndarray
    """[K] float64, in units of the normalised reward."""
    outcome: float
    """R: what the reward model paid for the episode, normalised; it sits on the last sampled token."""
    empty: float
    """Phi_0: its value of an empty answer; 0 for estimators that divide R itself."""

    def __post_init__(self) -> None:
        if len(self.credits) != len(self.spans):
            raise ValueError(f"{len(self.credits)} credits for {len(self.spans)} units")
        if not (np.isfinite(self.credits).all() and math.isfinite(self.outcome) and math.isfinite(self.empty)):
            raise ValueError(f"credits {self.credits} of outcome {self.outcome} over {self.empty} are not all finite")

    @property
    def any(self) -> bool:
        """Whether the segmenter found units; where it did not, the outcome alone says what the episode gets."""
        return bool(self.spans.found.any())

    @property
    def residual(self) -> float:
        """R - Phi_0 - sum of credits: 0 for credit that is conserved."""
        return self.outcome - self.empty - float(self.credits.sum())


class UnitRewards(CreditedUnits):
    """Causal credit: a reward that arrives with each unit, and goes through the return."""


class UnitAdvantages(CreditedUnits):
    """Hindsight credit: used as it is."""
