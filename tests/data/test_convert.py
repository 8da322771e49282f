"""Published data sets as rows, above all which answer HelpSteer3 prefers, and the reference answers of rows."""

from pathlib import Path

import pytest
from typer import Typer
from typer.testing import CliRunner

from posttrain.cli.data import convert
from posttrain.data.convert import CONVERTERS, convert_rows, gsm8k, helpsteer3, reference_answer
from posttrain.data.convert import ultrafeedback_binarized as ultrafeedback
from posttrain.data.examples import read_examples
from posttrain.data.files import read_rows, write_rows
from posttrain.data.problems import Problems
from posttrain.errors import InputError, RunError
from posttrain.recipe.data import ColumnsRecipe, SourceRecipe
from posttrain.seeds import random_stream
from tests.data.malformed import changed, value
from tests.data.test_examples import made
from tests.evaluation.made import write

CONTEXT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}, {"role": "user", "content": "r"}]


def preference(overall, language="english", **more):
    """A row as HelpSteer3 has them."""
    better = 1 if overall < 0 else 2
    reasoning = f"@Response {better} is slightly better than @Response {3 - better}, for it is right."
    opinions = [{"score": overall, "reasoning": reasoning, "feedback1": "f", "feedback2": "f"}] * 3
    row = {"domain": "general", "language": language, "context": CONTEXT, "response1": "first", "response2": "second"}
    return {**row, "overall_preference": overall, "individual_preference": opinions, **more}


def pairs(path: Path):
    problems = Problems()
    found = list(read_examples("pair", [SourceRecipe(path=str(path))], ColumnsRecipe(), problems))
    assert problems.total == 0
    return found


@pytest.mark.parametrize("overall", [-3, -2, -1, 1, 2, 3])
def test_negative_prefers_response_1(overall):
    row = helpsteer3(preference(overall))
    first, second = ({"role": "assistant", "content": text} for text in ("first", "second"))
    chosen, rejected = (first, second) if overall < 0 else (second, first)
    sides = {"chosen": [*CONTEXT, chosen], "rejected": [*CONTEXT, rejected]}
    assert row == {**sides, "margin": float(abs(overall)), "domain": "general"}


def test_neutral_and_other_languages_are_left_out():
    assert helpsteer3(preference(0)) == "neutral preference"
    assert helpsteer3(preference(1, language="python")) == "language is not english"
    assert isinstance(helpsteer3(preference(1, language="English")), dict)
    assert isinstance(helpsteer3(preference(1, language="python"), "any"), dict)
    assert isinstance(helpsteer3(preference(1, language="Chinese"), "chinese"), dict)


@pytest.mark.parametrize("overall", [None, True, "1", 4, -4, 0.5, float("nan"), [1]])
def test_other_preferences_are_left_out(overall):
    row = {**preference(1), "overall_preference": overall}
    assert helpsteer3(row) == "overall_preference is not a whole number from -3 to 3"


def test_gsm8k_and_ultrafeedback():
    row = {"question": "q", "answer": "1 + 1 = <<1+1=2>>2\n#### 2"}
    assert gsm8k(row) == {"prompt": "q", "completion": row["answer"]}
    user, good, bad = CONTEXT[0], *({"role": "assistant", "content": text} for text in "ab")
    row = {"prompt": "q", "chosen": [user, good], "rejected": [user, bad], "score_chosen": 8.5, "score_rejected": 6.0}
    assert ultrafeedback(row) == {"chosen": [user, good], "rejected": [user, bad], "margin": 2.5}
    alone = {**row, "chosen": [good], "rejected": [bad]}
    assert ultrafeedback(alone) == {"prompt": "q", "chosen": [good], "rejected": [bad], "margin": 2.5}
    assert ultrafeedback({**row, "score_rejected": 8.5}) == "equal scores"
    assert ultrafeedback({**row, "score_rejected": 9}) == "chosen has the lower score"
    assert ultrafeedback({**row, "score_chosen": 10**400}) == "a score is not a number"
    assert ultrafeedback({**row, "score_rejected": None}) == "a score is not a number"
    assert ultrafeedback({**row, "score_rejected": float("nan")}) == "chosen has the lower score"


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_file_of_pairs(tmp_path, suffix):
    rows = [preference(overall, language) for language in ("python", "english") for overall in range(-3, 4)]
    rows.append(preference(1, response2=" "))
    rows.append({**preference(1), "context": [{"role": "elf", "content": "q"}]})
    out = tmp_path / "made" / f"pairs{suffix}"
    done = convert_rows("helpsteer3", out, str(write(tmp_path / "train.jsonl", rows)))
    assert (done.read, done.written) == (16, 6)
    assert done.skipped == {"language is not english": 7, "neutral preference": 1}
    assert done.problems.total == 2
    found = pairs(out)
    assert [pair.margin for pair in found] == [3, 2, 1, 1, 2, 3]
    assert [pair.chosen[-1]["content"] for pair in found] == ["first"] * 3 + ["second"] * 3
    assert all(pair.prompt == CONTEXT and pair.domain == "general" for pair in found)
    assert [path.name for path in out.parent.iterdir()] == [out.name]
    lines = done.lines()
    assert lines[0] == "16 rows read, 6 written"
    assert any("empty answer (train.jsonl row 15" in line for line in lines)


def test_language_limit_and_the_reason_without_rows(tmp_path):
    rows = [preference(1, "python")] * 30 + [preference(-1, "english")] * 30
    source = str(write(tmp_path / "train.jsonl", rows))
    out = tmp_path / "out.jsonl"
    assert convert_rows("helpsteer3", out, source, limit=5).written == len(pairs(out)) == 5
    assert convert_rows("helpsteer3", out, source, language="any").written == len(pairs(out)) == 60
    assert convert_rows("helpsteer3", out, source, language="Python").written == len(pairs(out)) == 30
    out.unlink()
    source = str(write(tmp_path / "train.jsonl", [preference(1, "python")] * 3 + [{"a": 1}]))
    with pytest.raises(InputError, match=r"train\.jsonl: no row to write; 4 skipped: language is not english"):
        convert_rows("helpsteer3", tmp_path / "out.jsonl", source)
    with pytest.raises(InputError, match=r"no row to write; 4 rows dropped: null \(train\.jsonl row 1"):
        convert_rows("gsm8k", tmp_path / "out.jsonl", source)
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(
    ("name", "out", "more", "message"),
    [
        ("helpsteer4", "out.jsonl", {}, "unknown converter 'helpsteer4'; use one of helpsteer3"),
        ("gsm8k", "out.csv", {}, "name a .jsonl or .parquet file"),
        ("gsm8k", "out.jsonl", {"language": "english"}, "the rows of gsm8k have no language"),
        ("gsm8k", "out.jsonl", {"source": "missing.jsonl"}, "missing.jsonl: no such file"),
    ],
)
def test_wrong_input(tmp_path, name, out, more, message):
    with pytest.raises(InputError) as caught:
        convert_rows(name, tmp_path / out, **more)
    assert message in str(caught.value)


def test_a_failed_write_leaves_no_file_and_names_it(tmp_path):
    out = tmp_path / "out.parquet"
    with pytest.raises(InputError, match=r"out\.parquet: column a cannot be written .*; write \.jsonl instead"):
        write_rows(out, [{"a": 1}, {"a": "x"}])
    assert list(tmp_path.iterdir()) == []
    write_rows(out, [{"a": 1}, {"b": "x"}])
    assert [row for _, row in read_rows(SourceRecipe(path=str(out)))] == [{"a": 1, "b": None}, {"a": None, "b": "x"}]
    (tmp_path / "file").write_text("no directory")
    with pytest.raises(RunError, match=r"cannot write .*out\.jsonl: .*; check the path and the disk"):
        write_rows(tmp_path / "file" / "out.jsonl", [{"a": 1}])


def test_malformed_rows_raise_nothing():
    draws = random_stream("test", "malformed helpsteer")
    converted = 0
    for _ in range(1_000):
        row = preference(int(draws.integers(-3, 4)))
        for _ in range(draws.integers(1, 4)):
            row = changed(row, draws)
        row = row if isinstance(row, dict) else {"overall_preference": value(draws, 2)}
        for converter in CONVERTERS.values():
            assert isinstance(converter.row(row), dict | str)
        converted += isinstance(helpsteer3(row, "any"), dict)
    assert 200 < converted < 950


def test_the_command(tmp_path):
    app = Typer()
    app.command()(convert)
    source = write(tmp_path / "train.jsonl", [{"question": "q", "answer": "a"}] * 3)
    out = tmp_path / "out.jsonl"
    result = CliRunner().invoke(app, ["gsm8k", str(source), "--out", str(out), "--limit", "2"])
    assert result.exit_code == 0, result.output
    assert result.output == f"2 rows read, 2 written\nwrote {out}\n"
    assert out.read_text() == '{"prompt": "q", "completion": "a"}\n' * 2


QUESTION = {"role": "user", "content": "2 + 2?"}
ANSWER = {"role": "assistant", "content": "4"}


@pytest.mark.parametrize(
    ("row", "reference", "columns"),
    [
        ({"prompt": "2 + 2?", "completion": "4"}, "4", {}),
        ({"prompt": [QUESTION], "completion": [ANSWER]}, "4", {}),
        ({"prompt": "2 + 2?", "label": 4}, "4", {}),
        ({"prompt": "2 + 2?", "completion": "", "label": "4"}, "4", {}),
        ({"messages": [QUESTION, ANSWER]}, "4", {}),
        ({"messages": [QUESTION, {"role": "assistant", "content": "5"}, QUESTION, ANSWER]}, "4", {}),
        ({"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}, "4", {}),
        ({"chosen": [QUESTION, ANSWER], "rejected": [QUESTION, ANSWER]}, "4", {}),
        ({"prompt": "2 + 2?", "messages": [QUESTION, ANSWER]}, None, {}),
        ({"prompt": "2 + 2?", "label": True}, None, {}),
        ({"prompt": "2 + 2?"}, None, {}),
        ({"prompt": "2 + 2?", "completion": [{"role": 3}]}, None, {}),
        ({"question": "2 + 2?", "gold": "4", "completion": "5"}, "4", {"prompt": "question", "completion": "gold"}),
    ],
)
def test_the_reference_of_each_form(row, reference, columns):
    assert reference_answer(made("prompt", row, **columns), ColumnsRecipe(**columns)) == reference
