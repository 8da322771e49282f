"""The reward of an episode, computed from the vault before and after it and the reply.

No judge is needed. A judge can only reduce the reward, or approve what the program found no fault in.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from posttrain.errors import InputError
from posttrain_memory.worlds.changes import Outcome, broken_links, update_outcome
from posttrain_memory.worlds.published import published_outcome
from posttrain_memory.worlds.recipe import RewardWeights
from posttrain_memory.worlds.replies import (
    DISAGREE,
    MISSING,
    Answer,
    answer,
    contains_value,
    count_recited,
    declines,
    denies_change,
    other_values,
    says,
    similar_values,
    states_value,
    without_titles,
)
from posttrain_memory.worlds.task import MemoryTask
from posttrain_memory.worlds.theme import FOREIGN, theme_named
from posttrain_memory.worlds.truth import Parsed, parse
from posttrain_memory.worlds.values import FINDABLE, mentions, plain, spoken_values

ASIDES = 2
"""Number of facts not asked for that a correct reply may contain."""
LONGEST = 150
"""Maximum length of a correct reply, in words."""
YES = 0.5
"""Minimum score with which a judge approves."""


@dataclass(frozen=True)
class Scored:
    """The reward of an episode. `parts` add up to `total`; `faults` describe what prevented success."""

    total: float
    parts: dict[str, float]
    success: bool
    faults: tuple[str, ...] = ()


@dataclass
class _Verdict:
    """The solved share of the task, and the faults by the name of their weight."""

    share: float = 0.0
    wrong: dict[str, list[str]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    """What the reply lacks, in words. It lowers the share and is no fault."""

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

    `before` and `after` are the vault (path -> text), `reply` is the final reply or None, `asked` says whether it
    asks the user something (`replies.asks`), `turns` is the number of model messages, `checked_first` says whether
    the first tool call read `user.md`, and `judged` is a judge's score in [0, 1] or None. `grounded` is False if the
    notes still state what an update should have removed, so that asking for it is wrong.

    An episode succeeds if the whole task is solved without fault; `judged` can only reduce its reward. A task without
    programmatic truth (`"judge" in truth`) is solved if `judged` is at least `YES`; raises InputError if it is None. An update
    that is `asked_after` is solved by any change without damage, and its follow-up decides.
    """
    verdict = _Verdict()
    text = (reply or "").strip()
    if not text:
        verdict.fault("silent", "there is no reply")
    decided = "judge" in task.truth
    if decided and judged is None:
        raise InputError(f"{task.question[:60]!r} can only be scored by a judge; set `judge` or leave out such tasks")
    approved = not decided or (judged or 0.0) >= YES
    if task.kind == "update":
        known = task.truth.get("change")
        outcome = (
            published_outcome(task.question, before, after)
            if known is None
            else update_outcome(known, task.theme, before, after)
        )
        _update(task, outcome, before, text, asked, verdict)
        verdict.share = verdict.share if approved else 0.0
    else:
        vault = parse(before, task.theme)
        recorded = task.theme == FOREIGN.name and plain(text) == plain(task.reply)
        if dict(before) != dict(after):
            verdict.fault("damaged", "the notes were changed")
            if broken_links(vault, parse(after, task.theme)):
                verdict.fault("broken", "links lead nowhere")
        if text and (decided or recorded):
            verdict.share = float(approved)
        elif text and task.truth.get("point"):
            if not grounded:
                verdict.fault("guessed", "the notes still say it")
            _clarification(task, vault, text, asked, verdict)
        elif text:
            _answers(task, vault, text, asked, verdict)
    success = verdict.share == 1 and not verdict.wrong
    parts = {"success": weights.success if success else 0.0}
    # A partial solution counts only if it has no fault.
    parts["partial"] = 0.0 if success or verdict.wrong else weights.partial * verdict.share
    parts["check_first"] = weights.check_first if checked_first else 0.0
    parts["turns"] = -min(weights.turns_at_most, weights.turn * max(0, turns - weights.free_turns))
    for name in ("asked", "guessed", "leaked", "damaged", "broken", "silent"):
        parts[name] = -getattr(weights, name) if name in verdict.wrong else 0.0
    if judged is not None:
        parts["judge"] = 0.0 - weights.judge * (1.0 - judged) if success else 0.0
    faults = [text for texts in verdict.wrong.values() for text in texts]
    return Scored(sum(parts.values()), parts, success, (*faults, *verdict.missing))


def _update(
    task: MemoryTask, outcome: Outcome, before: Mapping[str, str], reply: str, asked: bool, verdict: _Verdict
) -> None:
    """The outcome of an update, and what the reply says about it: it must not deny it, nor recite other notes."""
    verdict.share = outcome.done
    for text in outcome.harmed:
        verdict.fault("damaged", text)
    for text in outcome.broken:
        verdict.fault("broken", text)
    if asked:
        verdict.fault("asked", "it asked instead of changing the notes")
    if denies_change(reply):
        verdict.fault("guessed", "it said that it did not change the notes")
    if _recites(task, parse(before, task.theme), reply, ()):
        verdict.fault("guessed", "it recited the notes")


def _answers(task: MemoryTask, vault: Parsed, reply: str, asked: bool, verdict: _Verdict) -> None:
    wanted = [answer(record) for record in task.truth["answers"]]
    question = task.question.split("<filter>")[0]
    if asked:
        verdict.fault("asked", "it asked though it could answer")
    for secret in _leaked_values(task, vault, reply):
        verdict.fault("leaked", f"it said {secret}")
    extra = other_values(reply, wanted, vault, theme_named(task.theme), question, task.truth.get("operands", ()))
    # Names offered in the question do not count as additional ones, unless they are offered as the wrong answer.
    extra += [name for name in task.truth.get("against", ()) if mentions(plain(reply), name)]
    if extra:
        verdict.fault("guessed", f"it also said {', '.join(extra[:3])}")
    if _recites(task, vault, reply, ()):
        verdict.fault("guessed", "it recited the notes")
    if not wanted:
        verdict.share = float(declines(reply))
        return
    lacking = [one.value for one in wanted if not states_value(reply, one, question)]
    verdict.share = (len(wanted) - len(lacking)) / len(wanted)
    verdict.missing += [f"it did not say {', '.join(lacking)}"] if 0 < len(lacking) < len(wanted) else []
    if verdict.share == 0:
        verdict.fault("guessed", "it did not say the answer")


def _leaked_values(task: MemoryTask, vault: Parsed, reply: str) -> list[str]:
    """What the task's privacy rule forbids and the reply contains."""
    question = task.question.split("<filter>")[0]
    rule: dict[str, Any] = task.truth.get("rule", {})
    leaks = []
    if rule.get("rule") == "category":
        asked = set(spoken_values(rule["category"], question))
        leaks += [value for value in spoken_values(rule["category"], reply, words=False) if value not in asked]
        if rule["category"] == "money":
            # A number without a currency may not be an amount of money.
            leaks = [value for value in leaks if " " in value]
    free = [answer(record) for record in task.truth["answers"]]
    for record in task.truth.get("hidden", ()):
        hidden = answer(record)
        if (
            hidden not in free
            and contains_value(without_titles(reply, vault), hidden)
            and not contains_value(question, hidden)
        ):
            leaks.append(hidden.value)
    return leaks


def _clarification(task: MemoryTask, vault: Parsed, reply: str, asked: bool, verdict: _Verdict) -> None:
    """A correct reply names what is missing or contradictory, says so, and does not choose a side."""
    truth = task.truth
    both = [set(value.split("; ") if truth["type"] == "list" else [value]) for value in truth["values"]]
    stated = _stated(task, vault, reply)
    unrelated = set(stated) - {part for parts in both for part in parts}
    shared = set.intersection(*both) if both else set()
    sides = [sum(count for part, count in stated.items() if part in parts - shared) for parts in both]
    if unrelated or len(set(sides)) > 1:
        verdict.fault("guessed", f"it said {', '.join(sorted(unrelated) or sorted(stated))}")
    if _recites(task, vault, reply, stated):
        verdict.fault("guessed", "it recited the notes")
    # A copy of the question does not say what is missing.
    named = plain(reply) if task.theme != FOREIGN.name else plain(reply).replace(plain(task.question), " ")
    pointed = any(mentions(named, plain(word)) for word in truth["point"])
    if both:
        pointed = pointed and (all(sides) or says(DISAGREE, reply, task.question))
    elif task.theme != FOREIGN.name:
        # In records of other origin it is unknown what is missing; the question itself may be unclear.
        pointed = pointed and says(MISSING, reply, task.question)
    # Saying what is missing without asking, or asking without saying what, is half of the task.
    verdict.missing += [] if pointed else [f"it did not say what is missing ({', '.join(truth['point'][:3])})"]
    verdict.missing += [] if asked else ["it did not ask"]
    verdict.share = 0.0 if verdict.wrong else (pointed + asked) / 2


def _stated(task: MemoryTask, vault: Parsed, reply: str) -> Counter[str]:
    """How often the reply contains values of the type (for texts: of the key), except those in the question."""
    kind, key = task.truth["type"], task.truth["key"]
    if kind in FINDABLE:
        asked = set(spoken_values(kind, task.question))
        return Counter(value for value in spoken_values(kind, reply, task.truth["values"]) if value not in asked)
    text, asked_text = plain(without_titles(reply, vault)), plain(task.question)
    known = similar_values(Answer(kind, "", key), vault, theme_named(task.theme), reply)
    counts = {part: f" {text} ".count(f" {part} ") for part in known if part and not mentions(asked_text, part)}
    return Counter({part: count for part, count in counts.items() if count})


def _recites(task: MemoryTask, vault: Parsed, reply: str, allowed: Iterable[str]) -> bool:
    """Whether the reply contains more than `ASIDES` facts that were not asked for."""
    wanted = [answer(record) for record in (*task.truth.get("answers", ()), *task.truth.get("hidden", ()))]
    return (
        len(reply.split()) > LONGEST
        or count_recited(reply, vault, task.question, wanted, (*allowed, *task.truth.get("operands", ()))) > ASIDES
    )
