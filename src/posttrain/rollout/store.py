"""The episode store: one compressed file per step and split, written atomically and read back exactly.

`step_000012.train.jsonl.zst` holds a header line and one line per episode. Arrays are stored as base64 of their
little-endian bytes, so every float is read back bit for bit.
"""

import base64
import json
import math
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from posttrain.credit.units.mixing import CreditedUnits, UnitAdvantages, UnitRewards
from posttrain.credit.units.spans import Spans
from posttrain.distributed.world import current_world
from posttrain.episode import Advantages, Episode, Outcome, StopReason, Stream, Turn
from posttrain.errors import InputError, RunError
from posttrain.images import FIRST, content_of, parts_of
from posttrain.runs.directory import storage_errors, write_atomically
from posttrain.runs.reader import open_file

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

Split = Literal["train", "evaluation", "final"]
"""Training episodes, held-out episodes of the learning curve, and held-out episodes of the final table."""

FORMAT = 2
_LARGEST, _EXPANSION = 256 << 20, 50
"""A file is damaged if it unpacks to more than this many bytes and to more than this many times its size."""
_LONGEST_HEADER = 1 << 20
"""Bytes."""
_PART = 1 << 12
"""Bytes that are unpacked at a time. Repetitive episodes unpack to hundreds of times their size."""
_DAMAGE = (
    *(OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError, RecursionError),
    zstd.ZstdError,
)
"""Exceptions that reading a damaged file raises."""
_NAME = re.compile(r"^step_(\d+)\.(train|evaluation|final)\.jsonl\.zst$")
_ARRAYS = {"ids": "i", "sampled": "b", "rollout_logprobs": "f", "rewards": "f", "turn": "i", "versions": "i"}
"""The arrays of a stream with their kinds of dtype."""
_FIELDS = ("seed", "group", "index", "version", "outcome", "failure")
"""The fields of an episode that are plain values."""
_CHANNELS: dict[str, type[CreditedUnits]] = {"reward": UnitRewards, "advantage": UnitAdvantages}
_CHANNEL_OF = {kind: name for name, kind in _CHANNELS.items()}


@dataclass(frozen=True)
class StoredStep:
    """The header of one file of the store."""

    path: Path
    step: int
    split: str
    episodes: int
    mean_return: float | None
    """Mean undiscounted return of the episodes that did not fail; None if there are none."""
    successes: int
    failed: int


@dataclass(frozen=True)
class StoredEpisodes:
    """The contents of one file of the store."""

    episodes: list[Episode]
    advantages: Advantages | None
    """None if the step has no credit."""
    units: list[CreditedUnits | None]
    """One per episode; None for an episode without unit credit."""


def episodes_file(directory: Path, step: int, split: Split) -> Path:
    """The file of a step and split."""
    return directory / f"step_{step:06d}.{split}.jsonl.zst"


def write_episodes(
    directory: Path,
    step: int,
    split: Split,
    episodes: list[Episode],
    advantages: Advantages | None = None,
    units: Sequence[CreditedUnits | None] = (),
) -> Path:
    """Store the episodes of a step, replacing those of an earlier attempt; returns the file. Only rank 0 writes.

    `units`: one per episode, or empty. Every field is stored exactly, except `Stream.experts`, which are not stored, and values
    of `Turn.info` that JSON cannot represent: numpy numbers and arrays become numbers and lists, other values become text.
    RunError if writing fails.
    """
    if advantages is not None and len(advantages.values) != len(episodes):
        raise ValueError(f"advantages of {len(advantages.values)} episodes for {len(episodes)} episodes")
    unit_credit = list(units) or [None] * len(episodes)
    for episode, credited in zip(episodes, unit_credit, strict=True):
        if credited is not None and credited.spans.tokens != episode.sampled_tokens:
            raise ValueError(
                f"units over {credited.spans.tokens} tokens for an episode that sampled {episode.sampled_tokens}"
            )
    returns = [episode.total_reward for episode in episodes if episode.has_return]
    path = episodes_file(directory, step, split)
    if not current_world().is_rank0:
        return path
    header = {
        "format": FORMAT,
        "step": step,
        "split": split,
        "episodes": len(episodes),
        "mean_return": sum(returns) / len(returns) if returns else None,
        "successes": sum(episode.success for episode in episodes),
        "failed": sum(episode.outcome is Outcome.FAILED for episode in episodes),
        "advantages": advantages is not None,
    }
    lines = [json_line(header)]
    for number, (episode, credited) in enumerate(zip(episodes, unit_credit, strict=True)):
        record = episode_record(episode, experts=False) | {"advantages": None, "units": None}
        if advantages is not None:
            record["advantages"] = [_pack(np.asarray(stream)) for stream in advantages.values[number]]
        if credited is not None:
            record["units"] = {
                "channel": _CHANNEL_OF[type(credited)],
                "cuts": _pack(credited.spans.cuts),
                "is_unit": _pack(credited.spans.is_unit),
                "credits": _pack(credited.credits),
                "outcome": float(credited.outcome),
                "empty_value": float(credited.empty_value),
            }
        lines.append(json_line(record))
    with storage_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
    checked: dict[int, int] = {zstd.CompressionParameter.checksum_flag: 1}
    write_atomically(path, zstd.compress("\n".join(lines).encode(), options=checked))
    return path


def stored_records(path: Path) -> Iterator[bytes]:
    """The episodes of one file as lines of JSON, in order; one line at a time is in memory. Errors as for
    `read_episodes`."""
    with _damage(path):
        lines = _lines(path)
        _checked_header(next(lines))
        yield from lines


def read_record(path: Path, record: bytes) -> tuple[Episode, list[np.ndarray] | None, CreditedUnits | None]:
    """One of the `stored_records` of `path`: the episode, its advantages per stream, and its units."""
    with _damage(path):
        return _contents(json.loads(record))


def read_head(path: Path, record: bytes) -> dict[str, Any]:
    """The fields of a record before its arrays: seed, group, index, outcome, failure, messages and turns."""
    with _damage(path):
        # The last such key belongs to the record: quotes inside strings are escaped.
        at = record.rfind(b',"streams":[')
        values = json.loads(record[:at] + b"}" if at > 0 else record)
        if not isinstance(values["messages"], list) or not isinstance(values["turns"], list):
            raise ValueError("messages and turns are not lists")
        _check_integers(values, "seed", "group", "index")
        return values | {"messages": _messages(values)}


def read_episodes(path: Path) -> StoredEpisodes:
    """Read one file. InputError if it does not exist, RunError if it is damaged or of another format."""
    with _damage(path):
        first, *lines = _lines(path)
        header = _checked_header(first)
        records = [json.loads(line) for line in lines]
        if len(records) != header["episodes"]:
            raise ValueError(f"{len(records)} episodes instead of {header['episodes']}")
        episodes, credits, units = zip(*map(_contents, records), strict=True) if records else ((), (), ())
        if header["advantages"] and any(credit is None for credit in credits):
            raise ValueError("an episode has no advantages")
        return StoredEpisodes(list(episodes), Advantages(list(credits)) if header["advantages"] else None, list(units))


def stored_steps(directory: Path) -> Iterator[StoredStep]:
    """The headers of the store's files, ordered by step. Episodes are not read."""
    for path in sorted(directory.glob("step_*.jsonl.zst")):
        if _NAME.match(path.name):
            with _damage(path):
                header = _checked_header(next(_lines(path)))
                fields = ("step", "split", "episodes", "mean_return", "successes", "failed")
                step = StoredStep(path=path, **{key: header[key] for key in fields})
            yield step


def remove_episodes_after(directory: Path, step: int) -> None:
    """Delete the files of later steps, which a resumed run plays again."""
    remove_steps(directory, _NAME, step + 1)


def remove_steps(directory: Path, name: re.Pattern[str], first: int, last: float = math.inf) -> None:
    """Delete the files whose name is a match of `name` with a step from `first` to `last` as its first group."""
    for path in directory.glob("*"):
        match = name.match(path.name)
        if match and first <= int(match[1]) <= last:
            with storage_errors(path):
                path.unlink(missing_ok=True)


@contextmanager
def _damage(path: Path) -> Iterator[None]:
    """Convert errors of reading the file at `path` inside the block to InputError and RunError."""
    try:
        yield
    except FileNotFoundError as error:
        raise InputError(f"no episodes at {path}; `posttrain episodes RUN` lists the stored steps") from error
    except _DAMAGE as error:
        raise RunError(
            f"the episode file {path} is damaged ({error}); delete it; nothing else in the run depends on it"
        ) from error


def _lines(path: Path) -> Iterator[bytes]:
    """The lines of a file, unpacked in parts, so that a decompression bomb does not fill the memory."""
    with open_file(path, path.parent.parent) as file:
        most = max(_LARGEST, _EXPANSION * os.fstat(file.fileno()).st_size)
        content, rest, size = zstd.ZstdDecompressor(), b"", 0
        while not content.eof and (part := file.read(_PART)):
            *lines, rest = (rest + content.decompress(part)).split(b"\n")
            size += sum(map(len, lines))
            if size == 0 and len(rest) > _LONGEST_HEADER:
                raise ValueError("its first line is not a header")
            yield from lines
            if size + len(rest) > most:
                raise ValueError(f"it unpacks to more than {most >> 20} MiB")
        if not content.eof:
            raise ValueError("it is truncated")
        yield rest


def _checked_header(line: bytes) -> dict[str, Any]:
    header = json.loads(line)
    if header["format"] != FORMAT:
        raise ValueError(f"format {header['format']}, this version reads {FORMAT}")
    _check_integers(header, "step", "episodes", "successes", "failed")
    _check_number(0.0 if header["mean_return"] is None else header["mean_return"])
    if header["split"] not in get_args(Split):
        raise ValueError(f"unknown split {header['split']!r}")
    return header


def _check_integers(values: dict[str, Any], *keys: str) -> None:
    for key in keys:
        if type(values[key]) is not int or not -(1 << 63) <= values[key] < 1 << 64:
            raise ValueError(f"{key} is not an integer of 64 bits")


def _check_number(value: Any) -> None:
    if type(value) not in (int, float):
        raise ValueError("a reward is not a number")
    float(value)  # raises OverflowError for an integer that is larger than any float


def json_line(value: dict[str, Any]) -> str:
    """One line of JSON. Numpy values become numbers and lists, other unsupported values become text."""
    numpy = (np.generic, np.ndarray)
    return json.dumps(value, default=lambda v: v.tolist() if isinstance(v, numpy) else str(v), separators=(",", ":"))


def _pack(array: np.ndarray) -> list[str]:
    little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    return [little.dtype.str, base64.b64encode(little.tobytes()).decode()]


def _unpack(packed: list[str], kind: str, size: int | None = None) -> np.ndarray:
    array = np.frombuffer(base64.b64decode(packed[1], validate=True), dtype=packed[0]).copy()
    if array.dtype.kind != kind or array.ndim != 1 or size not in (None, len(array)):
        raise ValueError(f"an array has the type {array.dtype} or the length {len(array)}")
    return array


def episode_record(episode: Episode, experts: bool = True) -> dict[str, Any]:
    """An episode as a dictionary of plain JSON values; `episode_from_record` is the inverse. `experts`: with `Stream.experts`,
    hundreds of bytes per token."""
    return {
        **{name: getattr(episode, name) for name in _FIELDS},
        "messages": [
            one | {"content": parts_of(one["content"])} if "content" in one else one for one in episode.messages
        ],
        "info": episode.info,
        "turns": [vars(turn) for turn in episode.turns],
        "streams": [_stream_record(stream, experts) for stream in episode.streams],
    }


def _stream_record(stream: Stream, experts: bool) -> dict[str, Any]:
    record: dict[str, Any] = {name: _pack(getattr(stream, name)) for name in _ARRAYS}
    if experts and stream.experts is not None:
        record["experts"] = [*_pack(stream.experts.reshape(-1)), list(stream.experts.shape)]
    return record


def _contents(record: dict[str, Any]) -> tuple[Episode, list[np.ndarray] | None, CreditedUnits | None]:
    """An episode of a file, its advantages per stream, and its units."""
    episode, credit, units = episode_from_record(record), record["advantages"], None
    if (stored := record["units"]) is not None:
        spans = Spans(_unpack(stored["cuts"], "i"), _unpack(stored["is_unit"], "b"))
        credits = _unpack(stored["credits"], "f")
        units = _CHANNELS[stored["channel"]](spans, credits, stored["outcome"], stored["empty_value"])
        if spans.tokens != episode.sampled_tokens:
            raise ValueError("the units are not those of the sampled tokens")
    if credit is None:
        return episode, None, units
    pairs = zip(credit, episode.streams, strict=True)
    return episode, [_unpack(packed, "f", len(stream)) for packed, stream in pairs], units


def _messages(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages of a record with the marks of their images."""
    return [one | {"content": content_of(one["content"])} if "content" in one else one for one in record["messages"]]


def episode_from_record(record: dict[str, Any]) -> Episode:
    """The inverse of `episode_record`."""
    _check_integers(record, "seed", "group", "index", "version")
    messages = _messages(record)
    for message in messages:
        if not isinstance(message["role"], str) or not isinstance(message.get("content"), str | None):
            raise ValueError("a message has no text or role")
    streams = [
        Stream(
            **{name: _unpack(stream[name], kind) for name, kind in _ARRAYS.items()},
            experts=_unpack(stream["experts"][:2], "i").reshape(stream["experts"][2]) if "experts" in stream else None,
        )
        for stream in record["streams"]
    ]
    for stream in streams:
        if (
            len({len(getattr(stream, name)) for name in _ARRAYS}) > 1
            or ((stream.ids >> 31 != 0) & (stream.ids < FIRST)).any()
        ):
            raise ValueError("the arrays of a stream have different lengths, or a token is not an integer of 31 bits")
    for turn in record["turns"]:
        _check_integers(turn, "stream", "start", "stop")
        _check_number(turn["reward"])
        if not isinstance(turn["answer"], str) or not isinstance(turn["info"], dict):
            raise ValueError("the answer of a turn is not text, or its information is not an object")
        if streams and not (
            0 <= turn["stream"] < len(streams) and 0 <= turn["start"] <= turn["stop"] <= len(streams[turn["stream"]])
        ):
            raise ValueError("the tokens of a turn do not exist")
    if not isinstance(record["failure"], str | None):
        raise ValueError("the failure is not text")
    known = {name: record[name] for name in _FIELDS}
    return Episode(
        **known | {"outcome": Outcome(record["outcome"])},
        streams=streams,
        turns=[Turn(**{**turn, "stop_reason": StopReason(turn["stop_reason"])}) for turn in record["turns"]],
        messages=messages,
        info=record.get("info", {}),
    )
