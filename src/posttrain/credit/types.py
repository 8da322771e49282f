"""The two kinds of credit. They are different types so that mixing them is an error."""

from dataclasses import dataclass

import numpy as np

PerToken = list[list[np.ndarray]]
"""`[episode][stream]` -> [T] float32, aligned with `Stream.ids`; zero where nothing was sampled."""


@dataclass(frozen=True)
class RewardStreams:
    """Causal credit: rewards per token, which go through the return before they reach the loss."""

    values: PerToken


@dataclass(frozen=True)
class Advantages:
    """Hindsight credit: used by the loss as it is."""

    values: PerToken
