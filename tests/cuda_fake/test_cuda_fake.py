"""The code for GPUs, executed on fake CUDA tensors in a separate process. Numbers and speed are not checked.

The checks are the functions `test_*` in the files `checks_*.py`. Each appears here under its own name.
"""

import json
import re
from pathlib import Path

import pytest
import torch

from posttrain.models.cpu.compiler import compiler
from tests.cuda_fake import started

pytestmark = pytest.mark.timeout(900)  # the first test waits for all checks, which take 40 s on an idle core

HERE = Path(__file__).parent
NAMES = sorted(
    f"{file.name}::{name}"
    for file in HERE.glob("checks_*.py")
    for name in re.findall(r"^def (test_\w+)", file.read_text(encoding="utf-8"), re.MULTILINE)
)


def run(folder, *options):
    """Name of a check, with its parameters -> its report."""
    if compiler() is None:
        pytest.skip("needs a C++ compiler for the fake CUDA device: install g++ or clang++, or set CXX")
    if torch.version.cuda is not None:
        pytest.skip("torch is built for CUDA, which the fake device would replace")
    results = folder / "results.json"
    done = started.run(results, *options)
    assert results.is_file(), done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(results.read_text(encoding="utf-8"))


def all_passed(reports):
    failed = [f"{key}\n{report['text']}" for key, report in reports.items() if report["outcome"] != "passed"]
    assert not failed, "\n\n".join(failed)


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    return run(tmp_path_factory.mktemp("fake"))


@pytest.mark.parametrize("name", NAMES)
def test_on_fake_tensors(name, reports):
    found = {key: report for key, report in reports.items() if key.partition("[")[0].endswith(name)}
    assert found, f"{name} was not run"
    all_passed(found)


@pytest.mark.slow
def test_slow_cases_on_fake_tensors(tmp_path):
    reports = run(tmp_path, "-m", "slow")
    assert len(reports) == 17
    all_passed(reports)
