"""One function per stage, like the commands of the command line.

    result = posttrain.rl("recipe.yaml", steps=20, optimizer={"learning_rate": 1e-5})
    result.evaluation, result.model

A recipe is given as paths of YAML files, mappings or typed recipes, merged left to right. Keyword arguments override its
keys: `steps=20`, `rollout={"groups_per_step": 4}`, or dotted with `**{"rollout.groups_per_step": 4}`.
"""

import difflib
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.errors import InputError, require_type
from posttrain.recipe.base import BaseConfig
from posttrain.recipe.compose import merge_typed, plain_values, typed_recipe
from posttrain.recipe.pipeline import load_pipeline
from posttrain.recipe.sources import Layer, read_file, texts, walk
from posttrain.recipe.stages import STAGES, EvaluateRecipe, Recipe
from posttrain.recipe.trust import require_trust_of_run
from posttrain.result import Result
from posttrain.runs.directory import RunDirectory, exported_model
from posttrain.terminal import printable

if TYPE_CHECKING:
    from rich.console import Console

    from posttrain.engines.protocol import Engine
    from posttrain.models.policy import Policy
    from posttrain.recipe.engines import LocalEngineRecipe
    from posttrain.training.trainer import Callback

    MakeEngine = Callable[[Policy, LocalEngineRecipe], Engine]

RecipeLike = str | Path | Mapping[str, Any] | BaseConfig | Layer
"""The path of a YAML file, a mapping, a typed recipe or an override of the command line."""
Reward = Callable[..., Any] | Sequence[Callable[..., Any] | tuple[Callable[..., Any], float]]
"""`reward(prompt, answer, **row)`, or a list of functions or of tuples of a function and its weight, see `docs/reference/python.md`."""


def sft(
    *recipe: RecipeLike,
    callbacks: Sequence["Callback"] = (),
    resume: str | Path | None = None,
    fall_back: bool = False,
    overwrite: bool = False,
    console: "Console | None" = None,
    **overrides: Any,
) -> Result:
    """Train a policy on conversations, or on the traces of an environment's expert.

        posttrain.sft(data={"train": "conversations.jsonl", "held_out": 100}, name="first")

    Args:
        recipe: recipes of stage `sft`, merged left to right.
        callbacks: called during the run, see `Callback`.
        resume: the directory of a run to continue. Only `steps` and `hardware` may then be overridden.
        fall_back: with `resume`, set damaged checkpoints aside and continue from the newest intact one.
        overwrite: delete a run of the same name first.
        console: rich console for progress; default: standard output.
        overrides: keys of the recipe.

    Raises:
        InputError: wrong input; one sentence per problem.
        RunError: the run could not continue. Its checkpoints are kept.
    """
    return _run("sft", recipe, overrides, callbacks, resume, overwrite, console, fall_back=fall_back)


def reward(
    *recipe: RecipeLike,
    callbacks: Sequence["Callback"] = (),
    resume: str | Path | None = None,
    fall_back: bool = False,
    overwrite: bool = False,
    console: "Console | None" = None,
    **overrides: Any,
) -> Result:
    """Train a reward model on pairs of answers. Arguments and errors as for `sft`.

    posttrain.reward(data={"train": "pairs.jsonl", "held_out": 100}, name="rm")
    """
    return _run("reward", recipe, overrides, callbacks, resume, overwrite, console, fall_back=fall_back)


def dpo(
    *recipe: RecipeLike,
    callbacks: Sequence["Callback"] = (),
    resume: str | Path | None = None,
    fall_back: bool = False,
    overwrite: bool = False,
    console: "Console | None" = None,
    **overrides: Any,
) -> Result:
    """Optimize a policy on preferences. Arguments and errors as for `sft`.

    posttrain.dpo(data={"train": "pairs.jsonl", "held_out": 100}, model={"path": first.model}, name="dpo")
    """
    return _run("dpo", recipe, overrides, callbacks, resume, overwrite, console, fall_back=fall_back)


def rl(
    *recipe: RecipeLike,
    reward: Reward | Mapping[str, Any] | None = None,
    engine: "MakeEngine | Mapping[str, Any] | BaseConfig | None" = None,
    callbacks: Sequence["Callback"] = (),
    resume: str | Path | None = None,
    fall_back: bool = False,
    overwrite: bool = False,
    console: "Console | None" = None,
    **overrides: Any,
) -> Result:
    """Train a policy by reinforcement learning in an environment. Other arguments and errors as for `sft`.

        posttrain.rl(environment={"prompts": "prompts.jsonl"}, reward=lambda answer, label: float(answer == label))

    Args:
        reward: a function `(prompt, answer, **row) -> float | dict[str, float]`, which scores the answers of the
            environment `text_task`; a list of functions or of tuples of a function and its weight; or the `reward`
            section of the recipe, which names a reward model.
        engine: a function `(policy, recipe) -> Engine` that creates the engine of this process, such as a subclass of
            `LocalEngine`; or the `engine` section of the recipe.
    """
    return _run("rl", recipe, overrides, callbacks, resume, overwrite, console, reward, fall_back, engine)


def distill(
    *recipe: RecipeLike,
    reward: Reward | Mapping[str, Any] | None = None,
    callbacks: Sequence["Callback"] = (),
    resume: str | Path | None = None,
    fall_back: bool = False,
    overwrite: bool = False,
    console: "Console | None" = None,
    **overrides: Any,
) -> Result:
    """Train a policy towards a teacher on the policy's own episodes. Other arguments and errors as for `sft`.

        posttrain.distill(environment={"prompts": "prompts.jsonl"}, teacher={"path": teacher.model})

    Args:
        reward: a function that scores the answers of the environment `text_task`, as for `rl`. It only measures success
            and is not used for training.
    """
    return _run("distill", recipe, overrides, callbacks, resume, overwrite, console, reward, fall_back)


def evaluate(
    *recipe: RecipeLike,
    reward: Reward | Mapping[str, Any] | None = None,
    resume: str | Path | None = None,
    overwrite: bool = False,
    console: "Console | None" = None,
    **overrides: Any,
) -> Result:
    """Evaluate a model in an environment on held-out seeds. Arguments and errors as for `rl`.

    posttrain.evaluate(environment={"type": "frozen_lake"}, model={"path": "runs/run/model"}).evaluation
    """
    return _run("evaluate", recipe, overrides, (), resume, overwrite, console, reward)


def evaluate_checkpoints(
    *recipe: RecipeLike, overwrite: bool = False, console: "Console | None" = None, **overrides: Any
) -> dict[str, Result]:
    """Evaluate all checkpoints of the run at `model.path`, or those that match it as a pattern.

    Writes `report.md` with the scores by checkpoint, and figures of them. Finished evaluations that have not changed are not
    run again.

        posttrain.evaluate_checkpoints(environment={"type": "frozen_lake"}, model={"path": "runs/run"}, name="scores")

    Returns:
        The name of each checkpoint -> the result of its evaluation. Other arguments and errors are those of `evaluate`.
    """
    from posttrain import pipelines

    typed = read_recipe("evaluate", *recipe, **overrides)
    assert isinstance(typed, EvaluateRecipe)
    runs = pipelines.run_pipeline(pipelines.evaluate_checkpoints(typed), overwrite=overwrite, console=console)
    return {path.name: Result.open(path) for path in runs}


def generate(
    *recipe: RecipeLike,
    resume: str | Path | None = None,
    overwrite: bool = False,
    console: "Console | None" = None,
    **overrides: Any,
) -> Result:
    """Answer the rows of a data set and write a file of predictions. Arguments and errors as for `sft`.

    posttrain.generate(data={"test": "test.jsonl"}, out="predictions.jsonl")
    """
    return _run("generate", recipe, overrides, (), resume, overwrite, console)


def pipeline(
    file: str | Path,
    *changes: Layer,
    only: str | None = None,
    start_from: str | None = None,
    overwrite: bool = False,
    strict: bool = False,
    console: "Console | None" = None,
    **overrides: Any,
) -> dict[str, Result]:
    """Run the stages of a pipeline in order, each from the model of an earlier one.

    Finished stages that have not changed are not run again.

        results = posttrain.pipeline("pipeline.yaml", **{"stages.rl.steps": 50})
        results["rl"].evaluation

    Args:
        file: the pipeline's YAML file.
        changes: overrides, as parsed by the command line.
        only: run only this stage.
        start_from: run this stage and those after it.
        overwrite: run finished stages again.
        strict: NothingLearned after the first trained stage whose held-out measure did not improve.
        overrides: `name`, `runs`, `common.KEY` for every stage, `stages.NAME.KEY` for one.

    Returns:
        The name of each selected stage -> its result.
    """
    loaded = load_pipeline(str(file), [], _layers(changes, overrides))
    from posttrain.pipelines import run_pipeline  # imports torch

    check = (lambda path: Result.open(path).require_learning()) if strict else None
    runs = run_pipeline(
        loaded, only=only, start_from=start_from, overwrite=overwrite, console=console, check_trained=check
    )
    return {path.name: Result.open(path) for path in runs}


def run(
    stage: str,
    /,
    *recipe: RecipeLike,
    callbacks: Sequence["Callback"] = (),
    resume: str | Path | None = None,
    fall_back: bool = False,
    overwrite: bool = False,
    console: "Console | None" = None,
    **overrides: Any,
) -> Result:
    """Run the stage named `stage`, such as one that `register_stage` added. Other arguments and errors as for `sft`.

    posttrain.run("merge", model={"path": "runs/rl/model"}, name="merged")
    """
    if stage not in STAGES:
        raise InputError(f"there is no stage {stage}; the stages are {', '.join(STAGES)}")
    return _run(stage, recipe, overrides, callbacks, resume, overwrite, console, fall_back=fall_back)


_VERBS: dict[str, Callable[..., Result]] = {
    verb.__name__: verb for verb in (sft, reward, dpo, rl, distill, evaluate, generate)
}


_ROWS = (".jsonl", ".jsonl.gz", ".parquet", ".csv")
"""Endings of files of rows."""


def read_recipe(stage: str, /, *recipe: RecipeLike, resume: str | Path | None = None, **overrides: Any) -> Recipe:
    """The typed recipe that the function of `stage` runs for these arguments. InputError as `sft`."""
    if resume is not None and not all(isinstance(part, Layer) for part in recipe):
        raise InputError(f"--resume {resume} continues with the recipe of that run; remove the recipe argument")
    for part in recipe:
        if isinstance(part, str | Path) and str(part).lower().endswith(_ROWS):
            key = {"generate": "data.test"}.get(stage, "data.train")
            if "environment" in STAGES[stage].model_fields and stage != "sft":
                key = "environment.type=text_task environment.prompts"
            raise InputError(f"{part} contains rows and is not a recipe; write {key}={part}")
    if stage == "evaluate":
        recipe = tuple(_with_runs(recipe))
    layers = _layers(recipe, overrides)
    for part, layer in zip(recipe, layers, strict=False):
        if isinstance(part, str | Path):
            require_trust_of_run(Path(part), layer.values, stage)
    return typed_recipe(merge_typed(layers, stage), stage) if resume is None else _resumed(stage, layers, Path(resume))


def _run(
    stage: str,
    recipe: Sequence[RecipeLike],
    overrides: Mapping[str, Any],
    callbacks: Sequence["Callback"],
    resume: str | Path | None,
    overwrite: bool,
    console: "Console | None",
    reward: Reward | Mapping[str, Any] | None = None,
    fall_back: bool = False,
    engine: "MakeEngine | Mapping[str, Any] | BaseConfig | None" = None,
) -> Result:
    known = STAGES[stage].model_fields
    parameters = [
        name for name in inspect.signature(_VERBS.get(stage, run)).parameters if name not in ("recipe", "overrides")
    ]
    for key in [key for key in overrides if key.partition(".")[0] not in known]:
        near = ["callbacks"] if key.startswith("on_") else difflib.get_close_matches(key, parameters, 1)
        if near and near[0] in parameters:
            raise InputError(f"posttrain.{stage} has no argument `{key}`; the nearest is `{near[0]}`")
    require_type("callbacks", callbacks, Sequence)
    for callback in callbacks:
        if isinstance(callback, str | type) or not hasattr(callback, "on_step"):
            raise InputError(f"the argument `callbacks` has {callback!r:.60}; pass objects of posttrain.Callback")
    require_type("resume", resume, str, Path, type(None))
    require_type("fall_back", fall_back, bool)
    require_type("overwrite", overwrite, bool)
    if resume is not None and overwrite:
        raise InputError("`resume` continues a run and `overwrite` deletes it; give only one of them")
    if fall_back and resume is None:
        raise InputError("`fall_back` chooses an older checkpoint of a run to resume; give `resume` as well")
    if isinstance(reward, Mapping | BaseConfig):
        overrides = {**overrides, "reward": reward}
    elif reward is not None:
        from posttrain.environments.rewards import register_reward

        name: Any
        if isinstance(reward, list):
            weighted = [one if isinstance(one, tuple) else (one, 1.0) for one in reward]
            name = [{"function": register_reward(function), "weight": weight} for function, weight in weighted]
        else:
            name = register_reward(reward)  # type: ignore[arg-type]
        if resume is None:
            recipe = [{"environment": {"type": "text_task"}}, *recipe]
            overrides = {**overrides, "environment.reward": name}
    make_engine = engine if callable(engine) else None
    if engine is not None and make_engine is None:
        overrides = {**overrides, "engine": engine}
    typed = read_recipe(stage, *recipe, resume=resume, **overrides)
    from posttrain.stages import run_stage

    if resume is not None and fall_back:
        from posttrain.training.checkpoint import Checkpoints

        directory = RunDirectory.open(resume)
        with directory.lock():
            checkpoints = Checkpoints(directory.checkpoints, directory.load_environment()["id"], typed.checkpoint)  # type: ignore[attr-defined]
            for message in checkpoints.fall_back():
                print(printable(f"warning: {message}"), file=sys.stderr)
    placed: AbstractContextManager[None] = nullcontext()
    if make_engine is not None:
        hardware = typed.hardware  # type: ignore[attr-defined]
        if hardware.ray is not None or hardware.learners > 1:
            raise InputError(
                "`engine` is a function of this process; set hardware.processes to 1 and remove hardware.ray"
            )
        from posttrain.engines.factory import open_engine

        placed = open_engine.placed_by(lambda policy, engine, *rest: make_engine(policy, engine))
    with original_folder(resume), placed:
        done = run_stage(typed, resume=resume is not None, overwrite=overwrite, console=console, callbacks=callbacks)
    return Result.open(done.path)


@contextmanager
def original_folder(resume: str | Path | None) -> Iterator[None]:
    """If a file is missing but exists in the folder in which the run was started, add that folder to the InputError."""
    try:
        yield
    except InputError as error:
        run = RunDirectory.open(resume) if resume is not None else None
        began = None if run is None else run.load_environment().get("folder")
        if run is None or began is None or Path(began) == Path.cwd():
            raise
        named = [re.sub(r"(?<=\.py):.*", "", text) for text in texts(read_file(str(run.recipe_file)).values)]
        if any((Path(began) / n).exists() and not Path(n).exists() for n in named if n in str(error)):
            raise InputError(f"{error}; the run was started in {began}, so resume it there") from error
        raise


def _with_runs(recipe: Sequence[RecipeLike]) -> Iterator[RecipeLike]:
    """The parts of a recipe of `evaluate`, in which a run stands for its recipe, and so its final tasks, and its model."""
    for part in recipe:
        if isinstance(part, str | Path) and (Path(part) / "recipe.yaml").is_file():
            yield Path(part) / "recipe.yaml"
            yield {"model": {"path": str(exported_model(Path(part)))}}
        else:
            yield part


def _layers(recipe: Sequence[RecipeLike], overrides: Mapping[str, Any]) -> list[Layer]:
    layers = []
    for part in recipe:
        if not isinstance(part, Layer):
            require_type("recipe", part, str, Path, Mapping, BaseConfig)
            part = read_file(str(part)) if isinstance(part, str | Path) else Layer(plain_values(part))
        layers.append(part)
    for key, value in overrides.items():
        values = plain_values({key: value})
        layers.append(Layer(values, dict.fromkeys((path for path, _ in walk(values) if path), f"argument {key}")))
    return layers


def _resumed(stage: str, layers: Sequence[Layer], run: Path) -> Recipe:
    """The recipe of the run in the directory `run`, with more `steps` or on other `hardware` where `layers` change those.

    InputError for any other change, because a resumed run keeps its settings, and for what needs trust.
    """
    directory = RunDirectory.open(run)
    begun = read_file(str(directory.recipe_file))
    for layer in layers:
        changed = [key for key in layer.values if key not in ("steps", "hardware")]
        if (changed or len(layer.values) != 1) and merge_typed([begun, layer], stage).values != begun.values:
            where = next(iter(layer.origins.values()), "the recipe")
            raise InputError(
                f"{where}: a resumed run keeps its recipe, except for steps and hardware; start a run with another name"
            )
    place = directory.path.resolve()
    # The run may have been moved or renamed; it continues at its current location and not in its `runs`.
    require_trust_of_run(directory.recipe_file, {**begun.values, "runs": "runs"}, stage, layers)
    recipe = typed_recipe(merge_typed([begun, *layers], stage), stage)
    done, steps = directory.saved_step(), getattr(recipe, "steps", None)
    if steps is not None and steps < done:
        raise InputError(
            f"--resume {run}: {done} steps are done and saved, more than steps = {steps}; set steps above {done}, or "
            "start a run with another name"
        )
    if (Path(recipe.runs) / recipe.name).resolve() == place:
        return recipe
    return recipe.model_copy(update={"runs": str(place.parent), "name": place.name})
