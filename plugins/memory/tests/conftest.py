"""Fixtures of the memory agent's tests."""

import pytest
from plugins.memory.tests.agent.scripts import NOTES, Script, vault

from posttrain_memory.agent.session import MemoryAgent
from posttrain_memory.interpreter.pool import Interpreter
from posttrain_memory.recipe import AgentRecipe


@pytest.fixture(scope="session")
def shared_interpreter():
    """An interpreter with the default limits."""
    with Interpreter() as one:
        yield one


@pytest.fixture
def agent(shared_interpreter):
    """A function that makes an agent which speaks a script."""

    def made(*script, rules=(), files=None, limits=None, **settings):
        return MemoryAgent(vault(files, limits), Script(*script), shared_interpreter, AgentRecipe(**settings), rules)

    return made


@pytest.fixture
def notes(tmp_path):
    """A folder with `NOTES`."""
    folder = tmp_path / "notes"
    for path, text in NOTES.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder
