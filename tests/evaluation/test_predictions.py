"""Files of predictions: valid, with other columns, truncated, and invalid."""

import json

import pytest

from posttrain.errors import InputError
from posttrain.evaluation.predictions import column_names, read_predictions
from posttrain.evaluation.text_metrics import corpus_metric, exact_match, normalized, verified
from tests.evaluation.made import predictions, write

ROW = {"id": 0, "prompt": "What is 2 + 2?", "prediction": "4", "reference": "4"}


def read(path, *words):
    return read_predictions(str(path), column_names(words))


def test_samples_of_a_prompt_are_one_item(tmp_path):
    found = read(predictions(tmp_path / "p.jsonl", 0.1, items=5, samples=3))
    assert (found.items, len(found.rows), found.problems.total) == (5, 15, 0)
    rows = [{key: value for key, value in ROW.items() if key != "id"} for _ in range(3)]
    assert read(write(tmp_path / "q.jsonl", [*rows, {**rows[0], "prompt": "Other?"}])).items == 2


def test_columns_are_renamed_and_prompts_may_be_messages(tmp_path):
    path = write(tmp_path / "p.jsonl", [{"q": [{"role": "user", "content": "Hi"}], "out": "Ho", "gold": 7}])
    row = read(path, "columns.prompt=q", "columns.prediction=out", "columns.reference=gold").rows[0]
    assert (row.text, row.reference, row.prompt) == ("Ho", "7", [{"role": "user", "content": "Hi"}])
    for word in ("columns.answer=x", "columns.prompt=", "prompt=x", "columns.prompt"):
        with pytest.raises(InputError, match="not a column setting"):
            column_names([word])


def test_parquet_is_read(tmp_path):
    from posttrain.data.files import write_rows

    write_rows(tmp_path / "p.parquet", [ROW, {**ROW, "id": 1, "prediction": "5"}])
    assert exact_match(read(tmp_path / "p.parquet").rows).scores.values().tolist() == [1.0, 0.0]


def test_truncated_and_contradictory_rows_are_dropped_and_reported(tmp_path):
    path = write(tmp_path / "p.jsonl", [ROW])
    path.write_text(path.read_text() + json.dumps({**ROW, "id": 1})[:-9])
    found = read(path)
    assert (len(found.rows), found.problems.total) == (1, 1)
    assert "p.jsonl row 2" in found.problems.summary()[0]
    rows = [{**ROW, "sample": 0}, {**ROW, "sample": 0}, {**ROW, "prompt": "Other?"}]
    found = read(write(tmp_path / "p.jsonl", rows))
    assert len(found.rows) == 1
    assert {line.split(": ")[1].split(" (")[0] for line in found.problems.summary()} == {
        "sample twice",
        "id of another prompt",
    }


def test_unavailable_values_are_omitted_and_never_zero(tmp_path):
    rows = [
        ROW,
        {**ROW, "id": 1, "prediction": None},
        {**ROW, "id": 2, "reference": None},
        {**ROW, "id": 3, "prediction": ""},
    ]
    found = read(write(tmp_path / "p.jsonl", rows))
    assert [row.item for row in found.rows] == ["0", "2", "3"]
    assert "no prediction" in found.warnings()[0]
    assert found.warnings()[1] == "1 of 3 predictions are empty; they are scored like any other"
    measured = exact_match(found.rows)
    assert measured.left_out == {"no reference": 1}
    assert measured.scores.items.keys() == {"0", "3"}
    assert measured.scores.values().tolist() == [1.0, 0.0]


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([], "has no rows"),
        ([{"text": "x"}], "missing column"),
        ([{**ROW, "prediction": None}], "no prediction"),
        ([{**ROW, "prediction": ["x"]}], "is a list, not text"),
        ([{**ROW, "reference": {"a": 1}}], "is an object, not text"),
        ([{**ROW, "id": 1.5}], "not text or a whole number"),
    ],
)
def test_a_file_without_usable_rows_is_refused(tmp_path, rows, told):
    with pytest.raises(InputError, match=told):
        read(write(tmp_path / "p.jsonl", rows))


def test_metrics_need_a_reference_which_is_normalized(tmp_path):
    rows = read(write(tmp_path / "p.jsonl", [{**ROW, "reference": None}])).rows
    for measure in (exact_match, lambda own: corpus_metric("bleu", own)):
        with pytest.raises(InputError, match="no row has a reference"):
            measure(rows)
    assert normalized("  The\n ANSWER\u00a0is ﬁne ") == "the answer is fine"
    assert normalized("a.") != normalized("a")
    with pytest.raises(InputError, match="no such file"):
        read(tmp_path / "nothing.jsonl")


def test_verifiers_of_reasoning_gym_and_rules(tmp_path):
    rows = read(
        write(
            tmp_path / "p.jsonl", [ROW, {**ROW, "id": 1, "prediction": "It is 4"}, {**ROW, "id": 2, "prediction": "5"}]
        )
    ).rows
    rule = verified(rows, "posttrain.environments.rewards:final_number")
    assert rule.scores.values().tolist() == [1.0, 1.0, 0.0]
    assert rule.scores.kind == "rate"
    gym = verified(rows, "chain_sum").scores
    assert gym.values()[0] == 1.0
    assert gym.values()[2] < 1.0
    own = tmp_path / "own.py"
    own.write_text(
        "def half(answer, **row):\n    return 0.5 if row['label'] == '4' and answer != '5' else float('nan')\n"
    )
    found = verified(rows, f"{own}:half")
    assert (found.texts, found.left_out, found.scores.kind) == (2, {"the verifier returned no number": 1}, "mean")


@pytest.mark.parametrize(
    ("verifier", "told"),
    [
        ("no_such_set", "no data set 'no_such_set'"),
        ("posttrain.environments.rewards:nothing", "--verifier: .*no function"),
        ("posttrain.environments.rewards:load_reward", "no parameter `answer`"),
    ],
)
def test_unavailable_verifiers(tmp_path, verifier, told):
    rows = read(write(tmp_path / "p.jsonl", [ROW])).rows
    with pytest.raises(InputError, match=told):
        verified(rows, verifier)
