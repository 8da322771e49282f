"""Runs scripts in processes that are forked from the server of `tests.training.small`.

It does not import torch again, and its runs draw no figures.
"""

import os
import runpy
import sys
import traceback
from pathlib import Path

from tests.training.small import fork_server


def run_script(script: Path, words: list[str], folder: Path) -> tuple[int, str]:
    """Run `script` as `python script words...` in `folder`; returns the exit code and the output."""
    log = folder / f"{script.stem}.log"
    process = fork_server().Process(target=_child, args=(script, words, folder, log))
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode, log.read_text()


def _child(script: Path, words: list[str], folder: Path, log: Path) -> None:
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "POSTTRAIN_PLOTS": "0"}
    os.fsync = lambda descriptor: None  # as in the process of the tests
    output = open(log, "w")  # noqa: SIM115
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    os.chdir(folder)
    sys.argv = [str(script), *words]
    sys.path[0] = str(script.parent)
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit:
        raise
    except BaseException:
        traceback.print_exc()
        sys.exit(1)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
