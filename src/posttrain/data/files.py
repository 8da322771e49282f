"""Rows into a file, whole or not at all."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posttrain.errors import InputError, RunError

FORMATS = (".jsonl", ".parquet")


def require_format(out: Path) -> None:
    """InputError unless rows can be written to a file of this name."""
    if out.suffix.lower() not in FORMATS:
        raise InputError(f"{out}: rows are written as {' or '.join(FORMATS)}; choose such a name")


def write_rows(out: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write rows of JSON values to `out`, as JSON lines or as parquet by its suffix; missing directories are made.

    The name holds the old or the new rows, never a part. InputError for another suffix and for rows that are no
    table; RunError where the disk refuses.
    """
    require_format(out)
    aside = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        try:
            with aside.open("wb") as file:
                if out.suffix.lower() == ".parquet":
                    _write_parquet(file, rows, out)
                else:
                    for row in rows:
                        file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(aside, out)
        finally:
            aside.unlink(missing_ok=True)
    except OSError as error:
        raise RunError(f"cannot write {out}: {error.strerror or error}; check the path and the disk") from error


def _write_parquet(file: Any, rows: Sequence[dict[str, Any]], out: Path) -> None:
    import pyarrow as arrow
    from pyarrow import parquet

    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = {}
    for name in names:
        try:
            columns[name] = arrow.array([row.get(name) for row in rows])
        except (arrow.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise InputError(f"{out}: column {name} is no parquet column ({error}); write .jsonl instead") from error
    parquet.write_table(arrow.table(columns), file)
