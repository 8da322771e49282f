"""Where llama.cpp's server is, and the files of weights that it is compared with."""

import os
import shutil
from pathlib import Path

from posttrain.models.load import cache_directory

ABSENT = (
    "llama.cpp is left out: there is no llama-server on the PATH; install it as docs/results/speed.md says under "
    "'Peers on a CPU' and name it with --llama-server or POSTTRAIN_LLAMA_SERVER"
)
FORMATS = {"bfloat16": "bf16", "float16": "f16", "q8_0": "q8_0"}
"""Name of a format in the table -> type of the weights in the GGUF file."""


def find_server(given: str | None) -> str | None:
    """The server's executable: the one given, that of the environment, or one on the PATH; None where there is none."""
    return shutil.which(given or os.environ.get("POSTTRAIN_LLAMA_SERVER") or "llama-server")


def gguf_file(model: Path, kind: str) -> Path:
    """The weights of the directory `model` in the GGUF type `kind`, written on first use and kept."""
    from posttrain.publishing.gguf import write_gguf

    file = cache_directory() / f"benchmark-{model.name}-{kind}.gguf"
    if not file.is_file():
        # Written aside and renamed, so that a file that was cut short is never used.
        aside = file.with_suffix(f".{os.getpid()}")
        try:
            write_gguf(model, aside, kind)
            aside.rename(file)
        finally:
            aside.unlink(missing_ok=True)
    return file
