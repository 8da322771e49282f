"""The scripts and their modules can be imported, as when a script is run."""

import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(FOLDER))


def output_of(script: str, *words: str) -> str:
    """What the script prints if it is run as users run it."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, str(FOLDER / f"{script}.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
