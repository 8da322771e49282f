"""A memory on disk, and a server of it in the same process, with the package's own client."""

import anyio
from mcp import Client
from plugins.memory.tests.agent.scripts import Script

from posttrain_memory.mcp.answers import Answers
from posttrain_memory.mcp.notes import SharedNotes
from posttrain_memory.mcp.server import memory_server
from posttrain_memory.recipe import AgentRecipe


def served(folder, *script, rules=(), read_only=False, patience=10.0):
    """A server whose agent speaks `script`; without one, `ask` is not available."""
    notes = SharedNotes(folder, rules)
    answers = Answers(notes, Script(*script), AgentRecipe(), read_only, patience) if script else None
    return memory_server(notes, answers, read_only)


def called(server, *calls):
    """(text, whether it is an error) of each call (tool, arguments), one after the other."""

    async def run():
        async with Client(server) as client:
            found = [await client.call_tool(name, given) for name, given in calls]
            return [(result.content[0].text, result.is_error) for result in found]

    return anyio.run(run)


def one(server, name, **given):
    return called(server, (name, given))[0]
