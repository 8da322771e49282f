"""The side of llama.cpp: its server with a slot for each request in flight, asked over HTTP on this machine."""

import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any

from sides.pipe import Answer, serve

START_TIMEOUT = 60.0
"""Seconds until the server has to be ready."""


def start(settings: dict[str, Any]) -> tuple[str, Answer]:
    """`settings["server"]` with the GGUF file `settings["file"]`."""
    server: Server | None = None

    def answer(job: dict[str, Any]) -> dict[str, Any]:
        nonlocal server
        if server is None or server.slots != job["in_flight"]:
            # Slots that are not in use would cost memory and time.
            if server is not None:
                server.close()
            server = Server(settings, job["in_flight"])
        return answer_all(server.ask, job)

    return _version(settings["server"]), answer


class Server:
    """llama-server on a free port of this machine, with `slots` slots of `settings["context"]` tokens each."""

    def __init__(self, settings: dict[str, Any], slots: int) -> None:
        self.slots = slots
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.address = f"http://127.0.0.1:{port}"
        threads = str(settings["threads"])
        self.process = subprocess.Popen(
            [
                *(settings["server"], "--model", settings["file"], "--host", "127.0.0.1", "--port", str(port)),
                *("--threads", threads, "--threads-batch", threads, "--parallel", str(slots)),
                *("--ctx-size", str(slots * settings["context"]), "--batch-size", "2048", "--no-webui"),
                # Requests wait in the connections, each of which occupies a thread.
                *("--threads-http", str(slots + 2)),
            ]
        )
        deadline = time.monotonic() + START_TIMEOUT
        while not self._ready():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"llama-server is not ready after {START_TIMEOUT:g} s, or has ended")
            time.sleep(0.1)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to one completion request."""
        body = json.dumps(request).encode()
        header = {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(f"{self.address}/completion", body, header)) as answer:
            return json.load(answer)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.address}/health") as answer:
                return answer.status == 200
        except (urllib.error.URLError, ConnectionError):
            return False


def answer_all(ask: Callable[[dict[str, Any]], dict[str, Any]], job: dict[str, Any]) -> dict[str, Any]:
    """Ask for all answers of `job`, with at most `in_flight` requests at a time."""

    def one(number: int) -> tuple[dict[str, Any], float]:
        request = {
            "prompt": job["prompts"][number],
            "n_predict": job["lengths"][number],
            "ignore_eos": True,
            "temperature": job["temperature"],
            # Its default chain truncates the distribution; without it, sampling is also faster.
            "samplers": ["temperature"],
            "seed": (job["seed"] + number) % 2**31,
            "response_fields": ["tokens_predicted", "timings"],
        }
        return ask(request), time.perf_counter()

    begun = time.perf_counter()
    with ThreadPoolExecutor(job["in_flight"]) as clients:
        answers = list(clients.map(one, range(len(job["prompts"]))))
    return {
        "seconds": time.perf_counter() - begun,
        "tokens": sum(answer["tokens_predicted"] for answer, _ in answers),
        "first": median(end - begun for _, end in answers),
        "reused": sum(answer["timings"]["cache_n"] for answer, _ in answers),
    }


def _version(server: str) -> str:
    """What `llama-server --version` prints first."""
    done = subprocess.run([server, "--version"], capture_output=True, text=True, check=True)
    return (
        next(line for line in (done.stdout + done.stderr).splitlines() if "version" in line).partition(":")[2].strip()
    )


if __name__ == "__main__":
    serve(start)
