"""Images in messages: from a file, a data URL or bytes to a stored image, by Pillow alone and within limits."""

import base64
import binascii
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from posttrain.data.messages import UnusableRow, kind_of
from posttrain.images import folder_of_rows, mark
from posttrain_images.store import put

FORMATS = ("PNG", "JPEG")
"""The only formats whose decoders are tried."""
MOST_BYTES = 20 << 20
"""Largest file of an image, in bytes."""
MOST_PIXELS = 1 << 24
"""Most pixels of an image. They are counted from the header, before anything is unpacked."""
MOST_RATIO = 100
"""Largest ratio of the sides of an image."""


def read_part(part: dict[str, Any], where: str) -> str:
    """Store the image of a part of a message, and return the mark that stands for it.

    Parts are `{"type": "image", ...}` with `path` (a file in the folder of the rows), `url` (a data URL) or `bytes` (base64 in
    JSON), and the forms of OpenAI and of Hugging Face data sets. `where` names the message. Raises UnusableRow for an image
    that is missing, damaged, beyond the limits, or in another format.
    """
    inner = next((part[key] for key in ("image_url", "image", "source") if part.get(key) is not None), part)
    if isinstance(inner, str | bytes):
        inner = {"url" if isinstance(inner, str) else "bytes": inner}
    inner = inner if isinstance(inner, dict) else {}
    kind = next((key for key in ("bytes", "data", "url", "path") if inner.get(key) is not None), None)
    if kind is None:
        raise UnusableRow("image without a source", f"that of {where} needs `path`, `url` (a data URL) or `bytes`")
    readers = {"url": _from_url, "path": _from_file}
    where += f" ({inner[kind][:80]!r})" if kind == "path" and isinstance(inner[kind], str) else ""
    return mark(put(decoded(readers.get(kind, _from_bytes)(inner[kind], where), where)))


def decoded(data: bytes, where: str, formats: tuple[str, ...] = FORMATS, most: int = MOST_BYTES) -> Image.Image:
    """The RGB image of a file's content of at most `most` bytes, upright. Raises UnusableRow."""
    if len(data) > most:
        raise UnusableRow("image too large", f"that of {where} has {len(data):,} bytes, more than {most:,}; resize it")
    try:
        with Image.open(BytesIO(data), formats=formats) as opened:
            width, height = opened.size
            if width * height > MOST_PIXELS or max(width, height) > MOST_RATIO * min(width, height):
                raise UnusableRow(
                    "image too large",
                    f"that of {where} is {width} x {height}; the limits are {MOST_PIXELS:,} pixels and a ratio of "
                    f"{MOST_RATIO}; resize or cut it",
                )
            upright = ImageOps.exif_transpose(opened)
            if upright.mode.startswith("I"):  # 16 bits of gray; the conversion would make all values above 255 white
                values = np.asarray(upright)
                clear = upright.info.get("transparency")
                upright = Image.fromarray(np.where(values == clear, 255, values >> 8).astype(np.uint8))
            if not upright.has_transparency_data:
                return upright.convert("RGB")
            # What is transparent shows white; its own color is often black, which hides black shapes.
            shown = upright.convert("RGBA")
            return Image.alpha_composite(Image.new("RGBA", shown.size, "white"), shown).convert("RGB")
    except UnusableRow:
        raise
    except Exception as error:  # decoders raise errors of many types
        reason = type(error).__name__ + ("" if "BytesIO" in str(error) else f": {str(error)[:80]}")
        raise UnusableRow(
            "image cannot be read",
            f"that of {where} is no {' or '.join(formats)} image ({reason}); save it again as one",
        ) from error


def _from_bytes(value: Any, where: str) -> bytes:
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if not isinstance(value, str):
        raise UnusableRow(
            "wrong type", f"the bytes of the image of {where} are {kind_of(value)}, not base64 text; encode the file"
        )
    if len(value) > 2 * MOST_BYTES:
        raise UnusableRow("image too large", f"that of {where} has {len(value):,} characters of base64; resize it")
    try:
        return base64.b64decode("".join(value.split()), validate=True)
    except (binascii.Error, ValueError):
        raise UnusableRow(
            "image cannot be read", f"the bytes of the image of {where} are not base64; encode the file"
        ) from None


def _from_url(value: Any, where: str) -> bytes:
    head, comma, data = value.partition(",") if isinstance(value, str) else ("", "", "")
    if not (head.startswith("data:image/") and head.endswith(";base64") and comma):
        raise UnusableRow(
            "image by address",
            f"that of {where} is not a data URL in base64, and nothing is downloaded; store the image",
        )
    return _from_bytes(data, where)


def _from_file(value: Any, where: str) -> bytes:
    folder = folder_of_rows()
    if not isinstance(value, str) or folder is None or "\0" in value:
        reason = "only rows of a file name files" if folder is None else f"its path is {kind_of(value)}"
        raise UnusableRow("image cannot be read", f"that of {where}: {reason}; give `bytes` or a data URL")
    root = folder.resolve()
    try:
        file = (root / Path(value)).resolve()
        if not file.is_relative_to(root):
            raise UnusableRow("image outside the data", f"that of {where} is not in {folder}; copy it there")
        if not file.is_file():
            raise UnusableRow("image cannot be read", f"that of {where} is no file in {folder}; copy it there")
        with file.open("rb") as opened:
            return opened.read(MOST_BYTES + 1)
    except (OSError, RuntimeError) as error:
        raise UnusableRow("image cannot be read", f"that of {where}: {error}") from error
