"""Rows out of files, directories and hub data sets, one at a time, with the place where each stands.

A row that cannot be read comes out as the text of its problem, and the rows after it are read all the same.
"""

import csv
import datetime
import gzip
import importlib
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal
from itertools import chain
from pathlib import Path
from typing import Any

from posttrain.data.problems import BROKEN_FILE
from posttrain.errors import InputError, RunError
from posttrain.plugins import require_module
from posttrain.recipe.data import SourceRecipe

Row = tuple[str, dict[str, Any] | str]
"""Where a row stands (`train.jsonl row 12`, counted from 1; of JSON lines, the line of the file) and the row, or what is wrong as `category: detail`."""

BATCH = 256
"""Parquet rows turned into Python values at a time."""
_MARK = b"\xef\xbb\xbf"
"""The byte order mark that some editors put first."""
_NOT_UNICODE = "broken UTF-8: a byte or an escape of the row is no character"
_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$", re.ASCII)
_HUB_SECONDS = 10.0
"""How long the hub may take to say whether a data set exists."""


def read_rows(source: SourceRecipe) -> Iterator[Row]:
    """The rows of a file, of all files of a directory in the order of their names, or of a hub data set.

    InputError, at the call, where there is nothing of that name or nothing that can be read.
    """
    path = Path(source.path).expanduser()
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if _suffix(file) in _FORMATS and _visible(file, path))
        if not files:
            raise InputError(f"{source.path}: the directory holds no {', '.join(_FORMATS)} file; name another")
        return chain.from_iterable(_read_file(file, str(file.relative_to(path))) for file in files)
    suffix = _suffix(path)
    if path.exists():
        if suffix not in _FORMATS:
            raise InputError(
                f"{source.path}: rows are read from {', '.join(_FORMATS)} files; convert it to one of them"
            )
        return _read_file(path, path.name)
    if suffix in _FORMATS or not _HUB_ID.match(source.path):
        raise InputError(f"{source.path}: there is no such file or directory; correct the path")
    return _read_hub(source)


def plain(value: Any) -> Any:
    """`value` with numpy scalars and arrays, tuples, sets, dates and decimals as plain Python; times as ISO text."""
    if value is None or type(value) in (str, bool, int, float):
        return value
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if isinstance(value, Decimal):
        return float(value)
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return value


def _visible(file: Path, root: Path) -> bool:
    return file.is_file() and not any(part.startswith(".") for part in file.relative_to(root).parts)


def _read_file(file: Path, name: str) -> Iterator[Row]:
    """Rows of one file. A file that cannot be opened at all is the user's error, not a row's."""
    try:
        file.open("rb").close()
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror}); correct its permissions") from error
    return _FORMATS[_suffix(file)](file, name)


def _suffix(file: Path) -> str:
    """The suffix that tells the format, in small letters; `.jsonl.gz` is one."""
    name = file.name.lower()
    return ".jsonl.gz" if name.endswith(".jsonl.gz") else file.suffix.lower()


def _read_packed_lines(file: Path, name: str) -> Iterator[Row]:
    """JSON lines in a gzip file; a file that breaks off gives the rows before the break."""
    with gzip.open(file, "rb") as lines:
        try:
            yield from _lines(lines, name)
        except (OSError, EOFError, zlib.error) as error:
            yield name, f"{BROKEN_FILE}: {_first_line(error)}"


def _read_lines(file: Path, name: str) -> Iterator[Row]:
    """JSON lines."""
    with file.open("rb") as lines:
        yield from _lines(lines, name)


def _lines(lines: Iterable[bytes], name: str) -> Iterator[Row]:
    """Lines end at a newline byte, so that one broken line cannot spoil another. A row has the number of its line, so
    that an editor finds it; blank lines are no rows, but count.
    """
    for number, line in enumerate(lines, 1):
        content = line.removeprefix(_MARK) if number == 1 else line
        if content.strip():
            yield f"{name} row {number}", _parsed_line(content.rstrip(b"\r\n"))


def _parsed_line(line: bytes) -> dict[str, Any] | str:
    try:
        return _object(json.loads(line.decode()))
    except UnicodeDecodeError as error:
        return f"broken UTF-8: byte {line[error.start]:#04x} at position {error.start + 1} of the line"
    except json.JSONDecodeError as error:
        return f"broken JSON: {error.msg} at character {error.pos + 1} of the line"
    except (ValueError, RecursionError) as error:
        return _broken_json(error)


def _read_json(file: Path, name: str) -> Iterator[Row]:
    """A list of objects, or JSON lines."""
    with file.open("rb") as opened:
        head = b""
        while not head and (line := opened.readline()):
            head = line.removeprefix(_MARK).strip()
    if head.startswith(b"["):
        # Broken bytes become surrogates, which stay within the text in which they stand.
        text = file.read_bytes().removeprefix(_MARK).decode(errors="surrogateescape")
        yield from _listed(text, name)
    elif isinstance(_parsed_line(head), str) and isinstance(_parsed_line(file.read_bytes().removeprefix(_MARK)), dict):
        yield name, f"{BROKEN_FILE}: it is one object, not a list of objects"
    else:
        yield from _read_lines(file, name)


def _listed(text: str, name: str) -> Iterator[Row]:
    """The objects of a JSON list, as far as it is whole."""
    decoder, number = json.JSONDecoder(), 0
    place = _skip_space(text, text.index("[") + 1)
    while text[place : place + 1] != "]":
        number += 1
        try:
            value, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError) as error:
            yield f"{name} row {number}", f"{_broken_json(error)}; the file is not read further"
            return
        yield f"{name} row {number}", _object(value) if _is_unicode(value) else _NOT_UNICODE
        place = _skip_space(text, place)
        if text[place : place + 1] == ",":
            place = _skip_space(text, place + 1)
        elif text[place : place + 1] != "]":
            yield name, f"{BROKEN_FILE}: the list breaks off after row {number}"
            return
    if text[place + 1 :].strip():
        yield name, f"{BROKEN_FILE}: what follows the list is not read"


def _skip_space(text: str, place: int) -> int:
    while text[place : place + 1] in (" ", "\t", "\n", "\r"):
        place += 1
    return place


def _object(value: Any) -> dict[str, Any] | str:
    return value if isinstance(value, dict) else f"row is not an object: it is of type {type(value).__name__}"


def _broken_json(error: ValueError | RecursionError) -> str:
    return "broken JSON: nested too deeply" if isinstance(error, RecursionError) else f"broken JSON: {error}"


def _is_unicode(value: Any) -> bool:
    """Whether all text in a JSON value can be written as UTF-8."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    except RecursionError:
        return True  # Too deep for the check; what reads the row will say so.
    return True


def _read_csv(file: Path, name: str) -> Iterator[Row]:
    """Rows under a header, with every cell as text."""
    # The reader's own limit is 128 KiB a cell, which a long conversation exceeds.
    csv.field_size_limit(2**31 - 1)
    with file.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as lines:
        cells = csv.reader(lines, strict=True)
        header: list[str] | None = None
        number = 0
        while True:
            try:
                row = next(cells)
                problem = None if _is_unicode(row) else _NOT_UNICODE
            except StopIteration:
                return
            except csv.Error as error:
                row, problem = [""], f"broken CSV row: {error}"
            if not row:
                continue
            if header is None:
                if problem or len(set(row)) < len(row):
                    yield name, f"{BROKEN_FILE}: the header has {problem or 'two columns of one name'}"
                    return
                header = row
                continue
            number += 1
            if problem is None and len(row) != len(header):
                problem = f"broken CSV row: {len(row)} cells under a header of {len(header)}"
            yield f"{name} row {number}", problem or dict(zip(header, row, strict=True))


def _read_parquet(file: Path, name: str) -> Iterator[Row]:
    """Row group by row group; what cannot be decoded costs the rows that it holds and no others."""
    from pyarrow import parquet

    # A broken file can make the decoder raise almost anything, so every error is taken for the file's.
    try:
        opened = parquet.ParquetFile(file)
        sizes = [opened.metadata.row_group(group).num_rows for group in range(opened.num_row_groups)]
    except Exception as error:
        yield name, f"{BROKEN_FILE}: it is no whole parquet file ({_first_line(error)})"
        return
    with opened:
        done = 0
        for group, size in enumerate(sizes):
            number = done
            try:
                for batch in opened.iter_batches(batch_size=BATCH, row_groups=[group]):
                    for row in _batch_rows(batch):
                        number += 1
                        yield f"{name} row {number}", row
            except Exception as error:
                lost = f"rows {number + 1} to {done + size} of {sum(sizes)} cannot be decoded"
                yield name, f"{BROKEN_FILE}: {lost} ({_first_line(error)})"
            done += size


def _batch_rows(batch: Any) -> list[dict[str, Any] | str]:
    """Rows of a record batch; one by one where a cell spoils the batch."""
    try:
        return [plain(row) for row in batch.to_pylist()]
    except Exception as error:
        if batch.num_rows == 1:
            if isinstance(error, UnicodeDecodeError):
                return [f"broken UTF-8: byte {error.object[error.start]:#04x} in a text"]
            return [f"broken row: {_first_line(error)}"]
        return [row for place in range(batch.num_rows) for row in _batch_rows(batch.slice(place, 1))]


def _read_hub(source: SourceRecipe) -> Iterator[Row]:
    """Rows of a hub data set as they come in."""
    datasets = require_module("datasets", f"{source.path}: there is no such file or directory, and a hub data set")
    hub = importlib.import_module("huggingface_hub")
    try:
        # Asked first because the loader tries again and again for half a minute before it gives up.
        hub.HfApi().dataset_info(source.path, timeout=_HUB_SECONDS)
        rows = datasets.load_dataset(source.path, source.subset, split=source.split, streaming=True)
    except Exception as error:
        part = f"split {source.split}" + (f" of {source.subset}" if source.subset else "")
        raise InputError(
            f"{source.path}: there is no such file or directory, and the hub gives no data set of that name with {part} "
            f"({_first_line(error)}); correct `path`, `subset` or `split`, or get the data and name its files"
        ) from error
    return _hub_rows(rows, " ".join(filter(None, (source.path, source.subset, source.split))))


def _hub_rows(rows: Any, name: str) -> Iterator[Row]:
    number = 0
    try:
        for row in rows:
            number += 1
            yield f"{name} row {number}", _object(plain(row))
    except Exception as error:
        raise RunError(f"{name}: reading stopped after row {number} ({_first_line(error)}); try again") from error


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200]


_FORMATS: dict[str, Callable[[Path, str], Iterator[Row]]] = {
    ".parquet": _read_parquet,
    ".jsonl": _read_lines,
    ".jsonl.gz": _read_packed_lines,
    ".json": _read_json,
    ".csv": _read_csv,
}
