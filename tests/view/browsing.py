"""A real server, and a real browser without a window."""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from urllib.parse import urlsplit

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium, such as Debian's package chromium")


@dataclass
class Server:
    """`posttrain view` in a process of its own."""

    address: str
    """With the token."""
    process: subprocess.Popen

    @property
    def root(self) -> str:
        parts = urlsplit(self.address)
        return f"{parts.scheme}://{parts.netloc}"

    @property
    def token(self) -> str:
        return self.address.partition("token=")[2]

    def cookie(self) -> str:
        return self.ask(f"/?token={self.token}").headers["set-cookie"].partition(";")[0]

    def ask(self, path: str, method: str = "GET", body: str | None = None, **headers: str) -> HTTPResponse:
        """One request with exactly these headers, besides Host unless it is given."""
        connection = HTTPConnection(urlsplit(self.address).netloc, timeout=30)
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body, given)
        response = connection.getresponse()
        response.text = response.read().decode()  # type: ignore[attr-defined]
        connection.close()
        return response


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "posttrain.cli.main", *map(str, words)]


@contextmanager
def served(folder: Path) -> Iterator[Server]:
    process = subprocess.Popen(command("view", folder, "--no-browser"), stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield Server(process.stdout.readline().strip(), process)
    finally:
        process.terminate()
        process.wait(20)


@contextmanager
def browsed(width: int = 1280, dark: bool = False, refused: tuple[str, ...] = ()) -> Iterator:
    """A page of a fresh browser; errors of scripts and refused resources fail the test, except those that name `refused`."""
    from playwright.sync_api import sync_playwright

    errors: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme="dark" if dark else "light", reduced_motion="reduce"
        )
        context.set_default_timeout(120_000)  # ms: processors are busy with other tests
        page = context.new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        requests: list[str] = []
        page.on("request", lambda request: requests.append(request.url))
        yield page
        browser.close()
    errors = [error for error in errors if not any(word in error for word in refused)]
    assert not errors, errors
    assert {re.match(r"\w+:(//[^/:]+)?", url)[0] for url in requests} <= {
        "http://127.0.0.1",
        "data:",
        "about:",
        "file:",
    }


def eventually(check: Callable[[], object], seconds: float = 60) -> None:
    """Wait until `check` is true."""
    until = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.1)


@contextmanager
def trained(folder: Path, model: Path, name: str = "live", steps: int = 100_000) -> Iterator[subprocess.Popen]:
    """A run of the bandit that trains meanwhile."""
    keys = [f"name={name}", f"runs={folder}", f"model.path={model}", f"steps={steps}", "environment.type=bandit"]
    small = ["rollout.groups_per_step=2", "rollout.episodes_per_group=4", "rollout.tokens_per_turn=8"]
    small += ["evaluation.every=5", "evaluation.seeds.count=8", "evaluation.final_seeds.count=8"]
    small += ["checkpoint.every=1000"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command("rl", *keys, *small), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()
