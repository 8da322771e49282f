"""The memory agent in use: questions to a model that reads and changes a vault, with the rules of training in force."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from posttrain.environments.game import Rejected
from posttrain.environments.protocol import Message
from posttrain.errors import InputError, RunError
from posttrain_memory.agent.clients import ContextFull, Speaker
from posttrain_memory.interpreter.pool import Interpreter
from posttrain_memory.interpreter.session import Desk
from posttrain_memory.parser import Reply, parse
from posttrain_memory.privacy.filter import Filter, split_question
from posttrain_memory.prompts import first_messages, last_call, refusal, system_prompt
from posttrain_memory.recipe import AgentRecipe
from posttrain_memory.vault.limits import VaultError
from posttrain_memory.vault.storage import MemoryStorage
from posttrain_memory.vault.vault import Vault


@dataclass(frozen=True)
class Thought:
    """What the model thought before it acted or replied."""

    text: str


@dataclass(frozen=True)
class Code:
    """A block of code that is about to run."""

    text: str


@dataclass(frozen=True)
class Result:
    """What the model was told about its code."""

    text: str


@dataclass(frozen=True)
class Refused:
    """A message that was not understood. Nothing was run, and the model was told the reason."""

    reason: str
    message: str


@dataclass(frozen=True)
class Said:
    """The reply to the user, and whether something that privacy rules hide was taken out of it."""

    text: str
    withheld: bool


@dataclass(frozen=True)
class GaveUp:
    """There is no reply; `reason` is a sentence that says why."""

    reason: str


Event = Thought | Code | Result | Refused | Said | GaveUp


class MemoryAgent:
    """A vault, a speaker, and privacy rules that hold for every question. One question at a time, from one thread."""

    def __init__(
        self,
        vault: Vault,
        speaker: Speaker,
        interpreter: Interpreter,
        settings: AgentRecipe | None = None,
        rules: Sequence[str] = (),
    ) -> None:
        """`rules` are texts of privacy rules, without their tags; InputError where one is not understood."""
        self.vault = vault
        self.settings = settings or AgentRecipe()
        self.rules = tuple(rules)
        self._speaker, self._interpreter = speaker, interpreter
        self._open = False
        """A conversation is under way that the next question may go on with."""
        self._undoable: list[int] = []
        """Of each question that changed something, the number of its first operation in the journal."""
        self._diff = ""
        problem = self._filter(self.rules).problem
        if problem is not None:
            raise InputError(_not_understood(problem.sentence, problem.reason))

    def ask(self, question: str) -> Iterator[Event]:
        """The events of one question, as they happen; the last is Said or GaveUp.

        A question with privacy rules of its own (`<filter>…</filter>`) is a conversation of its own. Any other goes
        on with the conversation, unless the last one ended without a reply. With rules, all events are as the model
        saw them, and looked through once more. Raises RunError where the interpreter, the server or the disk fails,
        and InputError for a question without words; what was changed until then can be undone.
        """
        words, own = split_question(question)
        if not words:
            raise InputError("the question has no words; ask something")
        going_on, self._open = self._open and not own, False
        rules = [*self.rules, *own]
        before, self._diff = self.vault.journal.mark(), ""
        try:
            desk = self._desk(rules)
            problem = desk.filter.problem
            if problem is not None:
                yield GaveUp(_not_understood(problem.sentence, problem.reason))
                return
            self._put(words, rules, going_on)
            for event in self._turns(desk):
                # What follows a question with its own rules must not know what it knew.
                self._open = isinstance(event, Said) and not own
                yield event
        except VaultError as error:
            raise RunError(f"the memory cannot be used: {error}") from None
        except OSError as error:
            raise RunError(f"the memory cannot be read or written: {error.strerror or type(error).__name__}") from None
        finally:
            self._remember(before)

    def new(self) -> None:
        """Let the next question begin a new conversation."""
        self._open = False

    def changes(self) -> str:
        """What the last question changed, as a unified diff; "" where it changed nothing or was undone."""
        return self._diff

    def undo(self) -> list[str]:
        """Take back all changes of the last question that changed something; the paths of the notes.

        The next question begins a new conversation, for the model would go on as if nothing were undone. InputError
        where there are none, or where one of these notes was changed otherwise since; then nothing is done.
        """
        if not self._undoable:
            raise InputError("there is nothing to undo: no question of this session changed a note")
        first = self._undoable[-1]
        try:
            changes = self.vault.journal.changes(first - 1)
            self.vault.journal.undo(first)
        except VaultError as error:
            raise InputError(f"the changes cannot be undone: {error}") from None
        except OSError as error:
            raise RunError(f"the changes could not be undone: {error.strerror or type(error).__name__}") from None
        self._undoable.pop()
        self._diff, self._open = "", False
        return [change.path for change in changes]

    def seen(self) -> Vault:
        """The vault as the standing rules show it: itself without any, else a copy without what they hide."""
        if not self.rules:
            return self.vault
        return Vault(MemoryStorage(self._filter(self.rules).view), self.vault.limits)

    def close(self) -> None:
        """Give back the vault and the speaker; the interpreter is the caller's."""
        self._speaker.close()
        self.vault.close()

    def _turns(self, desk: Desk) -> Iterator[Event]:
        """Turns until a reply, or until none are left; as those of an episode in training."""
        for left in range(self.settings.max_turns - 1, -1, -1):
            try:
                answer = self._speaker.answer()
            except ContextFull as full:
                yield GaveUp(f"{full}; ask again, and a new conversation begins")
                return
            found = parse(answer, self.settings.thinking)
            if isinstance(found, Rejected):
                yield Refused(desk.let_out(found.reason), desk.let_out(answer))
                message = refusal(found.reason, left)
            else:
                if found.thought.strip():
                    yield Thought(desk.let_out(found.thought.strip()))
                if isinstance(found, Reply):
                    said = desk.let_out(found.text.strip())
                    yield Said(said, said != found.text.strip())
                    return
                yield Code(desk.let_out(found.code.strip("\n")))
                if left:
                    message = self._ran(desk, found.code, left)
                    yield Result(desk.let_out(message["content"]))
            if left:
                self._speaker.observe([message])
        yield GaveUp(f"no reply within {self.settings.max_turns} messages; ask again, or for less at a time")

    def _ran(self, desk: Desk, code: str, left: int) -> Message:
        message = desk.run(code)
        return last_call(message) if left == 1 else message

    def _put(self, words: str, rules: Sequence[str], going_on: bool) -> None:
        """Put the question to the speaker, in the words that make its text harmless wherever it stands."""
        settings = self.settings
        system = system_prompt(settings.max_turns, settings.thinking, settings.prompt)
        messages = first_messages(system, words, rules)
        if going_on:
            self._speaker.observe(messages[1:])
        else:
            self._speaker.begin(messages, "<think>" if settings.opened_by == "environment" else "")

    def _desk(self, rules: Sequence[str]) -> Desk:
        return Desk(
            self.vault,
            self._interpreter,
            rules,
            tool_calls=self.settings.tool_calls,
            result_chars=self.settings.result_chars,
        )

    def _filter(self, rules: Sequence[str]) -> Filter:
        try:
            return Filter(rules, self.vault.files() if rules else {})
        except VaultError as error:
            raise RunError(f"the memory cannot be used with privacy rules: {error}; mend or move that note") from None

    def _remember(self, before: int) -> None:
        """Keep what was changed since the mark `before`, for `undo` and `changes`."""
        journal = self.vault.journal
        kept = [entry.number for entry in journal.entries()]
        if before not in kept if before else len(kept) >= self.vault.limits.journal_entries:
            self._undoable.clear()
            self._diff = "(more was changed than the journal keeps)\n"
        elif journal.changes(before):
            self._undoable.append(next(number for number in kept if number > before))
            self._diff = journal.diff(before)


def _not_understood(sentence: str, reason: str) -> str:
    return f"the privacy rule “{sentence}” is not understood ({reason}), so nothing is read; write it in other words"
