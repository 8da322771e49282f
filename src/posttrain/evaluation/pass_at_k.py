"""pass@k and mean@k of several attempts per task (Chen et al. 2021, arXiv 2107.03374)."""

from collections.abc import Mapping, Sequence

import numpy as np

from posttrain.evaluation.statistics import Estimate, clustered_rate

PASS = "pass@k/"
"""What the keys of pass@k begin with in a line of the metrics log."""
MEAN = "mean@k/"
"""What the key of mean@k begins with."""


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that at least one of k attempts, drawn without replacement from n of which c succeeded, succeeded.

    1 - C(n - c, k) / C(n, k), which is unbiased for the chance that k new attempts hold a success; ValueError unless
    0 <= c <= n and 1 <= k <= n. Computed as a product, for the binomials overflow.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@{k} needs at least {k} attempts and 0 to n successes, got n = {n} and c = {c}")
    if n - c < k:
        return 1.0
    return 1.0 - float(np.prod(1.0 - k / np.arange(n - c + 1, n + 1)))


def powers_up_to(n: int) -> list[int]:
    """1, 2, 4, ... and n itself."""
    found = [2**power for power in range(n.bit_length())]
    return found if found[-1] == n else [*found, n]


def attempts(successes: Mapping[int, Sequence[bool]]) -> int:
    """Attempts that every seed has at least; 0 without seeds. `successes`: seed -> whether each attempt succeeded."""
    return min((len(own) for own in successes.values()), default=0)


def passes(successes: Mapping[int, Sequence[bool]]) -> dict[int, Estimate]:
    """pass@k for k = 1, 2, 4, ... up to the attempts that every seed has, which is the last k.

    The mean over seeds, with the interval of `clustered_rate`: n attempts of a seed hold n / k that share none.
    """
    found = {}
    for k in powers_up_to(n) if (n := attempts(successes)) else []:
        of_seeds = [pass_at_k(len(own), sum(own), k) for own in successes.values()]
        found[k] = clustered_rate(of_seeds, sum(len(own) // k for own in successes.values()))
    return found


def mean_at_k(successes: Mapping[int, Sequence[bool]]) -> Estimate:
    """Share of a seed's attempts that succeeded, as a mean over seeds: what one attempt gives, whatever k is."""
    rates = [sum(own) / len(own) for own in successes.values()]
    return clustered_rate(rates, sum(map(len, successes.values())))
