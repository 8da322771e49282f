"""Stored images: each once, as a PNG file named by the digest of its pixels.

Images of rows are first in a temporary folder. An image that becomes tokens is copied to the folder of the run.
"""

import hashlib
import os
import shutil
from collections import Counter
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from tempfile import NamedTemporaryFile
from threading import Lock
from typing import IO

import numpy as np
from PIL import Image

from posttrain.data.messages import UnusableRow
from posttrain.errors import InputError, RunError
from posttrain.images import KEY_DIGITS, folders, when_forgotten

_same: dict[str, bytes] = {}
"""Key -> a longer digest of the stored image, so that it is not unpacked again to be compared."""
_users: Counter[str] = Counter()
"""Key -> how many need the image in the temporary folder."""
_lock = Lock()


def digest(pixels: np.ndarray, size: int = KEY_DIGITS // 2) -> bytes:
    """A digest of `size` bytes of pixels [height, width, 3] uint8. The shortest one is the key of the image."""
    made = hashlib.blake2b(repr(pixels.shape).encode(), digest_size=size)
    made.update(np.ascontiguousarray(pixels).tobytes())
    return made.digest()


def put(image: Image.Image) -> str:
    """Store an RGB image and return its key. Raises UnusableRow if the key is that of another image, and RunError if the stored
    file has been altered."""
    pixels = np.asarray(image)
    key, whole = digest(pixels).hex(), digest(pixels, 32)
    with _lock:
        _users[key] += 1
    if (later := when_forgotten()) is not None:
        later.callback(_forget, key)
    if _file(key) is None:
        content = BytesIO()
        image.save(content, "PNG", compress_level=1)
        _write(folders()[-1] / f"{key}.png", lambda opened: opened.write(content.getvalue()))
    elif whole != (_same.get(key) or digest(load(key), 32)):
        raise UnusableRow("two images have one key", f"{key}; change a pixel of one of them")
    _same[key] = whole
    return key


def _forget(key: str) -> None:
    with _lock:
        _users[key] -= 1
        if not _users[key]:
            del _users[key]
            _same.pop(key, None)
            (folders()[-1] / f"{key}.png").unlink(missing_ok=True)


def load(key: str) -> np.ndarray:
    """The pixels [height, width, 3] uint8 of a stored image. InputError if there is none, RunError if it is damaged."""
    from posttrain_images.reading import MOST_PIXELS, decoded

    if (file := _file(key)) is None:
        raise InputError(f"the image {key} of a message is not in {folders()[0]}; restore {key}.png there")
    try:
        pixels = np.asarray(decoded(file.read_bytes(), str(file), ("PNG",), 4 * MOST_PIXELS))
    except Exception as error:  # decoders raise errors of many types
        raise RunError(
            f"the image {file} is damaged ({error}); delete it, and what has the image stores it again"
        ) from error
    if digest(pixels).hex() != key:
        raise RunError(
            f"the image {file} was altered: its pixels are not those of its name; delete it, and what has the image stores it again"
        )
    return pixels


def keep(key: str) -> None:
    """Copy an image to the folder of the run, if one has begun."""
    file, target = _file(key), folders()[0] / f"{key}.png"
    if file is not None and file != target:
        with file.open("rb") as source:
            _write(target, lambda opened: shutil.copyfileobj(source, opened))


def _file(key: str) -> Path | None:
    return next((file for folder in folders() if (file := folder / f"{key}.png").is_file()), None)


def _write(file: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a file whole or not at all; processes and threads may write the same one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        with NamedTemporaryFile(dir=file.parent, suffix=".part", delete=False) as opened:
            write(opened)
        os.chmod(opened.name, 0o644)
        os.replace(opened.name, file)
    except OSError as error:
        raise RunError(f"{file} cannot be written ({error}); free space, or allow to write there") from error
