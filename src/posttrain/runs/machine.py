"""What a run ran on: the content of `environment.json`."""

import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = (
    *("posttrain", "torch", "transformers", "tokenizers", "safetensors", "peft", "gguf", "numpy", "scipy", "pydantic"),
    *("omegaconf", "gymnasium", "matplotlib", "zstandard", "tensorboard", "wandb", "trackio", "vllm", "ray"),
)


def describe_machine() -> dict[str, Any]:
    """Package versions (null where not installed), Python, platform, processors, commit, command line and time."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(sys.argv),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor(),
        "cpu_count": os.cpu_count(),
        "cpus_allowed": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "git": _commit(Path(__file__)),
        "packages": {name: _version(name) for name in PACKAGES},
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    """The processor's market name where Linux tells it, else what Python knows."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _commit(file: Path) -> dict[str, Any] | None:
    """Commit of the checkout that tracks posttrain's source; None when it runs from an installation."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(file.parents[1]), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        # An environment inside somebody else's checkout is not posttrain's checkout: the file itself must be tracked.
        git("ls-files", "--error-unmatch", str(file))
        return {"commit": git("rev-parse", "HEAD"), "modified": bool(git("status", "--porcelain", "--", "."))}
    except (OSError, subprocess.SubprocessError):
        return None
