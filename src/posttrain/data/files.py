"""Reading rows from files, directories and hub data sets, and writing rows to files.

A row that cannot be read is returned as a text that describes its problem; reading continues with the next row.
"""

import csv
import datetime
import gzip
import importlib
import json
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any, TextIO

from posttrain.data.messages import unique
from posttrain.data.problems import BROKEN_FILE
from posttrain.data.unpacked import ROW_BYTES, unpacked_bytes
from posttrain.errors import InputError, RunError
from posttrain.plugins import require_module
from posttrain.recipe.data import SourceRecipe
from posttrain.runs.directory import atomic_file, remove_partials

Row = tuple[str, dict[str, Any] | str]
"""The origin of a row (`train.jsonl row 12`, counted from 1; in JSON lines, the line number), and the row or its
problem as `category: detail`."""

BATCH = 256
"""Parquet rows converted to Python values at a time."""
_MIB = 1 << 20
_FREE = 64 * _MIB
"""Size in bytes up to which unpacked content is accepted regardless of its compressed size."""
_BOM = b"\xef\xbb\xbf"
"""The byte order mark that some editors write."""
_NOT_UNICODE = "broken UTF-8: a byte or an escape of the row is not a character"
_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$", re.ASCII)
_SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Split -> the words that identify it in file names, as in the library `datasets`."""
_ESCAPED = re.compile(rb"\\u[dD][89a-fA-F]")
"""An escape of a surrogate, which is a character only beside another."""
_MESSAGE_KEYS = {"role", "from"}
_CHAT_KEYS = _MESSAGE_KEYS | {"function", "parameters", "input_schema"}
"""Keys that show that the objects of a list are messages or tools."""
_SPACE = re.compile(r"[ \t\n\r]*")
_HUB_SECONDS = 10.0
"""Time-out of the request that checks whether a data set exists."""


def read_rows(source: SourceRecipe) -> Iterator[Row]:
    """Return the rows of a file, of all files of a directory sorted by name, or of a hub data set; of these, the part that
    `source.split` names in percent.

    InputError, at the call, if there is no such file or data set, or if it cannot be read.
    """
    require_source(source)
    name, first, last = source.part
    if (first, last) != (0, 100):
        rows = [*read_rows(source.model_copy(update={"split": name}))]
        part = rows[len(rows) * first // 100 : len(rows) * last // 100]
        if rows and not part:
            raise InputError(f"{source.path}: {source.split} has none of its {len(rows)} rows; widen the part in split")
        return iter(part)
    path = Path(source.path).expanduser()
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if _readable(file, path))
        if not files:
            raise InputError(f"{source.path}: the directory has no {', '.join(_FORMATS)} file; name another")
        return chain.from_iterable(_read_file(file, str(file.relative_to(path)), source) for file in files)
    return _read_file(path, path.name, source) if path.exists() else _read_hub(source)


def require_source(source: SourceRecipe) -> None:
    """InputError if the source is a file of no known format, or neither a file, a directory nor a possible hub id."""
    path = Path(source.path).expanduser()
    suffix = _suffix(path)
    if path.exists():
        if not path.is_dir() and suffix not in _FORMATS:
            raise InputError(f"{source.path}: unknown format; convert it to one of {', '.join(_FORMATS)}")
    elif suffix in _FORMATS or not _HUB_ID.match(source.path):
        raise InputError(f"{source.path}: no such file or directory; correct the path")


def read_split(source: SourceRecipe) -> Iterator[Row]:
    """As `read_rows`, but reads only the files of `source.split` from a directory, as the hub divides data sets.

    The files are those of the subdirectory `source.subset`, if there is one. Their names contain the split
    (`train.jsonl.gz`, `train-00000-of-00002.parquet`, `rationales_sft_val.parquet`). A directory without such names is
    one split, `train`. InputError if it has no file of the split.
    """
    path = Path(source.path).expanduser()
    if not path.is_dir():
        return read_rows(source)
    root = path / source.subset if source.subset and (path / source.subset).is_dir() else path
    names = sorted(str(file.relative_to(root)) for file in root.rglob("*") if _readable(file, root))
    chosen = [name for name in names if _names_split(name, source.split)]
    if source.split == "train" and not any(_names_split(name, split) for name in names for split in _SPLITS):
        chosen = names
    if not chosen:
        contents = f"its files are {', '.join(names[:8])}" if names else f"it has no {', '.join(_FORMATS)} file"
        raise InputError(
            f"{root}: no file of the split {source.split}, and {contents}; name one `{source.split}.jsonl`, or set `split`"
        )
    return chain.from_iterable(_read_file(root / name, name, source) for name in chosen)


def _names_split(name: str, split: str) -> bool:
    words = "|".join(map(re.escape, _SPLITS.get(split, (split,))))
    return re.search(rf"(?<![a-z0-9])({words})(?![a-z0-9])", name.lower()) is not None


def plain(value: Any) -> Any:
    """Return `value` with numpy scalars and arrays, tuples, sets and decimals as plain Python, and dates as ISO
    text."""
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


def nesting(value: Any, most: int) -> int:
    """Nesting depth of lists and objects in a value, 1 without nested ones. Stops counting after `most`."""
    level, inner = 0, [value]
    while level <= most and (inner := [one for one in inner if isinstance(one, dict | list)]):
        level += 1
        inner = [part for one in inner for part in (one.values() if isinstance(one, dict) else one)]
    return level


def _readable(file: Path, root: Path) -> bool:
    """Whether `file` has a known format and is not hidden below `root`."""
    return (
        _suffix(file) in _FORMATS
        and file.is_file()
        and not any(part.startswith(".") for part in file.relative_to(root).parts)
    )


def _read_file(file: Path, name: str, source: SourceRecipe) -> Iterator[Row]:
    """Return the rows of one file; InputError if the file cannot be opened."""
    try:
        file.open("rb").close()
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror}); correct its permissions") from error
    rows = _FORMATS[_suffix(file)](file, name, _Limits(int(source.max_row_mib * _MIB), source.max_expansion))
    return _of_depth(rows, source.max_depth)


def _of_depth(rows: Iterator[Row], most: int) -> Iterator[Row]:
    """`rows`, with a problem in place of each that is nested deeper than `most`."""
    for origin, row in rows:
        too_deep = not isinstance(row, str) and nesting(row, most) > most
        yield origin, f"nested too deeply: the row has more than {most} levels (`max_depth`)" if too_deep else row


@dataclass(frozen=True)
class _Limits:
    """Limits on reading a file of unknown origin. `row` is in bytes."""

    row: int
    expansion: float

    def unpacked(self, packed: int) -> int:
        """Maximum number of bytes that `packed` bytes may decompress to."""
        return max(int(packed * self.expansion), _FREE)

    def expanding(self) -> str:
        """The problem text of a file whose content is too large for its size."""
        return f"it unpacks to more than {self.expansion:g} times its size (`max_expansion`)"

    def too_large(self) -> str:
        """The problem text of a row that is too large."""
        return f"row is too large: it has more than {self.row / _MIB:g} MiB (`max_row_mib`)"


class _Unpacked(gzip.GzipFile):
    """A gzip file of which at most `most` bytes are unpacked; OSError after them."""

    def __init__(self, file: Path, limits: _Limits) -> None:
        super().__init__(file, "rb")
        self._left, self._limits = limits.unpacked(file.stat().st_size), limits

    def readline(self, size: int | None = -1) -> bytes:
        line = super().readline(size)
        self._left -= max(len(line), ROW_BYTES)
        if self._left < 0:
            raise OSError(self._limits.expanding())
        return line


def _suffix(file: Path) -> str:
    """Return the suffix in lower case; `.jsonl.gz` is one suffix."""
    name = file.name.lower()
    return ".jsonl.gz" if name.endswith(".jsonl.gz") else file.suffix.lower()


def _read_lines(file: Path, name: str, limits: _Limits) -> Iterator[Row]:
    """Read JSON lines, also from a gzip file. A truncated gzip file gives the rows before its end.

    Rows end in a newline byte, so a broken line does not affect others. The number of a row is its line number, as shown by
    editors. Blank lines are skipped but counted.
    """
    packed = file.suffix.lower() == ".gz"
    try:
        with _Unpacked(file, limits) if packed else file.open("rb") as lines:
            for number in count(1):
                line = lines.readline(limits.row + 1)
                if not line:
                    return
                if len(line) > limits.row:
                    while line and not line.endswith(b"\n"):
                        line = lines.readline(_MIB)
                    yield f"{name} row {number}", limits.too_large()
                    continue
                content = line.removeprefix(_BOM) if number == 1 else line
                if content.strip():
                    yield f"{name} row {number}", _parsed_line(content.rstrip(b"\r\n"))
    except (OSError, EOFError, zlib.error) as error:
        if not packed:
            raise
        yield name, f"{BROKEN_FILE}: {_first_line(error)}"


def _parsed_line(line: bytes) -> dict[str, Any] | str:
    try:
        value = json.loads(line.decode(), object_pairs_hook=unique)
        return _NOT_UNICODE if _ESCAPED.search(line) and not _is_unicode(value) else _object(value)
    except UnicodeDecodeError as error:
        return f"broken UTF-8: byte {line[error.start]:#04x} at position {error.start + 1} of the line"
    except json.JSONDecodeError as error:
        return f"broken JSON: {error.msg.removesuffix(' at')} at character {error.pos + 1} of the line"
    except (ValueError, RecursionError) as error:
        return _broken_json(error)


def _read_json(file: Path, name: str, limits: _Limits) -> Iterator[Row]:
    """Read a list of objects, or JSON lines."""
    with file.open("rb") as opened:
        head = b""
        while not head and (line := opened.readline(limits.row + 1)):
            head = line.removeprefix(_BOM).strip()
    if head.startswith(b"["):
        yield from _read_listed(file, name, limits)
    elif (
        file.stat().st_size <= limits.row
        and isinstance(_parsed_line(head), str)
        and isinstance(_parsed_line(file.read_bytes().removeprefix(_BOM)), dict)
    ):
        yield name, f"{BROKEN_FILE}: the file is one object, not a list of objects"
    else:
        yield from _read_lines(file, name, limits)


class _JsonText:
    """JSON text of a file. Only the part that is being parsed is in memory."""

    def __init__(self, file: TextIO, most: int) -> None:
        """`most`: maximum length of a value in characters."""
        self._file, self._most, self._decoder = file, most, json.JSONDecoder()
        self._text, self._position, self._ended = "", 0, False

    def next_sign(self) -> str:
        """The next non-space character, without consuming it; empty at the end of the file."""
        while True:
            self._position = _SPACE.match(self._text, self._position).end()  # type: ignore[union-attr]
            if self._position < len(self._text) or self._ended:
                return self._text[self._position : self._position + 1]
            self._read_more()

    def take_sign(self) -> None:
        """Consume the character that `next_sign` returned."""
        self._position += 1

    def take_value(self) -> tuple[Any, int]:
        """The next value and its number of characters. Raises the exceptions of `json`."""
        while True:
            self.next_sign()
            try:
                value, end = self._decoder.raw_decode(self._text, self._position)
                if end < len(self._text) or self._ended:
                    length, self._position = end - self._position, end
                    return value, length
            except json.JSONDecodeError as error:
                # The longest token that the end of the buffer can split is an escape of two surrogates.
                cut = error.msg.startswith("Unterminated string") or error.pos + 16 > len(self._text)
                if self._ended or not cut or len(self._text) - self._position > self._most:
                    raise
            self._read_more()

    def _read_more(self) -> None:
        left = self._text[self._position :]
        more = self._file.read(max(_MIB, len(left)))
        self._text, self._position, self._ended = left + more, 0, not more


def _read_listed(file: Path, name: str, limits: _Limits) -> Iterator[Row]:
    """Read the objects of a JSON list up to its first syntax error."""
    # Invalid bytes become lone surrogates, so they affect only the text that contains them.
    with file.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as opened:
        text, number = _JsonText(opened, max(4 * limits.row, _FREE)), 0
        text.next_sign()
        text.take_sign()
        while text.next_sign() != "]":
            number += 1
            try:
                value, length = text.take_value()
            except (ValueError, RecursionError) as error:
                yield f"{name} row {number}", f"{_broken_json(error)}; the rest of the file is not read"
                return
            if length > limits.row:
                yield f"{name} row {number}", limits.too_large()
            else:
                yield f"{name} row {number}", _object(value) if _is_unicode(value) else _NOT_UNICODE
            if text.next_sign() == ",":
                text.take_sign()
            elif text.next_sign() != "]":
                yield name, f"{BROKEN_FILE}: the list is cut off after row {number}"
                return
        text.take_sign()
        if text.next_sign():
            yield name, f"{BROKEN_FILE}: text after the list is not read"


def _object(value: Any) -> dict[str, Any] | str:
    return value if isinstance(value, dict) else f"row is not an object: its type is {type(value).__name__}"


def _broken_json(error: ValueError | RecursionError) -> str:
    reason = error.msg if isinstance(error, json.JSONDecodeError) else error
    return f"broken JSON: {'nested too deeply' if isinstance(error, RecursionError) else reason}"


def _is_unicode(value: Any) -> bool:
    """Whether all text in a JSON value can be encoded as UTF-8."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    except RecursionError:
        return True  # Too deeply nested to check here; `check_value` reports it.
    return True


def _read_csv(file: Path, name: str, limits: _Limits) -> Iterator[Row]:
    """Read rows under a header, with every cell as text. The limit of a row is that of a cell, in characters."""
    csv.field_size_limit(limits.row)
    with file.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as lines:
        # A longer line is returned in parts, which are broken rows.
        cells = csv.reader(iter(partial(lines.readline, 2 * limits.row), ""), strict=True)
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
                    yield name, f"{BROKEN_FILE}: the header has {problem or 'two columns of the same name'}"
                    return
                header = row
                continue
            number += 1
            if problem is None and len(row) != len(header):
                problem = f"broken CSV row: {len(row)} cells under a header of {len(header)}"
            yield f"{name} row {number}", problem or dict(zip(header, row, strict=True))


def _read_parquet(file: Path, name: str, limits: _Limits) -> Iterator[Row]:
    """Read row group by row group. A row group that cannot be decoded does not affect the others."""
    from pyarrow import parquet

    # The decoder raises many types of errors for broken files, so every exception counts as a broken file.
    try:
        with parquet.ParquetFile(file) as opened:
            leaves = [opened.schema.column(number) for number in range(len(opened.schema))]
        # Texts stay in dictionaries, or a few bytes that repeat a long text would become many copies of it.
        texts = [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"]
        opened = parquet.ParquetFile(file, read_dictionary=texts)
        sizes = [opened.metadata.row_group(group).num_rows for group in range(opened.num_row_groups)]
    except Exception as error:
        yield name, f"{BROKEN_FILE}: not a complete parquet file ({_first_line(error)})"
        return
    with opened:
        done, left = 0, limits.unpacked(file.stat().st_size)
        for group, size in enumerate(sizes):
            number = done
            try:
                meta = opened.metadata.row_group(group)
                columns = [meta.column(number) for number in range(meta.num_columns)]
                # A byte can stand for millions of values that are null.
                unpacked = sum(max(column.total_uncompressed_size, column.num_values) for column in columns)
                if unpacked > limits.unpacked(sum(column.total_compressed_size for column in columns)):
                    raise ValueError(
                        f"they unpack to more than {limits.expansion:g} times their size (`max_expansion`)"
                    )
                for batch in opened.iter_batches(batch_size=BATCH, row_groups=[group]):
                    for bytes_of_row, row in _batch_rows(batch, limits):
                        left -= bytes_of_row
                        if left < 0:
                            yield name, f"{BROKEN_FILE}: {limits.expanding()}; it is read up to row {number}"
                            return
                        number += 1
                        yield f"{name} row {number}", row
            except Exception as error:
                lost = f"rows {number + 1} to {done + size} of {sum(sizes)} cannot be decoded"
                yield name, f"{BROKEN_FILE}: {lost} ({_first_line(error)})"
            done += size


def _batch_rows(batch: Any, limits: _Limits) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """Yield the size in bytes and the content of the rows of a record batch. They are decoded one by one if the batch is
    larger than a row may be, or if one of its cells cannot be decoded."""
    size = ROW_BYTES * batch.num_rows + sum(map(unpacked_bytes, batch.columns))
    rows: list[dict[str, Any] | str] | None = None
    if size <= limits.row:
        try:
            rows = [_table_row(row, batch.schema) for row in batch.to_pylist()]
        except UnicodeDecodeError as error:
            problem = f"broken UTF-8: byte {error.object[error.start]:#04x} in a text"
        except Exception as error:
            problem = f"broken row: {_first_line(error)}"
    else:
        problem = limits.too_large()
    if rows is not None:
        yield from ((size // len(rows), row) for row in rows)
    elif batch.num_rows == 1:
        yield size, problem
    else:
        for index in range(batch.num_rows):
            yield from _batch_rows(batch.slice(index, 1), limits)


def _table_row(row: dict[str, Any], schema: Any, decode: bool = True) -> dict[str, Any]:
    """Return a row of an Arrow table. `decode`: parse its texts of the type JSON.

    All objects of a column have the same keys, with null for those that they lack. Messages and tools lose these nulls.
    """
    types = dict(zip(schema.names, schema.types, strict=True))
    cells = {}
    for name, cell in row.items():
        keys = getattr(getattr(types[name], "value_type", None), "names", ())
        cells[name] = _cell(cell, types[name], not _CHAT_KEYS.isdisjoint(keys), decode)
    return cells


def _cell(value: Any, type: Any, chat: bool, decode: bool) -> Any:
    if str(type) == "extension<arrow.json>":
        return json.loads(value) if decode and value is not None else value
    if isinstance(value, dict):
        cells = {field.name: _cell(value[field.name], field.type, chat, decode) for field in type}
        return {name: cell for name, cell in cells.items() if cell is not None or not chat}
    if isinstance(value, list) and hasattr(type, "value_type"):
        return [_cell(item, type.value_type, chat, decode) for item in value]
    return plain(value)


def _read_hub(source: SourceRecipe) -> Iterator[Row]:
    """Stream the rows of a hub data set."""
    datasets = require_module("datasets", f"{source.path}: no such file or directory, and a hub data set")
    hub = importlib.import_module("huggingface_hub")
    try:
        # The loader retries for half a minute before it fails, so check first that the data set exists.
        hub.HfApi().dataset_info(source.path, timeout=_HUB_SECONDS)
        rows = datasets.load_dataset(source.path, source.subset, split=source.split, streaming=True)
    except Exception as error:
        part = f"split {source.split}" + (f" of {source.subset}" if source.subset else "")
        raise InputError(
            f"{source.path}: no such file or directory, and no hub data set with {part} ({_first_line(error)}); correct `path`, "
            "`subset` or `split`, or download the data and name its files"
        ) from error
    name = " ".join(filter(None, (source.path, source.subset, source.split)))
    return _of_depth(_hub_rows(rows, name), source.max_depth)


def _hub_rows(rows: Any, name: str) -> Iterator[Row]:
    number, schema = 0, getattr(getattr(rows, "features", None), "arrow_schema", None)
    try:
        for row in rows:
            number += 1
            typed = isinstance(row, dict) and schema is not None
            yield f"{name} row {number}", _table_row(row, schema, False) if typed else _object(plain(row))
    except Exception as error:
        raise RunError(f"{name}: reading stopped after row {number} ({_first_line(error)}); try again") from error


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200]


_FORMATS: dict[str, Callable[[Path, str, _Limits], Iterator[Row]]] = {
    ".parquet": _read_parquet,
    ".jsonl": _read_lines,
    ".jsonl.gz": _read_lines,
    ".json": _read_json,
    ".csv": _read_csv,
}


# -- writing ----------------------------------------------------------------------------------------------------------

WRITTEN_FORMATS = (".jsonl", ".parquet")


def require_format(out: Path) -> None:
    """InputError unless rows can be written to a file of this name."""
    if out.suffix.lower() not in WRITTEN_FORMATS:
        raise InputError(f"{out}: unknown format; name a {' or '.join(WRITTEN_FORMATS)} file")


def write_rows(out: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write rows of JSON values to `out` as JSON lines or parquet, by its suffix. Missing directories are created.

    The write is atomic: `out` has either the old or the new rows.

    Raises:
        InputError: another suffix, or rows that parquet cannot represent.
        RunError: the file cannot be written.
    """
    require_format(out)
    remove_partials(out)
    with atomic_file(out) as file:
        if out.suffix.lower() == ".jsonl":
            file.writelines(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)
            return
        import pyarrow as arrow
        from pyarrow import parquet

        columns = {}
        for name in dict.fromkeys(name for row in rows for name in row):
            cells = [row.get(name) for row in rows]
            lists = [cell for cell in cells if isinstance(cell, list)]
            keys = {key for cell in lists for item in cell if isinstance(item, dict) for key in item}
            # Tools, and the arguments of calls, as JSON text: objects of a column would get each other's keys.
            if keys & _MESSAGE_KEYS:
                cells = [_with_text_arguments(cell) for cell in cells]
            elif keys & _CHAT_KEYS:
                cells = [_json_text(cell) for cell in cells]
            try:
                columns[name] = arrow.array(cells)
            except (arrow.ArrowException, TypeError, ValueError, OverflowError) as error:
                raise InputError(
                    f"{out}: column {name} cannot be written as parquet ({error}); write .jsonl instead"
                ) from error
        parquet.write_table(arrow.table(columns), file)


def _with_text_arguments(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _json_text(item) if k == "arguments" else _with_text_arguments(item) for k, item in value.items()}
    return [_with_text_arguments(item) for item in value] if isinstance(value, list) else value


def _json_text(value: Any) -> Any:
    return value if isinstance(value, str | None) else json.dumps(value, ensure_ascii=False)
