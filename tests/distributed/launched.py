"""A real run by the command line whose processes carry a mark in their environment, so that those left behind are found."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.training import small

ROOT = Path(__file__).parents[2]


class Launched:
    """`posttrain rl` on a tiny model in `folder`, in a process group of its own."""

    def __init__(self, tiny: Path, folder: Path, hardware: dict, steps: int = 2_000, resume: bool = False) -> None:
        self.folder, self.run = folder, folder / "runs" / "small"
        (folder / "tmp").mkdir(exist_ok=True)
        (folder / "runs").mkdir(exist_ok=True)
        values = small.recipe_values(tiny, folder / "runs", steps=steps, hardware=hardware)
        (folder / "recipe.yaml").write_text(json.dumps(values))
        words = ["--resume", str(self.run)] if resume else [str(folder / "recipe.yaml")]
        # The names of Ray's sockets have to be short.
        self.ray = Path(f"/tmp/pt-{os.getpid()}-{folder.name[-12:]}")
        self.ray.mkdir(exist_ok=True)
        self.mark = f"POSTTRAIN_TEST_MARK={folder}"
        variables = {"TMPDIR": str(folder / "tmp"), "RAY_TMPDIR": str(self.ray), "POSTTRAIN_PLOTS": "0"}
        variables |= {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "RAY_worker_niceness": "0", "OMP_NUM_THREADS": "1"}
        variables |= {"CUDA_VISIBLE_DEVICES": "", "RAY_USAGE_STATS_ENABLED": "0", "POSTTRAIN_TEST_MARK": str(folder)}
        self.log = folder / "launched.txt"
        with open(self.log, "a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "posttrain.cli.main", "rl", *words, "--trust"],
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | variables,
                cwd=ROOT,
            )

    def wait_for_step(self, step: int) -> None:
        """Wait until the metrics have so many training steps."""
        while self.finished() < step:
            assert self.process.poll() is None, self.log.read_text()[-3_000:]
            time.sleep(0.02)

    def finished(self) -> int:
        file = self.run / "metrics.jsonl"
        return file.read_text().count('"kind": "train"') if file.exists() else 0

    def left(self) -> list[str]:
        """Running processes of this run, and folders of its session."""
        processes = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                ended = (path / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
                if not ended and self.mark in (path / "environ").read_bytes().decode(errors="replace").split("\0"):
                    processes.append(f"{path.name} {(path / 'cmdline').read_bytes()[:150]!r}")
            except OSError:
                continue
        # Files of cached compilations in TMPDIR are no session of the run.
        folders = [*(self.folder / "tmp").glob("posttrain-*"), *self.ray.glob("ray/session_2*")]
        return [*processes, *map(str, folders)]

    def wait_until_nothing_is_left(self, seconds: float) -> float:
        """Wait until there are neither processes nor folders; returns the seconds that this took."""
        started = time.monotonic()
        while left := self.left():
            assert time.monotonic() - started < seconds, left
            time.sleep(0.1)
        return time.monotonic() - started

    def end(self) -> None:
        """End what a failed test left."""
        for line in self.left():
            if line.split()[0].isdigit():
                try:
                    os.kill(int(line.split()[0]), signal.SIGKILL)
                except ProcessLookupError:
                    continue
        self.process.wait()
