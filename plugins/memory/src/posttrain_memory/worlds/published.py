"""Checks of updates in the files of the published memory agent.

They have no programmatic truth: a judge, or a question that is asked afterwards, decides whether the notes now state what the
message says. Damage to other notes is detected here, from the message and the notes alone.
"""

import re
from collections import Counter
from collections.abc import Mapping

from posttrain_memory.vault.links import Notes
from posttrain_memory.vault.paths import USER
from posttrain_memory.worlds.changes import SPARE_CHARACTERS, Outcome, broken_links
from posttrain_memory.worlds.theme import FOREIGN
from posttrain_memory.worlds.truth import Parsed, parse
from posttrain_memory.worlds.values import links, mentions, plain

_MOST_ADDED = 10 * SPARE_CHARACTERS
"""Maximum number of characters that such an update may add to the notes."""
_FIRST_PERSON = frozenset(re.findall(r"\S+", "i i'm i've i'd i'll me my mine myself we we're we've us our ours"))
_NO_NAMES = frozenset(("the", "and", "for", "with", "from", "our", "his", "her", "its"))
_ALIASES = re.compile(r"^aliases?:[ \t]*(.*(?:\n[ \t]*-[ \t].*)*)", re.MULTILINE)
_RELATION = re.compile(r"\s*(?:[-*+|]\s*)?[*_]*([^:*|\[\]]{1,60}?)[*_]*\s*[:|]")
_OF_ANOTHER = re.compile(r"\b(?:of|for)\s+\[\[[^\[\]\n]+\]\][*_]*\s*:")


def published_outcome(message: str, before: Mapping[str, str], after: Mapping[str, str]) -> Outcome:
    """Compare two vaults (path -> text) around an update that `message` asks for. `done` is 1 if anything changed.

    Damage is: a changed note that the message does not name (see `named_notes`), except for links to new notes and
    lines about deleted ones; a new or deleted note that it does not name; and, in named notes, lost lines about other
    notes.
    """
    was, now = parse(before, FOREIGN.name), parse(after, FOREIGN.name)
    named = named_notes(message, before)
    gone, fresh = set(before) - set(after), set(after) - set(before)
    harmed = [f"{path} is gone" for path in gone if path == USER or path not in named]
    harmed += [f"{path} is new" for path in fresh if not _names(message, path, after[path])]
    texts, later = ({path: _lines(text) for path, text in files.items()} for files in (before, after))
    for path in sorted(set(before) & set(after)):
        if texts[path] == later[path]:
            continue
        if path in named:
            for line in (texts[path] - later[path]).elements():
                about = _mentioned(line, before) - {path, USER}
                # `label: [[note]]` is about the note that contains it, and so is everything in `user.md`.
                own = not _OF_ANOTHER.search(line) and (path == USER or _RELATION.match(line))
                harmed += [f"{path} lost: {line}"] if about and not about & named and not own else []
        elif _changed(path, before, after, was, now):
            harmed.append(f"{path} was changed")
    added = sum(max(0, len(text) - len(before.get(path, ""))) for path, text in after.items())
    if added > _MOST_ADDED:
        harmed.append(f"the notes are {added} characters longer")
    return Outcome(float(texts != later), tuple(sorted(harmed)), tuple(broken_links(was, now)))


def named_notes(message: str, files: Mapping[str, str]) -> set[str]:
    """The notes that a message names: by path, title, alias, the text or label of a link to it, or a word of its name
    that no other note has. A first-person message names `user.md`.
    """
    words = plain(message)
    names, notes = {path: _own_names(path, text) for path, text in files.items()}, Notes(files)
    for text in files.values():
        for line in text.split("\n"):
            label = _RELATION.match(line)
            for start, _, target, shown in links(line):
                path = notes.resolve_or_none(target)
                if path is not None:
                    names[path].add(plain(shown))
                    if label and label.end() <= start:
                        names[path].add(plain(label[1]))
    count = Counter(word for path in files for word in _words(_own_names(path, files[path])))
    named = {USER} if _FIRST_PERSON & set(words.split()) and USER in files else set()
    for path, known in names.items():
        unique = {word for word in _words(_own_names(path, files[path])) if count[word] == 1}
        if path != USER and any(mentions(words, name) for name in known | unique if name):
            named.add(path)
    return named


def _own_names(path: str, text: str) -> set[str]:
    """The plain names of a note: its file name, title and aliases."""
    heading = re.search(r"^# +(.+?)\s*$", text, re.MULTILINE)
    names = [path.rsplit("/", 1)[-1].removesuffix(".md").replace("_", " ").replace("-", " ")]
    names += [heading[1]] if heading else []
    aliases = _ALIASES.search(text.split("\n---", 1)[0]) if text.startswith("---") else None
    names += re.split(r"[,\n]", aliases[1]) if aliases else []
    return {plain(name) for name in names} - {""}


def _words(names: set[str]) -> set[str]:
    return {word for name in names for word in name.split() if len(word) > 2} - _NO_NAMES


def _names(message: str, path: str, text: str) -> bool:
    """Whether a message names a new note."""
    words, names = plain(message), _own_names(path, text)
    return any(mentions(words, name) for name in names | _words(names))


def _changed(path: str, before: Mapping[str, str], after: Mapping[str, str], was: Parsed, now: Parsed) -> bool:
    """Whether a note has changed in more than lines about deleted notes and links to new ones."""
    gone, fresh = set(before) - set(after), set(after) - set(before)
    old, new = _lines(before[path]), _lines(after[path])
    lost, added = list((old - new).elements()), list((new - old).elements())
    freed = [line for line in lost if gone & _mentioned(line, before)]
    others = [line for line in added if not fresh & _linked(line, after)]
    # A line may stay without the deleted note, and then consists mostly of its old words.
    known = {word for line in freed for word in plain(line).split()}
    kept_words = all(2 * len(known & set(plain(line).split())) > len(set(plain(line).split())) for line in others)
    kept = was.out[path] - gone <= now.out[path]
    return len(freed) < len(lost) or len(others) > len(freed) or not kept_words or not kept


def _linked(line: str, paths: Mapping[str, object]) -> set[str]:
    return {path for _, _, target, _ in links(line) if (path := Notes(paths).resolve_or_none(target)) is not None}


def _mentioned(line: str, files: Mapping[str, str]) -> set[str]:
    """The notes that a line links to or mentions by full name."""
    text = plain(line)
    titled = {p for p in files if any(len(name) > 2 and mentions(text, name) for name in _own_names(p, files[p]))}
    return _linked(line, files) | titled


def _lines(text: str) -> Counter[str]:
    """The non-empty lines of a note, stripped."""
    return Counter(line.strip() for line in text.split("\n") if line.strip())
