"""`posttrain generate` with the model in this process: its answers are the model's, and a kill changes none."""

import json
import random
import signal
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from posttrain.cli.main import main
from posttrain.data.rendering import Renderer
from posttrain.episode import Episode, Outcome, StopReason, Turn
from posttrain.evaluation.predictions import read_predictions
from posttrain.recipe.stages import GenerateRecipe
from posttrain.training.generate import PromptRow, prediction
from tests.training import small
from tests.training.preferences import write_jsonl

TEXTS = ["Reach the goal and keep off the holes.", "You walk on a frozen lake.", "Left or Right?", "reward", "0 1 2 3"]


@pytest.fixture(autouse=True)
def _here(monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "250")
    monkeypatch.chdir(tmp_path)


def some_rows(count):
    chosen = random.Random(3)
    return [{"prompt": " ".join(chosen.choices(TEXTS, k=1 + n % 4)), "completion": f"answer {n}"} for n in range(count)]


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def values(tiny, folder, rows, **changes):
    folder.mkdir(exist_ok=True)
    given = {"stage": "generate", "name": "small", "runs": str(folder), "samples": 2, "window": 7}
    given |= {"model": {"path": str(tiny), "threads": 1}, "engine": {"type": "local", "slots": 5}}
    given |= {"data": {"test": [{"path": write_jsonl(folder / "rows.jsonl", some_rows(rows))}]}}
    given |= {"rollout": {"tokens_per_turn": 24, "tokens_per_episode": 700}, "sampling": {"temperature": 1.0}}
    return given | changes


def test_greedy_answers_are_those_of_transformers(tiny_policy, tiny_model, tmp_path, capsys):
    data = write_jsonl(tmp_path / "rows.jsonl", some_rows(9))
    words = [f"model.path={tiny_model}", f"data.test={data}", "rollout.tokens_per_turn=20", "engine.slots=4"]
    assert main(["generate", *words, "out=p.jsonl"]) == 0
    found = lines_of(tmp_path / "p.jsonl")
    assert [row["id"] for row in found] == list(range(9))
    renderer = Renderer(tiny_policy.tokenizer, tiny_policy.end_tokens)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    for row, given in zip(found, some_rows(9), strict=True):
        assert row["prompt"] == [{"role": "user", "content": given["prompt"]}]
        assert row["reference"] == given["completion"]
        ids = torch.tensor([renderer.prompt(row["prompt"])])
        with torch.no_grad():
            ends = {"eos_token_id": sorted(tiny_policy.end_tokens), "max_new_tokens": 20}
            made = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **ends)
            made = made[0, ids.shape[1] :].tolist()
        assert row["tokens"] == len(made)
        assert row["prediction"] == renderer.answer_text(made)
        assert row["stop_reason"] == ("end_token" if made[-1] in tiny_policy.end_tokens else "turn_budget")
    said = capsys.readouterr().out
    total = sum(row["tokens"] for row in found)
    assert f"9 answers to 9 rows, {total} tokens; 9 of them in" in said
    cut = sum(row["stop_reason"] == "turn_budget" for row in found)
    assert f"{cut} of 9 truncated at rollout.tokens_per_turn = 20" in said


def test_answers_do_not_depend_on_slots_or_window_and_metrics_read_them(tiny_model, tmp_path):
    rows = [{**row, "level": n} for n, row in enumerate(some_rows(10))]
    data = write_jsonl(tmp_path / "rows.jsonl", rows)
    words = [f"model.path={tiny_model}", f"data.test={data}", "keep_columns=[level]"]
    paths = [tmp_path / f"runs/slots-{slots}/predictions.jsonl" for slots in (1, 3, 64)]
    for slots, window in ((1, 100), (3, 100), (64, 4)):
        engine = [f"engine.slots={slots}", f"window={window}", f"name=slots-{slots}", "rollout.tokens_per_turn=24"]
        assert main(["generate", *words, *engine, "samples=2", "sampling.temperature=1"]) == 0
    assert len({path.read_text() for path in paths}) == 1
    read = read_predictions(str(paths[0]))
    assert (len(read.rows), read.items, read.problems.total) == (20, 10, 0)
    assert [row.reference for row in read.rows[::2]] == [f"answer {n}" for n in range(10)]
    found = lines_of(paths[0])
    assert [(row["id"], row["sample"], row["level"]) for row in found] == [(n, s, n) for n in range(10) for s in (0, 1)]
    assert len({row["seed"] for row in found}) == 20


@pytest.fixture(scope="module")
def whole(tiny_model, tmp_path_factory):
    """The predictions of a run without interruption."""
    run = small.finished(values(tiny_model, tmp_path_factory.mktemp("whole"), 16))
    return (run / "predictions.jsonl").read_text()


APPEND, SYNC = "posttrain.runs.completions:CompletionLog.append", "os:fsync"
DEATHS = {
    "first answer": [(APPEND, 1)],
    "in a window": [(APPEND, 11)],
    "twice": [(APPEND, 3), (APPEND, 20)],
    "at the end": [("posttrain.runs.completions:write_lines", 1)],
    "while publishing": [(SYNC, 6)],
    "once published": [("os:replace", 3), (SYNC, 4)],
    "before the summary": [("posttrain.training.generate:_Generation._summary", 1)],
}


@pytest.mark.parametrize("name", small.cases(DEATHS, ("in a window", "once published")))
def test_killed_anywhere_it_resumes_to_the_same_file(name, tiny_model, tmp_path, whole):
    recipe = values(tiny_model, tmp_path / "runs", 16)
    run, torn = tmp_path / "runs/small", False
    for death in DEATHS[name]:
        assert small.killed(recipe, death) == [-signal.SIGKILL]
        journal = run / "checkpoints/completions.jsonl"
        if journal.exists() and journal.stat().st_size:
            with open(journal, "a") as file:
                file.write('{"id": 3, "sam')
            torn = True
    assert journal.exists()
    kept = {(row["id"], row["sample"]) for row in map(json.loads, journal.read_text().splitlines()[1:-1])}
    assert torn == bool(kept)
    assert (small.finished(recipe) / "predictions.jsonl").read_text() == whole
    keys = [(row["id"], row["sample"]) for row in lines_of(journal)[1:]]
    assert len(keys) == len(set(keys)) == 32
    assert kept <= set(keys)
    assert not list(run.glob(".*.partial"))


def test_another_recipe_or_other_data_are_refused(tiny_model, tmp_path, capsys):
    data = write_jsonl(tmp_path / "rows.jsonl", some_rows(4))
    words = [f"model.path={tiny_model}", f"data.test={data}", "rollout.tokens_per_turn=6", "name=a"]
    assert main(["generate", *words]) == 0
    assert main(["generate", *words]) == 2, "a used name"
    assert "the run runs/a exists" in capsys.readouterr().err
    before = (tmp_path / "runs/a/predictions.jsonl").read_bytes()
    assert main(["generate", "--resume", "runs/a"]) == 0
    assert "0 of them in 0:00, 0 tokens/s; 4 from earlier runs" in capsys.readouterr().out
    assert main(["generate", "--resume", "runs/a", "seed=4"]) == 2
    assert "a resumed run keeps its recipe" in capsys.readouterr().err
    write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "other"}, *some_rows(4)[1:]])
    # Rows are read once a process, so another one has to see the change.
    recipe = {"stage": "generate", "name": "a", "runs": str(tmp_path / "runs"), "model": {"path": str(tiny_model)}}
    more = {"data": {"test": [{"path": data}]}, "rollout": {"tokens_per_turn": 6}}
    assert small.run(recipe | more, resume=True) != 0
    assert "holds answers with another data" in (tmp_path / "runs/log.txt").read_text()
    assert (tmp_path / "runs/a/predictions.jsonl").read_bytes() == before


def test_rows_without_room_are_named_counted_and_listed(tiny_model, tmp_path, capsys):
    long = {"prompt": "phoenix " * 200, "completion": "x"}
    data = write_jsonl(tmp_path / "rows.jsonl", [*some_rows(2), long, {"prompt": ""}])
    words = [f"model.path={tiny_model}", f"data.test={data}", "rollout.tokens_per_turn=6", "name=a", "out=p.jsonl"]
    assert main(["generate", *words, "rollout.tokens_per_episode=120"]) == 0
    said = capsys.readouterr().out
    assert "1 row dropped: prompt leaves no room for an answer within 120 tokens (rows.jsonl row 3;" in said
    assert "rows.jsonl row 4" in said, "the reader leaves out the empty prompt, and says so"
    assert [row["id"] for row in lines_of(tmp_path / "p.jsonl")] == [0, 1]
    (missing,) = lines_of(tmp_path / "p.jsonl.failed.jsonl")
    assert (missing["id"], missing["origin"]) == (2, "rows.jsonl row 3")
    assert "leaves no room" in missing["error"]
    assert main(["generate", *words[:-2], "name=b", "rollout.tokens_per_episode=120", "data.strict=true"]) == 2
    write_jsonl(tmp_path / "long.jsonl", [long])
    assert main(["generate", words[0], "data.test=long.jsonl", "name=c", "rollout.tokens_per_turn=2040"]) == 2
    assert "no prompt leaves room for rollout.tokens_per_turn = 2040" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["samplez=3"], "the nearest is samples"),
        (["samples=2"], "greedy answers to one row are identical"),
        (["keep_columns=[prediction]"], "every prediction already has"),
        (["keep_columns=[nothing]"], "has no column `nothing`"),
        (["data.id=prompt"], "is also that of rows.jsonl row 1"),
        (["data.test=keys.jsonl", "data.id=key"], "the id '1' in `key` is also that of keys.jsonl row 1"),
        (["data.id=nothing"], "which is not an id"),
        (["out=rows.jsonl"], "which `data.test` reads"),
        (["out=p.csv"], "end in `.jsonl`"),
        (["out=there.jsonl"], "there.jsonl exists"),
        (["out=there.jsonl/p.jsonl"], "there.jsonl is not a writable folder; choose another `out`"),
        (["rollout.tokens_per_turn=5000"], "leaves no room for a prompt"),
        (["data.test=nowhere.jsonl"], "no such file"),
    ],
)
def test_an_input_error_is_one_sentence_and_leaves_the_name_free(words, said, tiny_model, tmp_path, capsys):
    write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "same"}, {"prompt": "same"}])
    write_jsonl(tmp_path / "keys.jsonl", [{"prompt": "one", "key": 1}, {"prompt": "other", "key": "1"}])
    (tmp_path / "there.jsonl").write_text("mine")
    given = ["generate", f"model.path={tiny_model}", "data.test=rows.jsonl", "name=a", "rollout.tokens_per_turn=2"]
    assert main([*given, *words]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert len(told.splitlines()) == 1
    assert (tmp_path / "there.jsonl").read_text() == "mine"
    assert main(given) == 0


def test_a_pipeline_generates_once_and_again_when_the_rows_change(tiny_model, tmp_path, capsys):
    rows = write_jsonl(tmp_path / "rows.jsonl", some_rows(3))
    (tmp_path / "p.yaml").write_text(
        f"stage: pipeline\nname: p\ncommon: {{model: {{path: {tiny_model}}}}}\nstages:\n"
        f"  - {{name: answers, stage: generate, data: {{test: {rows}}}, rollout: {{tokens_per_turn: 4}}, out: p.jsonl}}\n"
    )
    assert main(["pipeline", "p.yaml"]) == 0
    assert "runs (not run yet)" in capsys.readouterr().out
    assert main(["pipeline", "p.yaml"]) == 0
    assert "finished, nothing has changed" in capsys.readouterr().out
    assert main(["pipeline", "p.yaml", "common.seed=1"]) == 0
    assert "its recipe has changed" in capsys.readouterr().out
    assert len(lines_of(tmp_path / "p.jsonl")) == 3


def test_thinking_is_removed_by_its_tokens(tiny_policy):
    renderer = Renderer(tiny_policy.tokenizer, tiny_policy.end_tokens)
    question = PromptRow(0, 0, [{"role": "user", "content": "Left?"}], None, {}, "rows.jsonl row 1")

    def row(text, thinking="remove", primer="", ended=True):
        before = renderer.prompt(question.messages, primer)
        ids = renderer.encode(text) + ([renderer.tokenizer.eos_token_id] if ended else [])
        everything = np.array([*before, *ids])
        reason = StopReason.END_TOKEN if ended else StopReason.TURN_BUDGET
        turn = Turn(0, len(before), len(everything), 0.0, reason, renderer.answer_text(ids))
        stream = SimpleNamespace(ids=everything)
        episode = Episode(0, 0, 0, 0, [stream], [turn], Outcome.TERMINATED)
        recipe = GenerateRecipe.model_validate({"data": {"test": "x"}, "thinking": thinking})
        return prediction(recipe, question, 0, episode, renderer), len(ids)

    block = "<think>first é\nthen</think>\n\n"
    found, tokens = row(block + "Right é")
    assert (found["prediction"], found["tokens"]) == ("Right é", tokens)
    assert found["thinking_characters"] == len(block)
    assert found["thinking_tokens"] == tokens - 1 - len(renderer.encode("Right é"))
    assert row(block + "Right é", "keep")[0]["prediction"] == block + "Right é"
    assert "thinking_tokens" not in row(block + "Right é", "keep")[0]
    without = {"seed": 0, "thinking_tokens": 0, "thinking_characters": 0}
    assert row("no thoughts")[0] | {"seed": 0} == row("no thoughts", "keep")[0] | without
    opened, _ = row("first</think>Right", primer="<think>\n")
    assert (opened["prediction"], opened["thinking_characters"]) == ("Right", len("first</think>"))
    cut, tokens = row("<think>and so on", ended=False)
    assert (cut["prediction"], cut["thinking_tokens"]) == ("", tokens)


@pytest.mark.slow
def test_the_packaged_model_answers(tmp_path, capsys):
    rows = [{"prompt": "What is the capital of France?", "completion": "Paris"}, {"prompt": "Say hello."}] * 3
    data = write_jsonl(tmp_path / "rows.jsonl", rows)
    words = [f"data.test={data}", "rollout.tokens_per_turn=24", "samples=2", "sampling.temperature=0.3", "out=p.jsonl"]
    assert main(["generate", *words]) == 0
    found = lines_of(tmp_path / "p.jsonl")
    assert sum("Paris" in row["prediction"] for row in found if row["reference"]) >= 3
    assert "12 answers to 6 rows" in capsys.readouterr().out


@pytest.mark.slow
def test_the_packaged_model_killed_and_resumed_gives_the_same_bytes(tmp_path):
    more = {"model": {"path": "packaged:smollm2-135m", "threads": 1}, "window": 6}
    more["rollout"] = {"tokens_per_turn": 24, "tokens_per_episode": 700}
    whole = small.finished(values("", tmp_path / "whole", 8, **more))
    recipe = values("", tmp_path / "killed", 8, **more)
    assert small.killed(recipe, (APPEND, 3), (APPEND, 6)) == [-signal.SIGKILL] * 2
    found, expected = ((run / "predictions.jsonl").read_bytes() for run in (small.finished(recipe), whole))
    assert found == expected
    assert "repeated answers differ" not in (tmp_path / "killed/log.txt").read_text()
