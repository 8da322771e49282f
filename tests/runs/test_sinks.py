"""The real TensorBoard, and fake modules for the other two."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from posttrain.recipe.compose import load_recipe
from posttrain.recipe.run import TrackingRecipe
from posttrain.recipe.stages import RlRecipe
from posttrain.recipe.warnings import recipe_warnings
from posttrain.runs.directory import RunDirectory
from posttrain.runs.metrics import MetricsLog


def test_tensorboard_gets_every_number_and_drops_rewound_steps(run: RunDirectory) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with MetricsLog(run, ["tensorboard"]) as log:
        for step in range(1, 5):
            log.write(step, "train", {"loss/policy": step / 4, "note": "text", "flag": True, "bad": float("nan")})
        log.truncate_after(2)
        log.write(3, "train", {"loss/policy": 9.0})
        log.write(3, "evaluation", {"success": 0.5})
    events = EventAccumulator(str(run.logs / "tensorboard"))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == ["evaluation/success", "train/loss/policy"]
    read = [(event.step, event.value) for event in events.Scalars("train/loss/policy")]
    assert read == [(1, 0.25), (2, 0.5), (3, 9.0)]


class FakeRun:
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.calls.append(("axis", name, step_metric))

    def log(self, values: dict[str, float], step: int | None = None) -> None:
        self.calls.append((values, step))

    def finish(self) -> None:
        self.calls.append("finish")


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_services_get_the_recipe_and_the_numbers(run: RunDirectory, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    fake, given = FakeRun(), {}

    def init(**arguments: Any) -> FakeRun:
        given.update(arguments)
        return fake

    monkeypatch.setitem(sys.modules, name, SimpleNamespace(init=init))  # type: ignore[arg-type]
    with MetricsLog(run, [name]) as log:
        log.write(1, "train", {"x": 2.0, "text": "t"})
        log.write(2, "warning", {"message": "no numbers"})
    assert given["config"]["environment"]["sides"] == 3
    assert given["resume"] == "allow"
    logged = [call for call in fake.calls if call != "finish" and call[0] != "axis"]
    assert logged == ([({"step": 1, "train/x": 2.0}, None)] if name == "wandb" else [({"train/x": 2.0}, 1)])
    assert fake.calls[-1] == "finish"


OWN = {"project": "mine", "entity": "lab", "run_name": "third", "tags": ["gspo", "4b"]}
VARIABLES = {"WANDB_PROJECT": "set", "WANDB_NAME": "called"}


@pytest.mark.parametrize(
    ("sink", "tracking", "variables", "expected"),
    [
        ("wandb", {}, {}, {"project": "posttrain", "entity": None, "name": "tossing", "tags": None}),
        ("wandb", {}, VARIABLES, {"project": "set", "entity": None, "name": "called", "tags": None}),
        ("wandb", OWN, VARIABLES, {"project": "mine", "entity": "lab", "name": "third", "tags": ["gspo", "4b"]}),
        ("trackio", {}, VARIABLES, {"project": "posttrain", "name": "tossing-ID"}),
        ("trackio", OWN, {}, {"project": "mine", "name": "third-ID"}),
    ],
)
def test_project_entity_name_and_tags(
    recipe: RlRecipe, monkeypatch: pytest.MonkeyPatch, sink: str, tracking: dict, variables: dict, expected: dict
) -> None:
    given: dict[str, Any] = {}

    def init(**arguments: Any) -> FakeRun:
        given.update(arguments)
        return FakeRun()

    monkeypatch.setitem(sys.modules, sink, SimpleNamespace(init=init))  # type: ignore[arg-type]
    for name in ("WANDB_PROJECT", "WANDB_NAME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    run = RunDirectory.create(recipe.model_copy(update={"tracking": TrackingRecipe(**tracking)}))
    with MetricsLog(run, [sink]) as log:
        log.write(1, "train", {"x": 2.0})
    found = {key: given[key] for key in expected}
    found["name"] = found["name"].replace(run.load_environment()["id"], "ID")
    assert found == expected


def test_tracking_keys_that_no_sink_reads_give_a_warning() -> None:
    def warned(*words: str) -> list[str]:
        found = recipe_warnings(load_recipe([], [*words], "rl"))
        return [line.split()[0] for line in found if line.startswith("tracking.")]

    assert warned("tracking.project=p") == ["tracking.project"]
    assert warned("tracking.project=p", "tracking.tags=[a]", "sinks=[trackio]") == ["tracking.tags"]
    assert warned("tracking.project=p", "tracking.tags=[a]", "sinks=[wandb]") == []
