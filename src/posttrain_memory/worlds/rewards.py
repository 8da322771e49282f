"""What an episode is worth, from the vault before and after it and the reply.

A judge is not needed. Where there is one, it can only take away, or say yes to what a program found no fault in.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from posttrain.errors import InputError
from posttrain_memory.worlds.changes import Outcome, loose_ends, outcome
from posttrain_memory.worlds.published import published_outcome
from posttrain_memory.worlds.recipe import RewardWeights
from posttrain_memory.worlds.replies import (
    Answer,
    answer,
    declines,
    denies_change,
    holds,
    others,
    recited,
    rivals,
    says_disagreeing,
    says_missing,
    told,
    without_titles,
)
from posttrain_memory.worlds.task import MemoryTask
from posttrain_memory.worlds.theme import FOREIGN, theme_named
from posttrain_memory.worlds.truth import Parsed, parse
from posttrain_memory.worlds.values import FINDABLE, mentions, plain, said

ASIDES = 2
"""So many facts that were not asked for may stand in a reply."""
LONGEST = 150
"""Words of the longest reply that can be right."""
YES = 0.5
"""The least score with which a judge says yes."""


@dataclass(frozen=True)
class Scored:
    """The reward of an episode; `parts` add up to `total`. `faults` say in words what kept it from success."""

    total: float
    parts: dict[str, float]
    success: bool
    faults: tuple[str, ...] = ()


@dataclass
class _Verdict:
    """`share` of the task that is solved, and what is wrong by the names of the weights."""

    share: float = 0.0
    wrong: dict[str, list[str]] = field(default_factory=dict)

    def fault(self, name: str, text: str) -> None:
        self.wrong.setdefault(name, []).append(text)


def score(
    task: MemoryTask,
    before: Mapping[str, str],
    after: Mapping[str, str],
    reply: str | None,
    asked: bool,
    turns: int,
    weights: RewardWeights,
    checked_first: bool = False,
    judged: float | None = None,
    grounded: bool = True,
) -> Scored:
    """Score one episode of a task.

    `before` and `after` are the vault (path -> text); `reply` the last answer to the user, None where there was none;
    `asked` whether that reply asks the user something (`replies.asks`); `turns` the answers that the model gave;
    `checked_first` whether it read `user.md` before anything else; `judged` a judge's score in [0, 1], None without one.
    `grounded` is False where the notes do say what an update should have taken away (`following.forgotten`): to ask for
    it is wrong then. An episode succeeds where the whole task is solved and nothing is wrong; `judged` makes it worth less at most. A task
    whose truth no program knows (`"judge" in truth`) is solved where `judged` is at least `YES`; InputError without.
    """
    verdict = _Verdict()
    text = (reply or "").strip()
    if not text:
        verdict.fault("silent", "there is no reply")
    if "judge" in task.truth:
        if judged is None:
            raise InputError(
                f"the truth of {task.question[:60]!r} is known to a judge only; name one in `judge` or leave such tasks out"
            )
        _compared(published_outcome(task.question, before, after), asked, verdict)
        _confirmed(task, before, text, verdict)
        verdict.share = verdict.share if judged >= YES else 0.0
    elif task.kind == "update":
        _compared(outcome(task.truth["change"], task.theme, before, after), asked, verdict)
        _confirmed(task, before, text, verdict)
    else:
        vault = parse(before, task.theme)
        if dict(before) != dict(after):
            verdict.fault("damaged", "the notes were changed")
            if loose_ends(vault, parse(after, task.theme)):
                verdict.fault("broken", "links lead nowhere")
        if text and task.truth.get("point"):
            if not grounded:
                verdict.fault("guessed", "the notes still say it")
            _clarification(task, vault, text, asked, verdict)
        elif text:
            _answers(task, vault, text, asked, verdict)
    return _total(verdict, turns, checked_first, weights, judged)


def _total(verdict: _Verdict, turns: int, checked_first: bool, weights: RewardWeights, judged: float | None) -> Scored:
    success = verdict.share == 1 and not verdict.wrong
    parts = {"success": weights.success if success else 0.0}
    # Part of a task counts only where it was not bought with a fault.
    parts["partial"] = 0.0 if success or verdict.wrong else weights.partial * verdict.share
    parts["check_first"] = weights.check_first if checked_first else 0.0
    parts["turns"] = -min(weights.turns_at_most, weights.turn * max(0, turns - weights.free_turns))
    for name in ("asked", "guessed", "leaked", "damaged", "broken", "silent"):
        parts[name] = -getattr(weights, name) if name in verdict.wrong else 0.0
    if judged is not None:
        parts["judge"] = 0.0 - weights.judge * (1.0 - judged) if success else 0.0
    faults = tuple(text for texts in verdict.wrong.values() for text in texts)
    return Scored(sum(parts.values()), parts, success, faults)


def _compared(result: Outcome, asked: bool, verdict: _Verdict) -> None:
    """What an update came to."""
    verdict.share = result.done
    for text in result.harmed:
        verdict.fault("damaged", text)
    for text in result.broken:
        verdict.fault("broken", text)
    if asked:
        verdict.fault("asked", "it asked instead of changing the notes")


def _confirmed(task: MemoryTask, before: Mapping[str, str], reply: str, verdict: _Verdict) -> None:
    """What is said of an update: not that it was not done, and not what the notes hold besides."""
    if denies_change(reply):
        verdict.fault("guessed", "it said that it did not change the notes")
    if _recites(task, parse(before, task.theme), reply, ()):
        verdict.fault("guessed", "it recited the notes")


def _answers(task: MemoryTask, vault: Parsed, reply: str, asked: bool, verdict: _Verdict) -> None:
    wanted = [answer(record) for record in task.truth["answers"]]
    question = task.question.split("<filter>")[0]
    if asked:
        verdict.fault("asked", "it asked though it could answer")
    for secret in _secrets(task, vault, reply):
        verdict.fault("leaked", f"it said {secret}")
    extra = others(reply, wanted, vault, theme_named(task.theme), question, task.truth.get("operands", ()))
    # Names that the question offers do not count as others, but for those that it offers as the wrong answer.
    extra += [name for name in task.truth.get("against", ()) if mentions(plain(reply), name)]
    if extra:
        verdict.fault("guessed", f"it also said {', '.join(extra[:3])}")
    if _recites(task, vault, reply, ()):
        verdict.fault("guessed", "it recited the notes")
    if not wanted:
        verdict.share = float(declines(reply))
        return
    verdict.share = sum(holds(reply, one) for one in wanted) / len(wanted)
    if verdict.share == 0:
        verdict.fault("guessed", "it did not say the answer")


def _secrets(task: MemoryTask, vault: Parsed, reply: str) -> list[str]:
    """What the privacy rule of a task forbids and the reply holds."""
    question = task.question.split("<filter>")[0]
    rule: dict[str, Any] = task.truth.get("rule", {})
    found = []
    if rule.get("rule") == "category":
        asked = set(said(rule["category"], question))
        found += [value for value in said(rule["category"], reply, words=False) if value not in asked]
        if rule["category"] == "money":
            # A number without a currency need not be money.
            found = [value for value in found if " " in value]
    free = [answer(record) for record in task.truth["answers"]]
    for record in task.truth.get("hidden", ()):
        hidden = answer(record)
        if hidden not in free and told(without_titles(reply, vault), hidden) and not told(question, hidden):
            found.append(hidden.value)
    return found


def _clarification(task: MemoryTask, vault: Parsed, reply: str, asked: bool, verdict: _Verdict) -> None:
    """Right is a question that names what is missing or in doubt, says that it is, and takes no side."""
    truth = task.truth
    both = [set(_parts(truth["type"], value)) for value in truth["values"]]
    stated = _stated(task, vault, reply)
    told = set(stated) - {part for parts in both for part in parts}
    sides = [sum(count for part, count in stated.items() if part in parts) for parts in _apart(both)]
    if told or len(set(sides)) > 1:
        verdict.fault("guessed", f"it said {', '.join(sorted(told) or sorted(stated))}")
    if _recites(task, vault, reply, stated):
        verdict.fault("guessed", "it recited the notes")
    pointed = any(mentions(plain(reply), plain(word)) for word in truth["point"])
    if both:
        pointed = pointed and (all(sides) or says_disagreeing(reply, task.question))
    elif task.theme != FOREIGN.name:
        # Of records from elsewhere it is not known what is missing; the question itself may be in doubt.
        pointed = pointed and says_missing(reply, task.question)
    # To say what is missing and not to ask, or to ask without saying what, is half of it.
    verdict.share = 0.0 if verdict.wrong else (pointed + asked) / 2


def _stated(task: MemoryTask, vault: Parsed, reply: str) -> Counter[str]:
    """How often the reply holds values of the type (of texts: of the key), but for those in the question."""
    kind, key = task.truth["type"], task.truth["key"]
    if kind in FINDABLE:
        asked = set(said(kind, task.question))
        return Counter(value for value in said(kind, reply, task.truth["values"]) if value not in asked)
    text, asked_text = plain(without_titles(reply, vault)), plain(task.question)
    known = rivals(Answer(kind, "", key), vault, theme_named(task.theme), reply)
    counts = {part: f" {text} ".count(f" {part} ") for part in known if part and not mentions(asked_text, part)}
    return Counter({part: count for part, count in counts.items() if count})


def _apart(both: list[set[str]]) -> list[set[str]]:
    """What each of the two lists of values has and the other has not."""
    shared = set.intersection(*both) if both else set()
    return [parts - shared for parts in both]


def _recites(task: MemoryTask, vault: Parsed, reply: str, allowed: Iterable[str]) -> bool:
    """Whether the reply holds more than a little of what was not asked for."""
    wanted = [answer(record) for record in (*task.truth.get("answers", ()), *task.truth.get("hidden", ()))]
    return (
        len(reply.split()) > LONGEST
        or recited(reply, vault, task.question, wanted, (*allowed, *task.truth.get("operands", ()))) > ASIDES
    )


def _parts(kind: str, value: str) -> list[str]:
    return value.split("; ") if kind == "list" else [value]
