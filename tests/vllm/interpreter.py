"""Where vLLM is, for the tests that need the real one."""

import os
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@cache
def vllm_python() -> str | None:
    """The interpreter that has vLLM: that of POSTTRAIN_VLLM_PYTHON, or of `.venv-vllm`; None where there is none."""
    named = os.environ.get("POSTTRAIN_VLLM_PYTHON", str(ROOT / ".venv-vllm" / "bin" / "python"))
    if not Path(named).is_file():
        return None
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    return named if subprocess.run([named, "-c", code], check=False).returncode == 0 else None


needs_vllm = pytest.mark.skipif(
    vllm_python() is None,
    reason="no interpreter with vLLM: `make .venv-vllm/.ready` makes one, or POSTTRAIN_VLLM_PYTHON names it",
)
