"""A study that is killed anywhere resumes to the same trials, values and best values."""

import multiprocessing
import random
from pathlib import Path

import pytest
import yaml

from tests.training import small

from . import studies

GROUPS = [
    {"name": "one", "grid": {"rollout.groups_per_step": [2, 4], "rollout.episodes_per_group": [4, 6]}},
    {"name": "two", "grid": {"optimizer.learning_rate": [1e-5, 1e-4]}},
]
KILLED = {
    "search": {"pruner": {"type": "median", "startup_trials": 2}, "start": [{"optimizer.learning_rate": 9e-3}]},
    "groups": {"search": None, "trials": None, "groups": GROUPS},
}
COMMIT = "sqlalchemy.engine.default:DefaultDialect.do_commit"
PLACES = {
    "early": (COMMIT, 5, 30),
    "storage": (COMMIT, 30, 60),
    "late": (COMMIT, 60, 90),
    "run": ("posttrain.runs.directory:RunDirectory.create", 1, 6),
    "file": ("posttrain.tune.study:write_atomically", 1, 1),
    "report": ("posttrain.tune.run:write_report", 1, 1),
    "best": ("posttrain.tune.run:write_best", 1, 1),
}
"""Where the study is killed, and at which call: the first and the last that is tried."""
QUICK = [("search", "late"), ("search", "run"), ("groups", "report"), ("groups", "best")]
"""Kinds and places that are not slow tests."""


def best(folder):
    return yaml.safe_load((folder / "runs/s/best.yaml").read_text())


@pytest.fixture(autouse=True)
def begun(monkeypatch):
    return studies.stand_in(monkeypatch)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted search with groups, and all results that a kill must not change."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        studies.stand_in(patch)
        for name, changes in KILLED.items():
            folder = tmp_path_factory.mktemp(name)
            assert studies.tune(folder, **changes) == 0
            found[name] = (studies.summary(folder), best(folder))
    assert {trial[1] for trial in found["search"][0]} == {"FAIL", "COMPLETE", "PRUNED"}
    return found


def kill_and_go_on(folder: Path, kind: str, deaths: list[tuple[str, int]]) -> list[int | None]:
    """The exit codes of the processes to be killed; some may have finished before."""
    ended = []
    for what, call in deaths:
        process = multiprocessing.get_context("fork").Process(target=_die, args=(folder, kind, what, call))
        process.start()
        process.join()
        ended.append(process.exitcode)
    assert studies.tune(folder, *_resume(folder), **KILLED[kind]) == 0
    return ended


def _die(folder: Path, kind: str, what: str, call: int) -> None:
    small._arm(what, call)
    raise SystemExit(studies.tune(folder, *_resume(folder), **KILLED[kind]))


def _resume(folder: Path) -> list[str]:
    return ["--resume"] if (folder / "runs/s/study.yaml").exists() else []


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        pytest.param(kind, place, marks=[] if (kind, place) in QUICK else pytest.mark.slow)
        for place in PLACES
        for kind in KILLED
    ],
)
def test_it_resumes_after_a_kill(tmp_path, whole, kind, place, request):
    draw = random.Random(request.node.name)
    what, first, last = PLACES[place]
    assert kill_and_go_on(tmp_path, kind, [(what, draw.randint(first, last))]) == [-9]
    assert (studies.summary(tmp_path), best(tmp_path)) == whole[kind]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KILLED)
@pytest.mark.parametrize("chain", range(10))
def test_killed_many_times_anywhere(tmp_path, whole, kind, chain):
    draw = random.Random(f"{kind} {chain}")
    deaths = [(COMMIT, draw.randint(1, 60)) for _ in range(6)]
    assert -9 in kill_and_go_on(tmp_path, kind, deaths)
    assert (studies.summary(tmp_path), best(tmp_path)) == whole[kind]
