"""Attacks by images in rows: damaged files, wrong headers, paths that lead elsewhere, parts of any form."""

import base64
import json
import random
import struct
import zlib
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np


def _picture(draw: random.Random, form: str) -> bytes:
    from PIL import Image

    size = draw.randrange(1, 40), draw.randrange(1, 40)
    file = BytesIO()
    Image.frombytes("RGB", size, draw.randbytes(3 * size[0] * size[1])).save(file, form)
    return file.getvalue()


def _damaged(draw: random.Random) -> bytes:
    """The file of an image with changed, missing or repeated bytes, or with another size in its header."""
    data = bytearray(_picture(draw, draw.choice(["PNG", "JPEG", "GIF", "BMP", "TIFF", "PPM"])))
    for _ in range(draw.randrange(6)):
        at = draw.randrange(len(data))
        data[at : at + draw.randrange(4)] = draw.randbytes(draw.randrange(4))
        data = data or bytearray(b"\0")
    if data[:4] == b"\x89PNG" and len(data) > 33 and draw.random() < 0.4:
        head = struct.pack(">II", draw.randrange(1 << 31), draw.randrange(1 << draw.randrange(1, 31))) + data[24:29]
        data[16:33] = head + struct.pack(">I", zlib.crc32(b"IHDR" + head))
    return bytes(data[: draw.randrange(len(data) + 1)] if draw.random() < 0.3 else data)


def pictures(seed: int, folder: Path) -> None:
    """Every image is refused with a reason or becomes pixels; nothing outside the folder of the rows is read."""
    from posttrain.data.examples import read_examples
    from posttrain.data.messages import ConversationExample
    from posttrain.data.problems import Problems
    from posttrain.images import MARK
    from posttrain.recipe.data import ColumnsRecipe, SourceRecipe
    from posttrain_images.store import digest, load

    draw = random.Random(seed)
    data = folder / "data"
    (data / "inside").mkdir(parents=True)
    secret = _picture(draw, "PNG")
    (folder / "secret.png").write_bytes(secret)
    (data / "inside" / "a.png").write_bytes(_picture(draw, "PNG"))
    (data / "link.png").symlink_to(folder / "secret.png")
    (data / "way").symlink_to(folder)
    paths = ["inside/a.png", "../secret.png", "link.png", "way/secret.png", str(folder / "secret.png")]
    paths += ["inside/../../secret.png", "/dev/zero", "/proc/self/environ", "inside", "", "a\0b", "~/a.png"]
    paths += [f"file://{folder}/secret.png", "x" * 5_000]
    values: list[Any] = [None, 7, [], {}, "", "data:image/png;base64,", "http://127.0.0.1:1/a.png", {"url": 3}]

    def part() -> dict[str, Any]:
        kind = draw.choice(["image", "image_url", "input_image"])
        encoded = base64.b64encode(_damaged(draw)).decode()
        form = draw.choice(["bytes", "url", "path", "image", "image_url", "source", "odd"])
        given = {"bytes": encoded, "url": f"data:image/png;base64,{encoded}", "path": draw.choice(paths)}
        given |= {"image": {"bytes": encoded}, "image_url": {"url": f"data:image/x;base64,{encoded}"}}
        given |= {"source": {"data": encoded}}
        return {"type": kind, form if form in given else draw.choice(list(given)): given.get(form, draw.choice(values))}

    rows = [
        {"prompt": [{"role": "user", "content": [part(), {"type": "text", "text": "?"}]}], "completion": "x"}
        for _ in range(20)
    ]
    (data / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    problems = Problems()
    source = SourceRecipe(path=str(data / "rows.jsonl"))
    examples = list(read_examples("conversation", [source], ColumnsRecipe(), problems))
    assert problems.used == len(examples)
    assert problems.used + problems.total == len(rows)
    from PIL import Image

    outside = digest(np.asarray(Image.open(BytesIO(secret)))).hex()
    for example in examples:
        assert isinstance(example, ConversationExample)
        [key] = MARK.findall(example.messages[0]["content"])
        assert key != outside
        assert load(key).ndim == 3
