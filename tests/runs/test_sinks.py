"""The real TensorBoard, trackio and W&B, without a network."""

import json
import sqlite3
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from posttrain.cli.main import main
from posttrain.episode import Advantages, Episode, Outcome, StopReason, Stream, Turn
from posttrain.recipe.compose import load_recipe
from posttrain.recipe.run import TrackingRecipe
from posttrain.recipe.warnings import recipe_warnings
from posttrain.runs.directory import RunDirectory
from posttrain.runs.metrics import MetricsLog, read_metrics


def events_of(run, accumulator="event_accumulator"):
    module = __import__(f"tensorboard.backend.event_processing.{accumulator}", fromlist=[""])
    events = module.EventAccumulator(str(run.logs / "tensorboard"))
    events.Reload()
    return events


def episode(number, answer, outcome=Outcome.TERMINATED):
    """Two prompt tokens and two sampled ones, with advantages whose mean is `number`."""
    sampled = np.array([False, False, True, True])
    stream = Stream(np.arange(4), sampled, np.zeros(4), np.zeros(4), sampled - 1, sampled - 1)
    turn = Turn(0, 2, 4, number / 2, StopReason.END_TOKEN, answer, {"success": number > 0})
    texts = {"system": "Toss.", "user": "heads | tails?", "assistant": answer}
    messages = [{"role": role, "content": content} for role, content in texts.items()]
    failure = "the coin is lost" if outcome is Outcome.FAILED else None
    made = Episode(7, 5, number, 0, [stream], [turn], outcome, failure, messages)
    return made, [np.array([9.0, 9.0, number - 1.0, number + 1.0])]


def batch():
    """An episode that failed, and one with markup in its answer."""
    made = [episode(0, "tails", Outcome.FAILED), episode(1, "<b>heads</b>\nagain")]
    return [one for one, _ in made], Advantages([values for _, values in made])


ROWS = [
    {"reward": None, "credit": 0.0, "success": False, "completion": "tails", "outcome": "the coin is lost"},
    {"reward": 0.5, "credit": 1.0, "success": True, "completion": "<b>heads</b>\nagain", "outcome": "terminated"},
]
SHARED = {"group": 5, "task": 7, "prompt": "[system]\nToss.\n\n[user]\nheads | tails?"}


def test_tensorboard_gets_every_number_and_drops_rewound_steps(run):
    with MetricsLog(run, ["tensorboard"]) as log:
        for step in range(1, 5):
            log.write(step, "train", {"loss/policy": step / 4, "note": "text", "flag": True, "bad": float("nan")})
            log.completions(step, *batch())
    with MetricsLog(run, ["tensorboard"]) as log:
        log.truncate_after(2)
        log.write(3, "train", {"loss/policy": 9.0})
        log.completions(3, *batch())
        log.write(3, "evaluation", {"success": 0.5})
        for policy in ("random", "optimal"):
            log.write(0, "baseline", {"policy": policy, "success": 0.25})
    events = events_of(run)
    names = ["baseline/optimal/success", "baseline/random/success", "evaluation/success", "train/loss/policy"]
    assert sorted(events.Tags()["scalars"]) == names
    read = [(event.step, event.value) for event in events.Scalars("train/loss/policy")]
    assert read == [(1, 0.25), (2, 0.5), (3, 9.0)]
    # As its text tab reads them: its accumulator ignores the first start of a session.
    texts = events_of(run, "plugin_event_accumulator").Tensors("completions/text_summary")
    assert [event.step for event in texts] == [1, 2, 3]
    lines = texts[2].tensor_proto.string_val[0].decode().splitlines()
    assert [line.count("|") for line in lines] == [9, 9, 9, 9], "a cell ends at its own bar"
    prompt = "[system] Toss.  [user] heads &#124; tails?"
    assert lines[3] == f"| 5 | 7 | {prompt} | &lt;b>heads&lt;/b> again | 0.5 | 1 | True | terminated |"


def trackio_lines(run, folder):
    """(step, values) of every line that trackio has stored."""
    with sqlite3.connect(folder / "trackio" / "games.db") as stored:
        (config,) = stored.execute("select config from configs group by config").fetchone()
        assert json.loads(config)["_Group"] == "seeds"
        assert json.loads(config)["environment"]["sides"] == 3
        for step, values in stored.execute("select step, metrics from metrics order by id"):
            values = json.loads(values)
            if "completions" in values:
                values["completions"] = values["completions"]["_value"]
            yield step, values


def wandb_lines(run, folder):
    """(step, values) of every line in the files of W&B's offline runs."""
    from wandb.proto import wandb_internal_pb2

    for path in sorted((run.logs / "wandb").glob("offline-run-*/*.wandb")):
        # Blocks of 32 KiB that hold records, or parts of them, each after a checksum, a size and a type.
        content, at, whole = path.read_bytes(), 7, b""
        while at + 7 <= len(content):
            if (room := 32768 - at % 32768) < 7:
                at += room
                continue
            size, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
            whole += content[at + 7 : at + 7 + size]
            at += 7 + size
            if kind not in (1, 4):
                continue
            record, whole = wandb_internal_pb2.Record.FromString(whole), b""
            if record.HasField("run"):
                assert (record.run.project, record.run.run_group) == ("games", "seeds")
                assert record.run.run_id == run.load_environment()["id"]
            values = {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
            if "completions/path" in values:
                table = json.loads((path.parent / "files" / json.loads(values["completions/path"])).read_text())
                rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
                yield int(values["step"]), {"completions": rows}
            elif values:
                yield int(values["step"]), {k: json.loads(v) for k, v in values.items() if k.startswith("train/")}


@pytest.mark.parametrize(
    ("name", "stored"),
    # W&B starts its own service, which takes seconds.
    [pytest.param("wandb", wandb_lines, marks=pytest.mark.slow), ("trackio", trackio_lines)],
)
def test_a_resumed_run_sends_no_step_twice(recipe, tmp_path, monkeypatch, name, stored):
    settings = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "TRACKIO_DIR": str(tmp_path / "trackio")}
    for variable, value in settings.items():
        monkeypatch.setenv(variable, value)
    pytest.importorskip(name, reason=f"needs posttrain[{name}]")
    if name == "trackio":  # it reads its folder at import
        for module in [module for module in sys.modules if module.partition(".")[0] == "trackio"]:
            monkeypatch.delitem(sys.modules, module)
    tracking = TrackingRecipe(project="games", group="seeds")
    run = RunDirectory.create(recipe.model_copy(update={"tracking": tracking}))
    for first, stop, kept in ((1, 5, 0), (3, 6, 2)):
        with MetricsLog(run, [name]) as log:
            log.truncate_after(kept)
            for step in range(first, stop):
                log.completions(step, *batch())
                log.write(step, "train", {"x": step / 4, "text": "t"})
    lines = list(stored(run, tmp_path))
    numbers = [(step, values["train/x"]) for step, values in lines if "completions" not in values]
    assert numbers == [(step, step / 4) for step in range(1, 6)]
    tables = [(step, values["completions"]) for step, values in lines if "completions" in values]
    assert tables == [(step, [SHARED | row for row in ROWS]) for step in range(1, 6)]
    assert not [line for line in read_metrics(run.metrics) if line["kind"] == "warning"]


def test_a_training_run_sends_the_completions_of_its_first_groups(tiny_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["rl", "environment.type=bandit", f"model.path={tiny_model}", "steps=2", "plots=false", "name=shown"]
    words += ["rollout.groups_per_step=2", "rollout.episodes_per_group=2", "rollout.tokens_per_turn=4"]
    words += ["evaluation.seeds.count=2", "evaluation.final_seeds.count=2", "learner.updates_per_step=1"]
    assert main([*words, "sinks=[tensorboard]", "tracking.completions=3"]) == 0
    run = RunDirectory.open("runs/shown")
    events = events_of(run).Tensors("completions/text_summary")
    assert [event.step for event in events] == [1, 2]
    rows = [line.split(" | ") for line in events[1].tensor_proto.string_val[0].decode().splitlines()[2:]]
    assert [row[0].strip("| ") for row in rows] == ["0", "0", "1"]
    assert json.loads((run.logs / "sinks.json").read_text())["tensorboard"]["completions"] == 2


OWN = {"project": "mine", "entity": "lab", "run_name": "third", "group": "seeds"}
VARIABLES = {"WANDB_PROJECT": "set", "WANDB_NAME": "called"}


@pytest.mark.parametrize(
    ("sink", "tracking", "variables", "expected"),
    [
        ("wandb", {}, {}, {"project": "posttrain", "entity": None, "name": "tossing"}),
        ("wandb", {}, VARIABLES, {"project": "set", "entity": None, "name": "called"}),
        ("wandb", OWN, VARIABLES, {"project": "mine", "entity": "lab", "name": "third", "group": "seeds"}),
        ("trackio", {}, VARIABLES, {"project": "posttrain", "name": "tossing-ID"}),
        ("trackio", OWN, {}, {"project": "mine", "name": "third-ID", "group": "seeds"}),
    ],
)
def test_project_entity_name_and_tags(recipe, monkeypatch, sink, tracking, variables, expected):
    given = {}

    def ignore(*values, **more):
        pass

    def init(**arguments):
        given.update(arguments)
        return SimpleNamespace(define_metric=ignore, log=ignore, finish=ignore)

    monkeypatch.setitem(sys.modules, sink, SimpleNamespace(init=init))
    for name in ("WANDB_PROJECT", "WANDB_NAME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    run = RunDirectory.create(recipe.model_copy(update={"tracking": TrackingRecipe(**tracking)}))
    with MetricsLog(run, [sink]) as log:
        log.write(1, "train", {"x": 2.0})
    assert [line["kind"] for line in read_metrics(run.metrics)] == ["train"]
    settings = {key: given[key] for key in expected}
    settings["name"] = settings["name"].replace(run.load_environment()["id"], "ID")
    assert settings == expected


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        (["tracking.project=p"], ["project"]),
        (["tracking.project=p", "tracking.entity=e", "sinks=[trackio]"], ["entity"]),
        (["tracking.project=p", "tracking.entity=e", "sinks=[wandb]"], []),
        (["tracking.completions=4", "tracking.group=g", "sinks=[tensorboard]"], ["group"]),
        (["tracking.completions=4"], ["completions"]),
        (["tracking.completions=4", "sinks=[wandb]", "data.train=x.jsonl"], ["completions"]),
    ],
)
def test_tracking_keys_that_no_sink_reads_give_a_warning(words, keys):
    warnings = recipe_warnings(load_recipe([], words, "sft" if "data.train=x.jsonl" in words else "rl"))
    assert [line.split()[0] for line in warnings if line.startswith("tracking.")] == [f"tracking.{key}" for key in keys]
