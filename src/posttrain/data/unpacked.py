"""The memory that values of parquet files have as Python values."""

from typing import Any

ROW_BYTES, _CELL_BYTES = 64, 8
"""Smallest memory of a row and of a cell."""


def unpacked_bytes(array: Any) -> int:
    """Bytes of the values of an Arrow array, where a text counts as often as it appears."""
    import pyarrow as arrow  # imported late, so that commands without parquet files start quickly
    from pyarrow import compute

    if isinstance(array, arrow.ExtensionArray):
        return unpacked_bytes(array.storage)
    if isinstance(array, arrow.DictionaryArray):
        lengths = compute.take(compute.binary_length(array.dictionary), array.indices)
        return _CELL_BYTES * len(array) + (compute.sum(lengths).as_py() or 0)
    if isinstance(array, arrow.StructArray):
        return sum(map(unpacked_bytes, array.flatten()))
    if isinstance(array, arrow.MapArray):
        first, end = array.offsets[0].as_py(), array.offsets[-1].as_py()
        return sum(unpacked_bytes(entries.slice(first, end - first)) for entries in (array.keys, array.items))
    if hasattr(array, "flatten"):
        return _CELL_BYTES * len(array) + unpacked_bytes(array.flatten())
    return _CELL_BYTES * len(array) + array.nbytes
