"""Attacks on programs that run a model for others: `posttrain serve`.

The surfaces are functions as in `tests.adversary.surfaces`.
"""

import atexit
import json
import math
import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import cache
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from tests.adversary import hosts

SECONDS = 20
"""More processor time than the longest answer takes."""
_PATIENCE = 300
"""Seconds to wait for an answer on a machine that does other work."""
KEY = "sk-of-the-user"
SERVERS = ExitStack()
"""Closes the servers of this process."""


@cache
def served_port() -> int:
    """The port of a server of a tiny model in this process, with `KEY`, until `SERVERS` is closed."""
    atexit.register(SERVERS.close)
    return SERVERS.enter_context(_served())


@contextmanager
def _served() -> Iterator[int]:
    from posttrain.engines.factory import open_engine
    from posttrain.loopback import http_server, open_listener
    from posttrain.models.policy import Policy
    from posttrain.recipe.compose import section
    from posttrain.recipe.engines import LocalEngineRecipe
    from posttrain.recipe.model import ModelRecipe
    from posttrain.serving.policy import PolicyServer
    from posttrain.serving.server import guarded

    policy = Policy(section(ModelRecipe, path=str(hosts.tiny_model())))
    engine = open_engine(policy, section(LocalEngineRecipe), weights_change=False)
    with open_listener(0, "--port") as on:
        port = on.getsockname()[1]
        server = http_server(
            guarded(PolicyServer(engine, "tiny").app(), port, lambda key: None if key == KEY else "no")
        )
        thread = threading.Thread(target=server.run, args=([on],), daemon=True)
        thread.start()
        try:
            yield port
        finally:
            server.should_exit = True
            thread.join()


def _post(port: int, path: str, data: bytes, key: str = KEY) -> tuple[int, bytes]:
    with closing(HTTPConnection("127.0.0.1", port, timeout=_PATIENCE)) as connection:
        connection.request("POST", path, data, {"Authorization": f"Bearer {key}"})
        response = connection.getresponse()
        return response.status, response.read()


_CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}
_CHAT: dict[str, Any] = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": None, "tool_calls": [_CALL]},
        {"role": "tool", "tool_call_id": "c", "content": "gold"},
    ],
    "tools": [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}],
}
_CHAT |= {"max_tokens": 3, "stop": ["x"], "temperature": 0.7, "top_p": 0.9, "top_k": 5, "n": 2, "seed": 1}
_CHAT["logprobs"] = True
_TEXT = {"prompt": ["a b", "c"], "max_tokens": 3, "logprobs": 1, "stream": False, "min_p": 0.1, "echo": False}
_PLAIN = json.dumps({"prompt": "a b c", "max_tokens": 4, "temperature": 0}).encode()


def _plain_answer(port: int) -> str:
    status, answer = _post(port, "/v1/completions", _PLAIN)
    assert status == 200, answer
    return str(json.loads(answer)["choices"][0]["text"])


_expected = cache(_plain_answer)
"""Port -> the greedy answer of a server before any attack."""


def serve(seed: int, folder: Path) -> None:
    """Changed requests to `posttrain serve`: each is answered or refused, none stops it, and its answers stay the same."""
    draw = random.Random(seed)
    port = served_port()
    expected = _expected(port)
    odd: list[Any] = [None, True, -1, 0, 1e999, 1e-320, 10**30, "", "\x00\ud800", "<|im_end|>", [], {}, [[]] * 50]
    odd += ["9" * 5_000, "x " * 200_000, [1, 2], [[1]] * 3_000, [10**30], ["a", 1], {"type": "text"}, ["\ufffd"] * 70]

    for _ in range(8):
        path, valid = draw.choice([("/v1/chat/completions", _CHAT), ("/v1/completions", _TEXT)])
        body = hosts.mutated(draw, {**valid, "stream": draw.random() < 0.3}, odd)
        if isinstance(body, dict) and not draw.randrange(20):
            body["max_tokens"] = draw.choice([10**30, 2_000])
        data = bytearray(json.dumps(body).encode())
        if draw.random() < 0.2:
            data[draw.randrange(len(data))] = draw.randrange(256)
        if draw.random() < 0.1:
            depth = draw.choice([150, 990, 50_000])
            data = bytearray(b'{"prompt": "a", "x": ' + b"[" * depth + b"]" * depth + b"}")
        given = draw.choice([KEY] * 6 + [KEY + "x", ""])
        if given == KEY and draw.random() < 0.1:
            _leave(port, path, bytes(data))
            continue
        started = time.process_time()
        status, answer = _post(port, path, bytes(data), given)
        what = (status, answer[:200], bytes(data[:400]))
        assert time.process_time() - started < SECONDS, what
        assert status in ((200, 400) if given == KEY else (401,)), what
        assert status == 200 or json.loads(answer)["error"]["message"], what
        assert b"Traceback" not in answer, what
        if status == 200 and not answer.startswith(b"data: "):
            _check_numbers(json.loads(answer))
    assert _plain_answer(port) == expected, "another answer than before"


def _leave(port: int, path: str, data: bytes) -> None:
    """Send a request, and close the connection without waiting for the answer."""
    with closing(socket.create_connection(("127.0.0.1", port), timeout=_PATIENCE)) as connection:
        lines = [f"POST {path} HTTP/1.1", f"Host: 127.0.0.1:{port}", f"Authorization: Bearer {KEY}"]
        connection.sendall("\r\n".join([*lines, f"Content-Length: {len(data)}", "", ""]).encode() + data)


def _check_numbers(answer: dict[str, Any]) -> None:
    for choice in answer["choices"]:
        logprobs = choice["logprobs"] or {}
        values = logprobs.get("token_logprobs") or [one["logprob"] for one in logprobs.get("content", [])]
        values = values[values[:1] == [None] :]  # the first token of an echoed prompt has none
        assert all(math.isfinite(value) and value <= 0 for value in values), choice
