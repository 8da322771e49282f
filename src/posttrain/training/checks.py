"""Checks of `--dry-run`: load everything that a run loads before its model (placement, rows, tasks, scorers)."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

from posttrain.data.examples import read_examples
from posttrain.data.problems import Problems
from posttrain.data.rendering import Renderer
from posttrain.engines.openai import chat_client, require_reachable
from posttrain.environments.protocol import allowed, require_observation
from posttrain.errors import InputError
from posttrain.models.adapters import check_targets
from posttrain.models.files import on_disk
from posttrain.models.load import load_end_tokens, load_tokenizer, require_reward_model
from posttrain.planning.dry_run import tasks_of
from posttrain.planning.inputs import require_inputs
from posttrain.planning.workers import placed_recipe, refuse_placement
from posttrain.recipe.components import EnvironmentRecipe, environment_class
from posttrain.recipe.data import FixedRowsRecipe
from posttrain.recipe.detectable import FEWEST
from posttrain.recipe.model import ModelRecipe
from posttrain.recipe.plan import plural
from posttrain.recipe.rollout import evaluated_environment
from posttrain.recipe.run import StageRecipe
from posttrain.recipe.supervised import SupervisedRecipe
from posttrain.training.rows import check_rows, fixed_rows, load_data
from posttrain.training.tasks import check_tasks, parts_of, too_long

Result = TypeVar("Result")


def check_recipe(recipe: StageRecipe, made: Sequence[Path] = ()) -> list[str]:
    """Load everything that a run of `recipe` loads before its model. Returns one line per part.

    A line also names each part that cannot be checked yet: a model that has to be downloaded or converted, and files in
    the directories `made`, which earlier stages of a pipeline write. InputError if the run would stop. One
    sentence per problem, the same as in the run."""
    checks = _Checks(made)
    if not made:
        checks.run(lambda: require_inputs(recipe, engine_too=False))
    if getattr(recipe, "hardware", None) is not None and recipe.hardware.ray is not None:  # type: ignore[attr-defined]
        checks.run(lambda: refuse_placement(placed_recipe(recipe)))
    if (engine := recipe.remote) is not None:
        options = (engine.url, engine.timeout, engine.retries, engine.api_key_variable)
        checks.run(lambda: require_reachable("engine", chat_client("engine", *options)))
    paths = {f"{key}.path": section.path for key, section in recipe.models().items() if section.path is not None}
    there = [checks.model_is_there(key, path) for key, path in paths.items()]
    if there and there[0] and recipe.model.lora is not None:
        checks.lines += checks.run(lambda: check_targets(recipe.model, recipe.scores)) or []
    renderer = checks.run(lambda: _renderer(recipe.model.model_dump_json())) if there and there[0] else None
    if renderer is not None:
        checks.lines += renderer.warnings()
    checks.rows(recipe, renderer)
    if (evaluated := evaluated_environment(recipe)) is not None:
        checks.tasks(recipe, getattr(recipe, "environment", None) or evaluated, renderer)
    if checks.problems:
        raise InputError("\n".join(dict.fromkeys(checks.problems)))
    return checks.lines


def require_verdict(recipe: Any) -> None:
    """For `--strict`: InputError if a run of `recipe` cannot show that the model improved, as far as is known before it."""
    if not recipe.trains:
        raise InputError(f"--strict judges training, and {recipe.stage} trains no model; remove --strict")
    if (why := recipe.untested()) is not None:
        raise InputError(f"--strict needs a verdict: {why}")
    count, key = FEWEST, recipe.tested_key
    with suppress(InputError):  # of files that an earlier stage has yet to write; the run reports others
        if key.startswith("evaluation."):
            count = len(tasks_of(recipe).test)
        elif key == "experts.held_out":
            count = recipe.experts.held_out
        elif isinstance(recipe, SupervisedRecipe) and on_disk(recipe.model.path):
            data, renderer = recipe.data, _renderer(recipe.model.model_dump_json())
            rows = load_data(recipe.kind, data, renderer, recipe.row_loss, recipe.rows_per_update, recipe.seed)
            count = len(rows.final)
    if few := recipe.too_few(count):
        raise InputError(f"--strict needs a verdict: {few[0]}")


@lru_cache(maxsize=4)
def _renderer(model: str) -> Renderer:
    """The renderer of the model of a recipe, given as JSON."""
    recipe = ModelRecipe.model_validate_json(model)
    tokenizer = load_tokenizer(recipe)
    return Renderer(tokenizer, load_end_tokens(recipe.path, tokenizer))


class _Checks:
    """The results of the checks so far."""

    def __init__(self, made: Sequence[Path]) -> None:
        self.made = made
        self.lines: list[str] = []
        self.problems: list[str] = []

    def run(self, part: Callable[[], Result]) -> Result | None:
        """The result of `part`. If it raises InputError, record the problem and return None."""
        try:
            return part()
        except InputError as error:
            self.problems += str(error).splitlines()
            return None

    def is_later(self, path: str) -> bool:
        """Whether an earlier stage has yet to write `path`."""
        later = not Path(path).exists() and any(Path(path).is_relative_to(folder) for folder in self.made)
        if later:
            self.lines.append(f"not checked: {path} is written by an earlier stage")
        return later

    def model_is_there(self, key: str, path: str) -> bool:
        if self.is_later(path):
            return False
        there = self.run(lambda: on_disk(path, key))
        if there and key in ("reward.path", "audit.path"):
            self.run(lambda: require_reward_model(path, key))
        if there is False:
            self.lines.append(f"not checked: the tokenizer of {path}, which is not on this machine yet")
        return bool(there)

    def rows(self, recipe: StageRecipe, renderer: Renderer | None) -> None:
        """Rows of files that are not tasks, in the sections of the recipe, and the checks of the stage."""
        later = False
        for section in (recipe, *(value for _, value in recipe)):
            data = getattr(section, "data", None)
            if data is None or not isinstance(section, StageRecipe | FixedRowsRecipe):
                continue
            parts = [getattr(data, part, []) for part in ("train", "validation", "test")]
            if any(self.is_later(source.path) for part in parts for source in part):
                later = later or section is recipe
            elif isinstance(section, SupervisedRecipe):
                self.run(partial(self._supervised, section, renderer))
            elif isinstance(section, FixedRowsRecipe) and renderer is not None:
                read = self.run(partial(fixed_rows, section, 1, renderer, 0))
                self.lines += read.problems.summary() if read is not None else []
        if not later:
            self.lines += self.run(recipe.check) or []

    def _supervised(self, recipe: SupervisedRecipe, renderer: Renderer | None) -> None:
        data, kind = recipe.data, recipe.kind
        if renderer is None:
            problems = Problems()
            for sources in (data.train, data.validation, data.test):
                if sources and next(iter(read_examples(kind, sources, data.columns, problems)), None) is None:
                    problems.require_any(", ".join(source.path for source in sources))
            problems.raise_if(data.strict)
            self.lines += problems.summary()
            return
        rows = load_data(kind, data, renderer, recipe.row_loss, recipe.rows_per_update, recipe.seed)
        if not data.streaming:
            count, updates = len(rows.stored), rows.updates_per_epoch
            self.lines.append(
                f"{count:,} {plural('row', count)} to train on, {updates:,} {plural('update', updates)} an epoch; "
                f"{len(rows.validation):,} for validation, {len(rows.test):,} for the final table"
            )
        few = recipe.too_few(len(rows.final)) if rows.final and recipe.tested_key.startswith("data.") else []
        self.lines += [*rows.problems.summary(), *check_rows(recipe, rows), *(f"warning: {line}" for line in few)]

    def tasks(self, recipe: Any, environment: EnvironmentRecipe, renderer: Renderer | None) -> None:
        """Tasks, the functions and judges that score them, and how the chat template renders the first."""
        evaluated = recipe.evaluation.environment
        key = (environment.rows_key or "").removeprefix("environment.")
        if key and any(self.is_later(source.path) for source in getattr(environment, key)):
            return
        tasks = self.run(lambda: tasks_of(recipe))
        if tasks is None:
            return
        self.lines.append(str(tasks))
        if (found := self.run(partial(check_tasks, recipe, tasks))) is None:
            return  # as in the run; below, environments that cannot be created would say the same
        self.lines += found
        if renderer is not None:
            for one, _, training, held_out in parts_of(environment, tasks, evaluated):
                first = next(seed for seeds in (training, *held_out) for seed in seeds)
                self.run(partial(_render, one, first, renderer))
            if not isinstance(recipe, SupervisedRecipe):
                left_out = self.run(lambda: too_long(environment, recipe.rollout, renderer, tasks, evaluated))
                self.lines += left_out[1] if left_out is not None else []


def _render(environment: EnvironmentRecipe, seed: int, renderer: Renderer) -> None:
    made = environment_class(environment.type)(environment)
    first = allowed(require_observation, made.reset(seed), environment, seed)
    renderer.prompt(first.messages, made.primer, first.tools)
