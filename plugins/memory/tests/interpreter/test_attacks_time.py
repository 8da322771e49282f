"""Code and notes that could occupy the trusted side for minutes: the work of tools is bounded, and none is slow."""

import time

import pytest

from posttrain_memory.interpreter.pool import Interpreter, InterpreterLimits
from posttrain_memory.vault.storage import MemoryStorage
from posttrain_memory.vault.tools import tools
from posttrain_memory.vault.vault import Vault


def test_tools_that_take_too_long_end_the_block():
    """Whatever the code catches; what was done stays, and the next block works."""
    vault, done = Vault(MemoryStorage({"user.md": "# Me\n"})), 0

    def slow(path: str) -> bool:
        nonlocal done
        done += 1
        time.sleep(0.1)
        return True

    with Interpreter(InterpreterLimits(tool_timeout=0.25)) as one:
        code = "while True:\n    try:\n        slow('x')\n    except BaseException:\n        pass"
        ran = one.run(code, {"slow": slow})
        assert ran.error == (
            "TimeoutError: the code was stopped: its calls of tools took too much time; make fewer of them in one block"
        )
        assert done == ran.calls <= 3
        assert one.run("x = read_file('user.md')", tools(vault)).values == {"x": "# Me\n"}


def _words(count: int) -> list[str]:
    return [f"{number:04x}" for number in range(count)]


SLOW = {
    "links to one note": ({f"n{i}.md": "[[user]]" * 8_000 for i in range(60)}, "backlinks('user.md')", 40),
    "links to nowhere": (
        {f"n{i}.md": "".join(f"[[{i}{w}]]" for w in _words(6_000)) for i in range(60)},
        "backlinks('user.md')",
        40,
    ),
    "a move with many links": (
        {f"n{i}.md": "[[user]]" * 7_000 for i in range(60)},
        "move_file(f'n{i}.md', f'm{i}.md')",
        10,
    ),
    "many places of half a note": ({"a.md": "a" * 65_000}, "update_file('a.md', 'a' * 30_000, 'b')", 40),
    "a heading of signs": ({"a.md": "# " + "#" * 65_000 + "x"}, "follow_link('[[a#b]]')", 40),
    "a heading of blanks": ({"a.md": "# " + " #" * 32_000 + "x"}, "follow_link('[[a#b]]')", 40),
    "lines without end": ({f"n{i}.md": "a\n" * 32_000 for i in range(60)}, "search_files('a')", 20),
    "a near miss everywhere": ({f"n{i}.md": "a" * 64_000 for i in range(60)}, "search_files('a' * 199 + 'b')", 20),
    "a note far too large": ({}, "create_file('x.md', 'a' * 500_000)", 40),
}
"""Notes, a call, and how often: legal vaults that once kept the trusted side busy for minutes."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name.startswith(("links to", "a move", "lines")) else name
        for name in SLOW
    ],
)
def test_no_legal_vault_makes_the_tools_slow(name):
    files, call, times = SLOW[name]
    vault = Vault(MemoryStorage({"user.md": "# Me\n", **files}))
    with Interpreter(InterpreterLimits(tool_timeout=600)) as one:
        one.run("1", {})
        begun = time.process_time()
        code = f"raised = 0\nfor i in range({times}):\n    try:\n        {call}\n    except Exception as error:\n        raised += 1\ndone = True"
        ran = one.run(code, tools(vault))
        # A second or two at most; processor time, for others may hold up the machine.
        assert time.process_time() - begun < 15
    assert ran.error is None
    assert ran.values["done"]
    assert ran.calls == times
