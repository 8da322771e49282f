"""Baseline policies without a language model, which put scores into context. Each reads the vault and replies by a
fixed rule.

- `random`: replies with a random fact of the vault.
- `always asks`: says that it does not know and asks back.
- `one note`: recites the note that matches the question best.
- `bm25`: replies with the fact whose words match the question best (Robertson and Zaragoza 2009).
- `rule agent`: looks for names and labels in the question; can answer, ask, decline and change facts.

They see what a model would see: under a privacy rule, the view without the hidden parts.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from posttrain.environments.protocol import Baseline
from posttrain.runs.intervals import success_rate
from posttrain.seeds import random_stream
from posttrain_memory.privacy.facts import Fact, facts_of, names_of
from posttrain_memory.privacy.filter import HIDDEN, PrivacyFilter
from posttrain_memory.recipe import MemoryRecipe
from posttrain_memory.task_source import Assignment
from posttrain_memory.vault.paths import USER
from posttrain_memory.vault.text import split_question
from posttrain_memory.worlds.replies import asks
from posttrain_memory.worlds.rewards import Scored, score
from posttrain_memory.worlds.truth import title
from posttrain_memory.worlds.updates import is_forgotten

_DELETES = re.compile(r"\b(?:forget|delete|remove|take out|do not want|no longer need)\b", re.IGNORECASE)
_SETS = re.compile(
    r"\b(?:note|record|write down|add this|correction|change|set|out of date|days|now|was told|turns out)\b",
    re.IGNORECASE,
)
_GIVEN = re.compile(r"\b(?:is|are|to)(?: now)? (?P<value>.+?)(?: (?:now|these days))?(?:[,.;] |[.!]?$)")


def rule_agent(question: str, files: dict[str, str]) -> tuple[str, dict[str, str]]:
    """The reply to `question`, and the notes (path -> text) after its changes.

    It knows no theme: facts are lines with a label, and only labels of the vault are recognized. A chain such as `the
    phone of my emergency vet` is followed along relations, from the user or from a named note.
    """
    facts = facts_of(files)
    path, rest = _subject(question, files, facts)
    label = _label(rest, _values(facts))
    ends = question.strip().endswith("?")
    if label is not None and path is not None and not ends:
        changed = _changed(question, rest, path, label, files, facts)
        if changed is not None:
            return "I changed the notes.", changed
    if path is None:
        return "I find no note on this. Whom or what do you mean?", files
    if label is None:
        # From the links of the note: the targets of a relation, or their number.
        label = _label(rest, {label for fact in facts if fact.kind == "link" for label in fact.labels})
        targets = [fact.value for fact in facts if fact.kind == "link" and fact.about == path and label in fact.labels]
        if label is None or not targets:
            return "The notes do not say. What exactly do you want to know?", files
        names = [title(files.get(value, "")) or value for value in dict.fromkeys(targets)]
        return (f"There are {len(names)}." if "how many" in rest else f"{', '.join(names)}."), files
    matching = [fact for fact in facts if fact.about == path and label in fact.labels and fact.kind != "link"]
    name = title(files[path]) or "you"
    if not matching:
        return f"My note on {name} does not give the {label}. Can you tell me?", files
    values = {fact.value: files[fact.note][fact.value_start : fact.value_end].strip() for fact in matching}
    if any(HIDDEN in value for value in values.values()):
        return f"I may not share the {label} of {name}.", files
    if len(values) > 1:
        return f"My notes disagree on the {label} of {name}: {' or '.join(values.values())}. Which is right?", files
    return f"The {label} of {name}: {next(iter(values.values()))}.", files


def _subject(question: str, files: dict[str, str], facts: Sequence[Fact]) -> tuple[str | None, str]:
    """The note that the question is about, and the question without the words that name it."""
    lowered = " ".join(question.casefold().split())
    named = [(name, path) for name, path in names_of(files).items() if re.search(rf"\b{re.escape(name)}\b", lowered)]
    # A longer name may contain a shorter one. The title of the vault only says whose notes are meant.
    named.sort(key=lambda item: (item[1] == USER, -len(item[0])))
    path: str | None = None
    rest = lowered
    for name, name_path in named:
        rest = rest.replace(name, " ")
        if path is None and name_path != USER:
            path = name_path
    if path is None and re.search(r"\b(?:my|i|me)\b", lowered):
        path = USER
    relations = {label for fact in facts if fact.kind == "link" for label in fact.labels}
    for _ in range(2):
        label = _label(rest, relations) if path is not None else None
        steps = [f for f in facts if f.kind == "link" and f.about == path and label in f.labels and f.value in files]
        if label is None or len(steps) != 1 or _label(rest.replace(label, " "), _values(facts)) is None:
            break
        path, rest = steps[0].value, rest.replace(label, " ", 1)
    return path, rest


def _values(facts: Sequence[Fact]) -> set[str]:
    return {label for fact in facts if fact.kind != "link" for label in fact.labels}


def _label(text: str, labels: set[str]) -> str | None:
    """The longest of `labels` that occurs in `text`."""
    matches = [label for label in labels if re.search(rf"(?<!\w){re.escape(label)}(?!\w)", text)]
    return max(matches, key=lambda label: (len(label), label), default=None)


def _changed(
    question: str, rest: str, path: str, label: str, files: dict[str, str], facts: Sequence[Fact]
) -> dict[str, str] | None:
    """The notes after the change that the message asks for. None if it asks for none or is not understood."""
    matching = [fact for fact in facts if fact.note == path and fact.about == path and label in fact.labels]
    text = files[path]
    if _DELETES.search(question):
        if len(matching) != 1:
            return None
        return {**files, path: text[: matching[0].start] + text[matching[0].end + 1 :]}
    after = question[question.casefold().rfind(label) :]
    given = _GIVEN.search(after) if _SETS.search(question) else None
    if given is None:
        return None
    if len(matching) == 1:
        return {**files, path: text[: matching[0].value_start] + given["value"] + text[matching[0].value_end :]}
    gap = "" if text.endswith("\n") else "\n"
    return {**files, path: f"{text}{gap}- {label}: {given['value']}\n"} if not matching else None


BaselinePolicy = Callable[[str, dict[str, str]], tuple[str, dict[str, str]]]
"""Maps a question and the visible notes (path -> text) to a reply and the notes afterwards."""
NOTES, ASKED_AFTER = "update, notes", "update, asked after"
"""Scores with `follow_up`: the notes are as the update requires; the question after it is answered correctly."""


@dataclass(frozen=True)
class Outcome:
    """The result of one episode."""

    kind: str
    success: bool
    reward: float
    """Sum over the episode."""
    halves: tuple[bool, bool] | None = None
    """Success of the update and of its follow-up question, if there was one."""


def measure_baselines(recipe: MemoryRecipe, assignments: Sequence[Assignment]) -> dict[str, Baseline]:
    """Success of the baseline policies on these tasks, each with a look at the notes and a reply.

    The judge is not called. A policy is omitted if one of its episodes can be scored only by a judge.
    """
    results = {}
    for name, player in BASELINE_POLICIES.items():
        outcomes = [_play(recipe, player, one) for one in assignments]
        known = [outcome for outcome in outcomes if outcome is not None]
        if len(known) == len(outcomes):
            results[name] = summary(known, sampled=name == "random")
    return results


def summary(outcomes: Sequence[Outcome], sampled: bool = False) -> Baseline:
    """Success overall, by kind and of both halves of updates; with an interval if the policy is random (`sampled`)."""
    n = len(outcomes)
    rate = success_rate(sum(one.success for one in outcomes), n)
    columns: dict[str, list[bool]] = {}
    for one in outcomes:
        columns.setdefault(one.kind, []).append(one.success)
        for name, success in zip((NOTES, ASKED_AFTER), one.halves or (), strict=False):
            columns.setdefault(name, []).append(success)
    scores = {name: success_rate(sum(successes), len(successes)).limits for name, successes in columns.items()}
    mean_reward = math.fsum(one.reward for one in outcomes) / n
    return Baseline(rate.value, mean_reward, n, (rate.low, rate.high) if sampled else None, scores)


def _play(recipe: MemoryRecipe, player: BaselinePolicy, one: Assignment) -> Outcome | None:
    """The result of an episode; None if only a judge can score it."""
    scored, changed = _score_reply(recipe, player, one)
    if scored.success and "judge" in one.task.truth:
        return None
    if one.task.follow_up is None or not (recipe.follow_up or "asked_after" in one.task.truth):
        return Outcome(one.task.kind, scored.success, scored.total)
    grounded = is_forgotten(one.task, changed)
    after, _ = _score_reply(recipe, player, Assignment(one.task.follow_up, changed), grounded)
    halves = (scored.success, after.success)
    return Outcome(one.task.kind, all(halves), (scored.total + after.total) / 2, halves)


def _score_reply(
    recipe: MemoryRecipe, player: BaselinePolicy, one: Assignment, grounded: bool = True
) -> tuple[Scored, dict[str, str]]:
    """The score of the policy's reply, and the notes after it."""
    question, rules = split_question(one.task.question)
    hidden = PrivacyFilter(rules, one.files, one.task.theme)
    reply, after = player(question, dict(hidden.view))
    # Notes cannot be changed under a privacy rule.
    changed = one.files if hidden.active else after
    reply = reply or "I do not know."
    # Assume that the judge approves: an episode that fails even then has failed.
    yes = 1.0 if "judge" in one.task.truth else None
    # A baseline policy calls no tool, so it gets no reward for reading `user.md` first.
    scored = score(one.task, one.files, changed, reply, asks(reply), 2, recipe.weights, False, yes, grounded)
    return scored, changed


def random_policy(question: str, files: dict[str, str]) -> tuple[str, dict[str, str]]:
    """A random fact, drawn from the question's hash."""
    facts = [fact for fact in facts_of(files) if fact.about in files]
    if not facts:
        return "", files
    draw = random_stream("memory baseline", question).random()
    return f"{_value(facts[int(draw * len(facts))], files)}.", files


def asking_policy(question: str, files: dict[str, str]) -> tuple[str, dict[str, str]]:
    """Says, in the words of the question, that the answer is unknown, and asks back."""
    return f"I do not know this: {question.rstrip('?.! ')}. Can you tell me more?", files


def one_note_policy(question: str, files: dict[str, str]) -> tuple[str, dict[str, str]]:
    """Recites the note that matches the question best, without question marks, which would count as asking back."""
    paths = sorted(files)
    scores = bm25(_tokens(question), [_tokens(files[path]) for path in paths])
    best = max(range(len(paths)), key=lambda i: (scores[i], -i))
    return files[paths[best]].replace("?", "."), files


def bm25_policy(question: str, files: dict[str, str]) -> tuple[str, dict[str, str]]:
    """The fact whose label, note and value match the question best, in a sentence."""
    facts = [fact for fact in facts_of(files) if fact.about in files]
    if not facts:
        return "", files
    documents = [_tokens(f"{title(files[f.about])} {' '.join(f.labels)} {_value(f, files)}") for f in facts]
    scores = bm25(_tokens(question), documents)
    best = max(range(len(facts)), key=lambda i: (scores[i], -i))
    return f"{_value(facts[best], files)}.", files


BASELINE_POLICIES: dict[str, BaselinePolicy] = {
    "random": random_policy,
    "always asks": asking_policy,
    "one note": one_note_policy,
    "bm25": bm25_policy,
    "rule agent": rule_agent,
}
"""Name -> policy."""


def bm25(query: Sequence[str], documents: Sequence[Sequence[str]], k1: float = 1.2, b: float = 0.75) -> list[float]:
    """The BM25 score of each document (Robertson and Zaragoza 2009), over the distinct words t of the query:

        sum_t log(1 + (N - n_t + 0.5) / (n_t + 0.5)) * f_t (k1 + 1) / (f_t + k1 (1 - b + b |d| / mean |d|))

    with N documents, of which n_t contain t, and f_t occurrences of t in document d.
    """
    counts = [Counter(document) for document in documents]
    mean = sum(map(len, documents)) / len(documents) or 1.0
    scores = [0.0] * len(documents)
    for word in dict.fromkeys(query):
        holding = sum(word in count for count in counts)
        weight = math.log(1 + (len(documents) - holding + 0.5) / (holding + 0.5))
        for place, count in enumerate(counts):
            norm = k1 * (1 - b + b * len(documents[place]) / mean)
            scores[place] += weight * count[word] * (k1 + 1) / (count[word] + norm)
    return scores


def _tokens(text: str) -> list[str]:
    return re.findall(r"\w+", text.casefold())


def _value(fact: Fact, files: dict[str, str]) -> str:
    if fact.kind == "link":
        return title(files.get(fact.value, "")) or fact.value
    return files[fact.note][fact.value_start : fact.value_end].strip()
