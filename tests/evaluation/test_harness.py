"""lm-eval on our models: numbers equal to those of lm-eval's own model, results with intervals, and missing data."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import posttrain
from posttrain.cli.main import main
from posttrain.errors import InputError
from posttrain.evaluation.compare import compare
from posttrain.evaluation.results import read_results
from posttrain.evaluation.sides import read_sides
from posttrain.runs.tables import read_tables

pytest.importorskip("lm_eval", reason="needs posttrain[harness]")

ROWS = [
    {"question": f"What is {a} plus {b}?", "choices": [str(a + b), str(a - b), "a dog"], "answer": 0, "sum": str(a + b)}
    for a in range(4, 9)
    for b in range(1, 5)
]
CHOICE = """
task: sums_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
output_type: multiple_choice
test_split: test
fewshot_split: test
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_choice: choices
doc_to_target: answer
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
metadata: {{version: 1}}
"""
ANSWER = """
task: sums_answer
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
output_type: generate_until
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: sum
generation_kwargs: {{until: ["\\n", "e"], max_gen_toks: 12}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""
ROLLING = """
task: sums_text
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: question
metric_list: [{{metric: word_perplexity}}, {{metric: byte_perplexity}}, {{metric: bits_per_byte}}]
"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """Task files over local rows, by name."""
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    files = {}
    for name, text in (("choice", CHOICE), ("answer", ANSWER), ("text", ROLLING)):
        files[name] = folder / f"{name}.yaml"
        files[name].write_text(text.format(rows=folder / "rows.jsonl"))
    return {name: str(file) for name, file in files.items()}


@pytest.fixture(scope="module")
def ours(tiny_model):
    from posttrain.evaluation.harness import HarnessModel

    return HarnessModel(str(tiny_model), tokens_per_batch=64)


@pytest.fixture(scope="module")
def theirs(tiny_model):
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=str(tiny_model), device="cpu", batch_size=4, dtype="float32")


def instances(kind, arguments):
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, args, i) for i, args in enumerate(arguments)]


def test_likelihoods_equal_those_of_transformers(ours, theirs):
    texts = ["", "Question: one? ", "Question: two?\n", "Q" * 300, "x"]
    pairs = [(context, answer) for context in texts for answer in (" yes", "no", " a longer answer, with commas", "é")]
    asked = instances("loglikelihood", pairs)
    found, expected = ours.loglikelihood(asked), theirs.loglikelihood(asked)
    assert np.allclose([one for one, _ in found], [one for one, _ in expected], atol=2e-4, rtol=1e-5)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]


def test_the_greedy_answer_is_found_greedy(ours, theirs):
    context = "Question: two?\n"
    answer = ours.generate_until(instances("generate_until", [(context, {"until": [], "max_gen_toks": 3})]))[0]
    asked = instances("loglikelihood", [(context, answer), (context, answer[::-1])])
    assert ours.loglikelihood(asked)[0][1] == theirs.loglikelihood(asked)[0][1]
    assert [one for _, one in ours.loglikelihood(asked)] == [one for _, one in theirs.loglikelihood(asked)]


def test_rolling_windows_equal_those_of_transformers(ours, theirs, monkeypatch):
    for model in (ours, theirs):
        monkeypatch.setattr(type(model), "max_length", 16)  # so that a short text has several windows
    asked = instances("loglikelihood_rolling", [("A text of more than one window, " * n,) for n in (1, 3, 4)])
    assert ours.loglikelihood_rolling(asked) == pytest.approx(theirs.loglikelihood_rolling(asked), abs=1e-3)


def test_greedy_answers_equal_those_of_transformers(ours, theirs):
    settings = [{"until": ["e", "qq"], "max_gen_toks": 16}, {"until": [], "max_gen_toks": 5}]
    asked = instances("generate_until", [(f"Question {n}", one) for n in range(6) for one in settings])
    found = ours.generate_until(asked)
    assert found == theirs.generate_until(asked)
    assert not any("e" in text for text in found[::2])


def test_samples_differ_and_unknown_settings_are_refused(ours):
    asked = instances("generate_until", [("Question", {"do_sample": True, "temperature": 1.0, "max_gen_toks": 8})] * 4)
    assert len(set(ours.generate_until(asked))) > 1
    with pytest.raises(InputError, match="num_beams"):
        ours.generate_until(instances("generate_until", [("Question", {"num_beams": 4})]))


def test_chats_are_rendered_as_by_transformers(ours, theirs):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    assert ours.apply_chat_template(chat) == theirs.apply_chat_template(chat)
    begun = [*chat, {"role": "assistant", "content": "I"}]
    assert ours.apply_chat_template(begun, False) == theirs.apply_chat_template(begun, False)


@pytest.mark.parametrize("chat", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_run_has_the_numbers_of_lm_eval_with_intervals(chat, tasks, theirs, tiny_model, tmp_path):
    from lm_eval import simple_evaluate

    result = posttrain.harness(
        tasks=list(tasks.values()),
        model={"path": str(tiny_model)},
        runs=str(tmp_path),
        name="a",
        apply_chat_template=chat,
    )
    expected = simple_evaluate(
        theirs, tasks=list(tasks.values()), bootstrap_iters=0, apply_chat_template=chat, fewshot_random_seed=0
    )["results"]
    metrics, digests = read_results(result.run / "harness.json")
    row = result.evaluation[0]
    assert len(digests) == 3 * len(ROWS)
    for name in ("sums_choice/acc", "sums_choice/acc_norm", "sums_answer/exact_match"):
        task, _, metric = name.partition("/")
        assert row[name] == pytest.approx(expected[task][f"{metric},none"], abs=1e-12)
        assert row[f"{name}_low"] <= row[name] <= row[f"{name}_high"]
        assert row[f"{name}_n"] == len(metrics[name].scores) == len(ROWS)
    for metric in ("word_perplexity", "byte_perplexity"):
        assert row[f"sums_text/{metric}"] == pytest.approx(expected["sums_text"][f"{metric},none"], rel=1e-4)
        assert metrics[f"sums_text/{metric}"].better == "lower"
    assert any(
        "sums_text/bits_per_byte" in line for line in json.loads((result.run / "harness.json").read_text())["dropped"]
    )


@pytest.mark.slow
def test_runs_are_compared_document_by_document(tasks, tiny_model, tmp_path):
    for name, more in (("a", {}), ("b", {"model": {"path": "made:small"}}), ("c", {"num_fewshot": 2})):
        settings = {"model": {"path": str(tiny_model)}} | more
        posttrain.harness(tasks=tasks["choice"], runs=str(tmp_path), name=name, **settings)
    a, b, c = (str(tmp_path / name) for name in "abc")
    assert [table.title for table in read_tables(tmp_path / "a")] == [str(tiny_model)]
    comparison = compare(read_sides([a, b]))
    test = {test.metric: test for _, test in comparison.tests}["sums_choice/acc"]
    assert (test.n, test.test) == (len(ROWS), "McNemar, exact")
    assert test.difference.value == pytest.approx(test.b - test.a)
    with pytest.raises(InputError, match="shots"):
        compare(read_sides([a, c]))
    assert main(["compare", a, b]) == 0


def test_missing_data_is_named_and_nothing_is_downloaded(tasks, tiny_model, tmp_path, monkeypatch, capsys):
    import socket

    from lm_eval.tasks import TaskManager

    from posttrain.evaluation.harness import load_tasks

    def refuse(*arguments, **settings):
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    gone = tmp_path / "gone.yaml"
    gone.write_text(CHOICE.format(rows=tmp_path / "gone.jsonl"))
    words = ["tasks=arc_easy", f"model.path={tiny_model}", f"runs={tmp_path}", "name=none"]
    assert main(["evaluate", "harness", *words]) == 2
    error = capsys.readouterr().err
    assert "arc_easy" in error
    assert "allenai/ai2_arc" in error
    assert len(error.strip().splitlines()) == 1
    manager = TaskManager(include_defaults=False)
    for task, named in (
        (str(gone), "gone.jsonl"),
        ("no_such_task", "no task no_such_task"),
        ("x.yaml", "no task file x.yaml"),
    ):
        with pytest.raises(InputError, match=named):
            load_tasks(manager, [task])


def test_limits_and_a_dry_run(tasks, tiny_model, tmp_path, capsys):
    words = [f"tasks={tasks['choice']},{tasks['answer']}", f"model.path={tiny_model}", f"runs={tmp_path}", "limit=3"]
    assert main(["evaluate", "harness", *words, "--dry-run"]) == 0
    assert "first 3 documents" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
    assert main(["evaluate", "harness", *words, "gen_kwargs.max_gen_toks=1", "name=few"]) == 0
    assert "sums_choice/acc" in (tmp_path / "few" / "report.md").read_text()
    metrics, _ = read_results(tmp_path / "few" / "harness.json")
    assert len(metrics["sums_choice/acc"].scores) == 3
    assert math.isfinite(posttrain.Result.open(tmp_path / "few").evaluation[0]["sums_answer/exact_match"])


@pytest.mark.slow
def test_the_command_of_lm_eval_has_the_model(tasks, tiny_model, tmp_path):
    command = [sys.executable, "-m", "posttrain.evaluation.harness", "--model", "posttrain"]
    command += ["--model_args", f"path={tiny_model}", "--tasks", tasks["choice"], "--output_path", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    file = next(tmp_path.rglob("results_*.json"))
    assert json.loads(file.read_text())["results"]["sums_choice"]["acc,none"] >= 0


@pytest.mark.slow
def test_groups_have_the_documents_of_their_tasks(tasks, tiny_model, tmp_path):
    folder = tmp_path / "more"
    folder.mkdir()
    text = Path(tasks["choice"]).read_text()
    for name in ("one", "two"):
        (folder / f"{name}.yaml").write_text(text.replace("task: sums_choice", f"task: sums_{name}"))
    (folder / "group.yaml").write_text(
        "group: sums\ntask: [sums_one, sums_two]\naggregate_metric_list: [{metric: acc, weight_by_size: true}]\n"
    )
    run = posttrain.harness(
        tasks="sums", include_path=str(folder), model={"path": str(tiny_model)}, runs=str(tmp_path), name="a", limit=5
    )
    row = run.evaluation[0]
    assert (row["sums/acc_n"], row["sums_one/acc_n"]) == (10, 5)
    assert row["sums/acc"] == pytest.approx(row["sums_one/acc"])
    assert "sums/acc_norm" not in row, "the group does not define it"
