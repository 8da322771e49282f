"""How the MCP server has a question answered: the memory agent, a conversation of its own for each question."""

import sys
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import closing
from datetime import datetime

from posttrain.environments.untrusted import sanitize
from posttrain.errors import InputError
from posttrain_memory.agent.clients import Speaker
from posttrain_memory.agent.session import GaveUp, MemoryAgent, Refused, Result, Said
from posttrain_memory.interpreter.pool import Interpreter
from posttrain_memory.mcp.notes import SharedNotes
from posttrain_memory.privacy.filter import split_question
from posttrain_memory.recipe import AgentRecipe
from posttrain_memory.vault.storage import DiskStorage, MemoryStorage
from posttrain_memory.vault.vault import Vault

_PATIENCE = 10.0
"""Seconds to wait for another program that holds the lock of the vault."""


class Refusal(Exception):
    """Why a call did nothing or failed: one sentence that the client may read."""


class Work:
    """An answer in the making, for the thread that works on it and those who wait for it."""

    def __init__(self) -> None:
        self.doing = "waiting for earlier questions"
        """What is being done, in words that tell nothing of the notes."""
        self.stopped = threading.Event()
        """Set where nobody waits for the answer any more: work ends after the current turn."""


class Answers:
    """Answers questions about the vault of `notes`, whose standing privacy rules hold for each. One at a time.

    The vault is open, and locked where notes may be changed, only while a question is answered: between two questions
    others may change it.
    """

    def __init__(
        self,
        notes: SharedNotes,
        speaker: Speaker,
        settings: AgentRecipe,
        read_only: bool = False,
        patience: float = _PATIENCE,
    ) -> None:
        self._notes, self._speaker, self._settings = notes, speaker, settings
        self._read_only, self._patience = read_only, patience

    def __call__(self, question: str, work: Work) -> str:
        """The reply. Raises Refusal where there is none, and PosttrainError for faults that are not the question's."""
        words, own = split_question(question)
        if not words:
            raise Refusal("the question has no words; ask something")
        # Made for each question: a server may run for weeks, and the clock that the code sees stands still.
        now = datetime.now().isoformat(timespec="seconds")
        with Interpreter(self._settings.interpreter.model_copy(update={"now": now})) as interpreter:
            return self._replied(question, self._agent(own, interpreter, work), work)

    def _replied(self, question: str, agent: MemoryAgent, work: Work) -> str:
        work.doing, turn = "turn 1", 1
        events = agent.ask(question)
        assert isinstance(events, Generator)
        try:
            # Closed before the vault is: what the question changed is then written down.
            with closing(events):
                for event in events:
                    if isinstance(event, Said):
                        return self._notes.safe(event.text)
                    if isinstance(event, GaveUp):
                        raise Refusal(sanitize(event.reason))
                    if work.stopped.is_set():
                        break
                    turn += isinstance(event, Result | Refused)
                    work.doing = f"turn {turn} of at most {self._settings.max_turns}"
        finally:
            agent.close()
        raise Refusal("the question was withdrawn")

    def _agent(self, own: Sequence[str], interpreter: Interpreter, work: Work) -> MemoryAgent:
        """The agent for a question with rules of its `own`."""
        standing = rules = self._notes.rules
        if own and standing:
            # On a copy in which the standing rules have done their work: rules that name what may be told would add up
            # to more, and a rule that names someone whom the standing ones hide would tell that there is such a note.
            vault, rules = Vault(MemoryStorage(self._notes.view())), ()
        elif own or standing or self._read_only:
            vault = Vault(DiskStorage(self._notes.root, read_only=True))
        else:
            vault = self._locked(work)
        try:
            return MemoryAgent(vault, self._speaker, interpreter, self._settings, rules)
        except BaseException:
            vault.close()
            raise

    def _locked(self, work: Work) -> Vault:
        """The vault, to be changed; Refusal where another program has it for longer than our patience."""
        # First without the lock: what fails here will not be mended by waiting.
        DiskStorage(self._notes.root, read_only=True).close()
        until = time.monotonic() + self._patience
        while True:
            try:
                storage = DiskStorage(self._notes.root)
                break
            except InputError:
                work.doing = "waiting for another program that uses the memory"
                if work.stopped.wait(0.2) or time.monotonic() > until:
                    raise Refusal(
                        "another program is changing the memory; ask again when it is done, or close it"
                    ) from None
        try:
            vault = Vault(storage)
        except BaseException:
            # A lock that is not given back would keep ourselves out, too.
            storage.close()
            raise
        if vault.journal.remark:
            print(f"posttrain: {vault.journal.remark}", file=sys.stderr, flush=True)
        return vault
