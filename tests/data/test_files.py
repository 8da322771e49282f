"""Rows of files, directories and the hub with their origins. Damage affects only the damaged rows."""

import copy
import datetime
import gzip
import json
import tracemalloc
from decimal import Decimal

import numpy as np
import pytest

from posttrain.data.examples import load_dataset
from posttrain.data.files import _Limits, _read_listed, plain, read_rows, read_split, write_rows
from posttrain.errors import InputError, RunError
from posttrain.recipe.data import SourceRecipe
from posttrain.seeds import random_stream

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

ROWS = [{"prompt": f"question {n} é", "completion": f"answer {n}"} for n in range(1, 6)]


def read(path, **more):
    return list(read_rows(SourceRecipe(path=str(path), **more)))


def numbered(name, rows):
    return [(f"{name} row {n}", row) for n, row in enumerate(rows, 1)]


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


def rows_in(file, content, **more):
    """The rows of a file with this content."""
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return read(file, **more)


def peak_of(file, **more):
    """The rows of a file, and the largest memory of reading them."""
    tracemalloc.start()
    try:
        return read(file, **more), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_json_lines(tmp_path, ending):
    content = b"\xef\xbb\xbf" + (ending * 2).join(json.dumps(row) for row in ROWS).encode()
    # A row has the number of its line, and every second line is blank.
    expected = [(f"train.jsonl row {2 * n - 1}", row) for n, row in enumerate(ROWS, 1)]
    assert rows_in(tmp_path / "train.jsonl", content) == expected


def test_json_lists_and_json_lines_in_json(tmp_path):
    path = tmp_path / "train.json"
    assert rows_in(path, "\n " + json.dumps(ROWS, indent=1)) == numbered("train.json", ROWS)
    assert read(write_lines(path, ROWS)) == numbered("train.json", ROWS)
    assert rows_in(path, "[]") == rows_in(path, "") == []
    problem = "broken file: the file is one object, not a list of objects"
    assert rows_in(path, json.dumps({"data": ROWS}, indent=2)) == [("train.json", problem)]


def test_csv_with_quotes_newlines_and_long_cells(tmp_path):
    path = tmp_path / "train.csv"
    rows = [{"prompt": 'a, "b"\nc', "completion": "d"}, {"prompt": "é", "completion": ""}]
    assert rows_in(path, 'prompt,completion\n"a, ""b""\nc",d\n\né,\n') == numbered("train.csv", rows)
    assert len(rows_in(path, f"prompt\n{'x' * 200_000}\n")[0][1]["prompt"]) == 200_000


def test_values_of_parquet_and_numpy_become_plain(tmp_path):
    path = tmp_path / "train.parquet"
    rows = [{"n": n, "messages": [{"role": "user", "content": str(n)}]} for n in range(700)]
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=300)
    assert read(path) == numbered("train.parquet", rows)
    path = tmp_path / "train.parquet"
    table = pa.table(
        {
            "day": [datetime.date(2024, 2, 3)],
            "price": [Decimal("1.50")],
            "pairs": pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64())),
            "small": pa.array([1.5], pa.float16()),
        }
    )
    pq.write_table(table, path)
    row = read(path)[0][1]
    assert row == {"day": "2024-02-03", "price": 1.5, "pairs": [["a", 1]], "small": 1.5}
    assert type(row["small"]) is float
    value = plain({"a": np.float64(0.5), "b": np.arange(2), "c": (np.bool_(True), np.str_("x")), "d": np.int8(3)})
    assert value == {"a": 0.5, "b": [0, 1], "c": [True, "x"], "d": 3}
    assert [type(value["a"]), type(value["b"][0]), *map(type, value["c"])] == [float, int, bool, str]


def test_a_directory_is_read_in_the_order_of_names(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / ".cache").mkdir()
    write_lines(tmp_path / "b" / "one.jsonl", ROWS[:2])
    write_lines(tmp_path / "a.jsonl", ROWS[2:])
    write_lines(tmp_path / ".cache" / "hidden.jsonl", ROWS)
    (tmp_path / "README.md").write_text("no rows")
    assert read(tmp_path) == numbered("a.jsonl", ROWS[2:]) + numbered("b/one.jsonl", ROWS[:2])


def split_of(path, split, subset=None):
    return [origin.split()[0] for origin, _ in read_split(SourceRecipe(path=str(path), split=split, subset=subset))]


def test_the_files_of_a_split_are_found_by_their_names(tmp_path):
    for name in ("preference/train.jsonl.gz", "preference/validation.jsonl.gz", "edit/train.jsonl.gz"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        with gzip.open(tmp_path / name, "wt") as file:
            file.write(json.dumps(ROWS[0]) + "\n")
    assert split_of(tmp_path, "train", "preference") == ["train.jsonl.gz"]
    assert split_of(tmp_path, "validation", "preference") == ["validation.jsonl.gz"]
    # Without such a subdirectory, the whole directory counts.
    assert split_of(tmp_path, "train", "other") == ["edit/train.jsonl.gz", "preference/train.jsonl.gz"]
    assert split_of(tmp_path / "edit", "train", "preference") == ["train.jsonl.gz"]
    with pytest.raises(InputError, match=r"edit: no file of the split test, .* train\.jsonl\.gz; name one"):
        split_of(tmp_path / "edit", "test")


def test_names_of_splits_and_directories_without_them(tmp_path):
    names = ["own_val.jsonl", "own-dev-00000-of-00001.jsonl", "evaluate_trains.jsonl", "train_prefs.jsonl"]
    for name in names:
        write_lines(tmp_path / name, ROWS[:1])
    assert split_of(tmp_path, "validation") == ["own-dev-00000-of-00001.jsonl", "own_val.jsonl"]
    assert split_of(tmp_path, "train_prefs") == ["train_prefs.jsonl"]
    for name in names[:2] + names[3:]:
        (tmp_path / name).unlink()
    assert split_of(tmp_path, "train") == ["evaluate_trains.jsonl"]
    with pytest.raises(InputError, match="no file of the split validation"):
        split_of(tmp_path, "validation")


def test_reading_is_lazy(tmp_path):
    path = tmp_path / "train.jsonl"
    write_lines(path, ROWS * 2_000)
    rows = read_rows(SourceRecipe(path=str(path)))
    assert next(rows) == ("train.jsonl row 1", ROWS[0])
    # What is added now is read, too.
    with path.open("a") as file:
        file.write(json.dumps(ROWS[0]) + "\n")
    assert sum(1 for _ in rows) == 2_000 * len(ROWS)


def test_broken_lines_are_problems_of_their_row_only(tmp_path):
    path = tmp_path / "train.jsonl"
    lines = [b'{"a": 1}', b'{"a": "\xff"}', b'{"a": ', b"[1, 2]", b"", b"null", b'{"a": ' + b"[" * 100_000, b'{"a": 2}']
    path.write_bytes(b"\n".join([*lines, b'{"a": ' + b"1" * 10_000 + b"}"]))
    origins, (first, *broken, last, long) = zip(*read(path), strict=True)
    assert origins == tuple(f"train.jsonl row {n}" for n in (1, 2, 3, 4, 6, 7, 8, 9))
    assert (first, last) == ({"a": 1}, {"a": 2})
    starts = ["broken UTF-8: byte 0xff at position 8", "broken JSON: Expecting value at character 7"]
    starts += ["row is not an object: its type is list", "row is not an object: its type is NoneType"]
    for problem, start in zip([*broken, long], [*starts, "broken JSON: nested", "broken JSON: "], strict=True):
        assert problem.startswith(start)
    (tmp_path / "d.jsonl").write_text('{"x": "\\ud83d"}\n{"x": "\\ud83d\\ude00"}\n')
    (_, broken), (_, good) = read_rows(SourceRecipe(path=str(tmp_path / "d.jsonl")))
    assert broken.startswith("broken UTF-8")
    assert good == {"x": "\U0001f600"}


def test_a_truncated_json_list_is_read_up_to_the_damage(tmp_path):
    content = b'[{"a": 1}, {"a": "\xff"}, {"a": "\\ud800"}, 7, {"a": 2}, {"a": '
    origins, rows = zip(*rows_in(tmp_path / "train.json", content), strict=True)
    assert origins == tuple(f"train.json row {n}" for n in range(1, 7))
    assert (rows[0], rows[4]) == ({"a": 1}, {"a": 2})
    problems = [
        "broken UTF-8: ",
        "broken UTF-8: ",
        "row is not an object: its type is int",
        "broken JSON: Expecting value",
    ]
    for row, problem in zip([*rows[1:4], rows[5]], problems, strict=True):
        assert row.startswith(problem)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ('[{"a": 1} {"a": 2}]', "broken file: the list is cut off after row 1"),
        ('[{"a": 1}', "broken file: the list is cut off after row 1"),
        ('[{"a": 1}] more', "broken file: text after the list is not read"),
    ],
)
def test_a_truncated_list_keeps_its_rows(tmp_path, content, problem):
    found = rows_in(tmp_path / "train.json", content)
    assert found == [("train.json row 1", {"a": 1}), ("train.json", problem)]


def test_broken_rows_of_csv(tmp_path):
    content = b'a,b\n1,2\n1\n1,2,3\n\xff,2\n"x"y,2\n3,4\n"open,5\n6,7\n'
    origins, rows = zip(*rows_in(tmp_path / "train.csv", content), strict=True)
    assert origins == tuple(f"train.csv row {n}" for n in range(1, 8))
    assert (rows[0], rows[5]) == ({"a": "1", "b": "2"}, {"a": "3", "b": "4"})
    problems = [f"broken CSV row: {n} cells under a header of 2" for n in (1, 3)]
    problems += ["broken UTF-8: ", "broken CSV row: ", "broken CSV row: "]
    for row, problem in zip([*rows[1:5], rows[6]], problems, strict=True):
        assert row.startswith(problem)


@pytest.mark.parametrize("header", [b"a,a\n1,2\n", b"a,\xff\n1,2\n", b'"a"b,c\n1,2\n'])
def test_a_broken_header_is_one_problem(tmp_path, header):
    [(origin, problem)] = rows_in(tmp_path / "train.csv", header)
    assert origin == "train.csv"
    assert problem.startswith("broken file: the header has ")


@pytest.mark.parametrize("kept", [0, 3, 200, -1])
def test_a_truncated_parquet_file_is_one_problem(tmp_path, kept):
    path = tmp_path / "train.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), path)
    path.write_bytes(path.read_bytes()[:kept])
    [(origin, problem)] = read(path)
    assert origin == "train.parquet"
    assert problem.startswith("broken file: not a complete parquet file")


def test_broken_parts_of_parquet_drop_only_their_rows(tmp_path):
    path = tmp_path / "train.parquet"
    rows = [{"text": f"{n} " * 200} for n in range(90)]
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=30, compression="gzip", use_dictionary=False)
    start = pq.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
    content = bytearray(path.read_bytes())
    content[start : start + 60] = bytes(60)
    path.write_bytes(content)
    found = read(path)
    assert [origin for origin, row in found if isinstance(row, str)] == ["train.parquet"]
    assert found[30][1].startswith("broken file: rows 31 to 60 of 90 cannot be decoded")
    assert found[:30] + found[31:] == [(f"train.parquet row {n + 1}", rows[n]) for n in range(90) if not 30 <= n < 60]
    path = tmp_path / "train.parquet"
    texts = [b"one", b"tw\xff", "thré".encode()]
    array = pa.array(texts, pa.binary()).view(pa.string())
    pq.write_table(pa.table({"a": array}), path)
    assert read(path) == [
        ("train.parquet row 1", {"a": "one"}),
        ("train.parquet row 2", "broken UTF-8: byte 0xff in a text"),
        ("train.parquet row 3", {"a": "thré"}),
    ]


def test_random_bytes_in_any_format_raise_nothing(tmp_path):
    draws = random_stream("test", "random bytes")
    good = tmp_path / "good.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS * 20), good)
    samples = {
        ".parquet": good.read_bytes(),
        ".jsonl": write_lines(tmp_path / "g.jsonl", ROWS).read_bytes(),
        ".json": json.dumps(ROWS).encode(),
        ".csv": b"prompt,completion\n" + b'"a, b",c\n' * 20,
    }
    problems = 0
    for suffix, whole in samples.items():
        path = tmp_path / f"bad{suffix}"
        for _ in range(100):
            content = bytearray(whole)
            for place in draws.integers(len(content), size=8):
                content[place] = draws.integers(256)
            path.write_bytes(content[: draws.integers(len(content) // 2, len(content) + 1)])
            for origin, row in read(path):
                assert origin.startswith(path.name)
                assert isinstance(row, dict | str)
                problems += isinstance(row, str)
    assert problems > 200


@pytest.mark.parametrize("path", ["missing.jsonl", "no/such/directory", "./here", "/nowhere/x.parquet", "not an id"])
def test_a_missing_path_is_named(path):
    with pytest.raises(InputError, match="no such file or directory") as caught:
        read_rows(SourceRecipe(path=path))
    assert str(caught.value).startswith(f"{path}: ")


def test_files_of_other_kinds_and_empty_directories_are_named(tmp_path):
    (tmp_path / "rows.txt").write_text("x")
    with pytest.raises(InputError, match=r"rows\.txt: unknown format; .*\.parquet"):
        read(tmp_path / "rows.txt")
    with pytest.raises(InputError, match="the directory has no"):
        read(tmp_path)


@pytest.fixture
def hub(monkeypatch):
    """A hub with the given content; None is an unreachable hub."""
    datasets = pytest.importorskip("datasets")
    import huggingface_hub

    def set_up(rows):
        def info(self, path, **more):
            if rows is None:
                raise ConnectionError("Name or service not known\nsecond line")

        monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", info)
        monkeypatch.setattr(datasets, "load_dataset", lambda path, subset, split, streaming: rows(path, subset, split))

    return set_up


def test_rows_of_the_hub_and_its_failures(hub):
    hub(None)
    with pytest.raises(InputError) as caught:
        read_rows(SourceRecipe(path="owner/name", subset="main"))
    text = str(caught.value)
    assert text.startswith("owner/name: no such file or directory, and no hub data set with split")
    assert "split train of main (Name or service not known)" in text
    assert "\n" not in text
    hub(lambda path, subset, split: iter([{"a": np.int64(1)}, {"a": 2}]))
    assert read("owner/name", split="test") == numbered("owner/name test", [{"a": 1}, {"a": 2}])

    def rows(path, subset, split):
        yield {"a": 1}
        raise ConnectionError("gone")

    hub(rows)
    with pytest.raises(RunError, match=r"owner/name train: reading stopped after row 1 \(gone\)"):
        read("owner/name")


def test_packed_lines_are_read_up_to_a_break(tmp_path):
    rows = [{"number": number, "text": str(number) * 50} for number in range(400)]
    packed = gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode())
    assert rows_in(tmp_path / "rows.jsonl.gz", packed) == numbered("rows.jsonl.gz", rows)
    *whole, (origin, problem) = rows_in(tmp_path / "rows.jsonl.gz", packed[: len(packed) // 2])
    assert [row for _, row in whole] == rows[: len(whole)]
    assert origin == "rows.jsonl.gz"
    assert problem.startswith("broken file: ")


def test_a_row_that_is_too_large_is_skipped_without_being_kept(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n{"prompt": "' + b"x" * (9 << 20) + b'"}\n{"prompt": "b"}\n')
    rows, peak = peak_of(path, max_row_mib=0.5)
    too_large = "row is too large: it has more than 0.5 MiB (`max_row_mib`)"
    assert rows == numbered("train.jsonl", [{"prompt": "a"}, too_large, {"prompt": "b"}])
    assert peak < 4 << 20
    assert [type(row) for _, row in read(path)] == [dict] * 3


@pytest.mark.parametrize("line", [b"x" * 4096, b'{"prompt": "a"}\n'])
def test_a_gzip_bomb_is_read_up_to_its_limit(tmp_path, monkeypatch, line):
    monkeypatch.setattr("posttrain.data.files._FREE", 1 << 16)
    path = tmp_path / "train.jsonl.gz"
    with gzip.open(path, "wb") as file:
        file.write(b'{"prompt": "a"}\n' + line * 50_000)
    *_, last = read(path, max_expansion=20, max_row_mib=0.1)
    assert last == ("train.jsonl.gz", "broken file: it unpacks to more than 20 times its size (`max_expansion`)")
    assert len(read(path, max_expansion=5000, max_row_mib=0.1)) in (2, 50_001)


def test_a_parquet_bomb_is_not_decoded(tmp_path, monkeypatch):
    monkeypatch.setattr("posttrain.data.files._FREE", 1 << 16)
    path = tmp_path / "train.parquet"
    pq.write_table(pa.table({"a": ["x" * 1_000_000 + str(n) for n in range(3)]}), path, compression="zstd")
    ((_, problem),) = read(path, max_expansion=20)
    assert problem.startswith("broken file: rows 1 to 3 of 3 cannot be decoded (they unpack to more than 20 times")
    assert len(read(path, max_expansion=1_000_000)) == 3


LONG = pa.DictionaryArray.from_arrays(pa.array([0] * 50_000, pa.int32()), pa.array(["x" * (2 << 20)]))


@pytest.mark.parametrize(
    "column",
    [
        LONG,
        pa.StructArray.from_arrays([LONG], ["content"]),
        pa.ListArray.from_arrays(pa.array(range(50_001), pa.int32()), LONG),
        pa.MapArray.from_arrays(pa.array(range(50_001), pa.int32()), pa.array(["key"] * 50_000), LONG),
    ],
    ids=["text", "struct", "list", "map"],
)
def test_a_text_that_a_parquet_file_repeats_counts_each_time(tmp_path, column):
    path = tmp_path / "train.parquet"
    pq.write_table(pa.table({"a": column}), path, compression="zstd")
    assert path.stat().st_size < 60_000
    rows, peak = peak_of(path)
    assert len(rows) == 32
    assert "200 times its size (`max_expansion`); it is read up to row 31" in rows[-1][1]
    assert all(isinstance(row, dict) for _, row in rows[:-1])
    assert all("more than 1 MiB (`max_row_mib`)" in row for _, row in read(path, max_row_mib=1)[:-1])
    assert peak < 31 * (2 << 20) + (20 << 20), "more than the rows that the test keeps"


def test_nulls_of_a_parquet_file_count(tmp_path, monkeypatch):
    path = tmp_path / "train.parquet"
    pq.write_table(pa.table({"a": pa.array([[None] * 5_000_000], pa.list_(pa.int8()))}), path)
    assert path.stat().st_size < 10_000
    assert [row for _, row in read(path)] == ["row is too large: it has more than 16 MiB (`max_row_mib`)"]
    monkeypatch.setattr("posttrain.data.files._FREE", 1 << 20)
    ((_, problem),) = read(path)
    assert "they unpack to more than 200 times their size" in problem
    pq.write_table(pa.table({"a": pa.nulls(500_000, pa.string())}), path)
    *rows, (_, problem) = read(path)
    assert len(rows) == (1 << 20) // (64 + 8)
    assert "it unpacks to more than 200 times its size" in problem


@pytest.mark.parametrize(("name", "content"), [("a.json", '[{"a": "%s"}, {"a": "b"}]'), ("a.csv", "a\n%s\nb\n")])
def test_large_rows_of_other_formats_are_counted(tmp_path, name, content):
    rows = rows_in(tmp_path / name, content % ("x" * 200_000), max_row_mib=0.1)
    assert isinstance(rows[0][1], str)
    assert rows[-1][1] == {"a": "b"}


def test_a_json_list_is_read_in_pieces_with_any_borders(tmp_path, monkeypatch):
    rows = [{"a": 'é\U0001f600\\"' * (n % 7), "n": [n, -1.5e-7, None, True, {}]} for n in range(300)]
    file = tmp_path / "a.json"
    for text in (json.dumps(rows), json.dumps(rows, ensure_ascii=False, indent=1), json.dumps(list(range(300)))):
        file.write_text("\ufeff  " + text + " \n", encoding="utf-8")
        for size in (1, 2, 3, 17, 1 << 20):
            monkeypatch.setattr("posttrain.data.files._MIB", size)
            found = [row for _, row in _read_listed(file, "a.json", _Limits(1 << 20, 200))]
            assert found == (rows if "{" in text else ["row is not an object: its type is int"] * 300)


def test_a_json_list_without_end_is_not_read_into_memory(tmp_path):
    file = tmp_path / "a.json"
    with open(file, "wb") as endless:
        endless.write(b'[{"a": 1}, {"b": "')
        for _ in range(400):
            endless.write(b"x" * (1 << 20))
    found, peak = peak_of(file, max_row_mib=1)
    problem = "broken JSON: Unterminated string starting at; the rest of the file is not read"
    assert found == numbered("a.json", [{"a": 1}, problem])
    assert peak < 350 << 20


def test_the_nesting_of_rows_has_a_limit_per_source(tmp_path):
    def deep(levels):
        return {"a": deep(levels - 1)} if levels > 1 else {}

    file = write_lines(tmp_path / "a.jsonl", map(deep, (32, 33, 60)))
    assert [row for _, row in read(file)][1:] == [
        "nested too deeply: the row has more than 32 levels (`max_depth`)"
    ] * 2
    assert [type(row) for _, row in read(file, max_depth=50)] == [dict, dict, str]


TYPES: list[dict] = [
    {"city": {"type": "string", "enum": ["a", None], "default": None}},
    {"a": {"type": "integer"}, "b": {}},
]


def called(arguments, types):
    call = {"function": {"name": "f", "arguments": arguments}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    messages = [{"role": "user", "content": "q"}, answer, {"role": "tool", "content": "r"}]
    row = {"messages": [*messages, {"role": "assistant", "content": "a"}]}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": types}}}
    return row | ({"tools": [tool]} if types else {})


CALLED = [called({"city": "Paris"}, TYPES[0]), called({"a": 1, "b": None}, TYPES[1]), called({"a": [1, "x"]}, None)]


def conversations(path):
    return [(example.messages, example.tools) for example in load_dataset(path, strict=True)]


def test_parquet_has_the_conversations_of_the_rows_that_were_written(tmp_path):
    write_rows(tmp_path / "a.jsonl", CALLED)
    write_rows(tmp_path / "a.parquet", CALLED)
    assert conversations(tmp_path / "a.parquet") == conversations(tmp_path / "a.jsonl")
    rows = [{**row, "extra": {"kept": None}} for row in copy.deepcopy(CALLED[:2])]
    rows[1]["messages"][1]["tool_calls"][0]["function"]["arguments"] = {"a": 1}
    rows[0]["tools"][0]["function"]["parameters"]["properties"] = {"city": {"type": "string"}}
    rows[1]["tools"][0]["function"]["parameters"]["properties"] = {"a": {"type": "integer"}}
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "b.parquet")
    write_rows(tmp_path / "b.jsonl", rows)
    assert conversations(tmp_path / "b.parquet") == conversations(tmp_path / "b.jsonl")
    assert [row["extra"] for _, row in read(tmp_path / "b.parquet")] == [{"kept": None}] * 2
    texts = [json.dumps(message) for row in CALLED for message in row["messages"]]
    cells = pa.array(texts).cast(pa.json_())
    table = pa.table({"messages": pa.ListArray.from_arrays(range(0, len(texts) + 1, 4), cells)})
    pq.write_table(table, tmp_path / "c.parquet")
    write_rows(tmp_path / "c.jsonl", [{"messages": row["messages"]} for row in CALLED])
    assert conversations(tmp_path / "c.parquet") == conversations(tmp_path / "c.jsonl")


@pytest.mark.parametrize(
    ("split", "rows"), [("train[:50%]", range(5)), ("train[50%:]", range(5, 11)), ("train[20%:40%]", range(2, 4))]
)
def test_parts_of_a_file_are_disjoint(tmp_path, split, rows):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f'{{"row": {number}}}\n' for number in range(11)))
    source = SourceRecipe(path=str(file), split=split)
    assert [row["row"] for _, row in read_rows(source)] == [*rows]
    for wrong in ("train[5:7]", "train[50%:20%]", "train[:101%]"):
        with pytest.raises(ValueError, match="split"):
            SourceRecipe(path=str(file), split=wrong)
    with pytest.raises(InputError, match="none of its 11 rows"):
        read_rows(SourceRecipe(path=str(file), split="train[:1%]"))
