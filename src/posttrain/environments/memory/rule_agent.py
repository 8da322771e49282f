"""A memory agent without a model: it answers, asks and changes notes by names and labels that it finds in the question.

It knows no theme: only lines with a label are facts to it, and only the labels of the vault are words to it. A chain
such as `the phone of my emergency vet` is followed from the user or a named note along relations.
"""

import re
from collections.abc import Sequence

from posttrain.environments.memory.facts import Fact, facts_of, names_of
from posttrain.environments.memory.filters import HIDDEN
from posttrain.environments.memory.worlds.truth import title

USER = "user.md"
_DELETES = re.compile(r"\b(?:forget|delete|remove|take out|do not want|no longer need)\b", re.IGNORECASE)
_SETS = re.compile(
    r"\b(?:note|record|write down|add this|correction|change|set|out of date|days|now|was told|turns out)\b",
    re.IGNORECASE,
)
_GIVEN = re.compile(r"\b(?:is|are|to)(?: now)? (?P<value>.+?)(?: (?:now|these days))?(?:[,.;] |[.!]?$)")


def rule_agent(question: str, files: dict[str, str]) -> tuple[str, dict[str, str]]:
    """The reply to `question`, and the notes (path -> text) after what it changed."""
    facts = facts_of(files)
    path, rest = _subject(question, files, facts)
    label = _label(rest, {label for fact in facts if fact.kind != "link" for label in fact.labels})
    ends = question.strip().endswith("?")
    if label is not None and path is not None and not ends:
        changed = _changed(question, rest, path, label, files, facts)
        if changed is not None:
            return "I changed the notes.", changed
    if path is None:
        return "I find no note on this. Whom or what do you mean?", files
    if label is None:
        return _by_relation(rest, path, files, facts), files
    found = [fact for fact in facts if fact.about == path and label in fact.labels and fact.kind != "link"]
    name = title(files[path]) or "you"
    if not found:
        return f"My note on {name} does not give the {label}. Can you tell me?", files
    values = {fact.value: files[fact.note][fact.value_start : fact.value_end].strip() for fact in found}
    if any(HIDDEN in value for value in values.values()):
        return f"I may not share the {label} of {name}.", files
    if len(values) > 1:
        return f"My notes disagree on the {label} of {name}: {' or '.join(values.values())}. Which is right?", files
    return f"The {label} of {name}: {next(iter(values.values()))}.", files


def _subject(question: str, files: dict[str, str], facts: Sequence[Fact]) -> tuple[str | None, str]:
    """The note that the question is about, and the question without the words that name it."""
    lowered = " ".join(question.casefold().split())
    named = [(name, path) for name, path in names_of(files).items() if re.search(rf"\b{re.escape(name)}\b", lowered)]
    # A longer name may hold a shorter one; the title of the vault itself only says whose notes are meant.
    named.sort(key=lambda item: (item[1] == USER, -len(item[0])))
    path: str | None = None
    rest = lowered
    for name, found in named:
        rest = rest.replace(name, " ")
        if path is None and found != USER:
            path = found
    if path is None and re.search(r"\b(?:my|i|me)\b", lowered):
        path = USER
    relations = {label: fact for fact in facts if fact.kind == "link" for label in fact.labels}
    for _ in range(2):
        label = _label(rest, {label for label, fact in relations.items() if path is not None})
        steps = [f for f in facts if f.kind == "link" and f.about == path and label in f.labels and f.value in files]
        if label is None or len(steps) != 1 or _label(rest.replace(label, " "), _values(facts)) is None:
            break
        path, rest = steps[0].value, rest.replace(label, " ", 1)
    return path, rest


def _values(facts: Sequence[Fact]) -> set[str]:
    return {label for fact in facts if fact.kind != "link" for label in fact.labels}


def _label(text: str, labels: set[str]) -> str | None:
    """The longest of `labels` that stands in `text`."""
    found = [label for label in labels if re.search(rf"(?<!\w){re.escape(label)}(?!\w)", text)]
    return max(found, key=lambda label: (len(label), label), default=None)


def _by_relation(rest: str, path: str, files: dict[str, str], facts: Sequence[Fact]) -> str:
    """An answer from the links of a note: the names of a relation, or how many there are."""
    label = _label(rest, {label for fact in facts if fact.kind == "link" for label in fact.labels})
    found = [fact.value for fact in facts if fact.kind == "link" and fact.about == path and label in fact.labels]
    if label is None or not found:
        return "The notes do not say. What exactly do you want to know?"
    names = [title(files.get(value, "")) or value for value in dict.fromkeys(found)]
    return f"There are {len(names)}." if "how many" in rest else f"{', '.join(names)}."


def _changed(
    question: str, rest: str, path: str, label: str, files: dict[str, str], facts: Sequence[Fact]
) -> dict[str, str] | None:
    """The notes after the change that the message asks for; None where it asks for none that is understood."""
    own = [fact for fact in facts if fact.note == path and fact.about == path and label in fact.labels]
    text = files[path]
    if _DELETES.search(question):
        if len(own) != 1:
            return None
        return {**files, path: text[: own[0].start] + text[own[0].end + 1 :]}
    after = question[question.casefold().rfind(label) :]
    given = _GIVEN.search(after) if _SETS.search(question) else None
    if given is None:
        return None
    if len(own) == 1:
        return {**files, path: text[: own[0].value_start] + given["value"] + text[own[0].value_end :]}
    gap = "" if text.endswith("\n") else "\n"
    return {**files, path: f"{text}{gap}- {label}: {given['value']}\n"} if not own else None
