"""Images in messages and streams: the marks and ids that stand for them. A plug-in reads them.

In the text of a message, an image is a mark with its key, a digest of its pixels. No text can contain one: a mark has lone
surrogates, which are not Unicode, so every reader of rows, requests, observations and tools refuses them, and no tokenizer
decodes to them. In a stream, each token of an image is an id that no vocabulary has: the key, and the number of the token
in the image. Equal ids are equal inputs, so prefix trees, caches and stored episodes need to know nothing of images.
"""

import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

KEY_DIGITS = 12
EDGE = "\udfff"
"""What a mark begins and ends with."""
MARK = re.compile(f"{EDGE}([0-9a-f]{{{KEY_DIGITS}}}){EDGE}")
"""The mark of an image in text; group 1 is its key."""
FIRST = 1 << 62
"""The smallest id of a token of an image."""
TOKEN_BITS = 14
"""Bits of the number of a token in its image."""


class Pictured(str):
    """The content of a message whose marks are those of images that a part was read into."""


def mark(key: str) -> Pictured:
    """The text that stands for the image `key`."""
    return Pictured(f"{EDGE}{key}{EDGE}")


def parts_of(content: Any) -> Any:
    """A content with marks as the list of its parts, `{"type": "text", "text": ...}` and `{"type": "image", "key": ...}`;
    another one unchanged."""
    if not isinstance(content, str) or not MARK.search(content):
        return content
    pieces = enumerate(MARK.split(content))
    return [{"type": "image", "key": one} if n % 2 else {"type": "text", "text": one} for n, one in pieces if one]


def content_of(parts: Any) -> Any:
    """The inverse of `parts_of`. ValueError or KeyError for parts that it does not make."""
    if not isinstance(parts, list):
        return parts
    text = "".join(mark(one["key"]) if one["type"] == "image" else one["text"] for one in parts)
    if parts_of(text) != parts:
        raise ValueError("the parts of a message are not text and keys of images")
    return Pictured(text)


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
_forgetting: ContextVar[ExitStack | None] = ContextVar("forgetting", default=None)


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


@contextmanager
def forgetting(later: ExitStack) -> Iterator[None]:
    """In this context, images are stored until `later` is closed, unless something else has stored them too."""
    before = _forgetting.set(later)
    try:
        yield
    finally:
        _forgetting.reset(before)


def when_forgotten() -> ExitStack | None:
    """That of `forgetting`, whose callbacks forget stored images; None: they are kept."""
    return _forgetting.get()
