"""Start the checks in a process of their own, in which CUDA is the fake device."""

import os
import subprocess
import sys
from pathlib import Path

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
