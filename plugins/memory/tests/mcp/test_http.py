"""The MCP server over HTTP: authorization, and the same tools."""

import contextlib
import http.client
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from contextlib import asynccontextmanager, contextmanager

import anyio
import httpx2
import pytest
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from plugins.memory.tests.agent.scripts import NOTES, code, reply
from plugins.memory.tests.agent.servers import serving, turns
from plugins.memory.tests.mcp.mcp_served import written

from posttrain.errors import InputError
from posttrain.loopback import open_listener
from posttrain_memory.mcp.http import guarded, read_token

MAIN = "import sys; from posttrain.cli.main import main; sys.exit(main())"
IMPATIENT = f"from posttrain import loopback; loopback._HEADER_SECONDS = 4.0; {MAIN}"
"""Waits less long for the headers of a request, so that the end of connections that send none is seen."""
TOKEN = "a-token-of-the-test-0123456789"
PATIENCE = 240
LIST = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}},
}


@contextmanager
def running(folder, *words, program=MAIN, **variables):
    """The command with HTTP on a free port: the port, and the process, its lines before the address in `said`."""
    process = subprocess.Popen(
        [sys.executable, "-c", program, "memory", "mcp", str(folder), "--http", "0", *words],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
    )
    try:
        process.said = []
        for line in process.stderr:
            process.said.append(line)
            address = re.search(r"http://127\.0\.0\.1:(\d+)/mcp", line)
            if address:
                break
        yield int(address[1]), process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def memory(tmp_path_factory):
    return written(tmp_path_factory.mktemp("memory"))


@pytest.fixture(scope="module")
def server(memory):
    """The port of a server with a model behind it, and the model's server."""
    script = turns(code('text = read_file("user.md")'), reply("Kim, +41 31 555 01 99."))
    with serving(script) as model:
        words = ["--url", model.url, "--model", "x", "--filter", "hide: [{category: phone}]"]
        words += ["--token-variable", "MEMORY_TOKEN"]
        with running(memory, *words, program=IMPATIENT, MEMORY_TOKEN=TOKEN) as (port, _):
            yield port


def sent(port, body=LIST, method="POST", path="/mcp", token=TOKEN, **headers):
    """(status, text, headers) of the answer to a request; a header that is None is left out."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    given = {
        "Host": f"127.0.0.1:{port}",
        "Authorization": None if token is None else f"Bearer {token}",
        "Content-Type": "application/json",
        "Accept": "application/json, text/event-stream",
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
    for name, value in {"Content-Length": str(len(data)), **given}.items():
        for one in value if isinstance(value, list) else [value]:
            if one is not None:
                connection.putheader(name, one)
    connection.endheaders()
    connection.send(data)
    answer = connection.getresponse()
    found = answer.status, answer.read().decode(), dict(answer.getheaders())
    connection.close()
    return found


def test_requests_with_the_token_are_accepted(server):
    status, text, headers = sent(server)
    assert status == 200
    assert "posttrain-memory" in text
    assert not [name for name in headers if name.lower().startswith("access-control")]
    assert sent(server, Host=f"localhost:{server}")[0] == 200


@pytest.mark.parametrize("token", [None, "", "wrong", TOKEN[:-1], f"{TOKEN}x", TOKEN.upper(), f" {TOKEN}", "é" * 16])
@pytest.mark.parametrize("method", ["POST", "GET"])
def test_requests_without_the_token_are_rejected(server, token, method):
    status, text, headers = sent(server, method=method, token=token)
    assert status == 401
    assert TOKEN not in text
    assert {name.lower(): value for name, value in headers.items()}["www-authenticate"] == "Bearer"


def test_the_authorization_scheme_is_case_insensitive(server):
    for scheme in ("bearer", "BEARER"):
        assert sent(server, token=None, Authorization=f"{scheme} {TOKEN}")[0] == 200


def test_the_token_is_in_one_header_only(server):
    assert sent(server, token=None, Authorization=[f"Bearer {TOKEN}", f"Bearer {TOKEN}"])[0] == 401
    assert sent(server, token=None, Authorization=f"Basic {TOKEN}")[0] == 401
    assert sent(server, token=None, path=f"/mcp?token={TOKEN}")[0] == 401
    assert sent(server, token=None, path="/")[0] == 401
    assert sent(server, method="OPTIONS", token=None)[0] == 401


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:{port}",
        "127.0.0.1",
        "127.0.0.1:1",
        "0.0.0.0:{port}",
        "127.0.0.1.evil.example:{port}",
    ],
)
def test_another_host_is_refused(server, host):
    status, text, _ = sent(server, Host=host.format(port=server))
    assert status == 403
    assert "Host" in text


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "", "http://127.0.0.1:{port}", "http://localhost:1"])
def test_web_pages_are_refused(server, origin):
    status, text, headers = sent(server, Origin=origin.format(port=server))
    assert status == 403
    assert "web pages" in text
    assert not [name for name in headers if name.lower().startswith("access-control")]


def test_a_body_that_is_too_large_is_refused(server):
    assert sent(server, body=b" " * 300_000)[0] == 413
    # One that does not say how large it is.
    connection = http.client.HTTPConnection("127.0.0.1", server, timeout=PATIENCE)
    head = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json", "Accept": "application/json"}
    connection.request("POST", "/mcp", iter([b" " * 1_000] * 300), headers=head, encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()
    assert sent(server)[0] == 200


def test_half_open_connections_block_no_client(server):
    strangers = [socket.create_connection(("127.0.0.1", server)) for _ in range(200)]
    for number, stranger in enumerate(strangers):
        with contextlib.suppress(OSError):
            stranger.sendall(b"POST /mcp HTTP/1.1\r\n" if number % 2 else b"P")
    started = time.monotonic()
    assert sent(server)[0] == 200
    # The header time-out closes those that were not replaced.
    for stranger in strangers:
        stranger.settimeout(PATIENCE)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1000) == b""
        stranger.close()
    assert time.monotonic() - started < 60
    assert sent(server)[0] == 200


def test_a_flood_of_connections_blocks_no_client(server):
    """Connections are made faster than a client sends its headers: one that has sent them is not replaced."""
    flood = (
        "import socket\n"
        "while True:\n"
        f"    one = socket.socket(); one.settimeout(0.5); one.connect_ex(('127.0.0.1', {server})); one.close()\n"
    )
    strangers = [subprocess.Popen([sys.executable, "-c", flood]) for _ in range(2)]
    answered = 0
    try:
        time.sleep(1)
        for _ in range(8):
            with contextlib.suppress(OSError):
                answered += sent(server)[0] == 200
    finally:
        for one in strangers:
            one.kill()
            one.wait()
    assert answered >= 5


def test_a_client_with_the_token_stays_connected(server):
    connection = http.client.HTTPConnection("127.0.0.1", server, timeout=PATIENCE)
    head = {
        "Authorization": f"Bearer {TOKEN}",
        "Content-Type": "application/json",
        "Accept": "application/json, text/event-stream",
    }
    connection.request("POST", "/mcp", json.dumps(LIST), headers=head)
    assert connection.getresponse().read()
    strangers = [socket.create_connection(("127.0.0.1", server)) for _ in range(40)]
    connection.request("POST", "/mcp", json.dumps(LIST), headers=head)
    assert connection.getresponse().status == 200
    for one in (*strangers, connection):
        one.close()


@asynccontextmanager
async def client_of(port, token=TOKEN, mode="auto"):
    """The package's own client."""
    web = httpx2.AsyncClient(headers={"Authorization": f"Bearer {token}"}, timeout=PATIENCE)
    async with (
        web,
        Client(streamable_http_client(f"http://127.0.0.1:{port}/mcp", http_client=web), mode=mode) as client,
    ):
        yield client


def talked(port, talk, token=TOKEN, mode="auto"):
    async def run():
        with anyio.fail_after(PATIENCE):
            async with client_of(port, token, mode) as client:
                return await talk(client)

    return anyio.run(run)


def test_the_tools_are_the_same(server):
    async def talk(client):
        calls = [
            ("list", {}),
            ("read", {"path": "entities/ada.md"}),
            ("search", {"text": "dog"}),
            ("ask", {"question": "Who am I?"}),
        ]
        return [(await client.call_tool(name, given)).content[0].text for name, given in calls]

    found = talked(server, talk)
    assert found[0] == "user.md\nentities/\n  ada.md"
    assert "[hidden]" in found[1]
    assert found[2:] == ["entities/ada.md:5: - dog: Rufus", "Kim, [hidden]."]


def test_two_clients_ask_at_once(server):
    async def ask(client, found):
        found.append((await client.call_tool("ask", {"question": "Who am I?"})).content[0].text)

    async def both(client):
        found = []
        async with client_of(server) as other, anyio.create_task_group() as group:
            group.start_soon(ask, client, found)
            group.start_soon(ask, other, found)
        return found

    assert talked(server, both) == ["Kim, [hidden]."] * 2


@pytest.mark.slow
def test_a_cancelled_question_ends_after_its_turn(memory):
    """In both ways in which versions of the protocol say it: a notice, and the end of the request."""
    held = {}

    def answer(messages):
        held["began"].set()
        assert held["go"].wait(PATIENCE)
        return held["script"](messages)

    async def talk(client):
        held.update(began=threading.Event(), go=threading.Event())
        held["script"] = turns(code("x = 1"), code('append_file("user.md", "- city: Rome\\n")'), reply("Noted."))
        async with anyio.create_task_group() as group:
            group.start_soon(client.call_tool, "ask", {"question": "I live in Rome."})
            assert await anyio.to_thread.run_sync(held["began"].wait, PATIENCE)
            group.cancel_scope.cancel()
        await client.call_tool("list", {})
        await anyio.sleep(0.3)
        held["go"].set()
        held["script"] = turns(reply("In Bern."))
        return (await client.call_tool("ask", {"question": "Where does Ada live?"})).content[0].text

    variables = {"MEMORY_TOKEN": TOKEN}
    with serving(answer) as model:
        words = ["--url", model.url, "--model", "x", "--token-variable", "MEMORY_TOKEN"]
        with running(memory, *words, **variables) as (port, _):
            for mode in ("auto", "legacy"):
                assert talked(port, talk, mode=mode) == "In Bern."
                assert len(model.asked) == 2
                model.asked.clear()
    assert (memory / "user.md").read_text() == NOTES["user.md"]


@pytest.mark.slow
def test_a_missing_token_is_generated(memory):
    with running(memory) as (port, process):
        (token,) = re.findall(r"Bearer (\S+)", "".join(process.said))
        assert len(token) >= 32
        assert sent(port, token=token)[0] == 200
        assert sent(port, token="x" * len(token))[0] == 401
        taken = subprocess.run(
            [sys.executable, "-c", MAIN, "memory", "mcp", str(memory), "--http", str(port)],
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert taken.returncode == 2
        assert taken.stderr.count("\n") == 1
        assert f"port {port} of 127.0.0.1 cannot be used" in taken.stderr
        process.terminate()
        printed, _ = process.communicate(timeout=PATIENCE)
        assert printed == ""


def test_tokens_from_the_environment(monkeypatch):
    assert read_token(None) != read_token(None)
    monkeypatch.setenv("MEMORY_TOKEN", TOKEN)
    assert read_token("MEMORY_TOKEN") == TOKEN
    for bad in ["", "short", "with a blank in the middle", "nön-ascii-nön-ascii", "line\nbreak-line-break"]:
        monkeypatch.setenv("MEMORY_TOKEN", bad)
        with pytest.raises(InputError, match="MEMORY_TOKEN"):
            read_token("MEMORY_TOKEN")


def test_it_listens_on_localhost_only():
    with open_listener(0, "--http") as found:
        assert found.getsockname()[0] == "127.0.0.1"


@pytest.mark.slow
def test_an_invalid_http_request_is_refused():
    async def app(*_):
        raise AssertionError("let in")

    said = []

    async def send(message):
        said.append(message)

    anyio.run(guarded(app, 80, TOKEN), {"type": "websocket", "headers": []}, None, send)
    assert said[0]["status"] == 403
