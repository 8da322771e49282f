"""The location-aware normalizer of unit rewards: their mean and spread as functions of the position in the answer.

Source: Yin et al. 2025, "Segmenting text and learning their rewards for improved RLHF", arXiv 2501.02790. Unit k of K
has position p = k / K in (0, 1]. mean(p) = slope_mean log p + intercept_mean, sigma(p) = slope_std log p + intercept_std, and
a reward r becomes (r - mean(p)) / sigma(p).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from posttrain.errors import InputError
from posttrain.recipe.units import EntropyUnits, UnitsRecipe

EPSILON = 1.35
"""Huber's threshold, in units of the residuals' scale: 95% as efficient as least squares for normal residuals."""
FLOOR = 0.1
"""Minimum sigma, as a fraction of sigma at the end of the answer."""


@dataclass(frozen=True)
class Normalizer:
    """The four published numbers, in units of reward, and a floor on sigma.

    Without a floor, a published fit (tokens, Llama 3 8B SFT) has sigma <= 0 for p < 0.00407, so the first rewards change
    sign in answers of more than 245 units. Raises `ValueError` if sigma is not above 0 at the end.
    """

    slope_mean: float
    slope_std: float
    intercept_mean: float
    intercept_std: float
    floor: float = FLOOR

    def __post_init__(self) -> None:
        if not np.isfinite(self.numbers).all() or self.intercept_std <= 0:
            raise ValueError(
                f"a normalizer needs finite numbers and a standard deviation above 0 at the end, not {self.numbers}"
            )

    @property
    def numbers(self) -> list[float]:
        """In the published order: slopes of mean and sigma, then their intercepts."""
        return [self.slope_mean, self.slope_std, self.intercept_mean, self.intercept_std]

    def mean(self, positions: np.ndarray) -> np.ndarray:
        """[n] at `positions` [n] in (0, 1]."""
        return self.slope_mean * np.log(positions) + self.intercept_mean

    def sigma(self, positions: np.ndarray) -> np.ndarray:
        """[n], never below `floor` x sigma(1)."""
        values = self.slope_std * np.log(positions) + self.intercept_std
        return np.maximum(values, self.floor * self.intercept_std)

    def normalize(self, rewards: np.ndarray) -> np.ndarray:
        """[K] float64 of the rewards [K] of all units of one answer, in order."""
        positions = relative_positions(len(rewards))
        return (np.asarray(rewards, dtype=np.float64) - self.mean(positions)) / self.sigma(positions)


@dataclass(frozen=True, eq=False)
class Profile:
    """Rewards by position, the data of a fit: [m] each, positions increasing, rounded to three decimals as published."""

    positions: np.ndarray
    means: np.ndarray
    stds: np.ndarray
    """Sample standard deviations (n - 1); NaN for a single reward."""
    counts: np.ndarray


@dataclass(frozen=True, eq=False)
class Fit:
    """A normalizer and the share of variance that it explains."""

    normalizer: Normalizer
    profile: Profile
    r2_mean: float
    """1 - residual / total sum of squares of the means by position, weighted by counts; NaN if they are all equal."""
    r2_std: float


def relative_positions(units: int) -> np.ndarray:
    """[K] float64: k / K of the units 1 to K of an answer."""
    return np.arange(1, units + 1) / max(units, 1)


def reward_profile(answers: Sequence[np.ndarray]) -> Profile:
    """The profile of the unit rewards [K_i] of several answers. Raises `ValueError` if a reward is not finite."""
    rewards = np.concatenate([np.asarray(answer, dtype=np.float64) for answer in answers])
    if not np.isfinite(rewards).all():
        raise ValueError("some unit rewards are not finite")
    places = np.round(np.concatenate([relative_positions(len(answer)) for answer in answers]), 3)
    positions, group = np.unique(np.maximum(places, 1e-3), return_inverse=True)  # 1 of 3000 would round to 0
    counts = np.bincount(group)
    means = np.bincount(group, rewards) / counts
    squares = np.bincount(group, (rewards - means[group]) ** 2)
    stds = np.sqrt(np.divide(squares, counts - 1, out=np.full(len(counts), np.nan), where=counts > 1))
    return Profile(positions, means, stds, counts)


def fit_normalizer(answers: Sequence[np.ndarray]) -> Fit:
    """Fit mean and sigma against log p of the unit rewards [K_i] of several answers.

    Two Huber regressions on the profile, each position weighted by its count. The published fit weights all positions equally
    and takes 0 as the standard deviation of a single reward. The slopes are 0 if all answers have one unit. Raises
    `ValueError` if nothing can be fitted: fewer than two rewards at every position, or no spread.
    """
    profile = reward_profile(answers)
    several = profile.counts > 1
    if not several.any():
        raise ValueError("no position has two rewards, so there is no spread to fit; score more answers")
    logs = np.log(profile.positions)
    slope_mean, intercept_mean = huber_line(logs, profile.means, profile.counts)
    slope_std, intercept_std = huber_line(logs[several], profile.stds[several], profile.counts[several])
    normalizer = Normalizer(slope_mean, slope_std, intercept_mean, intercept_std)
    return Fit(
        normalizer,
        profile,
        _r2(profile.means, normalizer.mean(profile.positions), profile.counts),
        _r2(profile.stds[several], normalizer.sigma(profile.positions[several]), profile.counts[several]),
    )


def huber_line(x: np.ndarray, y: np.ndarray, weights: np.ndarray) -> tuple[float, float]:
    """Slope and intercept of y [n] on x [n] with weights [n] > 0, robust to outliers in y.

    Minimizes sum_i w_i (s + s H((y_i - a x_i - b) / s)) over a, b and the scale s, with H(z) = z^2 up to e = `EPSILON` and
    2 e |z| - e^2 beyond (Huber 1981, "Robust statistics", 7.7, proposal 2; the objective
    of scikit-learn's HuberRegressor without its penalty on the slope). Reweighted least squares alternates with a fixed-point
    update of s; both decrease the convex objective. The slope is 0 if all x are equal.
    """
    w = np.asarray(weights, dtype=np.float64) / np.sum(weights)
    inside = np.ones(len(x))
    scale = np.inf
    for _ in range(10_000):
        slope, intercept = _least_squares(x, y, w * inside)
        distances = np.abs(y - slope * x - intercept)
        before, limit = scale, EPSILON * scale
        scale = float(np.sqrt(np.sum(w * np.minimum(distances, limit) ** 2)))
        if scale <= 1e-12 * max(1.0, float(np.abs(y).max())) or abs(before - scale) <= 1e-12 * scale:
            break
        inside = np.minimum(1.0, EPSILON * scale / np.maximum(distances, 1e-300))
    return slope, intercept


def _least_squares(x: np.ndarray, y: np.ndarray, w: np.ndarray) -> tuple[float, float]:
    mean_x, mean_y = np.average(x, weights=w), np.average(y, weights=w)
    variance = np.average((x - mean_x) ** 2, weights=w)
    if variance <= 1e-18:
        return 0.0, float(mean_y)
    slope = np.average((x - mean_x) * (y - mean_y), weights=w) / variance
    return float(slope), float(mean_y - slope * mean_x)


def _r2(values: np.ndarray, fitted: np.ndarray, counts: np.ndarray) -> float:
    total = np.average((values - np.average(values, weights=counts)) ** 2, weights=counts)
    if total <= 1e-18:
        return float("nan")
    return float(1 - np.average((values - fitted) ** 2, weights=counts) / total)


class FitKey(NamedTuple):
    """The key of a fit in a file."""

    model: str
    dataset: str
    method: str
    """`peak` for entropy above a threshold, as published; otherwise the segmenter's `type`."""
    aggregate: str
    """`avg`, as published."""
    threshold: str
    """Nats, as text; `0` if the segmenter has none. Compared as a number."""

    def __str__(self) -> str:
        return " > ".join(self)


def parse_key(text: str) -> FitKey:
    """The inverse of `str`: five names separated by `>`."""
    return FitKey(*(name.strip() for name in text.split(">")))


def fit_key(model: str, dataset: str, segmenter: UnitsRecipe) -> FitKey:
    """The key of a fit for units of `segmenter`, aggregated by their mean."""
    if isinstance(segmenter, EntropyUnits):
        return FitKey(model, dataset, "peak", "avg", f"{segmenter.threshold:g}")
    return FitKey(model, dataset, segmenter.type, "avg", "0")


def read_normalizers(path: Path) -> dict[FitKey, Normalizer]:
    """All fits of the file. Raises `InputError` with the file and the position if it has another layout."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        problem = f"cannot be read ({error.strerror})" if isinstance(error, OSError) else f"is not JSON ({error})"
        raise InputError(f"{path} {problem}; make one with `posttrain fit-normalizer`") from error
    fits = {}
    for key, numbers in _walk(path, content, ()):
        try:
            slope_mean, slope_std, intercept_mean, intercept_std = (float(number) for number in numbers)
            fits[key] = Normalizer(slope_mean, slope_std, intercept_mean, intercept_std)
        except (TypeError, ValueError) as error:
            raise InputError(f"{path}: {key} must have four finite numbers ({error}); fit it again") from error
    return fits


def read_normalizer(path: Path, wanted: FitKey | None = None) -> tuple[FitKey, Normalizer]:
    """The fit `wanted`, or the only one, with its key. Raises `InputError` with the existing keys if there is none.

    The published code silently uses mean 0 and standard deviation 1 for a missing key.
    """
    fits = read_normalizers(path)
    if wanted is None and len(fits) == 1:
        return next(iter(fits.items()))
    matching = [(key, normalizer) for key, normalizer in fits.items() if wanted is not None and same(key, wanted)]
    if not matching:
        existing = "; ".join(map(str, fits)) or "none"
        problem = f"no fit {wanted}" if wanted is not None else f"{len(fits)} fits and none was named"
        raise InputError(f"{path} has {problem}; name one of: {existing}")
    return matching[0]


def file_with_normalizer(path: Path, key: FitKey, made: Normalizer) -> str:
    """The text of the file at `path` (which may not exist yet) with `made` at `key`. Other fits are kept."""
    fits = read_normalizers(path) if path.is_file() else {}
    fits = {old: other for old, other in fits.items() if not same(old, key)} | {key: made}
    content: dict[str, Any] = {}
    for place, normalizer in fits.items():
        inner = content
        for name in place[:-1]:
            inner = inner.setdefault(name, {})
        inner[place.threshold] = normalizer.numbers
    return json.dumps(content, indent=1) + "\n"


def _walk(path: Path, content: Any, above: tuple[str, ...]) -> list[tuple[FitKey, Any]]:
    if len(above) == 5:
        return [(FitKey(*above), content)]
    if not isinstance(content, dict):
        place = " > ".join(above) or "the top"
        raise InputError(
            f"{path}: {place} is {type(content).__name__}, but the layout model > dataset > method > aggregate > threshold "
            "requires a mapping; correct the file"
        )
    return [entry for name, inner in content.items() for entry in _walk(path, inner, (*above, name))]


def same(one: FitKey, other: FitKey) -> bool:
    """Whether two keys are equal, with thresholds compared as numbers."""
    return one[:-1] == other[:-1] and _number(one.threshold) == _number(other.threshold)


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text
