"""Studies of `posttrain tune`: which recipe keys are searched, the objective and the number of trials; how a study is loaded; and
the recipe of each search point."""

import difflib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from posttrain.errors import InputError
from posttrain.recipe.base import EXECUTES, NAME, BaseConfig, Executes, Text, Writes
from posttrain.recipe.catalogue import recipe_file
from posttrain.recipe.compose import checked, merge_typed, require_stage, typed_recipe
from posttrain.recipe.metrics import Metric
from posttrain.recipe.needs import unless
from posttrain.recipe.reference import metrics_of
from posttrain.recipe.rollout import SCORES
from posttrain.recipe.sources import Layer, merge, nested, read_file, read_overrides
from posttrain.recipe.stages import STAGES, Recipe
from posttrain.recipe.trust import require_trust_of_run


class Range(BaseConfig):
    """Every number from `low` to `high`, both included."""

    low: float
    """The lowest value."""
    high: float
    """The highest value."""
    log: bool = False
    """Search on a logarithmic scale."""
    int: bool = False
    """Whole numbers only."""
    step: float | None = Field(None, gt=0)
    """Distance between values, counted from `low`. Null: continuous (1 with `int`)."""

    def _check(self) -> None:
        low, high, step = self.low, self.high, self.step
        if low >= high:
            raise ValueError(f"`low` ({low:g}) must be below `high` ({high:g})")
        if self.log and low <= 0:
            raise ValueError(f"`low` is {low:g}; with `log` it must be above 0")
        if self.log and step is not None:
            raise ValueError("`log` and `step` are mutually exclusive; remove one")
        if step is not None and abs((steps := (high - low) / step) - round(steps)) > 1e-6:
            raise ValueError(f"`high` ({high:g}) must be a whole number of `step`s ({step:g}) above `low` ({low:g})")
        if self.int and any(value != round(value) for value in (low, high, step or 0)):
            raise ValueError("with `int`, `low`, `high` and `step` must be whole numbers")


class Together(BaseConfig):
    """Several keys that change together, under a name that is not a recipe key."""

    together: Annotated[list[dict[str, Any]], EXECUTES] = Field(min_length=2)
    """The choices; each is recipe key -> value."""


def _form(value: Any) -> str:
    if isinstance(value, list):
        return "choices"
    return "together" if isinstance(value, Together) or (isinstance(value, dict) and "together" in value) else "range"


Values = Annotated[
    Annotated[Range, Tag("range")]
    | Annotated[Together, Tag("together")]
    | Annotated[list[Any], EXECUTES, Tag("choices")],
    Discriminator(_form),
]
"""The search space under one name."""


class Limit(BaseConfig):
    """A constraint on a metric."""

    max: float | None = None
    """Largest allowed value."""
    min: float | None = None
    """Smallest allowed value."""

    def _check(self) -> None:
        if (self.max is None) == (self.min is None):
            raise ValueError("a limit needs exactly one of `max` and `min`")

    def __str__(self) -> str:
        """`at most 3`."""
        return f"at least {self.min:g}" if self.max is None else f"at most {self.max:g}"


class Objective(BaseConfig):
    """The optimized metric. A trial's value is that of its best evaluation after the start."""

    metric: Text
    """Held-out metric of the learning curve: `validation/...` for rows; `success`, `return` or `score/...` for episodes."""
    direction: Literal["minimize", "maximize"]
    """Direction of optimization."""
    within: dict[str, Limit] = {}
    """Constraints: metric -> `{max: x}` or `{min: x}` at the best evaluation. A metric of training steps, such as `policy/kl`,
    is averaged over the steps since the previous evaluation."""


class NoPruner(BaseConfig):
    """Every trial runs to its end."""

    type: Literal["none"]
    """`none`."""


class MedianPruner(BaseConfig):
    """Stop trials that are worse than the median of the others at the same evaluation."""

    type: Literal["median"]
    """`median`."""
    startup_trials: int = Field(5, ge=1)
    """Complete trials before any trial is stopped."""
    warmup_steps: int = Field(0, ge=0)
    """Steps of a trial before it may be stopped."""


class SamplerRecipe(BaseConfig):
    """Multivariate tree-structured Parzen estimator (TPE; Bergstra et al. 2011, Falkner et al. 2018)."""

    seed: int = Field(0, ge=0)
    """Seed of the sampler. With one worker, the same seed gives the same trials."""
    startup_trials: int = Field(10, ge=1)
    """Random trials before TPE starts."""


class Group(BaseConfig):
    """Keys that are searched together, on the full grid of their values."""

    name: Text = Field(pattern=NAME)
    """Name of the group in tables."""
    grid: dict[str, Values] = Field(min_length=1)
    """Recipe key -> list of values, or a name -> `together`. Later groups use the best values of earlier ones."""


class StudyRecipe(BaseConfig):
    """Hyperparameter search over recipe keys; every trial is a run."""

    stage: Literal["tune"] = "tune"
    """`tune`; `posttrain tune` takes this one."""
    name: Text = Field("study", pattern=NAME)
    """Name of the study: its directory is `<runs>/<name>`."""
    runs: Writes = "runs"
    """Directory that holds the study's directory."""
    recipe: Annotated[list[Executes], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)] = []
    """Recipe files, relative to the study's, merged left to right."""
    keys: Annotated[dict[str, Any], EXECUTES] = {}
    """Recipe keys of every trial, on top of those files, such as fewer `steps`. They are not part of `best.yaml`."""
    search: dict[str, Values] = {}
    """Recipe key -> a range (`low`, `high`, `log`, `int`, `step`) or a list of choices; or a name -> `together`, a list of
    settings of several keys. Searched by TPE."""
    groups: list[Group] = []
    """Groups of keys searched one after another, each on its full grid, instead of `search`."""
    objective: Objective
    trials: Annotated[int | None, unless("groups", refused=True)] = Field(None, ge=1)
    """Number of trials, failed ones included. Null: 20 with `search`; with `groups`, the size of their grids."""
    start: Annotated[Annotated[list[dict[str, Any]], EXECUTES], unless("groups", refused=True)] = []
    """Known good points, each recipe key -> value, to try first."""
    sampler: SamplerRecipe = SamplerRecipe()
    pruner: Annotated[
        Annotated[NoPruner | MedianPruner, Field(discriminator="type")], unless("groups", refused=True)
    ] = NoPruner(type="none")
    workers: int = Field(1, ge=1)
    """Trials that run at the same time, each in its own process."""
    devices: list[Text] = []
    """GPUs assigned to workers in turn, as in CUDA_VISIBLE_DEVICES. Empty: every worker sees all GPUs of the study."""
    weights: Literal["best", "all"] = "best"
    """`best`: keep the exported model of the best trial so far. `all`: of every trial, with its checkpoints."""

    def _check(self) -> None:
        if bool(self.search) == bool(self.groups):
            raise ValueError("a study needs exactly one of `search` and `groups`")
        grids = [(key, values, group.name) for group in self.groups for key, values in group.grid.items()]
        for key, values, name in grids:
            if isinstance(values, Range):
                raise ValueError(f"`{key}` of group {name} is a range; a grid needs a list of values")
        for what, given in (("groups", [one.name for one in self.groups]), ("keys", [key for key, *_ in grids])):
            if twice := [one for one in given if given.count(one) > 1]:
                raise ValueError(f"two of the {what} in `groups` are {twice[0]}; keep one of them")
        for key, values in self.spaces.items():
            choices = choices_of(values) or []
            if not isinstance(values, Range) and len(choices) < (2 if self.search else 1):
                raise ValueError(f"`{key}` has too few values to search; put a single one under `keys`")
            if any(choice in choices[:at] for at, choice in enumerate(choices)):
                raise ValueError(f"`{key}` contains a value twice; remove one")
        for point in self.start:
            for key in point:
                if key not in self.search:
                    raise ValueError(f"`start` gives {key}, which is not searched; put it under `keys` or `search`")

    @property
    def number_of_trials(self) -> int:
        """Trials of the whole study."""
        return sum(len(grid_of(group)) for group in self.groups) if self.groups else self.trials or 20

    @property
    def spaces(self) -> dict[str, Values]:
        """All searched keys with their values, in the order of the file."""
        return self.search | {name: values for group in self.groups for name, values in group.grid.items()}


def choices_of(values: Any) -> list[Any] | None:
    """The choices among `values` of a key; None for a range."""
    return None if isinstance(values, Range) else values.together if isinstance(values, Together) else values


def grid_of(group: Group) -> list[dict[str, Any]]:
    """Every combination of the group's values, the last key changing fastest."""
    combinations = itertools.product(*(choices_of(values) or [] for values in group.grid.values()))
    return [dict(zip(group.grid, values, strict=True)) for values in combinations]


_BY_DOMAIN = ("loss", "accuracy", "margin")
"""Metrics of validation rows that are also measured by domain, as `validation/loss/DOMAIN`."""


def trained_metrics(stage: str) -> list[Metric]:
    """The metrics that training steps of `stage` may have; which of them a run has depends on its recipe."""
    held_out = (SCORES, "validation/", "test/", "audit/")
    metrics = metrics_of(STAGES[stage])
    return [metric for metric in metrics if "/" in metric.name and not metric.name.startswith(held_out)]


def check_metrics(objective: Objective, stage: str, base: Mapping[str, Any], given: Layer, source: str) -> None:
    """`InputError` unless evaluations of the recipe `base` measure the objective, and evaluations or steps measure each
    limit."""
    if (base.get("evaluation") or {}).get("every") == 0:
        raise InputError(
            f"{source}: evaluation.every = 0 leaves a trial without an evaluation after its steps; set it to their number"
        )
    data, trained = base.get("data"), trained_metrics(stage)
    rows = isinstance(data, dict) and bool(data.get("validation") or data.get("held_out"))
    played = stage in ("rl", "distill") or (stage == "sft" and base.get("environment") is not None)
    # The number of rows is the same in every trial, and nothing may be selected on the metrics of the final table.
    names = [one.name for one in metrics_of(STAGES[stage]) if "*" not in one.name and one.name != "validation/rows"]
    known = [name for name in names if (rows and name.startswith("validation/")) or (played and "/" not in name)]
    for key, metric in [("metric", objective.metric), *(("within", limited) for limited in objective.within)]:
        logged = trained if key == "within" else []
        if _measured(metric, known) or any(one.matches(metric) for one in logged):
            continue
        choices = [*known, *(one.name for one in logged)]
        remedy = "name `data.validation` or `data.held_out` rows to measure on"
        if choices:
            near = difflib.get_close_matches(metric, choices, 1, 0.7)
            remedy = f"the nearest is {near[0]}" if near else f"use for example {' or '.join(choices[:4])}"
        raise InputError(
            f"{given.origin(('objective', key, metric)) or source}: objective.{key}: {metric} is not measured by evaluations "
            f"during training{' or by training steps' if logged else ''} of stage {stage} of this recipe; {remedy}"
        )


def _measured(metric: str, known: list[str]) -> bool:
    """Whether evaluations with the metrics `known` have `metric`, which may be a score or a metric of one domain."""
    if metric.startswith(SCORES):
        return "return" in known and not metric.endswith(("_low", "_high"))
    whole, _, domain = metric.removeprefix("validation/").partition("/")
    return metric in known or (bool(domain) and whole in _BY_DOMAIN and f"validation/{whole}" in known)


_TRAINED = ("sft", "reward", "dpo", "rl", "distill")
"""Stages that have a learning curve."""
Point = Mapping[str, Any]
"""Name of a search -> its value."""


@dataclass(frozen=True)
class Study:
    """A study and the recipe that it searches."""

    recipe: StudyRecipe
    trained: str
    """The stage of the trials."""
    base: Layer
    """Values of all trials: the recipe files and `keys`."""

    @property
    def directory(self) -> Path:
        """Directory of the study."""
        return Path(self.recipe.runs) / self.recipe.name

    def keys_of(self, point: Point) -> dict[str, Any]:
        """Recipe key -> value at `point`. Settings that change together are separate keys."""
        values: dict[str, Any] = {}
        for name, value in point.items():
            values |= value if isinstance(self.recipe.spaces.get(name), Together) else {name: value}
        return values

    def at(self, point: Point, runs: Path | None = None, name: str = "trial", **keys: Any) -> Recipe:
        """The recipe of `point`, as run `<runs>/<name>` and with top-level `keys`. Raises `InputError` if it is not valid."""
        named = self.keys_of(point).items()
        origins = {tuple(key.split(".")): f"{key}={shown(value)}" for key, value in named}
        place = {"runs": str(runs or self.directory / "trials"), "name": name}
        # One layer for all keys, so that a type and the keys of that type can be searched in any order.
        values = merge([Layer(nested(key, value)) for key, value in named]).values
        return typed_recipe(merge_typed([self.base, Layer(values | place | keys, origins)], self.trained), self.trained)


def shown(value: Any, narrow: bool = False) -> str:
    """A value as text for a table: numbers with four digits, settings as `key=value`, or only their values if `narrow`."""
    if isinstance(value, float):
        return re.sub(r"e\+?(-?)0*", r"e\1", f"{value:.4g}")  # 1e-5, not 1e-05
    if isinstance(value, dict) and narrow:
        return "/".join(shown(inner) for inner in value.values())
    if isinstance(value, dict):
        return ", ".join(f"{key}={shown(inner)}" for key, inner in value.items())
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def load_study(source: str, overrides: Sequence[str]) -> Study:
    """The study in the YAML file `source` with overrides such as `trials=30`, `search.KEY.high=1e-4`, `keys.KEY=value`.

    Raises `InputError` with one sentence per problem, each with the file and line, or the override, that caused it.
    This includes an objective that is not a held-out metric, and a limit on a metric that the stage does not measure.
    """
    source = str(recipe_file(source))
    given = _merged([read_file(source), *map(_whole_names, read_overrides(list(overrides)))])
    require_stage(given, "tune")
    recipe = checked(given, StudyRecipe)
    folder = Path(source).parent
    files = [read_file(str(folder / file)) for file in recipe.recipe]
    fixed = given.part("keys") if recipe.keys else Layer({})
    for key in ("name", "runs"):
        if key in fixed.values:
            raise InputError(f"{fixed.origin((key,))}: {key} of a trial has no effect; set {key} of the study")
    stage = merge([*files, fixed]).values.get("stage")
    if stage not in _TRAINED:
        problem = "the recipe has no stage" if stage is None else f"the recipe is for stage {stage}"
        raise InputError(
            f"{given.origin(('recipe',)) or source}: {problem}; a study searches one of {', '.join(_TRAINED)}; set it, for "
            "example `keys.stage=rl`"
        )
    for file, layer in zip(recipe.recipe, files, strict=True):
        require_trust_of_run(folder / file, layer.values, stage, [fixed])
    study = Study(recipe, stage, merge_typed([*files, fixed], stage))
    for number, point in enumerate(recipe.start, start=1):
        for key, value in point.items():
            if (words := _refused(recipe.search[key], value)) is not None:
                where = given.origin(("start", str(number - 1))) or given.origin(("start",))
                raise InputError(f"{where}: start point {number} has {key} = {shown(value)}, which is not {words}")
    check_metrics(recipe.objective, stage, study.base.values, given, source)
    return study


def _refused(values: Any, value: Any) -> str | None:
    """What a value of a key that is searched among `values` must be, in words; None if `value` is."""
    if isinstance(values, Range):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        fits = number and values.low <= value <= values.high
        return None if fits else f"from {values.low:g} to {values.high:g}"
    choices = choices_of(values) or []
    return None if value in choices else f"one of {', '.join(map(shown, choices))}"


def _merged(layers: Sequence[Layer]) -> Layer:
    """The layers merged left to right. The entries of `search` are merged separately, because their names contain dots."""
    plain = [Layer({key: v for key, v in layer.values.items() if key != "search"}, layer.origins) for layer in layers]
    merged = merge(plain)
    search: dict[str, Any] = {}
    for layer in layers:
        values = layer.values.get("search", {})
        if not isinstance(values, dict):
            raise InputError(f"{layer.origin(('search',))}: search must be a section of recipe keys")
        name = next((known for known in search for new in values if new.startswith(f"{known}.")), None)
        if name is not None:
            (long,) = values
            values = {name: nested(long.removeprefix(f"{name}."), values[long])}
        for key, value in values.items():
            old = search.get(key)
            search[key] = old | value if isinstance(old, dict) and isinstance(value, dict) else value
    return Layer(merged.values | ({"search": search} if search else {}), merged.origins)


def _whole_names(layer: Layer) -> Layer:
    """An override `search.a.b.c=1` as {"search": {"a.b.c": 1}}."""
    value, name = layer.values.get("search"), list[str]()
    if not isinstance(value, dict) or len(value) != 1 or "." in next(iter(value)):
        return layer
    while isinstance(value, dict) and len(value) == 1 and not (name and name[-1] in Range.model_fields):
        ((part, inner),) = value.items()
        if part in Together.model_fields or (part in Range.model_fields and not name):
            break
        name.append(part)
        value = inner
    where = next(iter(layer.origins.values()))
    key = ".".join(name)
    return Layer({"search": {key: value}}, {("search",): where, ("search", key): where})
