"""Attacks by callers: connections, requests, tool calls, answers, commands of other frameworks.

The surfaces are functions as in `tests.adversary.surfaces`.
"""

import atexit
import importlib.util
import io
import json
import logging
import math
import random
import socket
import string
import tempfile
import time
from contextlib import ExitStack, closing, suppress
from functools import cache
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from tests.adversary import hosts, models

SECONDS = 20
"""Seconds; longer than the slowest answer on a busy machine."""


def tool_calls(seed: int, folder: Path) -> None:
    """Malformed calls in each syntax: they are read as valid calls or give errors, quickly."""
    from posttrain.data.tools import SYNTAXES

    draw = random.Random(seed)
    tags = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "</function>"]
    tags += ["<function=look>", "<parameter=a>", "</parameter>", "<parameter=", ";", "look", " ", "\n", "NaN", "1e999"]
    tags += ['{"name": "look", "arguments": ', '{"name": "look", "parameters": {}}', '"\\ud800"', '{"a": ', "[", "]"]
    tags += ["}", "{}", '"', "9" * 5_000, "\x00", "</s>", '"\\u0000"', '{"name": "\\ud800"}', "null", ",", "é"]
    text = ""
    for _ in range(draw.randrange(1, 12)):
        text += draw.choice(tags)[:40] * (draw.choice([150, 900, 5_000]) if draw.random() < 0.2 else 1)
    if draw.random() < 0.3:
        depth = draw.choice([20, 190, 210, 900, 990, 5_000])
        inner = draw.choice(["[", '{"a":']) * depth
        call = f'{{"name": "look", "arguments": {{"x": {inner}1{("]" if inner[0] == "[" else "}") * depth}}}}}'
        text = draw.choice(["<tool_call>{}</tool_call>", "{}", "[TOOL_CALLS][{}]"]).format(call)
        if draw.random() < 0.3:
            text = text.replace("look", "[" * draw.randrange(3)).replace(call, f"{'[' * depth}{call}{']' * depth}")
    for name, parse in SYNTAXES.items():
        started = time.monotonic()
        found = parse(text)
        assert time.monotonic() - started < SECONDS, f"{name} takes {time.monotonic() - started:.0f} s: {text[:200]!r}"
        for call in found.calls:
            assert isinstance(call.name, str)
            assert isinstance(call.arguments, dict)
            json.dumps(call.message("c"), ensure_ascii=False, allow_nan=False).encode()
            # A template and a reply nest it further.
            json.dumps([[[[call.message("c")]]]])


def control_tokens(seed: int, folder: Path) -> None:
    """Messages, tools and observations with the text of control tokens: none ends a turn or starts one, in any use."""
    from posttrain.data.rendering import render_conversation
    from posttrain.data.templates import MARK
    from posttrain.episode import StopReason
    from posttrain.rollout.transcript import TokenTranscript
    from tests.data.test_encoding import controls, subjects

    draw = random.Random(seed)
    name = draw.choice(list(subjects()))
    subject = subjects()[name]
    tokens = [subject.tokenizer.convert_ids_to_tokens(number) for number in sorted(subject._encoder.control)]
    pieces = ["system\n", " ", "\n", "x", "</think>", "<think>", MARK, "\\ufdd0", "é", "＜", '"', "{", "\u200b"]

    def attack() -> str:
        text = ""
        for _ in range(draw.randrange(1, 9)):
            token = draw.choice(tokens)
            cut = draw.randrange(len(token) + 1)
            text += draw.choice([token, token, token[:cut], token[cut:], token[:cut] + token, draw.choice(pieces)])
        return f"k{text}k"

    def use(text: Any) -> list[list[int]]:
        first = [{"role": "system", "content": text()}] if subject.folds_system or "mistral" not in name else []
        first.append({"role": "user", "content": text()})
        answered = [*first, {"role": "assistant", "content": text()}]
        used = [stream.ids for loss in ("assistant", "all") for stream in render_conversation(subject, answered, loss)]  # type: ignore[arg-type]
        transcript = TokenTranscript(subject, first, primer="k" * (seed % 2))
        ids = subject.answer("k")
        transcript.answer(ids, [0.0] * len(ids), StopReason.END_TOKEN)
        transcript.observe([{"role": "user", "content": text()}])
        used.append(np.array(transcript.context))
        if subject.native_tools:
            function = {"name": text(), "arguments": {text(): [text()]}}
            call = {"id": "call00000", "type": "function", "function": function}
            tool = {"type": "function", "function": {"name": text(), "description": text(), "parameters": {}}}
            result = {"role": "tool", "name": text(), "tool_call_id": "call00000", "content": text()}
            called = [*first[-1:], {"role": "assistant", "content": "", "tool_calls": [call]}, result]
            used.append(np.array(subject.prompt(called, tools=[tool])))
        return [controls(subject, ids) for ids in used]

    assert use(attack) == use(lambda: "k"), name


@cache
def _servers() -> list[tuple[str, int, dict[str, str], str]]:
    """(kind, port, headers of an authorized client, path) of a live page, an agents' endpoint and `serve`."""
    from tests.conftest import make_tokenizer
    from tests.rollout import test_agent_calls as agents
    from tests.runs.comparing import make_run
    from tests.view.browsing import served

    atexit.register(models.SERVERS.close)
    runs = Path(models.SERVERS.enter_context(tempfile.TemporaryDirectory())) / "runs"
    make_run(runs, "first", seed=1)
    page = models.SERVERS.enter_context(served(runs))
    tokenizer = make_tokenizer()
    _, agent = models.SERVERS.enter_context(agents.served(agents.RecordingEngine(tokenizer), tokenizer))
    return [
        ("view", int(page.root.rpartition(":")[2]), {"Cookie": page.cookie()}, "/run/first"),
        ("serve", models.served_port(), {"Authorization": f"Bearer {models.KEY}"}, "/v1/models"),
        ("agents", agent.base_url.port, {"Authorization": f"Bearer {agent.api_key}"}, "/v1/models"),
    ]


def _tokens() -> dict[str, str]:
    """Kind of server -> the token that its addresses can have."""
    return {kind: headers["Cookie"].partition("=")[2] for kind, _, headers, _ in _servers() if "Cookie" in headers}


def _status(port: int, path: str, headers: dict[str, str]) -> int:
    with closing(HTTPConnection("127.0.0.1", port, timeout=SECONDS)) as connection:
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        response.read()
        return response.status


def connections(seed: int, folder: Path) -> None:
    """Connections that send nothing or part of a request: an authorized client is still answered."""
    draw = random.Random(seed)
    kind, port, headers, path = draw.choice(_servers())
    parts = [b"", b"G", b"GET / HTTP/1.1\r\n", b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"y" * 70_000, b"\x16\x03\x01\x02"]
    parts += [
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999999999\r\n\r\n{",
        b"\r\n" * 2_000,
    ]
    with ExitStack() as stack:
        for _ in range(draw.randrange(1, 300)):
            with suppress(OSError):
                one = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=SECONDS))
                one.sendall(draw.choice(parts))
        started = time.monotonic()
        status = None
        while status is None and time.monotonic() - started < SECONDS:
            with suppress(OSError, HTTPException):
                status = _status(port, path, headers)
        assert status == 200, f"{kind} answers {status}"
        assert time.monotonic() - started < SECONDS, kind


def wire(seed: int, folder: Path) -> None:
    """Bytes that are no valid HTTP, or that name another server: none is redirected away, none ends the server, an
    authorized client is still answered, and nothing is printed.
    """
    draw = random.Random(seed)
    kind, port, headers, path = draw.choice(_servers())
    head = "".join(f"{name}: {value}\r\n" for name, value in {"Host": f"127.0.0.1:{port}", **headers}.items())
    chunked, close = "Transfer-Encoding: chunked\r\n", "Connection: close\r\n"
    starts = ["//", "///", "/\\", "/%2f%2f", "/%5c", "http://", "/.//", "/..//", "/%09/", "/%0d%0aLocation:"]
    target = draw.choice(starts)
    target += f"x.example{draw.choice(['', '/', ':80/', '/../'])}?token={_tokens().get(kind, '')}"
    method = draw.choice(["GET", "HEAD", "OPTIONS", "TRACE", "CONNECT", "PRI"])
    sizes = ["-1", "+2", "0x2", "2, 2", "9" * 18, "9" * 4_000, "2\r\nContent-Length: 3", f"4\r\n{chunked}"[:-2]]
    size = draw.choice(sizes)
    part = draw.choice(["-1", "ZZ", "f" * 24, "2;" + "a" * 70_000, "", " 2", "2\n"])
    garbage = draw.choice(["\0\xff\r\n\r\n", "GET\r\n\r\n", "x" * 70_000, "GET / HTTP/9\r\n\r\n"])
    prompt = '{"prompt": "a b", "max_tokens": 9}'
    socket_key = "websocket\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13"
    upgrade = draw.choice([socket_key, "h2c"])
    post = "POST /v1/completions HTTP/1.1\r\n" + head
    sent = draw.choice(
        [
            f"{method} {target} HTTP/1.1\r\n{head}{close}\r\n",
            f"{method} {draw.choice(['*', path, 'x.example:443'])} HTTP/{draw.choice(['1.0', '1.1', '2.0'])}\r\n{head}\r\n",
            f"{post}Content-Length: {size}\r\n\r\n{{}}",
            f"{post}{chunked}\r\n2\r\n{{}}\r\n{part}\r\n{{}}\r\n",
            f"{post}Content-Length: {len(prompt)}\r\n\r\n{prompt}{garbage}",
            f"{post.replace('Authorization', 'X')}{chunked}\r\n{garbage}",
            f"GET {path} HTTP/1.1\r\n{head}\r\n" * draw.randrange(1, 9) + garbage,
            f"GET {path} HTTP/1.1\r\n{head}" + "a: b\r\n" * draw.choice([200, 100_000]) + f"{close}\r\n",
            f"GET {path} HTTP/1.1\r\n{head}X: {'y' * draw.choice([60_000, 1 << 20])}\r\n{close}\r\n",
            f"GET {path} HTTP/1.1\r\n{head}Connection: Upgrade\r\nUpgrade: {upgrade}\r\n\r\n",
        ]
    )
    answer, printed = b"", io.StringIO()
    loggers = [logging.getLogger(name) for name in ("asyncio", "uvicorn.error")]
    handler = logging.StreamHandler(printed)
    for logger in loggers:
        logger.addHandler(handler)
    try:
        with closing(socket.create_connection(("127.0.0.1", port), timeout=SECONDS)) as connection, suppress(OSError):
            connection.sendall(sent.encode("latin-1"))
            connection.settimeout(0.2)  # some are incomplete for the server, which then waits
            while data := connection.recv(1 << 16):
                answer += data
        assert _status(port, path, headers) == 200, f"{kind}: {sent[:300]!r}"
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
    what = f"{kind}: {sent[:300]!r}: {answer[:300]!r}"
    assert printed.getvalue() == "", f"{what}: {printed.getvalue()[-500:]}"
    named = [line for line in answer.split(b"\r\n") if line.lower().startswith(b"location:")]
    locations = [line.split(b":", 1)[1].strip() for line in named]
    # A browser reads a backslash as a slash.
    assert all(one.startswith(b"/") and one[1:2] not in (b"/", b"\\") for one in locations), what
    assert b"x.example" not in answer.split(b"\r\n\r\n")[0] or locations, what


def requests(seed: int, folder: Path) -> None:
    """Requests that lack the token, or come from another page: each is refused and shows nothing of a run."""
    draw = random.Random(seed)
    kind, port, headers, path = draw.choice(_servers())
    own = {"Host": f"127.0.0.1:{port}", **headers}
    (name, value), *_ = headers.items()
    wrongs: list[dict[str, Any]] = [
        {name: None},
        {name: value[:-1]},
        {name: value + draw.choice(string.ascii_letters)},
        {name: value.swapcase()},
        {name: draw.choice(["", "Bearer ", "Bearer", "a=b; c", "\xff", "=" * 5_000, "Basic Og=="])},
        {"Host": draw.choice(["posttrain.example", "127.0.0.2", "[::1]", "0.0.0.0", f"x.localhost:{port}", ""])},
    ]
    wrongs += [{"Origin": draw.choice(["null", "https://posttrain.example", f"http://127.0.0.1:{port}.example", ""])}]
    wrongs += [{"Host": f"127.0.0.1:{port + 1}"}]
    sent = {key: one for key, one in {**own, **draw.choice(wrongs)}.items() if one is not None}
    places = [path, "/", "/list", "/events", "/static/page.js", "/v1/completions", "/v1/chat/completions", "/x"]
    places += [f"{path}/..", "*"]
    place = draw.choice([path, draw.choice(places), quote(draw.choice(places), safe="")])
    method = draw.choice(["GET", "GET", "GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "CONNECT", "TRACE", "X"])
    with closing(socket.create_connection(("127.0.0.1", port), timeout=SECONDS)) as connection:
        lines = [f"{method} {place} HTTP/1.1", *(f"{key}: {one}" for key, one in sent.items()), "Connection: close"]
        connection.sendall("\r\n".join([*lines, "Content-Length: 2", "", "{}"]).encode("latin-1"))
        answer = b""
        with suppress(ConnectionResetError):
            while part := connection.recv(1 << 16):
                answer += part
    status = int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.1 ") else 0
    fine = {"view": {400, 403}, "serve": {400, 401, 403}, "agents": {400, 401, 403}}[kind]
    assert status in fine, f"{kind} answers {lines} with {answer[:200]!r}"
    assert b"first" not in answer, lines
    assert _status(port, path, headers) == 200


def answers(seed: int, folder: Path) -> None:
    """Any text as the answer in a game or in an adapter: a step with a finite reward, and text that can be stored."""
    from posttrain.environments.make import make_env

    draw = random.Random(seed)
    pieces = ["<answer>", "</answer>", "<think>", "</think>", "Up", "Left || Right", "Pull", "[5]", "0", "-1"]
    pieces += ["9" * 5_000, "NaN", "1e999", "true", "\x00", "\x1b[2J", "é", "\u202e", "[" * 3_000, '{"number": ', "1"]
    pieces += ["}", "take key", '{"a": "\\ud800"}', "look\nlook", " ", "|| " * 5_000, "<answer>" * 5_000]
    said = ["".join(draw.choice(pieces) for _ in range(draw.randrange(6))) for _ in range(4)]
    kinds: list[tuple[str, dict[str, Any]]] = [("bandit", {}), ("frozen_lake", {}), ("sokoban", {})]
    for name, path, keys in (
        ("gymnasium", "Gymnasium", {"id": draw.choice(["Taxi-v4", "Blackjack-v1", "FrozenLake-v1"])}),
        ("textarena", "TextArena", {"game": "GuessTheNumber-v0"}),
        ("textworld", "TextWorld", {"games": 1}),
    ):
        if importlib.util.find_spec(name) is not None:
            kinds.append((f"posttrain_environments.{name}:{path}", keys))
    kind, keys = draw.choice(kinds)
    environment = make_env(kind, **keys)()
    environment.reset(seed % 100)
    for answer in said:
        step = environment.step(answer)
        assert math.isfinite(step.reward), (kind, answer)
        stored = {"messages": step.messages, "info": step.info}
        json.dumps(stored, ensure_ascii=False, allow_nan=False, default=repr).encode()
        if step.terminated or step.truncated:
            break


def commands(seed: int, folder: Path) -> None:
    """A changed command of another framework: one sentence, or a recipe whose keys and values are those of its table."""
    import yaml
    from plugins.imports.tests import test_documents as documents

    from posttrain.errors import InputError
    from posttrain_import.commands import import_commands
    from posttrain_import.tables import markdown_table

    draw = random.Random(seed)
    texts = [part for name in documents.NUMBERS for part in documents.text_of(name).split("\n\n") if part.strip()]
    text = draw.choice(texts)
    marker = folder / "ran"
    pieces = [f"$(touch {marker})", f"`touch {marker}`", f"; touch {marker}", "'", '"', "\\", "$", "${", "${X:-", "}"]
    pieces += ["\n", "$'\\n'", "'\nstage: evil\n'", "--", "=", "9" * 5_000, "nan", "-1", "1e999", "\0", "<<EOF"]
    pieces += ["\ud800", "{a,b}", "../../etc/passwd", "/dev/zero", "[" * 3_000, "&a [*a]"]
    pieces += ["!!python/object/apply:os.system [id]", "# x", "é", "A=x\n" + "A=$A$A\n" * 60, '"' + "x" * 200_000 + '"']
    pieces += ['"' + '\\"' * 50_000 + '"', "read A <<EOF\n" * 5_000, "export A=1\ntrue\n" * 3_000]
    pieces += [f"\nbash {folder / 'train.sh'}\n" * 3]
    text = hosts.spliced(draw, text, pieces, draw.randrange(1, 5), 9)
    started = time.monotonic()
    try:
        found, _ = import_commands(text, documents.VARIABLES, draw.choice([None, 10, 5000]))
        for one in found:
            markdown_table(one)
            if not one.replacement:
                one.recipe()
                assert yaml.safe_load(one.recipe_text())["stage"] == one.stage, text
    except InputError:
        pass
    assert time.monotonic() - started < SECONDS, text
    assert not marker.exists(), text
    script = folder / "train.sh"
    script.write_bytes(text.encode("utf-8", "surrogatepass"))
    out = folder / "recipes"
    exit_code, _, errors = hosts.quietly(["import", str(script), "--out", f"{out}/", "--ignore-unknown"])
    assert exit_code in (0, 2), errors
    assert not marker.exists(), text
    assert {path.name for path in folder.iterdir()} <= {"train.sh", "recipes", "ran"}, text
