"""`posttrain view` on a large folder: time and memory of its pages, with the server and the browser on one processor.

The folder is written first: runs of 200 steps in groups of five seeds, and one run with a step of many episodes. Times
are wall clock; the processor time of the server says how much of them is its own work. Without Chromium, first paint is
left out.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from harness.models import model_directory
from harness.table import show

from posttrain.episode import Advantages, Episode, Outcome, StopReason, Stream, Turn
from posttrain.recipe.compose import load_recipe
from posttrain.rollout.store import write_episodes
from posttrain.runs.directory import RunDirectory

STEPS, METRICS, WORDS = 200, 45, 40
"""Steps of a run, metrics of a step, and words of an answer."""
LISTS = ("/", "/run/run-0000", "/charts/run-0000")
EPISODES = (
    ("episodes, first page", "/episodes/many?step=1"),
    ("episodes, page 200", "/episodes/many?step=1&page=199"),
    ("episodes, sorted by return", "/episodes/many?step=1&order=best+first"),
    ("group, first visit", "/group/many?step=1&group=0"),
    ("group, in the middle", "/group/many?step=1&group={middle}"),
    ("search in the text", "/episodes/many?step=1&text=needle"),
)


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=500, help="runs in the folder")
    parser.add_argument("--episodes", type=int, default=10_000, help="episodes of the step with the most")
    parser.add_argument("--folder", type=Path, help="where the runs are written, and kept; else a temporary folder")
    parser.add_argument("--json", metavar="FILE", help="also write the table there")
    return parser.parse_args()


def write_runs(folder: Path, count: int) -> None:
    """`count` runs without weights, five seeds to a recipe."""
    draw = np.random.default_rng(0)
    for number in range(count):
        keys = [f"name=run-{number:04d}", f"runs={folder}", f"seed={number % 5}", f"steps={STEPS}"]
        keys.append(f"optimizer.learning_rate={1e-6 * (1 + number // 5)}")
        run = RunDirectory.create(load_recipe([], [*keys, "environment.type=bandit"], "rl"))
        lines: list[dict[str, Any]] = []
        for step in range(1, STEPS + 1):
            values = {f"group/metric_{i}": float(value) for i, value in enumerate(draw.random(METRICS))}
            lines.append({"step": step, "kind": "train", "rollout/success": draw.random(), **values})
            if step % 20 == 0:
                rate = step / 300
                limits = {"success_low": rate - 0.1, "success_high": rate + 0.1}
                lines.append({"step": step, "kind": "evaluation", "success": rate, **limits, "n": 64})
        lines.append({"step": STEPS, "kind": "final", "policy": "trained", "success": 0.6, "n": 64})
        run.metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def write_step(folder: Path, count: int) -> None:
    """A run whose first step has `count` episodes of four turns, in groups of eight."""
    model = model_directory("qwen3")
    keys = ["name=many", f"runs={folder}", f"model.path={model}", "environment.type=bandit"]
    run = RunDirectory.create(load_recipe([], keys, "rl"))
    draw = np.random.default_rng(0)
    words = [f"word{i}" for i in range(2000)]
    episodes = []
    for number in range(count):
        spans = [(20 + 60 * turn, 60 + 60 * turn) for turn in range(4)]
        sampled = np.zeros(260, bool)
        of_turn, rewards = np.full(260, -1, np.int32), np.zeros(260, np.float32)
        turns, messages = [], []
        for turn, (start, stop) in enumerate(spans):
            sampled[start:stop], of_turn[start:stop] = True, turn
            answer = " ".join(words[i] for i in draw.integers(2000, size=WORDS))
            answer = "the needle" if number == count // 2 and turn == 3 else answer
            reward = float(turn == 3 and draw.random() < 0.5)
            rewards[stop - 1] = reward
            info = {"success": bool(reward)} if turn == 3 else {}
            turns.append(Turn(0, start, stop, reward, StopReason.END_TOKEN, answer, info))
            asked = " ".join(words[i] for i in draw.integers(2000, size=WORDS))
            messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        ids, logprobs = draw.integers(3, 300, size=260), -draw.random(260).astype(np.float32)
        stream = Stream(ids, sampled, logprobs * sampled, rewards, of_turn, np.where(sampled, 0, -1).astype(np.int32))
        place = (number // 8, number // 8, number % 8)
        episodes.append(Episode(*place, 0, [stream], turns, Outcome.TERMINATED, None, messages))
    credit = [[draw.standard_normal(260).astype(np.float32)] for _ in episodes]
    write_episodes(run.episodes, 1, "train", episodes, Advantages(credit))


class Server:
    """`posttrain view` in a process on one processor."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "posttrain.cli.main", "view", str(folder), "--no-browser"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()
        token = urlsplit(self.address)
        self.cookie = self._answer(f"/?{token.query}")[1].partition(";")[0]

    def ask(self, path: str) -> str:
        """The text of a page."""
        return self._answer(path)[0]

    def _answer(self, path: str) -> tuple[str, str]:
        connection = HTTPConnection(urlsplit(self.address).netloc, timeout=300)
        connection.request("GET", path, headers={"cookie": getattr(self, "cookie", "")})
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        if answer.status >= 400:
            raise SystemExit(f"{path} is answered with {answer.status}")
        return text, answer.headers.get("set-cookie", "")

    def seconds(self) -> float:
        """Processor time so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def mib(self) -> float:
        """Memory that is resident."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) / 1024


@contextmanager
def served(folder: Path) -> Iterator[Server]:
    """The server of a folder."""
    server = Server(folder)
    try:
        yield server
    finally:
        server.process.terminate()
        server.process.wait(20)


@contextmanager
def browsed() -> Iterator[Any]:
    """A page of Chromium; None where there is no Chromium."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        yield None
        return
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser.new_page(viewport={"width": 1280, "height": 900})
        browser.close()


def painted(page: Any, address: str) -> float:
    """Seconds from the start of the navigation to the first contentful paint."""
    page.goto(address)
    while not (
        entries := page.evaluate("performance.getEntriesByName('first-contentful-paint').map(e => e.startTime)")
    ):
        page.wait_for_timeout(50)
    return float(entries[0]) / 1000


def list_rows(folder: Path) -> list[dict[str, Any]]:
    """Measurements of the list of runs, the first page before any run was read."""
    rows = []
    with served(folder) as server, browsed() as page:

        def measure(what: str, seconds: float, before: float) -> None:
            own = server.seconds() - before
            rows.append({"page": what, "seconds": seconds, "server": own, "MiB": server.mib()})

        if page is not None:
            page.goto("about:blank")
            for what in ("first paint, runs not read yet", "first paint again"):
                before = server.seconds()
                seconds = painted(page, server.address if not rows else server.address.partition("?")[0])
                measure(what, seconds, before)
            page.goto("about:blank")  # which ends its requests for what is new
        start, before = time.monotonic(), server.seconds()
        while 'data-unread="0"' not in server.ask("/list"):
            pass
        measure("all runs read", time.monotonic() - start, before)
        for path in LISTS:
            start, before = time.monotonic(), server.seconds()
            server.ask(path)
            measure(f"answer of {path}", time.monotonic() - start, before)
        if page is not None:
            before = server.seconds()
            measure("first paint, runs read", painted(page, server.address.partition("?")[0]), before)
    return rows


def episode_rows(folder: Path, count: int) -> list[dict[str, Any]]:
    """Measurements of the pages of episodes."""
    rows = []
    with served(folder) as server:
        for what, path in EPISODES:
            start, before = time.monotonic(), server.seconds()
            server.ask(path.format(middle=count // 16))
            seconds = time.monotonic() - start
            rows.append({"page": what, "seconds": seconds, "server": server.seconds() - before, "MiB": server.mib()})
    return rows


def main() -> None:
    """Write the folders, measure and print the table."""
    chosen = options()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    with tempfile.TemporaryDirectory() as temporary:
        runs, many = ((chosen.folder or Path(temporary)) / name for name in ("runs", "many"))
        if not runs.is_dir():
            write_runs(runs, chosen.runs)
        if not many.is_dir():
            write_step(many, chosen.episodes)
        rows = [*list_rows(runs), *episode_rows(many, chosen.episodes)]
    notes = ["seconds: wall clock; server: processor seconds of the server; MiB: its resident memory afterwards"]
    show(f"{chosen.runs} runs, {chosen.episodes} episodes in one step, one processor", rows, notes, chosen.json)


if __name__ == "__main__":
    main()
