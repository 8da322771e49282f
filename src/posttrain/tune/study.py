"""A study on disk: directory, lock, Optuna storage, sampler and search space."""

import itertools
import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import BaseSampler, TPESampler
from optuna.trial import FrozenTrial, TrialState

from posttrain.errors import InputError
from posttrain.locks import lock
from posttrain.recipe.sources import dump_values
from posttrain.recipe.study import Point, Range, SamplerRecipe, Study, choices_of, shown
from posttrain.runs.directory import storage_errors, write_atomically
from posttrain.seeds import derive_seed, random_stream

_MAY_CHANGE = ("trials", "workers", "devices", "weights", "runs", "name")
"""Keys that may change when a study is resumed."""
_LOCK = ".lock"


def open_study(study: Study, resume: bool) -> optuna.Study:
    """Create or resume the Optuna study of `study`. The caller must hold `study_lock`.

    Raises `InputError` if the name is used, the search has changed, or the storage cannot be opened.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    file = study.directory / "study.yaml"
    if not resume and file.is_file():
        raise InputError(f"the study {study.directory} exists; continue it with `--resume`, or choose another `name`")
    if not resume and any(path.name != _LOCK for path in study.directory.iterdir()):
        raise InputError(f"{study.directory} exists and is not a study; choose another `name`")
    if resume and not file.is_file():
        raise InputError(f"there is no study in {study.directory}; omit --resume to start one")
    resolved = {**study.recipe.model_dump(mode="json"), "base": study.base.values}
    snapshot = (
        "# The resolved study with every default and the searched recipe (`base`). Continue with\n"
        f"# posttrain tune THE_STUDY.yaml --resume\n{dump_values(resolved)}"
    )
    pruner: optuna.pruners.BasePruner = optuna.pruners.NopPruner()
    if study.recipe.pruner.type == "median":
        pruner = optuna.pruners.MedianPruner(study.recipe.pruner.startup_trials, study.recipe.pruner.warmup_steps)
    if not file.is_file():
        write_atomically(file, snapshot)
    try:
        optuna_study = optuna.create_study(
            storage=f"sqlite:///{study.directory / 'study.db'}",
            study_name=study.recipe.name,
            direction=study.recipe.objective.direction,
            sampler=NumberedSampler(study.recipe.sampler),
            pruner=pruner,
            load_if_exists=True,
        )
    except Exception as error:
        reason = " ".join(str(error).split())
        raise InputError(
            f"{study.directory / 'study.db'} cannot be opened ({type(error).__name__}: {reason}); choose another `name`"
        ) from error
    before, now = optuna_study.user_attrs.get("study"), json.loads(json.dumps(resolved))
    if before is None:
        optuna_study.set_user_attr("study", now)
        before = now
    changed = [key for key in now if key not in _MAY_CHANGE and before.get(key) != now[key]]
    changed = ["the recipe" if key == "base" else key for key in changed if key not in ("recipe", "keys")]
    if changed:
        raise InputError(
            f"{' and '.join(changed)} of the study {study.directory} has changed since it began, so old and new trials are "
            "not comparable; choose another `name`, or undo the change"
        )
    write_atomically(file, snapshot)
    for number, point in enumerate(study.recipe.start):
        optuna_study.enqueue_trial(to_storage(point), user_attrs={"start": number}, skip_if_exists=True)
    return optuna_study


@contextmanager
def study_lock(study: Study) -> Iterator[None]:
    """Lock the study; raises `InputError` if another process holds the lock."""
    with storage_errors(study.directory):
        study.directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(study.directory / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            lock(descriptor)
        except BlockingIOError:
            raise InputError(f"another process runs the study {study.directory}; wait for it, or stop it") from None
        yield
    finally:
        os.close(descriptor)


class NumberedSampler(BaseSampler):
    """Multivariate TPE whose samples depend on the seed, the trial number and the finished trials.

    A single generator would repeat its first points in a resumed study, and would make the samples depend on timing if
    several processes share a study.
    """

    def __init__(self, recipe: SamplerRecipe) -> None:
        self.recipe = recipe

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return self._of(trial).infer_relative_search_space(study, trial)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        return self._of(trial).sample_relative(study, trial, search_space)

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        return self._of(trial, param_name).sample_independent(study, trial, param_name, param_distribution)

    def after_trial(
        self, study: optuna.Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None
    ) -> None:
        self._of(trial).after_trial(study, trial, state, values)

    def _of(self, trial: FrozenTrial, name: str = "") -> TPESampler:
        # NumPy's legacy generator, which Optuna uses, takes 32-bit seeds.
        seed = derive_seed(self.recipe.seed, "sampler", trial.number, name) % 2**32
        startup = self.recipe.startup_trials
        return TPESampler(seed=seed, multivariate=True, n_startup_trials=startup, constant_liar=True)


_MAX_CHECKED = 32
"""Maximum number of combinations to validate before a study starts."""


def distributions(study: Study) -> dict[str, BaseDistribution]:
    """Name -> Optuna distribution, in the order of the study file."""
    result: dict[str, BaseDistribution] = {}
    for name, values in study.recipe.spaces.items():
        if not isinstance(values, Range):
            result[name] = CategoricalDistribution([_stored(choice) for choice in choices_of(values) or []])
        elif values.int:
            low, high, step = int(values.low), int(values.high), int(values.step or 1)
            result[name] = IntDistribution(low, high, log=values.log, step=step)
        else:
            result[name] = FloatDistribution(values.low, values.high, log=values.log, step=values.step)
    return result


def to_storage(point: Point) -> dict[str, Any]:
    """`point` with values that an Optuna storage supports: lists and sections become JSON text."""
    return {name: _stored(value) for name, value in point.items()}


def from_storage(study: Study, params: Point) -> dict[str, Any]:
    """The inverse of `to_storage`."""
    values: dict[str, Any] = {}
    for name, value in params.items():
        choices = choices_of(study.recipe.spaces.get(name, []))
        values[name] = next((choice for choice in choices or [] if _stored(choice) == value), value)
    return values


def check_space(study: Study) -> list[str]:
    """Validate combinations of searched values; returns a message for each value that is never valid.

    Checks all combinations of choices and range ends, or, if there are many, single changes and a random sample. An
    invalid combination becomes a failed trial. Raises `InputError` if no combination is valid, which indicates a wrong key.
    """
    ends: dict[str, list[Any]] = {}
    for name, values in study.recipe.spaces.items():
        kind = int if isinstance(values, Range) and values.int else float
        ends[name] = [kind(values.low), kind(values.high)] if isinstance(values, Range) else choices_of(values) or []
    points = [{name: values[0] for name, values in ends.items()}]
    if math.prod(map(len, ends.values())) <= _MAX_CHECKED:
        points = [dict(zip(ends, values, strict=True)) for values in itertools.product(*ends.values())]
    else:
        points += [points[0] | {name: value} for name, values in ends.items() for value in values]
        draw = random_stream(study.recipe.sampler.seed, "corners")
        for _ in range(_MAX_CHECKED):
            points.append({name: values[int(draw.integers(len(values)))] for name, values in ends.items()})
    failed: dict[tuple[str, str], str] = {}
    valid: set[tuple[str, str]] = set()
    for point in points:
        stored = [(name, json.dumps(value)) for name, value in point.items()]
        try:
            study.at(point)
            valid |= set(stored)
        except InputError as error:
            for value in stored:
                failed.setdefault(value, str(error))
    if not valid:
        raise InputError(next(iter(failed.values())))
    return [
        f"{name} = {shown(json.loads(value))} gives no valid recipe: {error.splitlines()[0]}"
        for (name, value), error in failed.items()
        if (name, value) not in valid
    ]


def _stored(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | int | float | str) else json.dumps(value)
