"""The required effect of an update on a vault, and the comparison with its actual effect."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from posttrain_memory.vault.paths import USER
from posttrain_memory.worlds.graph import Statement
from posttrain_memory.worlds.replies import Answer, contains_value
from posttrain_memory.worlds.theme import theme_named
from posttrain_memory.worlds.truth import Parsed, parse
from posttrain_memory.worlds.values import plain

SPARE_CHARACTERS = 300
"""Number of characters without statements that an update may add to a note."""
_UNSEEN = re.compile(
    r"<!--.*?(?:-->|\Z)|^[ ]{0,3}(?P<fence>`{3,}|~{3,})[^\n]*\n.*?(?:^[ ]{0,3}(?P=fence)[^\n]*$|\Z)",
    re.DOTALL | re.MULTILINE,
)
"""Comments and code, which do not count as statements of a note."""
_DISOWNED = re.compile(
    r"\b(?:wrong|false|untrue|incorrect|mistaken|made up|invented|outdated|out of date|obsolete|invalid|a lie|unreliable"
    r"|(?:not|n't|never) (?:true|right|correct|so|trust|believe|rely)|disregard|ignore)\b",
    re.IGNORECASE,
)
_HEADING = re.compile(r"[ ]{0,3}#{1,6}\s")
_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=\S)")


@dataclass
class Expected:
    """The state after an update: `add` is stated, `drop` is not, and besides those only `may_add` and `may_drop` have
    changed. `touched` are the notes whose text may change, `gone` the deleted notes, `new` the path of a created
    note.
    """

    add: set[Statement] = field(default_factory=set)
    drop: set[Statement] = field(default_factory=set)
    may_add: set[Statement] = field(default_factory=set)
    touched: set[str] = field(default_factory=set)
    gone: set[str] = field(default_factory=set)
    new: str | None = None


@dataclass(frozen=True)
class Outcome:
    """The result of an update: the completed share, the damage in words, and the links that became broken."""

    done: float
    harmed: tuple[str, ...]
    broken: tuple[str, ...]


def expected(change: Mapping[str, Any], before: Parsed, after: Parsed) -> Expected:
    """The required effect of `change`. `after` is used only to find the path of a new note.

    `change["op"]` is `set` (about, key, value), `delete` (about, key), `new` (name, facts, owner, relation), `remove`
    (about) or `relink` (about, relation, was, value); values are canonical.
    """
    op, statements = change["op"], before.statements
    if op in ("set", "delete"):
        about, key = change["about"], change["key"]
        result = Expected(touched={about}, drop={s for s in statements if s.about == about and s.key == key})
        if op == "set":
            result.add = {Statement(about, about, key, change["value"])}
            result.drop -= result.add
        result.touched |= {s.note for s in result.drop}
        return result
    if op == "remove":
        about = change["about"]
        drop = {s for s in statements if about in (s.note, s.about, s.value)}
        linking = {path for path, out in before.out.items() if about in out}
        return Expected(drop=drop, touched=linking - {about}, gone={about})
    owner, key = change.get("owner", change.get("about")), change["relation"]
    back = f"{key}~"
    if op == "relink":
        old, now = change["was"], change["value"]
        return Expected(
            add={Statement(owner, owner, key, now)},
            drop={Statement(owner, owner, key, old), *(statements & {Statement(old, old, back, owner)})},
            may_add={Statement(now, now, back, owner)},
            touched={owner, old, now},
        )
    fresh = []
    for path in after.titles.keys() - before.titles.keys():
        stem = path.rsplit("/", 1)[-1].removesuffix(".md").replace("_", " ").replace("-", " ")
        fresh += [path] if plain(change["name"]) in (plain(after.titles[path]), plain(stem)) else []
    if len(fresh) != 1:
        return Expected(touched={owner})
    new = fresh[0]
    return Expected(
        add={Statement(new, new, fact, value) for fact, value in change["facts"].items()},
        may_add={Statement(owner, owner, key, new), Statement(new, new, back, owner)},
        touched={owner},
        new=new,
    )


def update_outcome(
    change: Mapping[str, Any], theme: str, before: Mapping[str, str], after: Mapping[str, str]
) -> Outcome:
    """Compare the vault after an update with the required effect."""
    # Comments and code keep their length as spaces, so that places stay the same.
    was, now = (
        parse({path: _UNSEEN.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), text) for path, text in files.items()}, theme)
        for files in (before, after)
    )
    want = expected(change, was, now)
    steps = [item in now.statements for item in want.add] + [item not in now.statements for item in want.drop]
    steps += [path not in after for path in want.gone]
    if change["op"] == "new":
        steps += [want.new is not None, want.new is not None and want.new in now.out.get(change["owner"], ())]
    harmed = _damage(theme, want, was, now, before, after)
    return Outcome(sum(steps) / len(steps), tuple(harmed), tuple(broken_links(was, now)))


def broken_links(was: Parsed, now: Parsed) -> list[str]:
    """Broken links and unreachable notes that were not broken or unreachable before."""
    broken = [f"{path} links to {target}, which is not there" for path, target in set(now.broken) - set(was.broken)]
    lost = (set(now.titles) - set(now.reached)) - (set(was.titles) - set(was.reached))
    return sorted(broken + [f"{path} is not reached from {USER}" for path in lost])


def _damage(
    theme_name: str, want: Expected, was: Parsed, now: Parsed, before: Mapping[str, str], after: Mapping[str, str]
) -> list[str]:
    extra = now.statements - was.statements - want.add - want.may_add
    lost = was.statements - now.statements - want.drop
    damage = [f"{stated.note} now says {stated.key} of {stated.about} is {stated.value}" for stated in extra]
    damage += [f"{stated.note} no longer says {stated.key} of {stated.about}" for stated in lost]
    for path, text in before.items():
        if path in want.gone:
            continue
        if path not in after:
            damage.append(f"{path} is gone")
        elif path not in want.touched:
            one, other = ([line.rstrip() for line in side.rstrip().split("\n")] for side in (text, after[path]))
            damage += [f"{path} was changed"] if one != other else []
        elif was.titles[path] != now.titles[path]:
            damage.append(f"{path} has another title")
        else:
            damage += _rewritten(theme_name, path, want, was, now, text, after[path])
    for path in after:
        if path not in before and path != want.new:
            damage.append(f"{path} is new")
    if want.new is not None and len(after[want.new]) > 3 * SPARE_CHARACTERS:
        damage.append(f"{want.new} is longer than the message requires")
    return sorted(damage)


def _rewritten(theme_name: str, path: str, want: Expected, was: Parsed, now: Parsed, old: str, new: str) -> list[str]:
    """Damage inside a touched note: lost unrelated sentences and headings, a changed order, and added text."""
    keys = {statement.key for statement in want.add | want.drop | want.may_add}
    gone = {place.statement.key for place in was.places if place.statement.value in want.gone}
    kept = _sentences(path, old, was, keys | gone) - _sentences(path, new, now, set())
    damage = [f"{path} lost: {text}" for text in kept]
    added = _sentences(path, new, now, keys) - _sentences(path, old, was, set())
    if sum(len(text) * count for text, count in added.items()) > SPARE_CHARACTERS:
        damage.append(f"{path} has much new text")
    damage += [f"{path} now says: {text}" for text in added if _DISOWNED.search(text)]
    old_values = {
        (stated.key, stated.value) for stated in want.drop if stated.about == path and "?" not in stated.value
    }
    old_values -= {(stated.key, stated.value) for stated in want.add}
    attributes = theme_named(theme_name).attributes
    for key, value in sorted(old_values):
        if key in attributes and any(contains_value(text, Answer(attributes[key].type, value, key)) for text in added):
            damage.append(f"{path} still says {value}")
    damage += [f"{path} lost the heading {line}" for line in _headings_lost(path, was, keys, old, new)]
    if not _in_order(old, new):
        damage.append(f"{path} has its lines in another order")
    return damage


def _headings_lost(path: str, was: Parsed, keys: set[str], old: str, new: str) -> list[str]:
    """Headings that were removed, except those whose section only stated the given keys."""
    before, after = ([line.strip() for line in text.split("\n") if _HEADING.match(line)] for text in (old, new))
    gone = Counter(before) - Counter(after)
    spans = [(p.start, p.end) for p in was.places if p.statement.note == path and p.statement.key in keys]
    lost, heading, empty, place = [], "", True, 0
    for line in [*old.split("\n"), "# "]:
        if _HEADING.match(line):
            lost += [heading] if heading in gone and not empty else []
            heading, empty = line.strip(), True
        elif line.strip() and not any(start < place + len(line) and place < end for start, end in spans):
            empty = False
        place += len(line) + 1
    return lost


def _in_order(old: str, new: str) -> bool:
    """Whether the lines that occur equally often in both texts have kept their order."""
    lines = [[" ".join(line.split()) for line in text.split("\n") if line.strip()] for text in (old, new)]
    counts = [Counter(side) for side in lines]
    kept = {line for line, count in counts[0].items() if counts[1][line] == count}
    one, other = ([line for line in side if line in kept] for side in lines)
    return one == other


def _sentences(path: str, text: str, parsed: Parsed, but: set[str]) -> Counter[str]:
    """Lines and sentences of a note, except headings, table rules, and what states one of the keys `but`."""
    spans = [(p.start, p.end) for p in parsed.places if p.statement.note == path and p.statement.key in but]
    blank = list(text)
    for start, end in spans:
        blank[start:end] = "\n" * (end - start)
    counts: Counter[str] = Counter()
    for line in "".join(blank).split("\n"):
        if line.lstrip().startswith("#") or not re.search(r"\w", line):
            continue
        counts.update(" ".join(part.split()) for part in _SENTENCE.split(line) if part.strip())
    return counts
