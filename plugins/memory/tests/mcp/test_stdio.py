"""`posttrain memory mcp` as a client starts it: a separate process, whose stdout holds the protocol and nothing else."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import anyio
import pytest
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client
from plugins.memory.tests.agent.scripts import LOOK, NOTES, code, reply
from plugins.memory.tests.agent.servers import serving, turns

from posttrain_memory.vault.storage import DiskStorage

MAIN = "import sys; from posttrain.cli.main import main; sys.exit(main())"
CHANGE = code('append_file("user.md", "- city: Rome\\n")')
PATIENCE = 240
HELLO = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}},
}


def started(notes, *words):
    """The configuration of a client."""
    given = ["-c", MAIN, "memory", "mcp", str(notes), *map(str, words)]
    return StdioServerParameters(command=sys.executable, args=given, env={"OMP_NUM_THREADS": "1"})


def talked(notes, *words, talk, log=None):
    """What `talk`, a function of a client, returns."""

    async def run():
        with anyio.fail_after(PATIENCE):
            with open(log or os.devnull, "w") as errors:
                async with Client(stdio_client(started(notes, *words), errlog=errors)) as client:
                    return await talk(client)

    return anyio.run(run)


class Held:
    """A chat server's answers, the first of which wait for `go`; `began` is set when one is requested."""

    def __init__(self, *script):
        self.script, self.go, self.began = turns(*script), threading.Event(), threading.Event()

    def __call__(self, messages):
        self.began.set()
        assert self.go.wait(PATIENCE)
        return self.script(messages)


def test_a_client_lists_reads_searches_and_asks(notes, tmp_path):
    told = []

    async def talk(client):
        async def progress(done, total, message):
            told.append(message)

        names = [tool.name for tool in (await client.list_tools()).tools]
        read = await client.call_tool("read", {"path": "entities/ada.md"})
        found = await client.call_tool("search", {"text": "bern"})
        asked = await client.call_tool("ask", {"question": "Where does Ada live?"}, progress_callback=progress)
        return names, read.content[0].text, found.content[0].text, asked.content[0].text, asked.is_error

    slow = turns(LOOK, CHANGE, reply("In Bern, +41 31 555 01 99."))

    def answer(messages):
        time.sleep(0.7)
        return slow(messages)

    with serving(answer) as server:
        words = ["--url", server.url, "--model", "x", "--filter", "hide: [{category: phone}]"]
        names, read, found, asked, failed = talked(notes, *words, talk=talk, log=tmp_path / "log")
    assert names == ["ask", "search", "read", "list"]
    assert "- city: Bern" in read
    assert "[hidden]" in read
    assert found == "entities/ada.md:3: - city: Bern"
    assert (asked, failed) == ("In Bern, [hidden].", False)
    assert told
    assert "555" not in json.dumps(server.asked)
    assert (notes / "user.md").read_text() == NOTES["user.md"]
    assert (tmp_path / "log").read_text() == ""


def raw(notes, *words):
    """The command without the package's client."""
    return subprocess.Popen(
        [sys.executable, "-c", MAIN, "memory", "mcp", str(notes), *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def say(process, *messages):
    for message in messages:
        process.stdin.write(json.dumps(message) + "\n")
        process.stdin.flush()


def asks(number, question):
    params = {"name": "ask", "arguments": {"question": question}}
    return {"jsonrpc": "2.0", "id": number, "method": "tools/call", "params": params}


@pytest.mark.parametrize("end", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_terminating_a_server_leaves_a_valid_vault(notes, end):
    held = Held(reply("x"))
    with serving(held) as server, raw(notes, "--url", server.url, "--model", "x") as process:
        say(process, HELLO, {"jsonrpc": "2.0", "method": "notifications/initialized"}, asks(2, "Where?"))
        assert held.began.wait(PATIENCE)
        process.send_signal(end)
        rest, _ = process.communicate(timeout=PATIENCE)
        held.go.set()
    assert [json.loads(line)["id"] for line in rest.splitlines()] == [1]
    assert process.returncode
    assert (notes / "user.md").read_text() == NOTES["user.md"]
    DiskStorage(notes).close()


@pytest.mark.slow
def test_a_local_model_writes_nothing_else_to_stdout(notes, tiny_model):
    """Loading and generating may print anything; invalid input on stdin is answered as specified."""
    with raw(notes, "--model", str(tiny_model), "--max-turns", "2", "--prompt", "brief") as process:
        say(process, HELLO)
        assert json.loads(process.stdout.readline())["id"] == 1
        process.stdin.write("no json\n")
        say(process, {"jsonrpc": "2.0", "method": "notifications/initialized"}, asks(2, "Where does Ada live?"))
        lines = []
        while not lines or lines[-1].get("id") != 2:
            lines.append(json.loads(process.stdout.readline()))
        process.stdin.close()
        assert process.stdout.read() == ""
        assert process.wait(PATIENCE) == 0
    result = lines[-1]["result"]
    # A random model has no reply.
    assert result["isError"]
    assert "no reply within 2 messages" in result["content"][0]["text"]
    assert all(line["jsonrpc"] == "2.0" for line in lines)


def test_protocol_output_is_separate_from_other_output():
    program = """
import os, subprocess, sys
from posttrain_memory.mcp.server import private_wire
with private_wire() as (incoming, outgoing):
    print("noise")
    os.write(1, b"noise\\n")
    subprocess.run(["sh", "-c", "echo noise; cat"])
    outgoing.write(b"got " + incoming.readline())
    outgoing.flush()
print("after")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], input="a line\n", capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.stdout == "got a line\nafter\n"
    assert done.stderr.count("noise") == 3
