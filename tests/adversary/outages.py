"""Judges, teachers and remote models that fail in the middle of a run: it goes on, or resumes, to the same bits.

The surfaces are functions as in `tests.adversary.surfaces`.
"""

import json
import random
import re
import threading
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.adversary import hosts
from tests.listening import listening

KINDS = ("judge", "teacher", "generate", "evaluate")
Answer = Callable[[str, dict[str, Any] | None], dict[str, Any]]
"""Path and body of a request -> the JSON value of the answer."""
_HTML = b"<!doctype html><title>502</title>\x1b[2J<h1>Bad Gateway</h1>" + b"<p>sorry</p>" * 2_000
MODES: dict[str, tuple[int, bytes]] = {
    "html": (200, _HTML),
    "gateway": (502, _HTML),
    "broken": (500, b'{"error": {"message": "CUDA error: device-side assert"}}'),
    "starting": (503, b""),
    "busy": (429, b'{"error": "slow down"}'),
    "forbidden": (401, b'{"error": {"message": "Incorrect API key provided: sk-abcdefghijklmnopqrstuvwx"}}'),
    "unknown": (404, b'{"error": {"message": "The model `m` does not exist"}}'),
    "elsewhere": (302, b""),
    "empty": (200, b""),
    "null": (200, b"null"),
    "list": (200, b"[" * 3_000),
    "nothing": (200, b'{"choices": []}'),
    "nan": (200, b'{"choices": [{"message": {"content": NaN}, "prompt_logprobs": [NaN]}]}'),
    "huge": (200, b" " * (40 << 20)),
}
"""Name -> status and body. Others are in `_Handler`: half, hang, drip, reset, another."""
_SCRIPTED = ("half", "hang", "drip", "reset", "another")


class Front(ThreadingHTTPServer):
    """A server that answers with `answer`, except for `count` requests from the request `first` on, which meet `mode`."""

    daemon_threads = True
    request_queue_size = 64
    allow_reuse_address = True

    def __init__(self, answer: Answer, first: int = 0, count: int = 0, mode: str = "") -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer, self.first, self.count, self.mode = answer, first, count, mode
        self.asked = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    def meets(self) -> str:
        """What the next request meets."""
        with self.lock:
            self.asked += 1
            return self.mode if self.first <= self.asked < self.first + self.count else ""

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that gave up are no errors."""


class _Handler(BaseHTTPRequestHandler):
    server: Front

    def do_GET(self) -> None:
        self._reply(None)

    def do_POST(self) -> None:
        self._reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _reply(self, body: dict[str, Any] | None) -> None:
        mode = self.server.meets() if body is not None else ""
        self.close_connection = bool(mode)
        if mode in ("reset", "hang"):
            time.sleep(4 if mode == "hang" else 0)
            return
        status, data = MODES.get(mode, (200, b""))
        if mode not in MODES:
            value = self.server.answer(self.path, body)
            if mode == "another":
                value |= {"model": "another"}
            data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/html" if data is _HTML else "application/json")
        self.send_header("Content-Length", str(len(data)))
        if status == 302:
            self.send_header("Location", "http://127.0.0.2:9/v1")
        self.send_header("Retry-After-Ms", "5")
        self.end_headers()
        with suppress(OSError):
            if mode == "drip":
                for place in range(30):
                    self.wfile.write(data[place : place + 1])
                    time.sleep(0.1)
            elif mode == "half":
                self.wfile.write(data[: len(data) // 2])
            else:
                self.wfile.write(data)

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


def _completion(text: str) -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "finish_reason": "stop", "message": message}
    usage = {"completion_tokens": 3, "prompt_tokens": 1}
    return {"id": "1", "object": "chat.completion", "created": 0, "model": "m-1", "choices": [choice], "usage": usage}


def _judge(path: str, body: dict[str, Any] | None) -> dict[str, Any]:
    """Points for the different letters of what is asked about, so that they differ from answer to answer."""
    asked = body["messages"][-1]["content"] if body else ""
    answer = re.findall(r"answer\]\n(.*?)\n\[/", asked, re.DOTALL)
    points = min(10, len({letter for letter in "".join(answer) if letter.isalpha()}))
    return _completion(json.dumps({"reason": "letters", "score": points}))


def _model(path: str, body: dict[str, Any] | None) -> dict[str, Any]:
    """An answer that is a function of the messages and of the seed."""
    draw = random.Random(json.dumps([body["messages"], body.get("seed")]) if body else "")
    return _completion("".join(draw.choice("abcdefgh ") for _ in range(9)))


def _upstream(url: str) -> Answer:
    """The answers of the server at `url`."""

    def answer(path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url.removesuffix("/v1") + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as response:
            found: dict[str, Any] = json.loads(response.read())
            return found

    return answer


@cache
def _teacher() -> str:
    """The address of a server with a teacher, for the rest of this process."""
    from tests.adversary.models import SERVERS
    from tests.training.teacher_server import serving

    return SERVERS.enter_context(serving(hosts.tiny_model(5)))


def _answer(kind: str) -> Answer:
    return {"judge": _judge, "teacher": _upstream(_teacher()) if kind == "teacher" else _judge}.get(kind, _model)


def _recipe(kind: str, runs: Path, url: str, retries: int) -> dict[str, Any]:
    """A run in which any request that fails after its retries stops the run, so that it loses no data."""
    from tests.training import preferences, small

    runs.mkdir(exist_ok=True)
    server = {"timeout": 1.0, "retries": retries}
    failures = {"max_share": 1e-9}
    rows = [{"prompt": f"Say word {n}.", "label": "a"} for n in range(12)]
    prompts = preferences.write_jsonl(runs / "prompts.jsonl", rows)
    held_out = {"every": 1, "seeds": {"start": 8, "count": 2}, "final_seeds": {"start": 10, "count": 2}}
    judge = {"url": url, "model": "m", "rubric": "letters", **server}
    remote = {"type": "openai", "url": url, "model": "m", "max_concurrent": 3, **server}
    if kind == "judge":
        values = small.recipe_values(hosts.tiny_model(), runs, steps=3, seeds={"start": 0, "count": 8})
        values["environment"] = {"type": "text_task", "prompts": prompts, "judge": judge, "success_reward": None}
        values["rollout"] |= {"failures": failures, "tokens_per_episode": 90, "filter": {"type": "none"}}
        values["evaluation"] |= held_out
        return values
    if kind == "teacher":
        values = hosts.tiny_run("distill", runs)
        values["rollout"] |= {"failures": failures}
        return values | {"teacher": {"urls": [url], **server}}
    values = {"stage": kind, "name": "small", "runs": str(runs), "engine": remote}
    if kind == "generate":
        return values | {"data": {"test": prompts}, "out": str(runs / "out.jsonl")}
    letters = str(Path(small.__file__).parent / "letters.py")
    values |= {"environment": {"type": letters, "max_turns": 2}, "rollout": {"failures": failures}}
    return values | {"evaluation": {"final_seeds": {"start": 0, "count": 6}}}


def _result(kind: str, runs: Path) -> Any:
    """What must not depend on the failure."""
    from tests.training import small

    run = runs / "small"
    if kind == "generate":
        return (runs / "out.jsonl").read_bytes()
    if kind == "evaluate":
        return json.loads((run / "results.json").read_text())["policies"]
    return small.weights(run), small.metrics(run), small.episodes(run)


@cache
def _undisturbed(kind: str) -> tuple[Any, int]:
    """The result of a run without failures, and the number of its requests."""
    from tests.training import small

    runs = Path(hosts._home().name) / f"outage-{kind}"
    with listening(Front(_answer(kind))) as server:
        assert small.run(_recipe(kind, runs, server.url, 1)) == 0, (runs / "log.txt").read_text()[-2_000:]
        return _result(kind, runs), server.asked


def outage(seed: int, folder: Path) -> None:
    """A server fails for some requests in the middle of a run: it goes on, or stops with a sentence and resumes, to the
    same bits."""
    from tests.training import small

    draw = random.Random(seed)
    kind = draw.choice(KINDS)
    whole, requests = _undisturbed(kind)
    runs, retries = folder / "runs", draw.choice([0, 0, 1, 3])
    mode = draw.choice([*MODES, *_SCRIPTED])
    first = draw.randrange(2, requests + 1)
    count = draw.choice([1, 2, 5, 10_000])
    case = f"{kind}, {mode} for {count} requests from {first} of {requests}, {retries} retries"
    with ExitStack() as stack:
        server = stack.enter_context(listening(Front(_answer(kind), first, count, mode)))
        values = _recipe(kind, runs, server.url, retries)
        started = time.monotonic()
        code = small.run(values)
        took = time.monotonic() - started
        said = (runs / "log.txt").read_text()
        case += f": exit code {code} after {took:.0f} s: {said[-700:]}"
        assert took < 120, case
        assert "Traceback" not in said or "posttrain.errors" in said, case
        assert "sk-abcdef" not in said, case
        server.count = 0
        assert mode != "another" or code != 0, case
        if code != 0:
            assert small.run(values, resume=True) == 0, f"{case}\nthen {(runs / 'log.txt').read_text()[-700:]}"
    assert _result(kind, runs) == whole, f"another result: {case}"
