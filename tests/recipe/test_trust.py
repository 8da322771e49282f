"""Marks of recipe keys, and trust in what a recipe executes, loads, connects to and writes."""

import json
import stat
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest

from posttrain.environments.rewards import BUILT_IN
from posttrain.environments.text_task import WeightedRewardRecipe
from posttrain.errors import InputError
from posttrain.plugins import trusting
from posttrain.recipe.base import BaseConfig
from posttrain.recipe.compose import load_recipe
from posttrain.recipe.pipeline import load_pipeline
from posttrain.recipe.sources import Layer, dump_values, read_text
from posttrain.recipe.stages import STAGES
from posttrain.recipe.study import load_study
from posttrain.recipe.trust import remember, require_trust_of_run, uses
from tests.recipe.marks import marked_keys, table

FILE = Path("runs/a/recipe.yaml")


@pytest.fixture(scope="module")
def keys():
    return marked_keys()


def test_every_key_that_takes_text_has_a_mark_and_is_found_in_the_values_of_a_recipe(keys):
    plain = (bool, int, float, type(None))
    unmarked = [leaf for found in keys.values() for leaf in found if leaf.mark is None and leaf.part not in plain]
    assert [leaf.key for leaf in unmarked if get_origin(leaf.part) is not Literal] == []
    assert sum(leaf.mark is not None for leaf in keys["rl"]) > 150
    for stage, schema in STAGES.items():
        for key, part, mark, wrap in keys[stage]:
            if mark is None:
                continue
            other: Any = ["wandb"] if key == "sinks" else {"x": "y"}
            value = {bool: True, str: "x.y:z"}.get(part, other)
            found = [(use.does, use.value) for use in uses(schema, wrap(value))]
            if mark.needs_trust:
                does = "executes" if key.endswith("environment.type") else mark.does
                assert does in [one for one, _ in found], key
                assert any(value == used or value in used.values() for _, used in found if used), key
            else:
                assert found == [], key


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"environment": {"type": "text_task", "reward": ["exact", {"function": "final_number"}]}}, []),
        ({"environment": {"type": "text_task", "reward": ["exact", "a.py:f"]}}, ["environment.reward.1"]),
        ({"environment": {"type": "text_task", "mcp": [{"url": "http://x"}]}}, ["environment.mcp.0.url"]),
        ({"environment": {"type": "gymnasium", "id": "FrozenLake-v1", "keys": {}}}, []),
        ({"environment": {"type": "gymnasium", "keys": {"size": 4}}}, ["environment.keys"]),
        ({"environment": {"type": "x.y:Own", "letters": "ab", "n": 1}}, ["environment.type", "environment.letters"]),
        ({"environment": {"type": ["bandit"]}}, ["environment.type"]),
        ({"environment": "x.py"}, ["environment"]),
        ({"evaluation": {"environment": {"tools": ["os:system"]}}}, ["evaluation.environment.tools"]),
        ({"engine": {"type": "vllm", "python": "x", "urls": "http://x"}}, ["engine.urls", "engine.python"]),
        ({"engine": {"type": "vllm", "python": None}, "model": {"trust_remote_code": False}}, []),
        ({"hardware": {"ray": "auto"}}, []),
        ({"hardware": {"ray": "ray://x:1"}}, ["hardware.ray"]),
        ({"ptx": {"data": {"train": ["a.jsonl", {"path": "b"}], "cache": "/x"}}}, ["ptx.data.cache"]),
        ({"model": "x", "steps": "y", "agent": 3, "credit": {"type": "none"}, "no": {"such": "key"}}, ["model"]),
    ],
    ids=str,
)
def test_uses_of_values_as_they_stand_in_a_file(values, named):
    assert list(dict.fromkeys(use.key for use in uses(STAGES["rl"], values))) == named


def test_an_unmarked_text_of_a_plugin_counts_as_code_and_the_name_of_a_built_in_reward_does_not():
    class Plugin(BaseConfig):
        script: str = ""
        options: dict[str, object] = {}
        count: int = 1

    found = uses(Plugin, {"script": "x", "options": {"a": [1, "b"]}, "count": 2})
    assert [(use.key, use.does) for use in found] == [("script", "executes"), ("options.a", "executes")]
    assert set(get_args(get_args(WeightedRewardRecipe.model_fields["function"].annotation)[0])) == set(BUILT_IN)


def refused(values, layers=()):
    FILE.parent.mkdir(parents=True, exist_ok=True)
    FILE.with_name("environment.json").touch()
    with trusting([]):
        try:
            require_trust_of_run(FILE, values, "rl", layers)
        except InputError as error:
            return str(error)
    return ""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    Path("own.py").write_text("def f(answer): return 1.0\n")
    Path("rows.jsonl").write_text("{}\n")
    return tmp_path


def own(*words):
    words = words or ("environment.reward=own.py:f",)
    return load_recipe([], ["environment.type=text_task", "environment.prompts=rows.jsonl", *words], "rl")


def test_what_an_earlier_command_used_in_this_folder_needs_no_trust_until_it_changes(folder, monkeypatch):
    recipe = own()
    values = recipe.model_dump(mode="json")
    assert "environment.reward: own.py:f (executes)" in refused(values)
    remember(recipe)
    remember(recipe)
    assert refused(values) == ""
    (ledger,) = (folder / "state/posttrain/trusted").iterdir()
    assert stat.S_IMODE(ledger.stat().st_mode) == 0o600
    assert len(ledger.read_text().split()) == 2
    assert refused({**values, "environment": {**values["environment"], "reward": "other.py:f"}})

    Path("own.py").write_text("import os\n")
    assert "own.py:f (executes, changed since your last run)" in refused(values)
    named = [Layer({"environment": {"type": "text_task", "reward": "own.py:f"}})]
    assert refused(values, named) == ""
    remember(recipe)
    assert refused(values) == ""

    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    assert refused(values)
    monkeypatch.chdir(folder / "work")
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "fresh"))
    assert refused(values)


@pytest.mark.parametrize(
    ("words", "file"),
    [
        (("environment.tools=[own.py:f]", "environment.max_turns=2", "environment.reward=exact"), "own.py"),
        (("environment.reward=exact", "agent.command='sh run.sh --x'", "agent.reward=report"), "run.sh"),
        (
            ("environment.reward=exact", "agent.command='python -m tools.agent'", "agent.reward=report"),
            "tools/agent.py",
        ),
        (("environment.reward=exact", "agent.command='cd tools;./run.sh'", "agent.reward=report"), "tools/run.sh"),
        (("environment.reward=exact", "agent.command='node --require=./c.js x'", "agent.reward=report"), "c.js"),
        (("environment.reward=exact", "agent.command='sh -c \"./run.sh;true\"'", "agent.reward=report"), "run.sh"),
        (("environment.reward=exact", "engine.type=vllm", "engine.python=venv/bin/python"), "venv/bin/python"),
        (("environment.reward=exact", "model.chat_template=chat.jinja"), "chat.jinja"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_changed_program_or_template_needs_trust(words, file, folder):
    path = Path(file)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("before")
    remember(own(*words))
    values = own(*words).model_dump(mode="json")
    assert refused(values) == ""
    path.write_text("after")
    assert "changed since" in refused(values)


def test_code_of_a_model_and_keys_of_servers_belong_to_their_model_and_server(folder):
    for name in ("one", "two"):
        Path(name, "parts").mkdir(parents=True)
        for file in ("modeling.py", "config.json", "parts/more.py"):
            Path(name, file).write_text("before")
    words = ("environment.reward=exact", "model.trust_remote_code=true", "model.path=one")
    values = own(*words).model_dump(mode="json")
    remember(own(*words))
    assert refused(values) == ""
    assert "model.trust_remote_code" in refused({**values, "model": {**values["model"], "path": "two"}})
    for file in ("modeling.py", "config.json", "parts/more.py"):
        Path("one", file).write_text("after")
        assert "changed since" in refused(values)
        Path("one", file).write_text("before")
        assert refused(values) == ""

    judge = {"url": "http://a", "model": "m", "rubric": "r", "api_key_variable": "KEY_OF_A"}
    other = judge | {"url": "http://b", "api_key_variable": "KEY_OF_B"}
    base = {"type": "text_task", "prompts": "rows.jsonl"}
    for server in (judge, other):
        remember(load_recipe([], [f"environment={json.dumps({**base, 'judge': server})}"], "rl"))
    for server, trusted in ((judge, True), (other, True), (other | {"api_key_variable": "KEY_OF_A"}, False)):
        assert (refused({"environment": {**base, "judge": server}}) == "") == trusted


@pytest.mark.parametrize("state", ["state", "~", ""])
def test_a_state_folder_that_may_come_with_a_run_is_not_used(state, folder, monkeypatch, capsys):
    monkeypatch.setenv("XDG_STATE_HOME", state)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # a user without a home
    remember(own())
    assert "the home directory is unknown" in capsys.readouterr().err
    assert refused(own().model_dump(mode="json"))
    (folder / "file").write_text("")  # and one that cannot be written does not stop a run
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "file"))
    remember(own())
    assert "will need --trust" in capsys.readouterr().err
    assert sorted(path.name for path in Path().iterdir()) == ["own.py", "rows.jsonl", "runs"]


def test_a_run_that_a_pipeline_or_a_study_names_needs_trust_too(folder):
    values = own().model_dump(mode="json")
    FILE.parent.mkdir(parents=True)
    FILE.write_text(dump_values(values))
    FILE.with_name("environment.json").touch()
    Path("pipeline.yaml").write_text(f"name: p\nstages: [{{name: one, recipe: {FILE}}}]\n")
    search = "search: {optimizer.learning_rate: {low: 1.0e-5, high: 1.0e-4}}"
    objective = "objective: {metric: success, direction: maximize}"
    Path("study.yaml").write_text(f"name: s\nrecipe: [{FILE}]\n{objective}\n{search}\n")
    reward = "environment.reward=own.py:f"
    named = ((load_pipeline, "pipeline.yaml", f"stages.one.{reward}"), (load_study, "study.yaml", f"keys.{reward}"))
    with trusting([]):
        for load, name, allowed in named:
            with pytest.raises(InputError, match=r"environment\.reward: own\.py:f \(executes\)"):
                load(name, [])
            load(name, [allowed])
        remember(own())
        for load, name, _ in named:
            load(name, [])


@pytest.mark.parametrize(
    "tag", ["!!binary eA==", "!!set {x}", "!!omap [a: x]", "!!pairs [a: x]", "!!timestamp 2026-01-01"]
)
def test_values_that_only_become_texts_later_are_refused(tag):
    with pytest.raises(InputError, match="line 2 is not YAML: could not determine a constructor"):
        read_text(f"engine:\n  python: {tag}\n", "f")


def test_recipes_without_such_values_leave_nothing_and_python_callers_are_not_restricted(folder):
    recipe = load_recipe([], ["environment.type=bandit"], "rl")
    remember(recipe)
    assert not (folder / "state").exists()
    assert refused(recipe.model_dump(mode="json")) == ""
    require_trust_of_run(FILE, own().model_dump(mode="json"), "rl")


def test_the_security_page_lists_every_key_that_needs_trust():
    assert table() in (Path(__file__).parents[2] / "SECURITY.md").read_text()
