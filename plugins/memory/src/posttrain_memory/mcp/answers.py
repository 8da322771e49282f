"""Answers questions for the MCP server with the memory agent. Each question is a separate conversation."""

import threading
import time
from collections.abc import Sequence
from contextlib import closing
from datetime import datetime

from posttrain.environments.untrusted import sanitize
from posttrain.errors import InputError
from posttrain_memory.agent.clients import ChatClient
from posttrain_memory.agent.session import MemoryAgent
from posttrain_memory.interpreter.pool import Interpreter
from posttrain_memory.mcp.notes import SharedNotes
from posttrain_memory.recipe import AgentRecipe
from posttrain_memory.vault.storage import DiskStorage, MemoryStorage
from posttrain_memory.vault.text import split_question
from posttrain_memory.vault.vault import Vault

_PATIENCE = 10.0
"""Seconds to wait for another program that holds the vault's lock."""


class Refusal(Exception):
    """A call did nothing or failed. The message is one sentence that the client may read."""


class Work:
    """The state of an answer in progress, shared between the working thread and those who wait."""

    def __init__(self) -> None:
        self.status = "waiting for earlier questions"
        """The current activity, in words that reveal nothing about the notes."""
        self.cancelled = threading.Event()
        """Set when no client waits for the answer any more; work then ends after the current turn."""


class Answers:
    """Answers questions about the vault of `notes`, one at a time, under its privacy rules.

    The vault is open, and locked if notes may be changed, only while a question is answered. Other programs may
    change it in between.
    """

    def __init__(
        self,
        notes: SharedNotes,
        chat_client: ChatClient,
        settings: AgentRecipe,
        read_only: bool = False,
        patience: float = _PATIENCE,
    ) -> None:
        self._notes, self._chat_client, self._settings = notes, chat_client, settings
        self._read_only, self._patience = read_only, patience

    def __call__(self, question: str, work: Work) -> str:
        """The reply. Raises Refusal if there is none, and PosttrainError for failures unrelated to the question."""
        words, question_rules = split_question(question)
        if not words:
            raise Refusal("the question is empty")
        # Set for each question: a server may run for weeks, and the code's clock is fixed.
        now = datetime.now().isoformat(timespec="seconds")
        with Interpreter(self._settings.interpreter.model_copy(update={"now": now})) as interpreter:
            agent = self._agent(question_rules, interpreter, work)
            work.status, turn = "turn 1", 1
            events = agent.ask(question)
            # Closed before the vault, so that the question's changes are recorded.
            with closing(agent), closing(events):
                for event in events:
                    if event.kind == "reply":
                        return self._notes.safe(event.text)
                    if event.kind == "no reply":
                        raise Refusal(sanitize(event.text))
                    if work.cancelled.is_set():
                        break
                    turn += event.kind in ("result", "not understood")
                    work.status = f"turn {turn} of at most {self._settings.max_turns}"
        raise Refusal("the question was cancelled")

    def _agent(self, question_rules: Sequence[str], interpreter: Interpreter, work: Work) -> MemoryAgent:
        """The agent for a question with the privacy rules `question_rules`."""
        standing = rules = self._notes.rules
        if question_rules and standing:
            # Works on a copy to which the server's rules have been applied. Combining both sets of rules could reveal
            # more, and a rule that names a hidden note would reveal that it exists.
            vault, rules = Vault(MemoryStorage(self._notes.view())), ()
        elif question_rules or standing or self._read_only:
            vault = Vault(DiskStorage(self._notes.root, read_only=True))
        else:
            vault = self._open_for_writing(work)
        try:
            return MemoryAgent(vault, self._chat_client, interpreter, self._settings, rules)
        except BaseException:
            vault.close()
            raise

    def _open_for_writing(self, work: Work) -> Vault:
        """The vault, opened for writing. Raises Refusal if another program holds the lock for too long."""
        # Open it without the lock first: what fails here would not be solved by waiting.
        DiskStorage(self._notes.root, read_only=True).close()
        until = time.monotonic() + self._patience
        while True:
            try:
                storage = DiskStorage(self._notes.root)
                break
            except InputError:
                work.status = "waiting for another program that uses the memory"
                if work.cancelled.wait(0.2) or time.monotonic() > until:
                    raise Refusal("another program is changing the vault; ask again when it has finished") from None
        try:
            vault = Vault(storage)
        except BaseException:
            # Release the lock, otherwise the next attempt would be locked out too.
            storage.close()
            raise
        vault.report_damage()
        return vault
