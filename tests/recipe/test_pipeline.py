"""Pipelines resolve to typed recipes, and every mistake names its stage."""

import pytest

from posttrain.errors import InputError
from posttrain.recipe.pipeline import load_pipeline

GOOD = """
stage: pipeline
name: demo
runs: out
common:
  seed: 5
  environment: {type: frozen_lake, size: 5}
stages:
- name: warm
  stage: sft
  epochs: 2
- name: learn
  recipe: rl.yaml
  from: warm
  max_minutes: 0.2
- name: after
  stage: evaluate
  from: learn
"""


@pytest.fixture
def pipeline(tmp_path, monkeypatch):
    """A function that writes a pipeline beside rl.yaml and loads it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "rl.yaml").write_text("stage: rl\nsteps: 7\nmax_minutes: 0.1\nname: alone\nseed: 6\n")

    def load(text, *overrides):
        (tmp_path / "parts" / "p.yaml").write_text(text)
        return load_pipeline("parts/p.yaml", list(overrides))

    return load


def test_stages_inherit_chain_and_override(pipeline):
    loaded = pipeline(GOOD, "stages.learn.steps=9", "common.environment.size=6")
    warm, learn, after = loaded.stages
    assert [stage.recipe.stage for stage in loaded.stages] == ["sft", "rl", "evaluate"]
    assert {stage.recipe.environment.size for stage in loaded.stages} == {6}
    assert (warm.recipe.seed, learn.recipe.seed) == (5, 6)
    assert (learn.recipe.steps, learn.recipe.max_minutes) == (9, 0.2)
    assert learn.recipe.model.path == "out/demo/warm/model"
    assert after.recipe.model.path == "out/demo/learn/model"
    assert (learn.recipe.runs, learn.recipe.name, learn.upstream) == ("out/demo", "learn", "warm")


def test_overrides_of_all_stages_win_over_files_and_those_of_one_stage_over_them(pipeline):
    words = ["common.seed=9", "common.model.dtype=bfloat16", "common.model.path=models/mine", "stages.after.seed=10"]
    loaded = pipeline(GOOD, *words)
    assert [stage.recipe.seed for stage in loaded.stages] == [9, 9, 10]
    assert {stage.recipe.model.dtype for stage in loaded.stages} == {"bfloat16"}
    # The first stage starts from the model; the others from the stage before them.
    assert [stage.recipe.model.path for stage in loaded.stages] == [
        "models/mine",
        "out/demo/warm/model",
        "out/demo/learn/model",
    ]
    with pytest.raises(InputError, match=r"write `common\.KEY=value`"):
        load_pipeline("parts/p.yaml", ["common=3"])


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("epochs: 2", "epochs: 0", "stage warm: parts/p.yaml line 11: epochs is 0; it must be a whole number, 1"),
        ("from: warm", "from: worm", "learn: parts/p.yaml line 14: there is no stage worm (did you mean warm?)"),
        ("from: warm", "from: after", "stage learn: parts/p.yaml line 14: it names after, which is not an earlier"),
        ("max_minutes: 0.2", "model: {path: x}", "stage learn: parts/p.yaml line 15: model.path and from: warm both"),
        ("max_minutes: 0.2", "runs: x", "stage learn: parts/p.yaml line 15: runs of a stage has no effect; set runs"),
        ("recipe: rl.yaml", "recipe: no.yaml", "stage learn: there is no recipe file parts/no.yaml; name a YAML file"),
        ("stage: sft", "stage: sftt", 'stage warm: parts/p.yaml line 10: stage is "sftt" (did you mean sft?)'),
        ("name: learn", "name: warm", "parts/p.yaml: two stages are called warm; rename one"),
        ("name: demo", "seed: 3", "parts/p.yaml line 3: there is no key seed; write common.seed"),
        ("name: demo", "name: 3", "parts/p.yaml line 3: name is 3; it must be text of up to 200 letters"),
    ],
)
def test_an_error_names_stage_location_and_remedy(pipeline, before, after, expected):
    assert before in GOOD
    with pytest.raises(InputError) as caught:
        pipeline(GOOD.replace(before, after, 1))
    assert expected in str(caught.value).splitlines()[0]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("stages.lern.steps=3", "override stages.lern.steps=3: there is no stage lern (did you mean learn?)"),
        ("stages=[]", "override stages=[]: the stages are changed one key at a time; write `stages.NAME.KEY=value`"),
    ],
)
def test_a_bad_override_of_a_stage(pipeline, override, expected):
    with pytest.raises(InputError) as caught:
        pipeline(GOOD, override)
    assert str(caught.value).startswith(expected)


def test_an_evaluation_exports_no_model(pipeline):
    with pytest.raises(InputError, match=r"stage more: .* line 21: after only evaluates"):
        pipeline(GOOD + "- name: more\n  stage: rl\n  from: after\n")


CONVERTED = """
name: chain
data: folder
common: {seed: 5}
stages:
- name: made
  stage: convert
  files:
    pairs: {converter: pairs, split: train}
    prompts: {converter: prompts}
- name: learn
  stage: reward
  data: {train: "stage:made/pairs"}
- name: play
  stage: rl
  from: learn
  environment: {type: text_task, prompts: ["stage:made/prompts", more.jsonl]}
  reward: {path: "stage:learn"}
"""


def test_a_stage_that_converts_data_gives_files_to_later_ones(pipeline):
    made, learn, play = pipeline(CONVERTED, "stages.made.files.prompts.limit=3").stages
    assert (made.recipe.stage, made.recipe.source, made.inputs) == ("convert", "folder", [])
    assert made.recipe.files["prompts"].limit == 3
    assert [source.path for source in learn.recipe.data.train] == ["runs/chain/made/pairs.jsonl"]
    prompts = [source.path for source in play.recipe.environment.prompts]
    assert prompts == ["runs/chain/made/prompts.jsonl", "more.jsonl"]
    assert (learn.inputs, sorted(play.inputs)) == (["made"], ["learn", "made"])
    assert (learn.recipe.seed, play.recipe.seed) == (5, 5)
    assert pipeline(CONVERTED, "data=/elsewhere").stages[0].recipe.source == "/elsewhere"
    assert pipeline(CONVERTED, "stages.made.source=mine").stages[0].recipe.source == "mine"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("stages.learn.data.train=stage:made/pair", "made makes no file 'pair' (did you mean pairs?)"),
        ("stages.play.reward.path=stage:learn/pairs", "learn exports a model and no files; write stage:learn"),
        ("stages.made.files.pairs.limt=3", "there is no key files.pairs.limt; the nearest is files.pairs.limit"),
    ],
)
def test_errors_about_converted_files(pipeline, override, expected):
    with pytest.raises(InputError) as caught:
        pipeline(CONVERTED, override)
    assert expected in str(caught.value)


def test_data_without_a_stage_that_converts_it_is_refused(pipeline):
    with pytest.raises(InputError, match="override data=x: data has no effect without a stage that converts it"):
        pipeline(GOOD, "data=x")


def test_a_stage_may_begin_with_several_files(pipeline, tmp_path):
    (tmp_path / "parts" / "more.yaml").write_text("steps: 8\nlearner: {updates_per_step: 2}\n")
    learn = pipeline(GOOD, "stages.learn.recipe=[rl.yaml,more.yaml]").stages[1].recipe
    assert (learn.steps, learn.max_minutes, learn.learner.updates_per_step) == (8, 0.2, 2)
    with pytest.raises(InputError, match=r"recipe is \[3\]; it must be a file or a list of files"):
        pipeline(GOOD, "stages.learn.recipe=[3]")
