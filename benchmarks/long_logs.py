"""Processor time and memory of the commands that read a run, for runs of very many steps.

Two runs are written, without weights or episodes. The aim is 5 seconds and 500 MB for 100,000 steps.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from harness.table import show

from posttrain.recipe.compose import load_recipe
from posttrain.runs.directory import RunDirectory

COMMANDS = ("plot a", "plot a b", "report a", "runs list .")
NAMED = ("rollout/return", "rollout/success", "policy/entropy", "loss/policy", "time/step")


def write_run(folder: Path, name: str, steps: int, metrics: int) -> Path:
    """A finished run with `metrics` numbers at each step, and an evaluation at every 100th. Returns its metrics."""
    keys = [f"name={name}", f"runs={folder}", f"steps={steps}", "environment.type=bandit"]
    run = RunDirectory.create(load_recipe([], keys, "rl"))
    names = [*NAMED, *(f"group/metric_{number}" for number in range(metrics - len(NAMED)))]
    draw = np.random.default_rng(0)
    with run.metrics.open("w") as file:
        for step in range(1, steps + 1):
            values = dict(zip(names, draw.random(len(names)).tolist(), strict=True))
            lines = [{"step": step, "kind": "train", "time/run": float(step), **values}]
            if step % 100 == 0:
                rate = 0.1 + step / (1.5 * steps)
                limits = {"success_low": rate - 0.1, "success_high": rate + 0.1}
                lines.append({"step": step, "kind": "evaluation", "success": rate, **limits, "n": 64})
            file.writelines(f"{json.dumps(line)}\n" for line in lines)
        file.write(json.dumps({"step": steps, "kind": "final", "policy": "trained", "success": 0.6, "n": 64}) + "\n")
    return run.metrics


def measure(command: str, folder: Path) -> dict[str, str | float]:
    """A line of the table."""
    program = [sys.executable, "-m", "posttrain.cli.main", *command.split()]
    process = subprocess.Popen(program, cwd=folder, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    seconds = usage.ru_utime + usage.ru_stime
    return {"command": command, "exit code": process.returncode, "seconds": seconds, "MB": usage.ru_maxrss / 1000}


def main() -> None:
    """Write the runs, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=100_000, help="steps of each run")
    parser.add_argument("--metrics", type=int, default=45, help="metrics of each step")
    parser.add_argument("--json", metavar="FILE", help="also write the table there")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="posttrain-benchmark-") as place:
        folder = Path(place)
        size, _ = (write_run(folder, name, chosen.steps, chosen.metrics).stat().st_size for name in ("a", "b"))
        rows = [measure(command, folder) for command in COMMANDS]
    notes = [
        f"{chosen.steps:,} steps, {chosen.metrics} metrics, a log of {size / 1e6:.0f} MB; processor seconds, peak memory"
    ]
    show("Long logs", rows, notes, chosen.json)


if __name__ == "__main__":
    main()
