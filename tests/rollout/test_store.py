import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from posttrain.credit.units.mixing import CreditedUnits, UnitAdvantages, UnitRewards
from posttrain.credit.units.spans import Spans
from posttrain.episode import Advantages, Episode, Outcome, StopReason, Stream, Turn
from posttrain.errors import InputError, RunError
from posttrain.rollout.store import (
    episodes_file,
    json_line,
    read_episodes,
    read_record,
    remove_episodes_after,
    stored_records,
    stored_steps,
    write_episodes,
    zstd,
)
from tests.rollout.episodes import played

FLOAT32 = st.floats(width=32, allow_nan=True, allow_infinity=True)
INFO = st.dictionaries(
    st.text(max_size=5),
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text()),
    max_size=3,
)


@st.composite
def streams(draw: st.DrawFn) -> Stream:
    length = draw(st.integers(0, 12))
    integers = arrays.arrays(np.int64, length, elements=st.integers(0, 2**31 - 1))
    floats = arrays.arrays(np.float32, length, elements=FLOAT32)
    turn = arrays.arrays(np.int32, length, elements=st.integers(-1, 9))
    sampled = arrays.arrays(np.bool_, length, elements=st.booleans())
    return Stream(draw(integers), draw(sampled), draw(floats), draw(floats), draw(turn), draw(turn))


@st.composite
def episodes_of(draw: st.DrawFn) -> Episode:
    parts = draw(st.lists(streams(), max_size=3))
    turns = []
    for _ in range(draw(st.integers(0, 3))):
        stream = draw(st.integers(0, max(len(parts) - 1, 0)))
        place = st.integers(0, len(parts[stream]) if parts else 99)  # without tokens, a turn counts those of its server
        start, stop = sorted((draw(place), draw(place)))
        reason, reward = draw(st.sampled_from(StopReason)), draw(st.floats(allow_nan=False))
        turns.append(
            Turn(stream, start, stop, reward, reason, draw(st.text()), draw(INFO), draw(st.none() | st.text()))
        )
    return draw(
        st.builds(
            Episode,
            seed=st.integers(0, 2**62),
            group=st.integers(0, 99),
            index=st.integers(0, 99),
            version=st.integers(0, 99),
            streams=st.just(parts),
            turns=st.just(turns),
            outcome=st.sampled_from(Outcome),
            failure=st.none() | st.text(),
            messages=st.lists(st.fixed_dictionaries({"role": st.just("user"), "content": st.text()}), max_size=3),
        )
    )


@st.composite
def credited_units(draw: st.DrawFn, tokens: int) -> CreditedUnits:
    cuts = Spans.from_cuts(tokens, np.array(draw(st.lists(st.integers(0, 12))), dtype=np.int64)).cuts
    number = st.floats(-1e300, 1e300)
    count = len(cuts) - 1
    kind = draw(st.sampled_from([UnitRewards, UnitAdvantages]))
    return kind(
        Spans(cuts, draw(arrays.arrays(np.bool_, count))),
        draw(arrays.arrays(np.float64, count, elements=number)),
        draw(number),
        draw(number),
    )


def same_arrays(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(st.data(), st.lists(episodes_of(), max_size=3), st.booleans(), st.integers(0, 10**7))
def test_everything_is_read_back(
    tmp_path: Path, data: st.DataObject, episodes: list[Episode], credited: bool, step: int
) -> None:
    units = [data.draw(st.none() | credited_units(e.sampled_tokens)) for e in episodes]
    advantages = Advantages([[s.rewards * np.float32(0.1) for s in e.streams] for e in episodes]) if credited else None
    stored = read_episodes(write_episodes(tmp_path, step, "train", episodes, advantages, units))
    assert len(stored.episodes) == len(episodes)
    for old, new in zip(episodes, stored.episodes, strict=True):
        for field in ("seed", "group", "index", "version", "turns", "outcome", "failure", "messages"):
            assert getattr(new, field) == getattr(old, field)
            assert type(getattr(new, field)) is type(getattr(old, field))
        for a, b in zip(old.streams, new.streams, strict=True):
            assert a.experts is None is b.experts
            assert all(same_arrays(getattr(a, name), getattr(b, name)) for name in vars(a) if name != "experts")
    assert (stored.advantages is None) == (advantages is None)
    if advantages is not None and stored.advantages is not None:
        for given_, back in zip(advantages.values, stored.advantages.values, strict=True):
            assert all(same_arrays(a, b) for a, b in zip(given_, back, strict=True))
    for own, unit in zip(units, stored.units, strict=True):
        assert type(unit) is type(own)
        if own is not None and unit is not None:
            pairs = [(own.spans.cuts, unit.spans.cuts), (own.spans.is_unit, unit.spans.is_unit)]
            assert all(same_arrays(a, b) for a, b in [*pairs, (own.credits, unit.credits)])
            assert (unit.outcome, unit.empty_value) == (own.outcome, own.empty_value)


def test_units_and_credit_must_fit(tmp_path):
    units = UnitRewards(Spans.from_cuts(2, np.array([1])), np.array([0.5, -0.5]), 0.0, 0.0)
    with pytest.raises(ValueError, match="units over 2 tokens for an episode that sampled 3"):
        write_episodes(tmp_path, 1, "train", [played()], units=[units])

    with pytest.raises(ValueError, match="of 0 episodes for 1"):
        write_episodes(tmp_path, 1, "train", [played()], Advantages([]))


def test_what_is_read_can_be_written_to_and_info_keeps_the_nearest_value(tmp_path):
    (episode,) = read_episodes(write_episodes(tmp_path, 1, "train", [played()])).episodes
    episode.streams[0].rewards[0] = 3

    odd: dict[str, Any] = {"n": np.float32(0.5), "a": np.array([1, 2]), "t": (1, 2), "p": Path("x")}
    episode = played()
    episode.turns[0].info = odd
    (read,) = read_episodes(write_episodes(tmp_path, 1, "train", [episode])).episodes
    assert read.turns[0].info == {"n": 0.5, "a": [1, 2], "t": [1, 2], "p": "x"}


def test_steps_are_listed_from_their_headers(tmp_path: Path) -> None:
    failed = played(7, (9.0,), outcome=Outcome.FAILED, failure="x")
    write_episodes(tmp_path, 12, "train", [played(1, (1.0,)), played(2, (0.0,), success=False), failed])
    write_episodes(tmp_path, 2, "evaluation", [])
    write_episodes(tmp_path, 2, "train", [played()])
    write_episodes(tmp_path, 12, "final", [played()])
    found = list(stored_steps(tmp_path))
    assert [(s.step, s.split, s.episodes, s.mean_return, s.successes, s.failed) for s in found] == [
        (2, "evaluation", 0, None, 0, 0),
        (2, "train", 1, 1.0, 1, 0),
        (12, "final", 1, 1.0, 1, 0),
        (12, "train", 3, 0.5, 1, 1),
    ]
    assert found[-1].path == episodes_file(tmp_path, 12, "train")
    assert found[-1].path.name == "step_000012.train.jsonl.zst"
    assert list(stored_steps(tmp_path / "nowhere")) == []
    remove_episodes_after(tmp_path, 2)
    assert [s.step for s in stored_steps(tmp_path)] == [2, 2]


def test_a_damaged_file_is_named_wherever_the_damage_is(tmp_path: Path) -> None:
    path = write_episodes(tmp_path, 3, "train", [played(seed) for seed in range(4)])
    content, whole, meaningless = path.read_bytes(), repr(read_episodes(path)), 0
    for end in range(0, len(content), 7):
        path.write_bytes(content[:end])
        with pytest.raises(RunError, match=r"step_000003\.train\.jsonl\.zst"):
            read_episodes(path)
    for position in range(0, len(content), 5):
        bent = bytearray(content)
        bent[position] ^= 0x40
        path.write_bytes(bytes(bent))
        # A few bits of a frame have no meaning; any other changed bit is detected.
        with contextlib.suppress(RunError):
            assert repr(read_episodes(path)) == whole
            meaningless += 1
    assert meaningless <= 2
    path.write_bytes(b"not zstandard")
    with pytest.raises(RunError, match="damaged"):
        list(stored_steps(tmp_path))


def test_missing_episodes_are_wrong_input(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no episodes"):
        read_episodes(episodes_file(tmp_path, 1, "train"))


def test_a_file_that_unpacks_to_far_more_than_its_size_is_damaged(tmp_path, monkeypatch):
    monkeypatch.setattr("posttrain.rollout.store._LARGEST", 1 << 20)
    path = tmp_path / "step_000001.train.jsonl.zst"
    path.write_bytes(zstd.compress(b"{" * (64 << 20)))
    for read in (lambda: read_episodes(path), lambda: list(stored_records(path)), lambda: list(stored_steps(tmp_path))):
        with pytest.raises(RunError, match=r"is damaged \(its first line is not a header\)"):
            read()
    header = zstd.decompress(write_episodes(tmp_path, 1, "train", [played()]).read_bytes()).split(b"\n")[0]
    path.write_bytes(zstd.compress(header + b"\n" + b"{" * (64 << 20)))
    assert [step.episodes for step in stored_steps(tmp_path)] == [1]
    for read in (lambda: read_episodes(path), lambda: list(stored_records(path))):
        with pytest.raises(RunError, match=r"is damaged \(it unpacks to more than 1 MiB\)"):
            read()


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "[]", "3", '{"format": 2}', '{"format": 2, "episodes": 1}\n[]', "null\n{}"]
)
def test_malformed_files_are_damaged(tmp_path, text):
    path = tmp_path / "step_000001.train.jsonl.zst"
    path.write_bytes(zstd.compress(text.encode()))
    with pytest.raises(RunError, match="is damaged"):
        read_episodes(path)


@pytest.mark.parametrize(
    "change",
    [
        *(
            {"turns": {"stream": 1}},
            {"turns": {"stream": -1}},
            {"turns": {"start": -3}},
            {"turns": {"start": 5, "stop": 2}},
        ),
        *({"turns": {"stop": 10**9}}, {"turns": {"info": [1]}}, {"failure": [1]}, {"advantages": []}, {"units": 3}),
        *({"streams": {name: ["|S10", "YWJjYWJjYWJjYQ=="]}} for name in ("ids", "sampled", "versions")),
        {"streams": {"versions": ["<i4", ""]}},
        {"streams": {"ids": ["<i8", "//////////8=" * 10]}},
        {"advantages": [["<f4", "AAAAAA=="]]},
    ],
    ids=str,
)
def test_episodes_that_contradict_themselves_are_damaged(tmp_path, change):
    episode = played(rewards=(1.0, 0.0))
    path = write_episodes(tmp_path, 1, "train", [episode], Advantages([[episode.streams[0].rewards]]))
    head, line = zstd.decompress(path.read_bytes()).split(b"\n")
    read_record(path, line)
    record = json.loads(line)
    for key, value in change.items():
        record[key] = [{**record[key][0], **value}] if isinstance(value, dict) else value
    line = json_line(record).encode()
    with pytest.raises(RunError, match="is damaged"):
        read_record(path, line)
    path.write_bytes(zstd.compress(head + b"\n" + line))
    with pytest.raises(RunError, match="is damaged"):
        read_episodes(path)
