"""Checkpoints that were evaluated by separate runs (`posttrain evaluate`), as evaluations of their training run."""

import json
import math
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.errors import PosttrainError
from posttrain.recipe.rollout import evaluated_environment
from posttrain.recipe.run import StageRecipe
from posttrain.runs.directory import RunDirectory
from posttrain.runs.log import Line, Log, read_log
from posttrain.runs.metrics import RESERVED

if TYPE_CHECKING:
    from posttrain.runs.sources import Source


def checkpoint_at(model: str) -> tuple[str, int] | None:
    """The training run and the step of the model at a `model.path`; None for a model that is not known to be a checkpoint.

    A checkpoint is `RUN/checkpoints/step_N/policy`, the exported `RUN/model`, or a model whose name ends in `step` and a
    number, such as a published one.
    """
    path = Path(model)
    folder = path.parent if path.name == "policy" else path
    if (match := re.fullmatch(r"step_(\d+)", folder.name)) and folder.parent.name == "checkpoints":
        return str(folder.parent.parent), int(match[1])
    if path.name == "model":
        steps = [line["best_step"] for line in _lines(path.parent) if "best_step" in line]
        return (str(path.parent), steps[-1]) if steps else None
    published = re.fullmatch(r"(.*?)[-_/]*step[-_]?(\d+)", model)
    return (published[1], int(published[2])) if published else None


def checkpoint_of(run: "Source") -> tuple[str, int] | None:
    """The training run and the step of the model that a run evaluated; None for other runs and models."""
    return checkpoint_at(run.model) if run.stage == "evaluate" else None


def evaluated_checkpoints(runs: Sequence["Source"]) -> dict[str, Log]:
    """Training run -> its training steps, and an evaluation line for each of `runs` that evaluated one of its checkpoints.

    The initial model of the training is step 0. A number after the name distinguishes evaluations in different
    environments or on different tasks.
    """
    placed: dict[tuple[str, str], dict[int, Line]] = {}
    started: list[tuple[str, str, Line]] = []
    for run in runs:
        final = dict(run.final)
        if run.stage != "evaluate" or run.recipe is None or not final:
            continue
        about = json.dumps(
            [run.recipe.get(key) for key in ("environment", "rollout", "evaluation", "reward", "agent")], sort_keys=True
        )
        if (checkpoint := checkpoint_of(run)) is None:
            started.append((run.model, about, final))
            continue
        placed.setdefault((checkpoint[0], about), {})[checkpoint[1]] = final
    for model, about, final in started:
        for (trained, same), steps in placed.items():
            with suppress(PosttrainError):  # the training run may be gone
                if same == about and model == RunDirectory.open(Path(trained)).load_recipe().model.path:
                    steps.setdefault(0, final)
    groups: dict[str, Log] = {}
    for (trained, _), steps in placed.items():
        name = Path(trained).name
        number = sum(other == name or other.startswith(f"{name} (") for other in groups)
        lines = [{**final, "kind": "evaluation", "step": step} for step, final in sorted(steps.items())]
        groups[f"{name} ({number + 1})" if number else name] = _lines(Path(trained)).with_lines(lines)
    return groups


_SAME = {
    "model": lambda model: {key: value for key, value in model.items() if key not in ("path", "threads")},
    "engine": lambda engine: engine,
    "seed": lambda seed: seed,
    "rollout": lambda rollout: {key: rollout.get(key) for key in ("tokens_per_turn", "tokens_per_episode", "failures")},
    "evaluation": lambda evaluation: {
        key: evaluation.get(key) for key in ("sampling", "seeds", "final_seeds", "held_out", "episodes_per_seed")
    },
}
"""Keys of a recipe that final episodes depend on -> function that selects the relevant part of the value."""


@dataclass(frozen=True)
class StartValues:
    """Values of an initial model that the run that trained it has measured."""

    final: dict[str, Any]
    """On the final data."""
    curve: dict[str, Any]
    """On the data of the learning curve; empty if that run did not measure them."""
    run: RunDirectory
    step: int
    """The step of that run whose model it is."""


def start_values(recipe: StageRecipe) -> StartValues | None:
    """The values of the initial model of a training run of `recipe`, if the run that trained it measured them.

    That run must have played the same held-out episodes with the same settings, and its files must be unchanged.
    Otherwise None, and the episodes must be played.
    """
    path = Path(recipe.model.path)
    run, weights = path.parent, [*path.glob("*.safetensors")]
    if path.name != "model" or not weights or not (run / "results.json").is_file():
        return None
    try:
        earlier = RunDirectory.open(run).load_recipe()
    except PosttrainError:
        return None
    scored = any(getattr(each, "reward", None) is not None for each in (recipe, earlier))
    if scored or max(file.stat().st_mtime for file in weights) > (run / "results.json").stat().st_mtime:
        return None
    settings = [_final_settings(each) for each in (recipe, earlier)]
    if None in settings or settings[0] != settings[1]:
        return None
    lines = _lines(run)
    finals = [line for line in lines if line["kind"] == "final" and "best_step" in line and "episodes" in line]
    if not finals:
        return None
    step = finals[-1]["best_step"]
    curve = [line for line in lines if line["kind"] == "evaluation" and line["step"] == step]
    # As they were measured, without what the lines say about their run.
    about_the_run = (*RESERVED, "policy", "best_step", "chosen")
    final, *at_step = (
        {key: value for key, value in line.items() if key not in about_the_run}
        | {key: math.nan for key in line.get("nonfinite", ()) if line.get(key) is None}
        for line in (finals[-1], *curve)
    )
    return StartValues(final, at_step[-1] if at_step else {}, RunDirectory.open(run), step)


def _final_settings(recipe: StageRecipe) -> dict[str, Any] | None:
    """The settings that final episodes of a training run depend on; None for stages without episodes."""
    values, environment = recipe.model_dump(mode="json"), evaluated_environment(recipe)
    if environment is None or any(key not in values for key in _SAME):
        return None
    return {key: select(values[key]) for key, select in _SAME.items()} | {
        "environment": environment.model_dump(mode="json")
    }


def _lines(run: Path) -> Log:
    """The metrics of a run; empty if there is no run."""
    try:
        return read_log(RunDirectory.open(run).metrics)
    except PosttrainError:
        return Log()
