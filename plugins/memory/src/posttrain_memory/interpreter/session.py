"""Tool access of a model for one question: what its code can reach, what it sees, and what the user sees.

The environment, the chat and the MCP server all use this class, so limits and privacy rules hold in each of them.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from posttrain.environments.protocol import Message
from posttrain_memory.interpreter.pool import Interpreter
from posttrain_memory.privacy.filter import PrivacyFilter
from posttrain_memory.prompts import result
from posttrain_memory.vault.limits import VaultError
from posttrain_memory.vault.links import parse_link
from posttrain_memory.vault.paths import USER, note_path
from posttrain_memory.vault.storage import MemoryStorage
from posttrain_memory.vault.tools import call, tools
from posttrain_memory.vault.vault import Vault

CHANGING = ("create_file", "update_file", "append_file", "delete_file", "move_file")
"""The tools that change notes."""
_READING = ("read_file", "follow_link")


class ToolSession:
    """Runs a model's code over a vault for one question."""

    def __init__(
        self,
        vault: Vault,
        interpreter: Interpreter,
        rules: Sequence[str] = (),
        theme: str | None = None,
        tool_calls: int = 60,
        result_chars: int = 4_000,
    ) -> None:
        """With privacy rules (`rules`), the code sees a copy of the vault without hidden parts and cannot change notes.

        `theme`: of a generated world, if known. `tool_calls`: maximum number of calls in total.
        """
        self.vault = vault
        self.filter = PrivacyFilter(rules, vault.files() if rules else {}, theme)
        self.calls = 0
        """Number of tool calls so far."""
        self.checked_first = False
        """Whether the first call read `user.md` or a section of it."""
        self._interpreter = interpreter
        self._most, self._chars = tool_calls, result_chars
        self._seen = Vault(MemoryStorage(self.filter.view), vault.limits) if self.filter.active else vault
        self._functions = {name: self._guarded(name, function) for name, function in tools(self._seen).items()}

    def run(self, code: str, turns_left: int | None = None) -> Message:
        """Run a block of code and return its result as the next message to the model, which has `turns_left` messages.

        Raises InterpreterFault if the interpreter fails, and any exception of a tool that is not a VaultError.
        """
        ran = self._interpreter.run(code, self._functions)
        return result(ran.values, ran.printed, ran.error, self._chars, turns_left)

    def _guarded(self, name: str, function: Callable[..., object]) -> Callable[..., object]:
        @wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> object:
            if self.calls >= self._most:
                raise VaultError("no more calls are allowed in this task; reply with what you know", "RuntimeError")
            self.calls += 1
            first = self.calls == 1
            if self.filter.active and name in CHANGING:
                raise VaultError("notes cannot be changed while a privacy rule holds", "PermissionError")
            returned = call({name: function}, name, list(args), kwargs)
            if first and name in _READING:
                where = str(next(iter([*args, *kwargs.values()])))
                link = name == "follow_link"
                path = self._seen.resolve(parse_link(where).target) if link else note_path(where, self.vault.limits)
                self.checked_first = path == USER
            return returned

        return guarded
