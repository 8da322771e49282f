"""Files of normalisers in the published layout:
`{model: {fit_dataset: {segment_method: {aggregate: {threshold: [slope_mean, slope_std, intercept_mean, intercept_std]}}}}}`.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.credit.units.normaliser import FLOOR, Normaliser
from posttrain.errors import InputError
from posttrain.recipe.units import EntropyUnits, UnitsRecipe


@dataclass(frozen=True)
class FitKey:
    """Where in a file a fit stands."""

    model: str
    dataset: str
    method: str
    """`peak` for entropy above a threshold, as published; else the segmenter's `type`, `local_max` for such peaks."""
    aggregate: str
    """`avg`, as published."""
    threshold: str
    """Nats, as a number in text; `0` where the segmenter has none. Compared as a number."""

    @property
    def path(self) -> tuple[str, ...]:
        return self.model, self.dataset, self.method, self.aggregate, self.threshold

    def __str__(self) -> str:
        return " > ".join(self.path)


def key_in(text: str) -> FitKey:
    """The key that `str` of it says: five names with `>` between them."""
    return FitKey(*(name.strip() for name in text.split(">")))


def key_of(model: str, dataset: str, segmenter: UnitsRecipe) -> FitKey:
    """The place of a fit for units of `segmenter`, aggregated by their mean."""
    if isinstance(segmenter, EntropyUnits):
        method = "peak" if segmenter.peak == "threshold" else segmenter.peak
        return FitKey(model, dataset, method, "avg", f"{segmenter.threshold:g}")
    return FitKey(model, dataset, segmenter.type, "avg", "0")


def read_normalisers(path: Path, floor: float = FLOOR) -> dict[FitKey, Normaliser]:
    """All fits of the file. `InputError` naming the file and the place where it is not of the layout."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({error.strerror}); make one with `posttrain fit-normalizer`"
        ) from error
    except ValueError as error:
        raise InputError(f"{path} is no JSON ({error}); make one with `posttrain fit-normalizer`") from error
    return {key: _normaliser(path, key, numbers, floor) for key, numbers in _walk(path, content, ())}


def read_normaliser(path: Path, wanted: FitKey | None = None, floor: float = FLOOR) -> tuple[FitKey, Normaliser]:
    """The fit `wanted`, or the only one, and its key. `InputError` naming those there are where that is not to be had; the published
    code takes mean 0 and standard deviation 1 for a key that is missing, and goes on."""
    found = read_normalisers(path, floor)
    if wanted is None and len(found) == 1:
        return next(iter(found.items()))
    matching = [(key, made) for key, made in found.items() if wanted is not None and same(key, wanted)]
    if not matching:
        there = "; ".join(map(str, found)) or "none"
        asked = f"no fit {wanted}" if wanted is not None else f"{len(found)} fits, and one has to be named"
        raise InputError(f"{path} has {asked}; there are: {there}")
    return matching[0]


def with_normaliser(path: Path, key: FitKey, made: Normaliser) -> str:
    """The text of the file at `path`, if there is one, with `made` at `key`; other fits stay."""
    fits = read_normalisers(path) if path.is_file() else {}
    fits = {old: other for old, other in fits.items() if not same(old, key)} | {key: made}
    content: dict[str, Any] = {}
    for place, normaliser in fits.items():
        inner = content
        for name in place.path[:-1]:
            inner = inner.setdefault(name, {})
        inner[place.threshold] = normaliser.numbers
    return json.dumps(content, indent=1) + "\n"


def _walk(path: Path, content: Any, above: tuple[str, ...]) -> list[tuple[FitKey, Any]]:
    if len(above) == 5:
        return [(FitKey(*above), content)]
    if not isinstance(content, dict):
        place = " > ".join(above) or "the top"
        raise InputError(
            f"{path}: at {place} stands {type(content).__name__} where the layout model > dataset > method > aggregate > "
            "threshold has names; correct it"
        )
    return [entry for name, inner in content.items() for entry in _walk(path, inner, (*above, name))]


def _normaliser(path: Path, key: FitKey, numbers: Any, floor: float) -> Normaliser:
    try:
        slope_mean, slope_std, intercept_mean, intercept_std = (float(number) for number in numbers)
        return Normaliser(slope_mean, slope_std, intercept_mean, intercept_std, floor)
    except (TypeError, ValueError) as error:
        raise InputError(f"{path}: {key} is not four numbers of a normaliser ({error}); fit it again") from error


def same(one: FitKey, other: FitKey) -> bool:
    """Whether two keys are one, thresholds compared as numbers."""
    return one.path[:-1] == other.path[:-1] and _number(one.threshold) == _number(other.threshold)


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text
