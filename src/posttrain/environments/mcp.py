"""Tools of MCP servers, which are started as processes (stdio) or reached over HTTP. A server serves all episodes of a
process."""

import asyncio
import atexit
import json
import logging
import re
import shlex
import threading
from collections.abc import Mapping
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from pydantic import Field

from posttrain.data.tools import schema
from posttrain.engines.http import bounded_async
from posttrain.engines.openai import encodable, shortened
from posttrain.environments.tools import Tool, ToolFailure, short_schema
from posttrain.errors import InputError
from posttrain.plugins import require_module
from posttrain.recipe.base import BaseConfig, Connects, Executes, Text
from posttrain.terminal import printable

_START = 60
"""Time-out for the start of a server, in seconds."""
_NAME = re.compile(r"[\w./-]{1,128}", re.ASCII)
"""Names of tools: those that MCP allows, and `/`."""
_MOST_TOOLS = 256
_LONGEST_TOOLS = 256 << 10
"""Maximum number of characters of all descriptions of tools together, which stand in every prompt."""
_LONGEST = 1 << 20
"""Maximum number of characters of a result."""


class McpRecipe(BaseConfig):
    """An MCP server."""

    command: Executes | None = None
    """Command line of a server that speaks over standard input and output, for example `python server.py`."""
    url: Connects | None = None
    """Address of a server over HTTP, for example `http://localhost:8765/mcp`, instead of `command`."""
    tools: list[Text] | None = None
    """Names of the tools to offer. null: all of them."""
    timeout: float = Field(30.0, gt=0)
    """Time-out of a call in seconds. A call that takes longer fails its episode."""

    def _check(self) -> None:
        if (self.command is None) == (self.url is None):
            raise ValueError("give exactly one of `command` and `url`")


def mcp_tools(server: McpRecipe) -> list[Tool]:
    """The tools of a server, which is started or connected at the first call in this process.

    All episodes share the server, so its tools must not depend on earlier calls. InputError if the server cannot be
    started or reached, lacks a tool named in `server.tools`, or describes tools that no prompt can show.
    """
    address = server.command, server.url
    with _OPENING:
        connection = _OPEN.get(address)
        # A broken connection is replaced, as when the server was started again.
        if connection is None or connection.broken:
            if connection is not None:
                connection.close()
            connection = _OPEN[address] = _Connection(*address)
    described = {one.name: one for one in connection.tools}
    for name in [one.name for one in connection.tools]:
        if not _NAME.fullmatch(name):
            raise InputError(f"mcp: the server {connection.name} has a tool {shortened(ascii(name))}; rename it there")
    if len(described) < len(connection.tools):
        raise InputError(f"mcp: the server {connection.name} has two tools of one name; rename one there")
    if unknown := sorted(set(server.tools or ()) - described.keys()):
        raise InputError(
            f"mcp: the server {server.command or server.url} has no tool {unknown[0]!r}; use {', '.join(described)}"
        )
    wanted = described if server.tools is None else server.tools
    try:
        schemas = {
            name: schema(name, encodable(described[name].description or ""), short_schema(described[name].input_schema))
            for name in wanted
        }
        length = len(json.dumps(list(schemas.values())))
    except (AttributeError, RecursionError):
        raise InputError(f"mcp: the server {connection.name} has a tool whose schema is malformed") from None
    if length > _LONGEST_TOOLS:
        raise InputError(
            f"mcp: the server {connection.name} describes its tools in {length:,} characters, more than "
            f"{_LONGEST_TOOLS:,}; name those to offer in `tools`"
        )
    return [Tool(one, partial(connection.call, name, server.timeout)) for name, one in schemas.items()]


_OPEN: dict[tuple[str | None, str | None], "_Connection"] = {}
_OPENING = threading.Lock()


class _Connection:
    """An open session with a server, in an event loop of its own thread."""

    def __init__(self, command: str | None, url: str | None) -> None:
        self.name = command or str(url)
        self.tools: list[Any] = []
        self.broken = False
        """Whether a call failed, and neither its tool nor its time is the reason."""
        self._mcp = require_module("mcp", f"mcp ({self.name})")
        # It logs a trace for each line that a server should not send.
        logging.getLogger("mcp").setLevel(logging.CRITICAL)
        target: Any = url
        if command is not None:
            program, *words = shlex.split(command)
            target = self._mcp.StdioServerParameters(command=program, args=words)
        self._client: Any = None
        self._failure: BaseException | None = None
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, args=(target,), name="mcp", daemon=True)
        self._thread.start()
        if not self._ready.wait(_START):
            raise InputError(
                f"mcp: the server {self.name} did not answer within {_START} s; correct `command` or `url`"
            )
        if self._failure is not None:
            raise InputError(
                f"mcp: the server {self.name} cannot be started or reached ({_reason(self._failure)}); correct `command` or `url`"
            ) from self._failure
        atexit.register(self.close)

    def call(self, name: str, timeout: float, arguments: Mapping[str, Any]) -> str:
        """The result of a call as text. ToolFailure with the message of the tool; RuntimeError if the server does not
        answer."""
        future = asyncio.run_coroutine_threadsafe(self._client.call_tool(name, dict(arguments)), self._loop)
        try:
            result = future.result(timeout)
        except TimeoutError:
            future.cancel()
            raise RuntimeError(f"the MCP server {self.name} took longer than {timeout:g} s for {name}") from None
        except Exception as error:
            self.broken = True
            raise RuntimeError(f"the MCP server {self.name} failed in {name}: {_reason(error)}") from error
        text = "\n".join(part.text for part in result.content if getattr(part, "type", "") == "text")
        if len(text) > _LONGEST:
            raise RuntimeError(f"the MCP server {self.name} sent more than {_LONGEST:,} characters for {name}")
        if result.is_error:
            raise ToolFailure(text or f"{name} failed")
        return text

    def close(self) -> None:
        """End the session, and the server process if this process started it."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join(5)

    def _run(self, target: Any) -> None:
        try:
            self._loop.run_until_complete(self._serve(target))
        except BaseException as error:
            self._failure = self._failure or error
        finally:
            self._ready.set()

    async def _serve(self, target: Any) -> None:
        self._closing = asyncio.Event()
        async with AsyncExitStack() as stack:
            if isinstance(target, str):
                from mcp.client.streamable_http import streamable_http_client

                target = streamable_http_client(target, http_client=await stack.enter_async_context(bounded_async()))
            self._client = client = await stack.enter_async_context(self._mcp.Client(target))
            listed = await client.list_tools()
            self.tools = list(listed.tools)
            while listed.next_cursor and len(self.tools) <= _MOST_TOOLS:
                listed = await client.list_tools(cursor=listed.next_cursor)
                self.tools += listed.tools
            if len(self.tools) > _MOST_TOOLS:
                raise ValueError(f"it has more than {_MOST_TOOLS} tools")
            self._ready.set()
            await self._closing.wait()


def _reason(error: BaseException) -> str:
    """The message of the first error of a group, in one short line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return shortened(printable(" ".join(str(error)[:10_000].split()))) or type(error).__name__
