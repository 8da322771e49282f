"""Two small runs that have ended: reinforcement learning with a whole model, and fine-tuning with adapters."""

import json
from pathlib import Path

import pytest

from posttrain.cli.main import main
from posttrain.runs.directory import RunDirectory
from tests.conftest import save_tiny_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """The folder of the runs, with a base model that states its licence."""
    place = tmp_path_factory.mktemp("publishing")
    save_tiny_model(place / "base")
    (place / "base/README.md").write_text("---\nlicense: mit\n---\n# base\n")
    return place


@pytest.fixture(scope="session")
def played(folder) -> RunDirectory:
    words = ["steps=1", "rollout.groups_per_step=2", "rollout.episodes_per_group=2", "rollout.tokens_per_turn=4"]
    words += ["evaluation.seeds.count=2", "evaluation.final_seeds.count=3", "evaluation.every=0", "plots=false"]
    given = [f"model.path={folder}/base", f"runs={folder}/runs", "name=played", "environment.type=bandit"]
    assert main(["rl", *given, *words]) == 0
    return RunDirectory.open(folder / "runs/played")


@pytest.fixture(scope="session")
def adapted(folder) -> RunDirectory:
    rows = [{"prompt": f"Say {n}.", "completion": f"{n}"} for n in range(12)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["model.lora.rank=2", "model.lora.export=adapter", "rows_per_update=4", "steps=1", "plots=false"]
    words += [f"data.train={folder}/rows.jsonl", "data.held_out=4", f"data.cache={folder}/cache"]
    assert main(["sft", f"model.path={folder}/base", f"runs={folder}/runs", "name=adapted", *words]) == 0
    return RunDirectory.open(folder / "runs/adapted")
