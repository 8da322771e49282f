"""The little of HTTP that asking an engine takes: one connection for each request, closed when the asker gives up."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from posttrain.engines.vllm.replica import Died, Refused

_CONNECT_SECONDS = 10
_PIECE = 2**20


async def ask(url: str, method: str, path: str, headers: dict[str, str], content: bytes | Path = b"") -> dict[str, Any]:
    """The JSON that the server at `url` answers; `content` is the body, or the file that holds it.

    Raises Refused for a status that is not 200, and Died where the connection fails or ends early.
    """
    address = urlsplit(url)
    secure = address.scheme == "https"
    port = address.port or (443 if secure else 80)
    try:
        async with asyncio.timeout(_CONNECT_SECONDS):
            reader, writer = await asyncio.open_connection(address.hostname, port, ssl=secure)
    except (OSError, TimeoutError) as error:
        raise Died(_words(error)) from error
    try:
        _notice_loss(writer.get_extra_info("socket"))
        length = content.stat().st_size if isinstance(content, Path) else len(content)
        lines = {"host": address.netloc, "connection": "close", "content-length": str(length)} | headers
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        writer.write(f"{method} {address.path.rstrip('/')}{path} HTTP/1.1\r\n{head}\r\n".encode())
        async for piece in _pieces(content):
            writer.write(piece)
            await writer.drain()
        status, body = await _response(reader)
    except (OSError, asyncio.IncompleteReadError) as error:
        raise Died(_words(error)) from error
    finally:
        writer.close()
    try:
        found = json.loads(body)
    except ValueError as error:
        raise Refused(f"{url} is no vLLM server of posttrain's") from error
    if status != 200:
        raise Refused(found.get("error", f"status {status}") if isinstance(found, dict) else f"status {status}")
    return found


async def _response(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    status = int(head[0].split()[1])
    sizes = [line.partition(":")[2] for line in head if line.lower().startswith("content-length:")]
    return status, await reader.readexactly(int(sizes[0])) if sizes else await reader.read()


async def _pieces(content: bytes | Path) -> AsyncIterator[bytes]:
    if isinstance(content, bytes):
        yield content
        return
    with content.open("rb") as file:
        while piece := file.read(_PIECE):
            yield piece


def _notice_loss(connection: socket.socket | None) -> None:
    """Let the system find out that the other machine is gone: an answer may take any time, so no time-out tells."""
    if connection is None:
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _words(error: BaseException) -> str:
    if isinstance(error, asyncio.IncompleteReadError):
        return "it hung up"
    return str(error) or type(error).__name__
