"""Checks of `--dry-run`: load everything that a run loads before its model (placement, rows, tasks, scorers)."""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import TypeVar

from posttrain.data.examples import read_examples
from posttrain.data.problems import Problems
from posttrain.data.rendering import Renderer
from posttrain.data.tokens import Kind
from posttrain.engines.openai import chat_client, require_reachable
from posttrain.errors import InputError
from posttrain.models.adapters import check_targets
from posttrain.models.load import load_end_tokens, load_tokenizer, on_disk, require_reward_model
from posttrain.planning.dry_run import Played, tasks_of
from posttrain.planning.workers import placed_recipe, refuse_placement
from posttrain.recipe.components import EnvironmentRecipe, environment_class
from posttrain.recipe.data import DataRecipe, PtxRecipe, SourceRecipe
from posttrain.recipe.distill import OffPolicyRecipe
from posttrain.recipe.engines import OpenAIEngineRecipe
from posttrain.recipe.model import ModelRecipe
from posttrain.recipe.rollout import evaluated_environment
from posttrain.recipe.stages import (
    DistillRecipe,
    DpoRecipe,
    EvaluateRecipe,
    GenerateRecipe,
    Recipe,
    RewardRecipe,
    RlRecipe,
    SftRecipe,
)
from posttrain.training.completers import read_prompts
from posttrain.training.rows import FixedRows, check_labels, check_margins, load_data
from posttrain.training.tasks import check_tasks, parts_of, too_long

Result = TypeVar("Result")


def check_recipe(recipe: Recipe, made: Sequence[Path] = ()) -> list[str]:
    """Load everything that a run of `recipe` loads before its model. Returns one line per part.

    A line also names each part that cannot be checked yet: a model that has to be downloaded or converted, and files in
    the directories `made`, which earlier stages of a pipeline write.

    Raises:
        InputError: the run would stop. One sentence per problem, the same as in the run.
    """
    checks = _Checks(made)
    if getattr(recipe, "hardware", None) is not None and recipe.hardware.ray is not None:  # type: ignore[union-attr]
        checks.run(lambda: refuse_placement(placed_recipe(recipe)))
    if isinstance(recipe, GenerateRecipe | EvaluateRecipe) and recipe.remote is not None:
        checks.server(recipe.remote)
    there = [checks.model_is_there(key, path) for key, path in _models(recipe)]
    if there and there[0] and recipe.model.lora is not None:
        checks.lines += checks.run(lambda: check_targets(recipe.model, isinstance(recipe, RewardRecipe))) or []
    renderer = checks.run(lambda: _renderer(recipe.model)) if there and there[0] else None
    if renderer is not None:
        checks.lines += renderer.warnings()
    checks.rows(recipe, renderer)
    if isinstance(recipe, Played) and (environment := recipe.environment or evaluated_environment(recipe)) is not None:
        checks.tasks(recipe, environment, renderer)
    if checks.problems:
        raise InputError("\n".join(dict.fromkeys(checks.problems)))
    return checks.lines


def _models(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Keys and paths of the models that a run loads, `model.path` first; none if the model is behind a server."""
    if recipe.remote is not None:
        return
    yield "model.path", recipe.model.path
    if isinstance(recipe, RlRecipe | EvaluateRecipe) and recipe.reward is not None:
        yield "reward.path", recipe.reward.path
    if isinstance(recipe, RlRecipe) and recipe.has_critic and recipe.critic.path is not None:
        yield "critic.path", recipe.critic.path
    if isinstance(recipe, RlRecipe | DistillRecipe) and recipe.teacher is not None and recipe.teacher.path is not None:
        yield "teacher.path", recipe.teacher.path


def _renderer(model: ModelRecipe) -> Renderer:
    return _renderer_of(model.model_dump_json())


@lru_cache(maxsize=4)
def _renderer_of(model: str) -> Renderer:
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

    def server(self, engine: OpenAIEngineRecipe) -> None:
        """Check the API key and the address of the server."""
        client = self.run(
            lambda: chat_client("engine", engine.url, engine.timeout, engine.retries, engine.api_key_variable)
        )
        if client is not None:
            self.run(lambda: require_reachable("engine", client))

    def model_is_there(self, key: str, path: str) -> bool:
        if self.is_later(path):
            return False
        there = self.run(lambda: on_disk(path, key))
        if there and key == "reward.path":
            self.run(lambda: require_reward_model(path, key))
        if there is False:
            self.lines.append(f"not checked: the tokenizer of {path}, which is not on this machine yet")
        return bool(there)

    def rows(self, recipe: Recipe, renderer: Renderer | None) -> None:
        """Rows of files that are not tasks."""
        if isinstance(recipe, SftRecipe | DpoRecipe | RewardRecipe) and recipe.data is not None:
            data = recipe.data
            if not self._later_rows([*data.train, *data.validation, *data.test]):
                self.run(lambda: self._supervised(recipe, data, renderer))
        if isinstance(recipe, RlRecipe) and recipe.ptx is not None:
            self._fixed(recipe.ptx, renderer)
        if isinstance(recipe, DistillRecipe) and recipe.off_policy is not None:
            self._fixed(recipe.off_policy, renderer)
        if isinstance(recipe, GenerateRecipe) and not any(self.is_later(source.path) for source in recipe.data.test):
            prompts = self.run(lambda: read_prompts(recipe))
            if prompts is not None:
                self.lines += [f"{len(prompts[0]):,} rows to answer", *prompts[1].summary()]

    def _fixed(self, rows: PtxRecipe | OffPolicyRecipe, renderer: Renderer | None) -> None:
        if renderer is not None and not self._later_rows(rows.data.train):
            read = self.run(lambda: FixedRows(rows.data, rows.loss_on, 1, renderer, 0))
            self.lines += read.warnings if read is not None else []

    def _later_rows(self, sources: Sequence[SourceRecipe]) -> bool:
        return any(self.is_later(source.path) for source in sources)

    def _supervised(
        self, recipe: SftRecipe | DpoRecipe | RewardRecipe, data: DataRecipe, renderer: Renderer | None
    ) -> None:
        kind: Kind = "conversation" if isinstance(recipe, SftRecipe) else "pair"
        if isinstance(recipe, DpoRecipe) and recipe.loss.type == "kto":
            kind = "unpaired"
        if renderer is None:
            problems = Problems()
            for sources in (data.train, data.validation, data.test):
                if sources and next(iter(read_examples(kind, sources, data.columns, problems)), None) is None:
                    problems.require_any(", ".join(source.path for source in sources))
            problems.raise_if(data.strict)
            self.lines += problems.summary()
            return
        loss_on = recipe.loss_on if isinstance(recipe, SftRecipe) else "assistant"
        rows = load_data(kind, data, renderer, loss_on, recipe.rows_per_update, recipe.seed)
        if not data.streaming:
            self.lines.append(
                f"{len(rows.stored):,} rows to train on, {rows.updates_per_epoch:,} updates an epoch; {len(rows.validation):,} for "
                f"validation, {len(rows.test):,} for the final table"
            )
        self.lines += rows.problems.summary()
        if isinstance(recipe, RewardRecipe):
            self.lines += check_margins(recipe, rows)
        if isinstance(recipe, DpoRecipe):
            self.lines += check_labels(recipe, rows)

    def tasks(self, recipe: Played, environment: EnvironmentRecipe, renderer: Renderer | None) -> None:
        """Tasks, the functions and judges that score them, and how the chat template renders the first."""
        evaluated = recipe.evaluation.environment
        key = (environment.rows_key or "").removeprefix("environment.")
        if key and any(self.is_later(source.path) for source in getattr(environment, key)):
            return
        tasks = self.run(lambda: tasks_of(recipe))
        if tasks is None:
            return
        self.lines.append(str(tasks))
        other_reward = isinstance(recipe, DistillRecipe | SftRecipe) or recipe.reward is not None
        other_reward = other_reward or (isinstance(recipe, RlRecipe) and recipe.teacher is not None)
        self.lines += self.run(lambda: check_tasks(environment, tasks, recipe.rollout, other_reward, evaluated)) or []
        if renderer is not None:
            for one, _, training, held_out in parts_of(environment, tasks, evaluated):
                first = next(seed for seeds in (training, *held_out) for seed in seeds)
                self.run(partial(_render, one, first, renderer))
            if not isinstance(recipe, SftRecipe):
                left_out = self.run(lambda: too_long(environment, recipe.rollout, renderer, tasks, evaluated))
                self.lines += left_out[1] if left_out is not None else []


def _render(environment: EnvironmentRecipe, seed: int, renderer: Renderer) -> None:
    made = environment_class(environment.type)(environment)
    first = made.reset(seed)
    renderer.prompt(first.messages, made.primer, first.tools)
