"""Images of rows: every form of a part, and hostile ones, which are refused before a decoder unpacks them."""

import base64
import json
import struct
import zlib

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image
from plugins.images.tests.conftest import encoded, part, picture, text

from posttrain import images
from posttrain.data.examples import load_dataset
from posttrain.data.messages import UnusableRow, messages_of
from posttrain.environments.protocol import Observation, ProtocolError, require_observation
from posttrain.errors import InputError, RunError
from posttrain_images import reading, store
from tests.forked import run_script

ANSWER = {"role": "assistant", "content": "red"}
PNG = encoded(picture())
URL = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"


def read(*parts):
    """The text of a message with these parts."""
    return messages_of([{"role": "user", "content": list(parts)}], "messages")[0]["content"]


def key(content):
    return images.MARK.findall(content)


FORMS = {
    "bytes": {"type": "image", "bytes": base64.b64encode(PNG).decode()},
    "raw bytes": {"type": "image", "bytes": PNG},
    "url": {"type": "image", "url": URL},
    "OpenAI": {"type": "image_url", "image_url": {"url": URL, "detail": "low"}},
    "responses": {"type": "input_image", "image_url": URL},
    "Hugging Face": {"type": "image", "image": {"bytes": PNG, "path": "cat.png"}},
    "Anthropic": {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": base64.b64encode(PNG).decode()},
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_part_is_the_same_image(form):
    content = read(FORMS[form], text("What is it?"))
    assert content == f"{images.mark(store.digest(np.asarray(picture())).hex())}What is it?"
    assert np.array_equal(store.load(key(content)[0]), np.asarray(picture()))


def test_a_photo_is_read_upright_and_in_color():
    image = picture(40, 64).convert("L")
    exif = image.getexif()
    exif[0x0112] = 6  # the camera was turned
    [one] = key(read({"type": "image", "bytes": encoded(image, "JPEG", exif=exif, quality=95)}))
    assert store.load(one).shape == (64, 40, 3)


def test_a_picture_of_16_bits_keeps_its_high_ones():
    gray = np.arange(0, 1 << 16, 16, dtype=np.uint16).reshape(64, 64)
    for clear in (None, 16, 4096):  # a value that is transparent, and no other one with the same high bits
        settings = {} if clear is None else {"transparency": clear}
        [one] = key(read({"type": "image", "bytes": encoded(Image.fromarray(gray), **settings)}))
        assert np.array_equal(store.load(one)[..., 0], np.where(gray == clear, 255, gray >> 8))


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_what_is_transparent_is_white(mode):
    """Also where its color is black, as in drawings of black lines on nothing."""
    drawn = Image.new("RGBA", (64, 40), (0, 0, 0, 0))
    drawn.paste((0, 0, 0, 255), (10, 10, 30, 30))
    [one] = key(read({"type": "image", "bytes": encoded(drawn.convert(mode))}))
    pixels = store.load(one)
    assert (pixels[:10] == 255).all()
    assert (pixels[12:28, 12:28] == 0).all()


def test_files_of_rows_are_read_from_their_folder(tmp_path):
    (tmp_path / "data" / "pictures").mkdir(parents=True)
    (tmp_path / "data" / "pictures" / "a.png").write_bytes(PNG)
    (tmp_path / "secret.png").write_bytes(PNG)
    (tmp_path / "data" / "link.png").symlink_to(tmp_path / "secret.png")
    (tmp_path / "data" / "loop.png").symlink_to(tmp_path / "data" / "loop.png")
    paths = ["pictures/a.png", "../secret.png", str(tmp_path / "secret.png"), "link.png", "loop.png", "none.png"]
    paths += ["pictures", "a\0b", 7]
    rows = [
        {"messages": [{"role": "user", "content": [{"type": "image", "path": p}, text("?")]}, ANSWER]} for p in paths
    ]
    file = tmp_path / "data" / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    with pytest.warns(UserWarning, match="rows dropped") as caught:
        examples = load_dataset(file)
    assert len(examples) == 1
    assert key(examples[0].messages[0]["content"])
    reasons = " ".join(str(one.message) for one in caught)
    assert reasons.count("image outside the data") == 1  # one line for a category
    assert "'../secret.png'" in reasons
    assert "5 rows dropped: image cannot be read" in reasons
    with pytest.raises(UnusableRow, match="only rows of a file name files"):
        read({"type": "image", "path": "pictures/a.png"})


def test_rows_of_parquet_have_images_as_bytes(tmp_path):
    image, words = {"type": "image", "bytes": PNG, "text": None}, {"type": "text", "bytes": None, "text": "?"}
    rows = {"prompt": [[{"role": "user", "content": [image, words]}]]}
    pyarrow.parquet.write_table(pyarrow.table({**rows, "completion": ["red"]}), tmp_path / "rows.parquet")
    [example] = load_dataset(tmp_path / "rows.parquet")
    assert key(example.messages[0]["content"])


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width, height, data, before=b""):
    """A PNG file; `before`: chunks before its data."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + before + chunk(b"IDAT", data) + chunk(b"IEND", b"")


HOSTILE = {
    "a bomb": (png(50_000, 50_000, zlib.compress(bytes(1 << 20))), "Bomb"),
    "a large one": (png(5_000, 5_000, b""), "5000 x 5000"),
    "a line": (png(4_000, 2, b""), "ratio"),
    "the largest header": (png((1 << 31) - 1, (1 << 31) - 1, b"a"), "Bomb"),
    "no width": (png(0, 9, b"a"), "cannot be read"),
    "a bomb of colors": (png(8, 8, b"", chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(1 << 24)))), "cannot be read"),
    "no data": (png(40, 40, b""), "cannot be read"),
    "cut": (PNG[: len(PNG) // 2], "cannot be read"),
    "other data": (png(40, 40, zlib.compress(bytes(99))), "cannot be read"),
    "text bomb": (PNG[:33] + chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(1 << 24))) + PNG[33:], "cannot be read"),
    "empty": (b"", "cannot be read"),
    "text": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "PNG or JPEG"),
    "an svg": (b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>', "PNG or JPEG"),
    "an animation": (
        encoded(picture(), "GIF", save_all=True, append_images=[picture(seed=n) for n in range(99)]),
        "PNG or JPEG",
    ),
    "a gif": (encoded(picture(), "GIF"), "PNG or JPEG"),
    "a tiff": (encoded(picture(), "TIFF"), "PNG or JPEG"),
    "a large file": (bytes(reading.MOST_BYTES + 1), "bytes"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_images_are_refused(name):
    data, reason = HOSTILE[name]
    with pytest.raises(UnusableRow, match=reason):
        read({"type": "image", "bytes": data})


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"type": "image"}, "without a source"),
        ({"type": "image", "url": "https://example.com/a.png"}, "nothing is downloaded"),
        ({"type": "image", "url": "file:///etc/passwd"}, "nothing is downloaded"),
        ({"type": "image", "url": "data:text/html;base64,aaaa"}, "nothing is downloaded"),
        ({"type": "image", "bytes": "not base64!"}, "not base64"),
        ({"type": "image", "bytes": ["a"]}, "are a list"),
        ({"type": "image", "image": 3}, "without a source"),
        ({"type": "image_url", "image_url": {"url": {}}}, "nothing is downloaded"),
    ],
)
def test_wrong_parts_are_refused(wrong, reason):
    with pytest.raises(UnusableRow, match=reason):
        read(wrong)


def test_random_damage_never_gets_past_the_reader():
    draws = np.random.default_rng(0)
    jpeg = encoded(picture(), "JPEG")
    for _ in range(300):
        data = bytearray(PNG if draws.random() < 0.5 else jpeg)
        for _ in range(int(draws.integers(1, 9))):
            data[int(draws.integers(len(data)))] = int(draws.integers(256))
        try:
            content = read({"type": "image", "bytes": bytes(data[: int(draws.integers(1, len(data) + 1))])})
        except UnusableRow:
            continue
        assert store.load(key(content)[0]).dtype == np.uint8


def test_observations_of_environments_may_have_parts():
    observation = require_observation(Observation([{"role": "user", "content": [part(picture()), text("?")]}]))
    assert key(observation.messages[0]["content"])
    with pytest.raises(ProtocolError, match="without a source"):
        require_observation(Observation([{"role": "user", "content": [{"type": "image"}]}]))


def test_an_image_is_stored_once_and_checked_when_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(images, "_folders", [tmp_path / "run" / "images"])
    [one] = key(read(part(picture(seed=5))))
    assert not (tmp_path / "run").exists()  # an image that no stream refers to
    store.keep(one)
    store.keep(one)
    assert [file.name for file in (tmp_path / "run" / "images").iterdir()] == [f"{one}.png"]
    (tmp_path / "run" / "images" / f"{one}.png").write_bytes(encoded(picture(seed=6)))
    with pytest.raises(RunError, match="was altered"):
        store.load(one)
    store._same.clear()  # as in the process of a resumed run
    with pytest.raises(RunError, match="was altered"):
        read(part(picture(seed=5)))
    (tmp_path / "run" / "images" / f"{one}.png").write_bytes(b"")
    with pytest.raises(RunError, match="is damaged"):
        store.load(one)
    with pytest.raises(InputError, match="restore"):
        store.load("0" * 12)


def test_a_model_of_text_refuses_images(tiny_policy):
    from posttrain.data.rendering import Renderer

    content = read(part(picture()), text("?"))
    with pytest.raises(InputError, match="reads text only"):
        Renderer(tiny_policy.tokenizer, tiny_policy.end_tokens).prompt([{"role": "user", "content": content}])


def test_a_run_of_text_imports_nothing_of_this(tiny_model, tmp_path):
    code = (
        "import sys, posttrain\n"
        f"posttrain.sft(model={{'path': {str(tiny_model)!r}}}, data={{'train': {str(tmp_path / 'rows.jsonl')!r}}}, steps=1, "
        f"rows_per_update=1, runs={str(tmp_path)!r}, name='run')\n"
        "print([name for name in sys.modules if name.startswith('posttrain_images')])"
    )
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "1?"}, ANSWER]}))
    (tmp_path / "script.py").write_text(code)
    code, said = run_script(tmp_path / "script.py", [], tmp_path)
    assert code == 0, said
    assert said.splitlines()[-1] == "[]"
    assert not (tmp_path / "run" / "images").exists()
