"""MCP servers that answer anything, never, or with hostile tools.

The surfaces are functions as in `tests.adversary.surfaces`.
"""

import json
import random
import resource
import shlex
import sys
import time
from contextlib import ExitStack, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest import mock

from tests.adversary import mcp_server
from tests.listening import listening

_PATIENCE = 1.0
"""Seconds until a server that does not answer is given up here."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, where: str, what: str, seed: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.where, self.what, self.draw = where, what, random.Random(seed)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that gave up are no errors."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        self.send_error(405)

    do_DELETE = do_GET

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        self.close_connection = True
        hostile = request.get("method") == server.where
        if hostile and server.what == "silent":
            time.sleep(3 * _PATIENCE)
            return
        lines = mcp_server.answer(request, server.where, server.what, server.draw)
        if lines is None:
            return
        stream = hostile and server.what in ("endless", "flood")
        data = b"".join(b"data: %b\n\n" % line for line in lines) if stream else b"".join(lines)
        self.send_response(200 if lines else 202)
        if hostile and server.what == "packed":
            self.send_header("Content-Encoding", "gzip")
            data = mcp_server.packed(data)
        self.send_header("Content-Type", "text/event-stream" if stream else "application/json")
        if not stream:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        with suppress(OSError):
            if hostile and server.what == "endless":
                for _ in range(2_000):
                    self.wfile.write(b"data: xxxx" if server.draw.random() < 0.5 else b": " + b"x" * 65_536 + b"\n")
                    time.sleep(0.002)
            self.wfile.write(data)

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


def mcp(seed: int, folder: Path) -> None:
    """A server over either transport that answers one request with anything, or offers hostile tools."""
    from posttrain.data.tools import parse_hermes
    from posttrain.environments import mcp as client
    from posttrain.environments.tools import ToolCalls, ToolFailure, calling
    from posttrain.errors import InputError

    draw = random.Random(seed)
    what = draw.choice([*mcp_server.ANSWERS, "tools", "tools"])
    where = draw.choice(mcp_server.WHERE)
    http = draw.random() < 0.5 or what == "packed"
    mcp_server.packed(b"")  # it takes memory once
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.monotonic()
    case = f"{'http' if http else 'stdio'}, {what} at {where}"
    with ExitStack() as stack:
        # A list of hostile tools that the client cannot parse is never an answer.
        starts = where == "tools/call" and what != "tools"
        stack.enter_context(mock.patch.object(client, "_START", 60 if starts else 2 * _PATIENCE))
        if http:
            server = stack.enter_context(listening(_Server(where, what, seed)))
            recipe = client.McpRecipe(url=f"http://127.0.0.1:{server.server_port}/mcp", timeout=_PATIENCE)
        else:
            words = [sys.executable, "-S", mcp_server.__file__, where, what, str(seed)]
            recipe = client.McpRecipe(command=shlex.join(words), timeout=_PATIENCE)
        said = ""
        try:
            tools = client.mcp_tools(recipe)
        except InputError as error:
            tools, refusal = [], str(error)
            _check_text(refusal, f"{case}: {refusal[:200]!r}")
            assert what == "tools" or where != "tools/call", f"{case}: {refusal}"
        size = len(json.dumps([tool.schema for tool in tools]))
        assert size < 1 << 20, f"{case}: {size} characters of tools"
        names = [tool.name for tool in tools]
        assert len(set(names)) == len(names), f"{case}: {names[:9]}"
        assert all(name.isprintable() and name.isascii() and 0 < len(name) <= 200 for name in names), f"{case}: {names}"
        for _ in range(2) if tools else ():
            with suppress(ToolFailure, RuntimeError):
                said = tools[0].call({})
            assert len(said) <= 4 << 20, f"{case}: {len(said)} characters"
            try:
                step = ToolCalls(tools, 3, -0.1).step(parse_hermes(calling((tools[0].name, {}))))
            except RuntimeError as error:
                _check_text(str(error), f"{case}: {str(error)[:200]!r}")
            else:
                json.dumps(step.messages).encode()
        if http:
            server.what, client._START = "well", 60
            for _ in range(5):  # the first finds the connection broken, and others may be slow on a busy machine
                with suppress(RuntimeError, ToolFailure):
                    said = client.mcp_tools(recipe)[0].call({}) if said != "gold" else said
            assert said == "gold", f"{case}: {said[:200]} from a server that is well again"
        for one in client._OPEN.values():
            one.close()
        client._OPEN.clear()
    took, grown = time.monotonic() - started, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert took < 60, f"{case}: {took:.0f} s"
    assert grown < 400 << 10, f"{case}: {grown >> 10} MiB"


def _check_text(text: str, case: str) -> None:
    """A sentence: short, one line, and nothing that a terminal obeys."""
    assert len(text) < 1_000, case
    assert all(letter.isprintable() for letter in text), case
