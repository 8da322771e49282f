"""Tools of MCP servers, which are started as processes (stdio) or reached over HTTP. A server serves all episodes of a
process.
"""

import asyncio
import atexit
import shlex
import threading
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from pydantic import Field, model_validator

from posttrain.data.tools import schema
from posttrain.environments.tools import Tool, ToolFailure, short_schema
from posttrain.errors import InputError
from posttrain.plugins import require_module
from posttrain.recipe.base import BaseConfig, Connects, Executes, Text

_START = 60
"""Time-out for the start of a server, in seconds."""


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

    @model_validator(mode="after")
    def _one_address(self) -> "McpRecipe":
        if (self.command is None) == (self.url is None):
            raise ValueError("give exactly one of `command` and `url`")
        return self


def mcp_tools(server: McpRecipe) -> list[Tool]:
    """The tools of a server, which is started or connected at the first call in this process.

    All episodes share the server, so its tools must not depend on earlier calls. InputError if the server cannot be
    started or reached, or lacks a tool named in `server.tools`.
    """
    connection = _connection(server.command, server.url)
    described = {one.name: one for one in connection.tools}
    if unknown := sorted(set(server.tools or ()) - described.keys()):
        raise InputError(
            f"mcp: the server {server.command or server.url} has no tool {unknown[0]!r}; use {', '.join(described)}"
        )
    wanted = described if server.tools is None else server.tools
    return [
        Tool(
            schema(name, described[name].description or "", short_schema(described[name].input_schema)),
            _caller(connection, name, server.timeout),
        )
        for name in wanted
    ]


def _caller(connection: "_Connection", name: str, timeout: float) -> Callable[[Mapping[str, Any]], str]:
    return lambda arguments: connection.call(name, dict(arguments), timeout)


@lru_cache(maxsize=32)
def _connection(command: str | None, url: str | None) -> "_Connection":
    return _Connection(command, url)


class _Connection:
    """An open session with a server, in an event loop of its own thread."""

    def __init__(self, command: str | None, url: str | None) -> None:
        self.name = command or str(url)
        self.tools: list[Any] = []
        self._mcp = require_module("mcp", f"mcp ({self.name})")
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

    def call(self, name: str, arguments: dict[str, Any], timeout: float) -> str:
        """The result of a call as text. ToolFailure with the message of the tool; RuntimeError if the server does not
        answer.
        """
        future = asyncio.run_coroutine_threadsafe(self._client.call_tool(name, arguments), self._loop)
        try:
            result = future.result(timeout)
        except TimeoutError:
            future.cancel()
            raise RuntimeError(f"the MCP server {self.name} took longer than {timeout:g} s for {name}") from None
        except Exception as error:
            raise RuntimeError(f"the MCP server {self.name} failed in {name}: {_reason(error)}") from error
        text = "\n".join(part.text for part in result.content if getattr(part, "type", "") == "text")
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
        async with self._mcp.Client(target) as client:
            self._client = client
            self.tools = list((await client.list_tools()).tools)
            self._ready.set()
            await self._closing.wait()


def _reason(error: BaseException) -> str:
    """The message of the first error of a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) or type(error).__name__
