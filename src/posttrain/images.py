"""Images in messages and streams: the marks and ids that stand for them. A plug-in reads them.

In the text of a message, an image is a mark with its key, a digest of its pixels. In a stream, each of its tokens is an id that
no vocabulary has: the key, and the number of the token in the image. Equal ids are equal inputs, so prefix trees, caches
and stored episodes need to know nothing of images.
"""

import base64
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

KEY_DIGITS = 12
MARK = re.compile(f"\ufdd1([0-9a-f]{{{KEY_DIGITS}}})\ufdd1")
"""The mark of an image in text; group 1 is its key. U+FDD1 is a noncharacter of Unicode."""
FIRST = 1 << 62
"""The smallest id of a token of an image."""
TOKEN_BITS = 14
"""Bits of the number of a token in its image."""


def mark(key: str) -> str:
    """The text that stands for the image `key`."""
    return f"\ufdd1{key}\ufdd1"


def first_id(key: str) -> int:
    """The id of token 0 of the image `key`; that of token n is n larger."""
    return FIRST | int(key, 16) << TOKEN_BITS


def key_of(token: int) -> str:
    """The key of the image of an id from `FIRST` on."""
    return f"{(token ^ FIRST) >> TOKEN_BITS:0{KEY_DIGITS}x}"


def number_of(token: int) -> int:
    """The number of a token in its image; 0 for a token of text."""
    return token & ((1 << TOKEN_BITS) - 1) if token >= FIRST else 0


def whole_images(tokens: "np.ndarray", start: int, stop: int) -> int:
    """`stop`, moved so that `tokens[start:stop]` [T] int64 ends inside no image: back to the beginning of the image, or to its
    end if nothing else would be left."""

    def divides(at: int) -> bool:
        return at < len(tokens) and tokens[at] >= FIRST and tokens[at] == tokens[at - 1] + 1

    begin = stop
    while begin > start and divides(begin):
        begin -= 1
    if begin > start:
        return begin
    while divides(stop):
        stop += 1
    return stop


def data_url(png: bytes) -> str:
    """A stored image as a data URL."""
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def readable(text: str) -> str:
    """`text` as people read it, with the keys of its images in brackets."""
    return MARK.sub(r"[image \1]", text)


def decoding(decode: Callable[[Sequence[int]], str]) -> Callable[[Sequence[int]], str]:
    """`decode` for ids of which some may be those of images, which become `[image KEY]`."""

    def decoded(ids: Sequence[int]) -> str:
        parts = groupby(ids, lambda token: key_of(token) if token >= FIRST else "")
        return "".join(f"[image {key}]" if key else decode(list(part)) for key, part in parts)

    return decoded


# -- where images are -------------------------------------------------------------------------------------------------

_folders: list[Path] = []
_rows_from: ContextVar[Path | None] = ContextVar("rows_from", default=None)


@cache
def _temporary() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="posttrain-images-")


def folders() -> list[Path]:
    """Folders of stored images: that of the run, if one has begun, and a temporary one of this process."""
    return [*_folders, Path(_temporary().name)]


def keep_in(folder: Path) -> None:
    """Store the images that streams of this process refer to in `folder`, that of a run."""
    _folders[:] = [folder]


@contextmanager
def rows_from(folder: Path | None) -> Iterator[None]:
    """In this context, rows may name image files below `folder`; None: no files."""
    before = _rows_from.set(folder)
    try:
        yield
    finally:
        _rows_from.reset(before)


def folder_of_rows() -> Path | None:
    """The folder of `rows_from`."""
    return _rows_from.get()
