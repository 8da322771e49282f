"""Start the checks in a process of their own, in which CUDA is the fake device."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from posttrain.models.cpu.compiler import build, compiler

HERE = Path(__file__).parent
TORCH = Path(torch.__file__).parent


def run(results: Path, *options: str, timeout: float = 880) -> "subprocess.CompletedProcess[str]":
    """Run the checks that the `options` of pytest select, by default all; `results` is the file that `child.py` writes. Needs
    a compiler, and a torch without CUDA."""
    program = compiler()
    assert program is not None, "needs a C++ compiler: install g++ or clang++, or set CXX"
    include = [f"-I{TORCH / 'include'}", f"-I{TORCH / 'include/torch/csrc/api/include'}"]
    library = build(
        "fake-cuda", HERE / "fake_cuda.cpp", [program, "-std=c++20", "-shared", "-fPIC", *include], torch.__version__
    )
    return subprocess.run(
        [sys.executable, "-m", "tests.cuda_fake.child", str(library), str(TORCH / "lib"), str(results), *options],
        cwd=HERE.parents[1],
        env=os.environ
        | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        | {"PYTHONPATH": os.pathsep.join([str(HERE.parents[1] / "src"), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def printed_rows(check: str, only: str) -> list[dict[str, Any]]:
    """The row that each case of the `check` of `table_memory.py` prints as JSON; `only` selects cases, as the option `-k` of
    pytest. SystemExit if one fails."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        done = run(results, "-o", "python_files=table_memory.py", "-k", f"{check} and ({only or check})", timeout=7200)
        reports = json.loads(results.read_text()) if results.exists() else {}
    if not reports or any(report["outcome"] != "passed" for report in reports.values()):
        sys.exit(done.stdout[-3000:] + done.stderr[-3000:])
    return [json.loads(report["printed"].splitlines()[-1]) for report in reports.values()]
