"""Bad input from end to end: files with every kind of bad row through the command line, and ten thousand more."""

import html
import json
import re
from itertools import pairwise

import numpy as np
import pytest

from posttrain.cli.main import main
from posttrain.data.rendering import Renderer
from posttrain.recipe.data import DataRecipe
from posttrain.runs.directory import RunDirectory
from posttrain.seeds import random_stream
from posttrain.training.rows import StreamedRows, load_data, samples_of_row
from posttrain.training.updater import pack
from tests.conftest import make_tokenizer
from tests.data.malformed import malformed
from tests.training import small
from tests.training.preferences import pair_rows, unpaired_rows, write_jsonl

LONG = "Up Down " * 60
NULL = {"role": "assistant", "content": None}


def asked(answer, role="assistant", prompt="Say Goal."):
    return [{"role": "user", "content": prompt}, {"role": role, "content": answer}]


BAD = {
    "conversation": [
        ({"note": "Goal"}, "missing column"),
        ({"messages": None}, "null"),
        ({"messages": [{"role": "user", "content": "a"}, NULL]}, "null"),
        ({"messages": asked("Goal", "robot")}, "wrong role"),
        ({"messages": asked("Goal")[1:]}, "roles out of order"),
        ({"messages": asked("Goal")[:1]}, "no assistant message"),
        ({"messages": asked(" \n")}, "empty answer"),
        ({"messages": asked("Goal", prompt=" ")}, "empty prompt"),
        ({"messages": "Goal"}, "wrong type"),
        ({"messages": asked(["Goal", 3])}, "content is not text"),
        ({"messages": asked("Goal"), "domain": 3}, "wrong type"),
        ({"messages": asked("\ud800")}, "broken UTF-8"),
        ({"messages": asked(LONG)}, "longer than data.max_tokens"),
        ({"messages": asked("Goal", prompt=LONG)}, "longer than data.max_tokens"),
        ({"messages": [*asked("Goal")[:1], {"role": "assistant", "content": "Goal", "train": False}]}, "nothing is"),
        ([1, 2], "wrong type"),
    ],
    "pair": [
        ({"prompt": "Say Goal.", "chosen": "Goal"}, "missing column"),
        ({"prompt": "Say Goal.", "chosen": "Goal", "rejected": None}, "null"),
        ({"chosen": "Goal", "rejected": "Up"}, "answers as text without a prompt"),
        ({"chosen": asked("Goal"), "rejected": asked("Goal")}, "chosen equals rejected"),
        ({"chosen": asked("Goal"), "rejected": asked(" ")}, "empty answer"),
        ({"chosen": asked("Goal"), "rejected": asked("Up", "critic")}, "wrong role"),
        ({"chosen": asked("Goal"), "rejected": asked("Up")[:1]}, "no assistant message"),
        ({"chosen": asked("Goal"), "rejected": 3}, "wrong type"),
        ({"chosen": asked("Goal"), "rejected": asked("Up"), "margin": -1}, "margin is not a number"),
        ({"chosen": asked("Goal"), "rejected": asked("\udfff")}, "broken UTF-8"),
        ({"chosen": asked("Goal"), "rejected": asked(LONG)}, "longer than data.max_tokens"),
        ({"prompt": LONG, "chosen": "Goal", "rejected": "Up"}, "longer than data.max_tokens"),
        ("row", "wrong type"),
    ],
    "unpaired": [
        ({"prompt": "Say Goal.", "completion": "Goal"}, "missing column"),
        ({"prompt": "Say Goal.", "completion": "Goal", "label": "perhaps"}, "label is neither"),
        ({"prompt": "Say Goal.", "completion": "", "label": True}, "empty answer"),
        ({"prompt": LONG, "completion": "Goal", "label": 0}, "longer than data.max_tokens"),
    ],
}
RAW = [(b'{"messages": ', "broken JSON"), (b"not JSON", "broken JSON"), (b'{"prompt": "\xff\xfe"}', "broken UTF-8")]
"""Lines that no row can be read from."""

STAGES = {"sft": "conversation", "dpo": "pair", "kto": "unpaired", "reward": "pair"}
"""Stage, or loss of the stage `dpo`, and the kind of its rows."""


def good_rows(kind, count):
    if kind == "conversation":
        return [{"messages": row["chosen"]} for row in pair_rows(count)]
    return (unpaired_rows if kind == "unpaired" else pair_rows)(count)[:count]


def write_mixed(path, kind, good=12):
    """Good rows with bad ones among them; category -> numbers of the rows that it is expected of."""
    entries = [(json.dumps(row).encode(), None) for row in good_rows(kind, good)]
    entries += [(json.dumps(row).encode(), category) for row, category in BAD[kind]] + RAW
    order = [entries[place] for place in np.random.default_rng(0).permutation(len(entries))]
    path.write_bytes(b"\n".join(line for line, _ in order) + b"\n")
    expected = {}
    for number, (_, category) in enumerate(order, 1):
        if category is not None:
            expected.setdefault(category, []).append(number)
    return expected


def command(variant, tiny, folder, train, *more):
    """Words of a short run of the stage."""
    words = ["dpo", "loss.type=kto"] if variant == "kto" else [variant]
    words += [f"name={variant}", f"runs={folder / 'runs'}", f"model.path={tiny}", "model.threads=1"]
    words += [f"data.train={train}", "data.max_tokens=60", f"data.cache={folder / 'cache' / 'tokens'}"]
    return [*words, "steps=2", "rows_per_update=6", "learner.tokens_per_batch=500", *more]


def told(run):
    """The output of the run before its first step."""
    assert [line["step"] for line in small.lines(run, "train")] == [1, 2]
    return [message for message in small.messages(run) if "dropped" in message]


@pytest.mark.parametrize("variant", STAGES)
def test_bad_rows_among_good_ones_are_named_in_one_summary(variant, tiny_model, tmp_path, capsys):
    path = tmp_path / "train.jsonl"
    expected = write_mixed(path, STAGES[variant])
    assert main(command(variant, tiny_model, tmp_path, path, "data.held_out=2")) == 0, capsys.readouterr()
    run = tmp_path / "runs" / variant
    summary = told(run)
    assert sum(int(line.split()[0]) for line in summary) == sum(map(len, expected.values()))
    for category, numbers in expected.items():
        lines = [line for line in summary if re.match(rf"\d+ rows? dropped: {re.escape(category)}", line)]
        assert lines, f"{category} is not told in {summary}"
        named = [int(number) for line in lines for number in re.findall(r"row (\d+)", line.partition(" (")[2])]
        assert set(numbers) & set(named) or len(named) >= 5
        assert set(named) <= {number for numbers in expected.values() for number in numbers}
        assert all("train.jsonl row" in line for line in lines)
    printed = " ".join(capsys.readouterr().out.split())
    report = RunDirectory.open(run).report.read_text()
    for line in summary:
        category = line.partition(" dropped: ")[2].partition(" (")[0]
        assert f"dropped: {category}" in printed
        assert category in html.unescape(report)


@pytest.mark.parametrize("variant", STAGES)
def test_strict_makes_the_first_bad_row_an_error(variant, tiny_model, tmp_path, capsys):
    path = tmp_path / "train.jsonl"
    expected = write_mixed(path, STAGES[variant])
    assert main(command(variant, tiny_model, tmp_path, path, "data.strict=true")) == 2
    said = capsys.readouterr().err.strip()
    assert len(said.splitlines()) == 1
    number = int(re.match(r"posttrain: train\.jsonl row (\d+): ", said)[1])
    # Rows that are too long are found after all have been read.
    late = {"longer than data.max_tokens", "nothing is"}
    assert number == min(n for category, numbers in expected.items() if category not in late for n in numbers)
    assert f"{sum(map(len, expected.values())) - 1} more problems" in said
    assert "strict: false" in said


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("variant", STAGES)
def test_no_usable_row_is_an_error(variant, streaming, tiny_model, tmp_path, capsys):
    kind = STAGES[variant]
    path = tmp_path / "train.jsonl"
    path.write_bytes(b"\n".join([*(json.dumps(row).encode() for row, _ in BAD[kind]), *(line for line, _ in RAW)]))
    words = command(variant, tiny_model, tmp_path, path, f"data.streaming={str(streaming).lower()}")
    assert main(words) == 2
    said = capsys.readouterr().err.strip()
    assert len(said.splitlines()) == 1
    assert said.startswith(f"posttrain: {path}: no usable row; {len(BAD[kind]) + len(RAW)} problems, most often ")
    assert re.search(r"\(train\.jsonl row \d+", said)


def write_parquet(path, rows):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=4)
    return path


def test_a_truncated_parquet_file_beside_a_whole_one(tiny_model, tmp_path, capsys):
    folder = tmp_path / "rows"
    folder.mkdir()
    rows = good_rows("conversation", 20)
    write_parquet(folder / "a.parquet", rows[:12])
    broken = write_parquet(folder / "b.parquet", rows[12:])
    broken.write_bytes(broken.read_bytes()[:-300])
    assert main(command("sft", tiny_model, tmp_path, folder)) == 0, capsys.readouterr()
    (line,) = told(tmp_path / "runs" / "sft")
    assert line.startswith("1 file dropped: broken file (b.parquet")
    assert main([*command("sft", tiny_model, tmp_path, folder, "data.strict=true"), "--overwrite"]) == 2
    assert capsys.readouterr().err.startswith("posttrain: b.parquet: broken file")
    assert main([*command("sft", tiny_model, tmp_path, broken), "--overwrite"]) == 2
    assert "b.parquet: no usable row; 1 problem, most often broken file" in capsys.readouterr().err


def test_damaged_caches_and_unwritable_ones_change_nothing(tiny_model, tmp_path, capsys):
    train = write_jsonl(tmp_path / "train.jsonl", good_rows("pair", 8))
    words = command("dpo", tiny_model, tmp_path, train)
    run = tmp_path / "runs" / "dpo"
    assert main(words) == 0, capsys.readouterr()
    first = small.metrics(run)
    caches = sorted((tmp_path / "cache").rglob("*.npz"))
    assert [file.parent.name for file in caches] == ["references", "tokens"]
    for damage in (lambda whole: whole[: len(whole) // 2], lambda whole: b"?" * 99, lambda whole: b""):
        for file in caches:
            file.write_bytes(damage(file.read_bytes()))
        assert main([*words, "--overwrite"]) == 0, capsys.readouterr()
        assert small.metrics(run) == first
        assert sorted((tmp_path / "cache").rglob("*")) == sorted({*caches, *(file.parent for file in caches)})
        for file in caches:
            with np.load(file) as stored:
                assert all(len(stored[name]) for name in stored)
    (tmp_path / "file").write_text("not a directory")
    assert main([*words, "--overwrite", f"data.cache={tmp_path / 'file' / 'tokens'}"]) == 0, capsys.readouterr()
    assert small.metrics(run) == first


# -- ten thousand ------------------------------------------------------------------------------------------------------


def write_malformed(path, kind, count):
    """`count` damaged lines, some of them unreadable."""
    draws = random_stream("test", "bad rows", kind)
    with path.open("wb") as file:
        for row in malformed(kind, count, draws):
            try:
                escaped = bool(draws.integers(2))
                line = bytearray(json.dumps(row, ensure_ascii=escaped).encode("utf-8", "surrogatepass"))
            except (TypeError, ValueError, RecursionError):
                line = bytearray(b"not JSON")
            if draws.random() < 0.1:
                line[draws.integers(len(line))] = draws.integers(128, 256)
            elif draws.random() < 0.05:
                line = line[: draws.integers(1, len(line) + 1)]
            file.write(bytes(line).replace(b"\n", b" ") + b"\n")


def checked(rows, kind, limit):
    """The samples of the rows, with everything held that the learner relies on."""
    samples = []
    for number, row in enumerate(rows):
        made = samples_of_row(row, number if kind != "conversation" else -1)
        assert made
        assert len(made) == {"pair": 2, "unpaired": 1}.get(kind, len(made))
        if kind == "pair":
            assert made[0].stream.ids.tolist() != made[1].stream.ids.tolist()
        assert 0 <= row.margin < float("inf")
        for sample in made:
            ids, sampled = sample.stream.ids, sample.stream.sampled
            assert ids.dtype == np.int64
            assert 0 <= ids.min() <= ids.max() < 400
            assert len(ids) == len(sampled) <= limit
            assert sampled.any()
            assert not sampled[0]
            assert sample.sampled_tokens == len(sample.advantages)
        samples += made
    packed = sorted(i for group in pack(samples, 2 * limit) for i in group)
    assert packed == list(range(len(samples)))
    return samples


@pytest.mark.parametrize(
    ("kind", "loss_on", "overlong", "limit"),
    [
        ("conversation", "assistant", "drop", 40),
        ("conversation", "all", "truncate", 25),
        ("pair", "assistant", "truncate", 30),
        ("unpaired", "assistant", "truncate", 25),
    ],
)
def test_thousands_of_malformed_rows_never_reach_the_loss(kind, loss_on, overlong, limit, tmp_path):
    path, count = tmp_path / "train.jsonl", 1_500
    write_malformed(path, kind, count)
    tokenizer = make_tokenizer()
    renderer = Renderer(tokenizer, frozenset({tokenizer.eos_token_id}))
    recipe = DataRecipe(train=str(path), max_tokens=limit, overlong=overlong, cache=str(tmp_path / "cache"))
    data = load_data(kind, recipe, renderer, loss_on, 8, 0)
    samples = checked(data.stored, kind, limit)
    assert len(data.stored) > 30
    lines = (line for line in path.read_bytes().splitlines() if line.strip())
    assert len(data.stored) + data.problems.total == sum(1 for _ in lines) >= count - 100
    assert len(data.problems.summary()) >= 10
    trained = sum(sample.sampled_tokens for sample in samples)
    # Once from the cache, and once as a stream, they are the same rows.
    again = load_data(kind, recipe, renderer, loss_on, 8, 0)
    assert sum(s.sampled_tokens for s in checked(again.stored, kind, limit)) == trained
    assert again.problems.state() == data.problems.state()
    streamed = StreamedRows(kind, recipe.model_copy(update={"shuffle_buffer": 1}), renderer, loss_on, 8, 0)
    rows = [row for step in range(len(data.stored) // 8) for row in streamed.batch(step)]
    for one, other in zip(rows, data.stored, strict=False):
        assert one.origin == other.origin
        assert all(np.array_equal(a.ids, b.ids) for a, b in zip(one.streams, other.streams, strict=True))
    numbers = [int(row.origin.rpartition(" ")[2]) for row in data.stored]
    assert all(one < other for one, other in pairwise(numbers))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("variant", STAGES)
def test_ten_thousand_malformed_rows_through_a_stage(variant, tiny_model, tmp_path, capsys):
    path = tmp_path / "train.jsonl"
    write_malformed(path, STAGES[variant], 10_000)
    words = command(variant, tiny_model, tmp_path, path, "data.held_out=20", "steps=20")
    assert main(words) == 0, capsys.readouterr()
    train = small.lines(tmp_path / "runs" / variant, "train")
    assert len(train) == 20
    assert all(np.isfinite(line["loss/total"]) for line in train)
    assert not any(line.get("optimizer/skipped") for line in train)
