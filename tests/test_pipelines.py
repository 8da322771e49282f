"""A pipeline skips finished stages, reruns changed ones, and resumes interrupted ones."""

from functools import partial
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from posttrain import pipelines as module
from posttrain.cli.main import main
from posttrain.data.files import write_rows
from posttrain.errors import InputError
from posttrain.models.reward import RewardModel
from posttrain.pipelines import planned, run_pipeline
from posttrain.recipe.components import environment_class
from posttrain.recipe.model import ModelRecipe
from posttrain.recipe.pipeline import load_pipeline
from posttrain.runs.directory import RunDirectory
from posttrain.runs.tables import POLICY_HEADINGS, policy_tables

TEXT = """
name: p
stages:
- {name: warm, stage: sft, environment: {type: bandit}}
- {name: learn, stage: rl, from: warm}
- {name: after, stage: evaluate, from: learn}
"""


class Stages:
    """Replaces `run_stage`: makes the run and a model whose content depends on the recipe."""

    def __init__(self):
        self.calls = []
        self.interrupt = None
        self.content = {}

    def __call__(self, recipe, *, resume=False, overwrite=False, console=None):
        self.calls.append((recipe.name, "resume" if resume else "overwrite" if overwrite else "fresh"))
        path = f"{recipe.runs}/{recipe.name}"
        run = RunDirectory.open(path) if resume else RunDirectory.create(recipe, overwrite)
        if recipe.name == self.interrupt:
            raise KeyboardInterrupt
        if recipe.stage != "evaluate":
            (run.path / "model").mkdir(exist_ok=True)
            (run.path / "model" / "weights").write_text(self.content.get(recipe.name, f"{recipe.name} {recipe.seed}"))
        return run


@pytest.fixture
def stages(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recorder = Stages()
    monkeypatch.setattr(module, "run_stage", recorder)
    return recorder


def play(stages, *overrides, text=TEXT, **options):
    """Run the pipeline; returns the stages that ran, how, and the output."""
    Path("p.yaml").write_text(text)
    stages.calls = []
    console = Console(file=StringIO(), width=200)
    run_pipeline(load_pipeline("p.yaml", list(overrides)), console=console, **options)
    return stages.calls, [line for line in console.file.getvalue().splitlines() if line.startswith("stage ")]


def test_the_second_call_runs_nothing(stages):
    calls, printed = play(stages)
    assert calls == [("warm", "fresh"), ("learn", "fresh"), ("after", "fresh")]
    assert printed[0] == "stage warm: runs (not run yet)"
    assert play(stages) == ([], [f"stage {name}: finished, nothing has changed" for name in ("warm", "learn", "after")])


def test_a_changed_recipe_or_model_reruns_its_stage_and_later_stages(stages):
    play(stages)
    calls, printed = play(stages, "stages.warm.seed=1")
    # The stand-in for learn writes the same model again, so what follows it has nothing new to do.
    assert calls == [("warm", "overwrite"), ("learn", "overwrite")]
    assert printed == [
        "stage warm: runs (its recipe has changed)",
        "stage learn: runs (stage warm has changed)",
        "stage after: finished, nothing has changed",
    ]
    # The same model of a changed recipe, moved runs and other sinks change nothing.
    stages.content = {"warm": "warm 1"}
    assert play(stages, "stages.warm.seed=1", "stages.warm.epochs=2")[0] == [("warm", "overwrite")]
    Path("runs").rename("moved")
    same = ("stages.warm.seed=1", "stages.warm.epochs=2", "runs=moved", "stages.learn.sinks=[tensorboard]")
    assert play(stages, *same)[0] == []
    Path("moved/p/warm/model/weights").write_text("something else")
    calls, printed = play(stages, *same)
    assert (calls, printed[0]) == ([("warm", "overwrite")], "stage warm: runs (its exported model was modified)")


@pytest.mark.parametrize(
    ("overrides", "how", "why"),
    [
        ([], "resume", "stage learn: resumes (it was interrupted)"),
        (["stages.learn.steps=3"], "overwrite", "stage learn: runs (its recipe has changed after it was interrupted)"),
    ],
)
def test_an_interrupted_stage_is_resumed_unless_its_recipe_changed(stages, overrides, how, why):
    stages.interrupt = "learn"
    with pytest.raises(KeyboardInterrupt):
        play(stages)
    assert plan()[1:] == ["stage learn: would resume (it was interrupted)", "stage after: would run (not run yet)"]
    stages.interrupt = None
    calls, printed = play(stages, *overrides)
    assert calls == [("learn", how), ("after", "fresh")]
    assert printed[1] == why


def test_only_and_from_choose_stages(stages):
    with pytest.raises(InputError, match="stage learn uses the model of warm, which has not finished; run"):
        play(stages, only="learn")
    assert play(stages, only="warm")[0] == [("warm", "fresh")]
    assert play(stages, start_from="learn")[0] == [("learn", "fresh"), ("after", "fresh")]
    assert play(stages, only="after", overwrite=True)[0] == [("after", "overwrite")]
    for options, message in (
        ({"only": "lern"}, "--only lern: the pipeline has no such stage; its stages are warm, learn"),
        ({"only": "warm", "start_from": "warm"}, "--only and --from exclude each other"),
    ):
        with pytest.raises(InputError, match=message):
            play(stages, **options)


def test_an_excluded_stage_that_is_out_of_date_is_reported(stages):
    play(stages)
    printed = play(stages, "stages.warm.seed=1", start_from="learn")[1]
    assert printed == [
        "stage warm: out of date (its recipe has changed), but used; run it again with `--from warm`",
        "stage learn: finished, nothing has changed",
        "stage after: finished, nothing has changed",
    ]
    # Also if another stage is between them, but not if the chosen stage does not depend on it.
    assert play(stages, "stages.warm.seed=1", only="after")[1][0].startswith("stage warm: out of date (its recipe")
    assert play(stages, "stages.learn.seed=1", only="warm")[1] == ["stage warm: finished, nothing has changed"]
    assert play(stages, only="after")[1] == ["stage after: finished, nothing has changed"]


def plan(*overrides, only=None, start_from=None, overwrite=False):
    Path("p.yaml").write_text(TEXT)
    return planned(load_pipeline("p.yaml", list(overrides)), only, start_from, overwrite)


def test_a_plan_names_the_stages_that_would_run(stages):
    assert plan() == [f"stage {name}: would run (not run yet)" for name in ("warm", "learn", "after")]
    assert not Path("runs").exists()
    assert plan(start_from="learn")[:2] == [
        "stage warm: skipped (--from learn)",
        "stage learn: could not run; it uses the model of warm, which has not finished",
    ]
    play(stages)
    assert plan() == [f"stage {name}: finished, nothing has changed" for name in ("warm", "learn", "after")]
    assert plan("stages.learn.steps=3", start_from="learn") == [
        "stage warm: skipped (--from learn)",
        "stage learn: would run (its recipe has changed)",
        "stage after: would run if learn exports a different model",
    ]
    assert plan("stages.warm.seed=1", only="learn") == [
        "stage warm: out of date (its recipe has changed), but used; run it again with `--from warm`",
        "stage warm: skipped (--only learn)",
        "stage learn: finished, nothing has changed",
        "stage after: skipped (--only learn)",
    ]
    assert plan(overwrite=True) == [f"stage {name}: would run (--overwrite)" for name in ("warm", "learn", "after")]


@pytest.mark.parametrize("overrides", [[], ["stages.warm.seed=1"], ["stages.learn.steps=3"], ["stages.after.seed=2"]])
def test_a_run_does_what_its_plan_shows(stages, overrides):
    play(stages)
    lines = plan(*overrides)
    ran = [name for name, _ in play(stages, *overrides)[0]]
    finished = [line for line in lines if line.endswith("nothing has changed")]
    certain = [line for line in lines if "would run (" in line]
    assert all(line.split(":")[0].split()[1] in ran for line in certain)
    assert not any(line.split(":")[0].split()[1] in ran for line in finished)


@pytest.mark.parametrize("words", [["--recipe", "p.yaml"], ["--recipe=p.yaml"], ["stages.learn.steps=3", "p.yaml"]])
def test_a_dry_run_names_the_stages_and_shows_the_chosen_ones(words, stages, capsys):
    Path("p.yaml").write_text(TEXT)
    assert main(["pipeline", *words, "--dry-run", "--full", "--only", "warm"]) == 0
    out = capsys.readouterr().out
    skipped = [f"stage {name}: skipped (--only warm)" for name in ("learn", "after")]
    assert out.splitlines()[:3] == ["stage warm: would run (not run yet)", *skipped]
    assert "recipe (sft)" in out
    assert "recipe (rl)" not in out
    assert not Path("runs").exists()
    for given, message in (
        ([*words, "q.yaml"], "posttrain pipeline takes one file; remove q.yaml"),
        (["name=x"], "name=x is not a pipeline; name a pipeline file first"),
    ):
        assert main(["pipeline", *given, "--dry-run"]) == 2
        assert message in capsys.readouterr().err


CONVERTING = """
name: p
data: folder
stages:
- name: rows
  stage: convert
  files: {train: {converter: pairs, split: train}, test: {converter: pairs, split: test}}
- {name: learn, stage: reward, data: {train: "stage:rows/train", test: "stage:rows/test"}}
"""


converted = partial(play, text=CONVERTING)


def write_pairs(folder, **counts):
    Path(folder).mkdir(exist_ok=True)
    for split, count in counts.items():
        rows = [{"prompt": f"q{n}", "chosen": "good", "rejected": "bad"} for n in range(count)]
        write_rows(Path(folder) / f"pairs_{split}.jsonl", rows)


def test_converted_data_has_lineage(stages):
    write_pairs("folder", train=3, test=2)
    calls, printed = converted(stages)
    assert calls == [("learn", "fresh")]
    assert printed == ["stage rows: runs (not run yet)", "stage learn: runs (not run yet)"]
    assert len(Path("runs/p/rows/train.jsonl").read_text().splitlines()) == 3
    assert "test.jsonl: 2 rows read, 2 written" in Path("runs/p/rows/report.md").read_text()
    done = [f"stage {name}: finished, nothing has changed" for name in ("rows", "learn")]
    assert converted(stages) == ([], done)
    # The rows count, not the place of the folder or of the runs.
    Path("folder").rename("moved")
    Path("runs").rename("elsewhere")
    assert converted(stages, "data=moved", "runs=elsewhere") == ([], done)
    write_pairs("moved", train=4)
    calls, printed = converted(stages, "data=moved", "runs=elsewhere")
    assert (calls, printed) == (
        [("learn", "overwrite")],
        ["stage rows: runs (the data has changed)", "stage learn: runs (stage rows has changed)"],
    )
    Path("elsewhere/p/rows/test.jsonl").write_text("")
    assert converted(stages, "data=moved", "runs=elsewhere")[1][0] == "stage rows: runs (its files were modified)"


def test_a_conversion_that_was_interrupted_starts_again_and_later_stages_need_its_files(stages, monkeypatch):
    def interrupted(*given):
        Path("runs/p/rows").mkdir(parents=True)
        raise KeyboardInterrupt

    write_pairs("folder", train=3, test=2)
    with monkeypatch.context() as patch:
        patch.setattr(module, "convert_files", interrupted)
        with pytest.raises(KeyboardInterrupt):
            converted(stages)
    with pytest.raises(InputError, match="stage learn uses the files of rows, which has not finished"):
        converted(stages, only="learn")
    assert converted(stages)[1] == ["stage rows: runs (it was interrupted)", "stage learn: runs (not run yet)"]


def test_the_plan_of_a_conversion_counts_the_rows_and_writes_none(stages, capsys):
    write_pairs("folder", train=3)
    Path("p.yaml").write_text(CONVERTING)
    assert main(["pipeline", "p.yaml", "--dry-run", "--only", "rows"]) == 2
    taken = capsys.readouterr()
    assert "train.jsonl: 3 rows read, 3 to write" in taken.out
    assert "posttrain: files.test: folder: no file of the split test, and its files are" in taken.err
    assert not Path("runs").exists()
    assert main(["pipeline", "p.yaml", "--dry-run", "--only", "rows", "data=someone/pairs"]) == 0
    assert "train.jsonl: rows of someone/pairs, which is read when the stage runs" in capsys.readouterr().out


EVALUATING = """
name: p
runs: runs
common:
  model: {{path: {0}}}
  environment: {1}
  rollout: {{tokens_per_turn: 4}}
  evaluation: {{final_seeds: {{{2}}}}}
stages:
{3}"""


def test_policies_without_a_model_keep_their_names_in_the_table_of_all_stages(tiny_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    worlds = "{notes: 4, facts: [1, 1], filler: [0, 0]}"
    environment = f"{{type: memory, prompt: brief, max_turns: 2, worlds: {worlds}}}"
    stages = "- {name: first, stage: evaluate}\n- {name: second, stage: evaluate, seed: 1}\n"
    Path("p.yaml").write_text(EVALUATING.format(tiny_model, environment, "count: 2", stages))
    pipeline = load_pipeline("p.yaml", [])
    run_pipeline(pipeline, console=Console(file=StringIO()))
    scripted = environment_class("memory").scripted_baselines
    assert len(scripted) > 1
    policies = [row.policy for row in module.combined_rows(pipeline, pipeline.stages)]
    assert policies == ["random policy", *scripted, "first", "second", "optimal policy"]


@pytest.fixture
def scored(tiny_model, tmp_path, monkeypatch):
    """The tables of a pipeline that evaluates one model with rewards from different sources."""
    monkeypatch.chdir(tmp_path)
    write_rows(Path("prompts.jsonl"), [{"prompt": f"Say {n}", "label": str(n)} for n in range(6)])
    for number, name in enumerate(("first", "second")):
        model = RewardModel(ModelRecipe(path=str(tiny_model)), seed=number)
        model.set_statistics(0.1, 0.5)
        model.export(Path(name))

    def run(stages):
        environment = "{type: text_task, prompts: prompts.jsonl}"
        Path("p.yaml").write_text(EVALUATING.format(tiny_model, environment, "start: 0, count: 3", stages))
        pipeline = load_pipeline("p.yaml", [])
        run_pipeline(pipeline, console=Console(file=StringIO()))
        report = (Path("runs") / "p" / "report.md").read_text()
        titles = [line.removeprefix("## ") for line in report.splitlines() if line.startswith("## p: ")]
        tables = [policy_tables(module.combined_rows(pipeline, group))[0] for group in module.played_stages(pipeline)]
        assert all(f"| {' | '.join(table.headings)} |" in report for table in tables)
        return tables, titles

    return run


def test_returns_of_different_reward_models_are_in_different_columns(scored):
    (table,), _ = scored("""
- {name: a, stage: evaluate, reward: {path: first}}
- {name: b, stage: evaluate, reward: {path: second}}
- {name: c, stage: evaluate, reward: {path: second, normalize: none}, seed: 1}
- {name: d, stage: evaluate, reward: {path: first}, seed: 1}
""")
    sources = ["reward model first", "reward model second", "reward model second, raw"]
    assert table.headings == ("policy", "success", *(f"mean return, {one}" for one in sources), "n", "note")
    filled = {row[0]: [number for number, cell in enumerate(row[2:5]) if cell != "–"] for row in table.rows}
    assert filled == {"a": [0], "b": [1], "c": [2], "d": [0]}
    assert "not comparable" in table.note


def test_different_reward_functions_have_different_tables(scored):
    tables, titles = scored("""
- {name: a, stage: evaluate, environment: {reward: contains}}
- {name: b, stage: evaluate, environment: {reward: exact}}
- {name: c, stage: evaluate, environment: {reward: exact}, seed: 1}
""")
    assert titles == ["p: text_task, held-out seeds of b, c", "p: text_task, held-out seeds of a"]
    assert [[row[0] for row in table.rows] for table in tables] == [["b", "c"], ["a"]]
    assert {table.headings for table in tables} == {POLICY_HEADINGS}
