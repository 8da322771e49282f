"""Tools of MCP servers, over both transports, alone and in an environment."""

import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from posttrain.environments.mcp import McpRecipe, mcp_tools
from posttrain.environments.tools import ToolFailure, calling
from posttrain.errors import InputError
from posttrain.recipe.components import environment_class, environment_recipe
from posttrain.recipe.compose import section

pytest.importorskip("mcp.server.mcpserver", reason="the package mcp of the extra `memory` is not installed")
SERVER = Path(__file__).parent / "shop_server.py"
STDIO = f"{shlex.quote(sys.executable)} {shlex.quote(str(SERVER))}"


@pytest.fixture(scope="module", params=["stdio", "http"])
def server(request):
    if request.param == "stdio":
        yield McpRecipe(command=STDIO, timeout=20)
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with subprocess.Popen([sys.executable, str(SERVER), str(port)], stderr=subprocess.DEVNULL) as process:
        try:
            until_reachable(port)
            yield McpRecipe(url=f"http://127.0.0.1:{port}/mcp", timeout=20)
        finally:
            process.kill()


def until_reachable(port):
    for _ in range(400):
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise AssertionError("the server does not answer")


def test_tools_of_a_server_are_described_and_called(server):
    price = next(one for one in mcp_tools(server) if one.name == "price")
    assert price.schema["function"] == {
        "name": "price",
        "description": "The price of an item.",
        "parameters": {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]},
    }
    assert price.call({"item": "lamp"}) == "41"
    with pytest.raises(ToolFailure, match="price"):
        price.call({"item": "cow"})
    with pytest.raises(ToolFailure, match="Field required"):
        price.call({})


def test_some_tools_of_a_server_are_an_environment_with_prompts(server, tmp_path):
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "What does a lamp cost?", "label": "41"}\n')
    keys = {"prompts": str(tmp_path / "tasks.jsonl"), "reward": "exact", "max_turns": 3}
    server = {**server.model_dump(), "tools": ["price"]}
    recipe = environment_recipe({"type": "text_task", **keys, "mcp": [server]})
    task = environment_class("text_task")(recipe)
    assert task.blocking
    assert [one["function"]["name"] for one in task.reset(0).tools] == ["price"]
    (result,) = task.step(calling(("price", {"item": "lamp"}))).messages
    assert (result["role"], result["content"]) == ("tool", "41")
    assert task.step("41").info == {"success": True}
    assert task.reset(0).messages
    assert task.step(calling(("wait", {"seconds": 0}))).info["rejected"].startswith("Error: there is no tool 'wait'")


def test_a_call_that_takes_too_long_is_not_an_answer():
    wait = next(one for one in mcp_tools(McpRecipe(command=STDIO, timeout=20)) if one.name == "wait")
    assert wait.call({"seconds": 0}) == "done"
    slow = next(one for one in mcp_tools(McpRecipe(command=STDIO, timeout=0.5)) if one.name == "wait")
    with pytest.raises(RuntimeError, match=r"took longer than 0\.5 s for wait"):
        slow.call({"seconds": 3})


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"command": "no-such-program"}, "no-such-program cannot be started or reached"),
        ({"url": "http://127.0.0.1:9/mcp"}, "cannot be started or reached"),
        ({"command": STDIO, "tools": ["sell"], "timeout": 20}, "has no tool 'sell'; use price, wait"),
        ({}, "exactly one of `command` and `url`"),
    ],
)
def test_a_missing_server_is_named(keys, problem):
    with pytest.raises(InputError, match=problem):
        mcp_tools(section(McpRecipe, **keys))
