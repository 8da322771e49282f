"""One question to a memory agent and the vault it may use: what its code can reach, what it is shown, what is let out.

Environment, chat and server all go through here, so the limits and the privacy rules hold in each.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from posttrain.environments.protocol import Message
from posttrain_memory.interpreter.pool import Interpreter
from posttrain_memory.interpreter.tools import call, tools
from posttrain_memory.privacy.filter import Filter
from posttrain_memory.prompts import result
from posttrain_memory.vault.limits import VaultError
from posttrain_memory.vault.links import parse_link
from posttrain_memory.vault.paths import note_path
from posttrain_memory.vault.storage import MemoryStorage
from posttrain_memory.vault.vault import Vault
from posttrain_memory.worlds.graph import USER

CHANGING = ("create_file", "update_file", "append_file", "delete_file", "move_file")
"""The functions that change notes."""
_READING = ("read_file", "follow_link")


class Desk:
    """Runs an agent's code over a vault for one question."""

    def __init__(
        self,
        vault: Vault,
        interpreter: Interpreter,
        rules: Sequence[str] = (),
        theme: str | None = None,
        tool_calls: int = 60,
        result_chars: int = 4_000,
    ) -> None:
        """`rules` are the user's privacy rules. With any, the code works on a copy of the vault without what they hide,
        and notes cannot be changed. `theme`: that of a made-up world, if it is known. `tool_calls`: most calls in all.
        """
        self.vault = vault
        self.filter = Filter(rules, vault.files() if rules else {}, theme)
        self.calls = 0
        """Calls of tools so far."""
        self.checked_first = False
        """Whether the first of them read `user.md`, or a part of it."""
        self._interpreter = interpreter
        self._most, self._chars = tool_calls, result_chars
        self._seen = Vault(MemoryStorage(self.filter.view), vault.limits) if self.filter.active else vault
        self._functions = {name: self._guarded(name, function) for name, function in tools(self._seen).items()}

    def run(self, code: str) -> Message:
        """Run a block of code; its result, as the next message to the model. Raises where we are at fault."""
        ran = self._interpreter.run(code, self._functions)
        return result(ran.values, ran.printed, ran.error, self._chars)

    def let_out(self, reply: str) -> str:
        """The reply as the user may see it."""
        return self.filter.clean(reply) if self.filter.active else reply

    def _guarded(self, name: str, function: Callable[..., object]) -> Callable[..., object]:
        @wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> object:
            if self.calls >= self._most:
                raise VaultError("no more calls are allowed in this task; reply with what you know", "RuntimeError")
            self.calls += 1
            first = self.calls == 1
            if self.filter.active and name in CHANGING:
                raise VaultError("notes cannot be changed while a privacy rule holds", "PermissionError")
            found = call({name: function}, name, list(args), kwargs)
            if first and name in _READING:
                self.checked_first = self._is_user(name, str(next(iter([*args, *kwargs.values()]))))
            return found

        return guarded

    def _is_user(self, name: str, where: str) -> bool:
        """Whether what was read, at a path or over a link, is in `user.md`."""
        if name == "follow_link":
            return self._seen.resolve(parse_link(where).target) == USER
        return note_path(where, self.vault.limits) == USER
