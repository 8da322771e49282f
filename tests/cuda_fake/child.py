"""The process that runs the checks: it loads the library of `fake_cuda.cpp` and only then torch, and writes the results.

python -m tests.cuda_fake.child LIBRARY TORCH_LIB RESULTS [options of pytest]
"""

import ctypes
import json
import sys
import time
from pathlib import Path


class Results:
    """A plug-in of pytest that keeps the outcome of every check, and the processor seconds of its function."""

    def __init__(self) -> None:
        self.reports: dict[str, dict[str, str | float]] = {}
        self._before = time.process_time()

    def pytest_runtest_logreport(self, report):
        before, self._before = self._before, time.process_time()
        if report.when == "call" or not report.passed:
            self.reports[report.nodeid] = {
                "outcome": report.outcome,
                "text": report.longreprtext,
                "printed": report.capstdout,
                "seconds": self._before - before,
            }


def main(library: str, torch_lib: str, results: str, *options: str) -> None:
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(Path(torch_lib) / name), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    import pytest

    kept = Results()
    here = str(Path(__file__).parent)
    fixed = [here, "-o", "python_files=checks_*.py", "-p", "no:cacheprovider", "-p", "no:xdist"]
    pytest.main([*fixed, *options], plugins=[kept])
    Path(results).write_text(json.dumps(kept.reports), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
