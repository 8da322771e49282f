"""The guard and the limit of connections that all HTTP servers share."""

import asyncio
import socket
import threading
import time
from collections import Counter
from contextlib import closing, contextmanager, suppress

import pytest

pytest.importorskip("uvicorn", reason="needs posttrain[agents]")

from posttrain import loopback
from posttrain.loopback import Guard, Scope, header, http_server, open_listener


async def app(scope: Scope, receive: loopback.Receive, send: loopback.Send):
    """Computes in the event loop before it answers, as the local engine does."""
    time.sleep(float(b"".join(header(scope, b"compute")) or 0.01))
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body"})


@contextmanager
def served():
    """The port of a server that admits requests with the header `Key`."""
    with open_listener(0, "--port") as listener:
        port = listener.getsockname()[1]

        def check(scope: Scope):
            return None if header(scope, b"key") else (401, "no key")

        server = http_server(Guard(app, port, check))
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield port
        finally:
            server.should_exit = True
            thread.join()


async def load(port: int, clients: int, requests: int, sent: bytes):
    """Send `sent` in a new connection for each request; returns status, or name of the error -> number of requests."""
    results: Counter[str] = Counter()
    left = iter(range(requests))

    async def client():
        for _ in left:
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(sent)
                results[(await reader.read())[9:12].decode() or "no answer"] += 1
                writer.close()
            except OSError as error:
                results[type(error).__name__] += 1

    await asyncio.gather(*(client() for _ in range(clients)))
    return results


def request(port: int, key: str = "Key: x\r\n"):
    return f"GET / HTTP/1.1\r\nHost: localhost:{port}\r\n{key}Connection: close\r\n\r\n".encode()


def test_no_connection_is_reset_while_the_process_computes():
    """Reading the requests of all clients takes longer than a client takes to send one."""
    with served() as port:
        assert asyncio.run(load(port, 200, 400, request(port))) == {"200": 400}


@pytest.mark.parametrize("drip", [b"", b"G", b"GET / HTTP/1.1\r\nX: "])
def test_idle_and_slow_connections_are_replaced(monkeypatch: pytest.MonkeyPatch, drip: bytes):
    monkeypatch.setattr(loopback, "_ANONYMOUS", 8)
    with served() as port:
        strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(100)]
        for stranger in strangers:
            with suppress(OSError):
                stranger.sendall(drip)
        assert asyncio.run(load(port, 1, 5, request(port))) == {"200": 5}
        kept = 0
        for stranger in strangers:
            stranger.setblocking(False)
            try:
                stranger.recv(1)
            except BlockingIOError:
                kept += 1
            except ConnectionResetError:
                pass
            stranger.close()
        assert kept <= 8


def test_a_client_that_has_yet_to_send_is_not_closed_for_older_connections(monkeypatch: pytest.MonkeyPatch):
    """All connect while the process computes, so that it accepts them before it reads what the strangers sent."""
    monkeypatch.setattr(loopback, "_ANONYMOUS", 8)
    with served() as port, closing(socket.create_connection(("127.0.0.1", port))) as first:
        first.sendall(request(port, "Key: x\r\nCompute: 0.5\r\n"))
        time.sleep(0.1)
        strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
        for stranger in strangers:
            stranger.sendall(b"G")
        with closing(socket.create_connection(("127.0.0.1", port), timeout=20)) as client:
            assert first.recv(100)[9:12] == b"200"
            time.sleep(0.2)
            client.sendall(request(port))
            assert client.recv(100)[9:12] == b"200"
        for stranger in strangers:
            stranger.close()


def test_a_connection_without_a_request_is_closed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(loopback, "_HEADER_SECONDS", 0.1)
    with served() as port, closing(socket.create_connection(("127.0.0.1", port), timeout=20)) as idle:
        with suppress(ConnectionResetError):
            assert idle.recv(1) == b""
        assert asyncio.run(load(port, 1, 2, request(port))) == {"200": 2}
        assert asyncio.run(load(port, 1, 2, request(port, ""))) == {"401": 2}


def test_malformed_bytes_after_a_request_end_its_connection_alone(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
):
    with served() as port:
        for extra in (b"\0\r\n\r\n", b"x" * 70_000, request(port).replace(b"GET", b"\xff")):
            kept = request(port).replace(b"Connection: close\r\n", b"")
            asyncio.run(load(port, 1, 1, kept + extra))
            asyncio.run(
                load(port, 1, 1, b"POST" + kept[3:-2] + b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n" + extra)
            )
        assert asyncio.run(load(port, 1, 2, request(port))) == {"200": 2}
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []
    assert capsys.readouterr().err == ""
