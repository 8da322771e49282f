"""The memory agent in use: a model that reads and changes a vault, under the limits and privacy rules of training."""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from posttrain.environments.game import Rejected
from posttrain.errors import InputError, RunError
from posttrain_memory.agent.clients import ChatClient, ContextFull
from posttrain_memory.interpreter.pool import Interpreter
from posttrain_memory.interpreter.session import ToolSession
from posttrain_memory.parser import Reply, parse
from posttrain_memory.privacy.filter import PrivacyFilter
from posttrain_memory.privacy.rules import NotUnderstood
from posttrain_memory.prompts import first_messages, refusal, system_prompt
from posttrain_memory.recipe import AgentRecipe
from posttrain_memory.vault.limits import VaultError
from posttrain_memory.vault.storage import MemoryStorage
from posttrain_memory.vault.text import split_question
from posttrain_memory.vault.vault import Vault


@dataclass(frozen=True)
class Event:
    """What happens while a question is answered.

    `kind`: a `thought` before code or a reply; `code` that is about to run, and its `result` as returned to the model;
    why a message was `not understood`; and last the `reply`, or why there is `no reply`.
    """

    kind: Literal["thought", "code", "result", "not understood", "reply", "no reply"]
    text: str
    message: str = ""
    """The message that was not understood."""
    withheld: bool = False
    """Whether privacy rules removed part of the reply."""


class MemoryAgent:
    """A vault, a chat client, and privacy rules for every question. Not thread-safe; one question at a time."""

    def __init__(
        self,
        vault: Vault,
        chat_client: ChatClient,
        interpreter: Interpreter,
        settings: AgentRecipe | None = None,
        rules: Sequence[str] = (),
    ) -> None:
        """`rules` are privacy rules without their tags. Raises InputError if one is not understood."""
        self.vault = vault
        self.settings = settings or AgentRecipe()
        self.rules = tuple(rules)
        self._chat_client, self._interpreter = chat_client, interpreter
        self._continuable = False
        """Whether the next question may continue the current conversation."""
        self._undoable: list[int] = []
        """For each question that changed notes, the number of its first operation in the journal."""
        self._diff = ""
        problem = self._filter(self.rules).problem
        if problem is not None:
            raise InputError(_not_understood(problem))

    def ask(self, question: str) -> Generator[Event]:
        """Yield the events of a question as they occur; the last is a `reply` or `no reply`.

        A question with its own privacy rules (`<filter>…</filter>`) is a separate conversation. Any other question
        continues the conversation, unless the last one ended without a reply. With rules, all events show what the
        model saw, redacted once more.

        Raises InputError for an empty question, and RunError if the interpreter, the server or the disk fails.
        Changes made before a failure can be undone.
        """
        words, question_rules = split_question(question)
        if not words:
            raise InputError("the question is empty")
        continues, self._continuable = self._continuable and not question_rules, False
        rules = [*self.rules, *question_rules]
        before, self._diff = self.vault.journal.mark(), ""
        try:
            settings = self.settings
            session = ToolSession(
                self.vault, self._interpreter, rules, None, settings.tool_calls, settings.result_chars
            )
            problem = session.filter.problem
            if problem is not None:
                yield Event("no reply", _not_understood(problem))
                return
            system = system_prompt(settings.max_turns, settings.thinking, settings.prompt)
            messages = first_messages(system, words, rules)
            if continues:
                self._chat_client.observe(messages[1:])
            else:
                self._chat_client.begin(messages, "<think>" if settings.opened_by == "environment" else "")
            for event in self._turns(session):
                # A question after one with its own rules must not know what that one revealed.
                self._continuable = event.kind == "reply" and not question_rules
                yield event
        except VaultError as error:
            raise RunError(f"the vault cannot be used: {error}") from None
        except OSError as error:
            raise RunError(f"the vault cannot be read or written: {error.strerror or type(error).__name__}") from None
        finally:
            self._remember(before)

    def new(self) -> None:
        """Start a new conversation with the next question."""
        self._continuable = False

    def changes(self) -> str:
        """The changes of the last question as a unified diff; "" if there are none or they were undone."""
        return self._diff

    def undo(self) -> list[str]:
        """Undo all changes of the last question that changed notes, and return their paths.

        The next question starts a new conversation, because the model does not know of the undo. Raises InputError,
        and changes nothing, if there is nothing to undo or one of the notes has been changed by something else since.
        """
        if not self._undoable:
            raise InputError("nothing to undo: no question of this session changed a note")
        first = self._undoable[-1]
        try:
            changes = self.vault.journal.changes(first - 1)
            self.vault.journal.undo(first)
        except VaultError as error:
            raise InputError(f"the changes cannot be undone: {error}") from None
        except OSError as error:
            raise RunError(f"the changes could not be undone: {error.strerror or type(error).__name__}") from None
        self._undoable.pop()
        self._diff, self._continuable = "", False
        return [change.path for change in changes]

    def visible_vault(self) -> Vault:
        """The vault as seen under the agent's rules: with rules, a copy without the hidden parts."""
        if not self.rules:
            return self.vault
        return Vault(MemoryStorage(self._filter(self.rules).view), self.vault.limits)

    def close(self) -> None:
        """Close the vault. The interpreter and the client belong to the caller."""
        self.vault.close()

    def _turns(self, session: ToolSession) -> Iterator[Event]:
        """Play turns until a reply or the turn limit, as in a training episode."""
        for left in range(self.settings.max_turns - 1, -1, -1):
            try:
                answer = self._chat_client.answer()
            except ContextFull as full:
                yield Event("no reply", f"{full}; the next question starts a new conversation")
                return
            parsed = parse(answer, self.settings.thinking)
            if isinstance(parsed, Rejected):
                yield Event("not understood", session.filter.clean(parsed.reason), session.filter.clean(answer))
                message = refusal(parsed.reason, left)
            else:
                if parsed.thought:
                    yield Event("thought", session.filter.clean(parsed.thought))
                if isinstance(parsed, Reply):
                    reply = session.filter.clean(parsed.text)
                    yield Event("reply", reply, withheld=reply != parsed.text)
                    return
                yield Event("code", session.filter.clean(parsed.code))
                if left:
                    message = session.run(parsed.code, left)
                    yield Event("result", session.filter.clean(message["content"]))
            if left:
                self._chat_client.observe([message])
        yield Event(
            "no reply", f"no reply within {self.settings.max_turns} messages; ask again, or ask for less at once"
        )

    def _filter(self, rules: Sequence[str]) -> PrivacyFilter:
        try:
            return PrivacyFilter(rules, self.vault.files() if rules else {})
        except VaultError as error:
            raise RunError(f"the vault cannot be used with privacy rules: {error}; correct or move that note") from None

    def _remember(self, before: int) -> None:
        """Record the changes since the mark `before`, for `undo` and `changes`."""
        journal = self.vault.journal
        kept = [entry.number for entry in journal.entries()]
        if before not in kept if before else len(kept) >= self.vault.limits.journal_entries:
            self._undoable.clear()
            self._diff = "(more was changed than the journal keeps)\n"
        elif journal.changes(before):
            self._undoable.append(next(number for number in kept if number > before))
            self._diff = journal.diff(before)


def _not_understood(problem: NotUnderstood) -> str:
    return (
        f"the privacy rule “{problem.sentence}” is not understood ({problem.reason}), so nothing was read; rephrase it"
    )
