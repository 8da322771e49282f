"""Small studies: on stand-ins for runs, whose metrics follow a formula, and on real runs of a tiny model."""

import json
import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import sqlalchemy
from sqlalchemy.engine import Engine

from posttrain.cli.main import main
from posttrain.recipe.sources import dump_values
from posttrain.runs.directory import RunDirectory
from posttrain.tune.trial import Attempt

LETTERS = Path(__file__).parents[1] / "training" / "letters.py"
SEARCH = {
    "optimizer.learning_rate": {"low": 1e-6, "high": 1e-2, "log": True},
    "rollout.episodes_per_group": {"low": 2, "high": 9, "int": True},
}


def study_values(**changes: Any) -> dict[str, Any]:
    """Six trials of RL, judged by the return."""
    values = {
        "stage": "tune",
        "name": "s",
        "runs": "runs",
        "keys": {"stage": "rl", "environment": {"type": "bandit"}, "steps": 4},
        "search": SEARCH,
        "objective": {"metric": "return", "direction": "maximize"},
        "sampler": {"seed": 1, "startup_trials": 2},
        "trials": 6,
    }
    merged = values | changes
    return {key: value for key, value in merged.items() if value is not None}


def tune(folder: Path, *words: str, **changes: Any) -> int:
    """Write the study to `folder` and run it there, by the command line; its exit code."""
    (folder / "s.yaml").write_text(dump_values(study_values(**changes)))
    before = Path.cwd()
    os.chdir(folder)
    try:
        return main(["tune", "s.yaml", "--trust", *words])
    finally:
        os.chdir(before)


def trials(folder: Path, name: str = "s") -> list[optuna.trial.FrozenTrial]:
    """All trials, as any user of Optuna reads them."""
    study = optuna.load_study(study_name=name, storage=f"sqlite:///{folder}/runs/{name}/study.db")
    return study.get_trials()


def summary(folder: Path) -> list[tuple[Any, ...]]:
    """What must not depend on interruptions: number, state, parameters, value, intermediate values, user attributes."""
    return [
        (
            t.number,
            t.state.name,
            t.params,
            t.value,
            t.intermediate_values,
            t.constraints,
            {k: v for k, v in t.user_attrs.items() if k not in ("owner", "minutes")},
        )
        for t in trials(folder)
    ]


def quality(recipe: Any) -> float:
    """The stand-in's truth: best at a learning rate of 1e-4 and five episodes."""
    rate, episodes = recipe.optimizer.learning_rate, recipe.rollout.episodes_per_group
    return 1 - 0.1 * (math.log10(rate) + 4) ** 2 - 0.02 * (episodes - 5) ** 2 + 0.001 * recipe.seed


def stand_in(monkeypatch: Any, measure: Callable[[Any, int], dict[str, Any]] | None = None) -> list[str]:
    """Replace processes by a formula: `measure(recipe, step)` gives an evaluation's values.

    Returns the runs begun.

    The metric grows to `quality` in four evaluations; a learning rate above 3e-3 is killed after the second.
    """
    # A stand-in needs no machine, and nothing here outlives a power failure; both would take most of the time.
    monkeypatch.setattr("posttrain.runs.directory.describe_machine", dict)
    if not sqlalchemy.event.contains(Engine, "connect", _without_sync):
        sqlalchemy.event.listen(Engine, "connect", _without_sync)
    begun: list[str] = []
    measure = measure or (lambda recipe, step: {"return": quality(recipe) * step / 4})

    def start(attempt: Attempt, device: str | None) -> None:
        recipe = attempt.recipe
        begun.append(recipe.name)
        if not attempt.run.path.exists():
            RunDirectory.create(recipe)
        dies = recipe.optimizer.learning_rate > 3e-3
        lines = [{"step": 0, "kind": "evaluation", "time/run": 0.0, "return": 9.0}]
        for step in range(1, 3 if dies else 5):
            kl = {"policy/kl": 100 * recipe.optimizer.learning_rate * step}
            lines.append({"step": step, "kind": "train", "time/run": 60.0 * step, **kl})
            lines.append({"step": step, "kind": "evaluation", "time/run": 60.0 * step, **measure(recipe, step)})
        attempt.run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
        if dies:
            attempt._process = _Dead(-signal.SIGKILL)
        else:
            attempt.run.report.write_text("done")

    monkeypatch.setattr(Attempt, "start", start)
    return begun


def _without_sync(connection: Any, record: object) -> None:
    connection.execute("PRAGMA synchronous = OFF")


class _Dead:
    """A process that has ended."""

    def __init__(self, exitcode: int) -> None:
        self.exitcode = exitcode

    def is_alive(self) -> bool:
        return False

    def terminate(self) -> None:
        pass
