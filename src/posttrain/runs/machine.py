"""What describes the machine and the command of a run, for environment.json and for results."""

import functools
import os
import platform
import shlex
import subprocess
import sys
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = (
    *("posttrain", "torch", "transformers", "tokenizers", "safetensors", "peft", "gguf", "numpy", "scipy", "pydantic"),
    *("gymnasium", "matplotlib", "backports.zstd", "tensorboard", "wandb", "trackio", "vllm", "ray"),
)


def usable_processors() -> list[int]:
    """The logical processors that this process may use: fewer than the machine has in some containers."""
    known = hasattr(os, "sched_getaffinity")  # on Linux alone
    return sorted(os.sched_getaffinity(0)) if known else list(range(os.cpu_count() or 1))


def memory_of_processors() -> int | None:
    """Bytes of memory of this machine; None if the system does not say, as Windows."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def describe_machine() -> dict[str, Any]:
    """Package versions (None if not installed), Python, platform, processors, git commit, command line, folder and start time."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(sys.argv),
        "folder": os.getcwd(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": processor(),
        "cpu_count": os.cpu_count(),
        "cpus_allowed": len(usable_processors()),
        "git": _commit(Path(__file__)),
        "packages": {name: _version(name) for name in PACKAGES},
    }


@functools.cache
def _version(package: str) -> str | None:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


def processor() -> str:
    """Model name of the processor from /proc/cpuinfo, else from the standard library."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _commit(file: Path) -> dict[str, Any] | None:
    """Commit of the checkout that contains `file`; None for an installed package."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(file.parents[1]), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        # The package may be installed inside another project's checkout, so the file itself must be tracked.
        git("ls-files", "--error-unmatch", str(file))
        return {"commit": git("rev-parse", "HEAD"), "modified": bool(git("status", "--porcelain", "--", "."))}
    except (OSError, subprocess.SubprocessError):
        return None
