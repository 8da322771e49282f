"""Tasks and vaults in the files of the published memory agent.

- Training records have `context_messages` and a label of three parts, the kind of task, the name of a memory, and the answer,
  separated by lines of `~/~/…~`. Memories are files `base_memory.json` with their name, `user_md`, and `entities`
  (`entity_file_path`, `entity_file_content`).
- Evaluation items are lines of `KIND/N_qa.jsonl`, with `question`, `answer` and `judge` (a rubric), and for updates with `update`, which
  the question is asked after. Their vault is the folder `KIND/N`.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.errors import InputError
from posttrain_memory.vault.limits import VaultError, VaultLimits
from posttrain_memory.vault.paths import USER, collision, note_path, portable_path
from posttrain_memory.vault.text import split_question
from posttrain_memory.worlds.replies import Answer
from posttrain_memory.worlds.task import KINDS, MemoryTask
from posttrain_memory.worlds.theme import FOREIGN
from posttrain_memory.worlds.values import FINDABLE, canonical, mentions, plain

_SEPARATOR = re.compile(r"\s*\n*(?:~/){3,}~\n*\s*")
_FILTERED = re.compile(r"\s*<filter>(?P<rule>.*?)</filter>\s*<answer>(?P<answer>.*)</answer>\s*", re.DOTALL)
_ITEMS = "_qa.jsonl"
Files = dict[str, str]
"""Path -> text."""


@dataclass(frozen=True)
class Memories:
    """Vaults by name, and their notes that were renamed."""

    vaults: Mapping[str, Files]
    renamed: list[str]
    """`FILE: old -> new` of each note whose path a vault does not accept."""


def is_published_row(row: Mapping[str, Any]) -> bool:
    """Whether a record has this format, and not that of `dataset.row_of`."""
    return isinstance(row.get("label"), str) and len(_SEPARATOR.split(row["label"])) == 3


def read_published_row(
    row: Mapping[str, Any], memories: Mapping[str, Files], decided: frozenset[str] = frozenset()
) -> tuple[MemoryTask, Files]:
    """The task of a record and its vault, which is looked up in `memories` by name. A judge decides kinds in `decided`.

    Raises InputError for other records, for an unknown memory, and for tasks that only a judge could decide.
    """
    parts = _SEPARATOR.split(row["label"])
    if len(parts) != 3:
        raise InputError(f"no valid label: {len(parts)} parts between lines of ~/~; expected kind, memory and answer")
    kind, name, text = (part.strip() for part in parts)
    if name not in memories:
        raise InputError(f"unknown memory: no base_memory.json file has the name {name}; check `environment.memories`")
    messages = row.get("context_messages")
    said = [one for one in messages if isinstance(one, dict)] if isinstance(messages, list) else []
    asked = [one.get("content") for one in said if one.get("role") == "user"]
    if not asked or not isinstance(question := asked[-1], str):
        raise InputError("no user message: `context_messages` needs one with a text; correct or remove the row")
    if rule := _FILTERED.fullmatch(text) if kind == "retrieval" else None:
        # The rules of such records are sentences, which the model alone can follow.
        kind, text = "filter", rule["answer"].strip()
        words, rules = split_question(question)
        question = f"{words}\nPrivacy rule: {' '.join(rules) or rule['rule'].strip()}"
    gold = "" if kind == "update" else text  # the third part of an update repeats its message
    return _task(kind, question, gold, memories[name], decided), dict(memories[name])


def is_evaluation(folder: Path) -> bool:
    """Whether a folder has evaluation items below it."""
    return folder.is_dir() and next(folder.rglob(f"*{_ITEMS}"), None) is not None


def read_evaluation(folder: Path) -> Iterator[tuple[str, str, str, Path]]:
    """Origin, line, kind ("" if no folder is named after it) and vault folder of each evaluation item below `folder`."""
    for file in sorted(folder.rglob(f"*{_ITEMS}")):
        kind = next((part for part in reversed((folder.name, *file.relative_to(folder).parts)) if part in KINDS), "")
        for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").split("\n"), 1):
            if line.strip():
                yield f"{file} row {number}", line, kind, file.with_name(file.name.removesuffix(_ITEMS))


def read_item(line: str, kind: str, vault: Files, decided: frozenset[str]) -> MemoryTask:
    """The task of an evaluation item. Raises InputError for other lines, and for tasks that only a judge could decide."""
    try:
        item = dict(json.loads(line))
    except (ValueError, TypeError, RecursionError) as error:
        raise InputError(f"no JSON object: {error}; correct or remove the line") from error
    kind = kind or ("update" if "update" in item else "retrieval")
    names = ("question", "answer", "judge", "update", "filters")
    texts = {name: "" if item.get(name) is None else str(item[name]).strip() for name in names}
    if not texts["update" if kind == "update" else "question"]:
        raise InputError(f"{kind} without a message: set `{'update' if kind == 'update' else 'question'}` of the item")
    if kind != "update":
        question = f"{texts['question']}\nPrivacy rule: {texts['filters']}" if texts["filters"] else texts["question"]
        return _task(kind, question, texts["answer"], vault, decided, texts["judge"])
    after = _task("retrieval", texts["question"], texts["answer"], vault, decided) if texts["answer"] else None
    return _task(kind, texts["update"], "", vault, decided, texts["judge"], after)


def read_memories(folder: Path) -> Memories:
    """The vaults in all files `base_memory.json` below a folder. Raises InputError for an invalid file."""
    vaults, renamed = {}, []
    for file in sorted(folder.rglob("base_memory.json")):
        try:
            memory = json.loads(file.read_text(encoding="utf-8"))
            name = memory["mem_id" if "mem_id" in memory else "memory_id"]
            entities = {_path(item["entity_file_path"]): item["entity_file_content"] for item in memory["entities"]}
            vaults[str(name)], changed = accepted({USER: memory["user_md"], **entities})
            "".join(vaults[str(name)].values()).encode()  # half of a surrogate pair cannot be written
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise InputError(f"{file} is not a memory ({error}); it needs mem_id, user_md and entities") from error
        renamed += [f"{file}: {old} -> {new}" for old, new in changed.items()]
    return Memories(vaults, renamed)


def read_folder(folder: Path) -> Files:
    """The Markdown files below a folder. Raises InputError if there is no `user.md`."""
    files = {file.relative_to(folder).as_posix(): file for file in sorted(folder.rglob("*.md"))}
    if USER not in files:
        raise InputError(f"no {USER}: {folder} lacks it; an item N{_ITEMS} needs a folder N of Markdown files")
    try:
        return {path: file.read_text(encoding="utf-8") for path, file in files.items()}
    except (OSError, UnicodeError) as error:
        raise InputError(f"unreadable notes: {folder} ({error}); save them as UTF-8") from error


def accepted(files: Files) -> tuple[Files, dict[str, str]]:
    """The vault with names that a vault accepts, also in its links, and the renamed notes (old -> new path)."""
    changed: dict[str, str] = {}
    kept: list[str] = []
    for path in files:
        try:
            valid = note_path(path, VaultLimits())
        except VaultError:
            valid = ""
        if valid and collision(valid, kept) is None and valid not in kept:
            kept.append(valid)
        else:
            kept.append(portable_path(path, kept))
        if kept[-1] != path:
            changed[path] = kept[-1]
    texts = list(files.values())
    for old, new in changed.items():
        # A link names a note by its path, or without the folder, or without the suffix.
        for form in {old, old.removesuffix(".md"), old.rpartition("/")[2], old.rpartition("/")[2].removesuffix(".md")}:
            texts = [
                text.replace(f"[[{form}]]", f"[[{new}]]")
                .replace(f"[[{form}|", f"[[{new}|")
                .replace(f"[[{form}#", f"[[{new}#")
                for text in texts
            ]
    return dict(zip(kept, texts, strict=True)), changed


def _path(text: str) -> str:
    """The path of a note within its vault."""
    place = text.find("entities/")
    path = text[place:] if place >= 0 else f"entities/{text.rsplit('/', 1)[-1]}"
    return path if path.endswith(".md") else f"{path}.md"


def _task(
    kind: str,
    question: str,
    gold: str,
    vault: Files,
    decided: frozenset[str],
    rubric: str = "",
    after: MemoryTask | None = None,
) -> MemoryTask:
    """A task. Without a judge, a retrieval answer is compared as the type that it looks like, an update is decided by the question
    after it, and a clarification is correct if the reply asks for what the vault lacks, or as recorded.
    """
    solution = [gold] if gold else []
    if kind == "update" and after is not None:
        truth: dict[str, Any] = {"asked_after": after.question}
    elif ("retrieval" if kind == "filter" else kind) in decided:
        truth = {"judge": question, **({"rubric": rubric} if rubric else {})}
    elif kind == "update":
        raise _only_judged(kind, "a question after it")
    elif kind == "clarification":
        # A reply must name one of the words that the notes do not have, or else of the topics.
        words, notes = plain(question).split(), plain("\n".join([*vault, *vault.values()]))
        topics = [[word for word in words if len(word) > n and word not in _NO_TOPICS] for n in (4, 2, 0)]
        absent = [word for word in topics[1] if not mentions(notes, word)]
        point = next(filter(None, [absent, *topics]), words)
        truth = {"point": point, "type": "text", "key": "answer", "values": []}
        solution = solution or [f"My notes say nothing about this: {' '.join(point)}. Can you tell me more?"]
    elif kind not in ("retrieval", "filter"):
        raise InputError(f"unknown kind: {kind!r}; use {', '.join(KINDS)}")
    elif not gold:
        raise _only_judged("retrieval", "an answer")
    else:
        truth = {"answers": [_answer(gold).to_json()], **({"rule": {}, "hidden": []} if kind == "filter" else {})}
    return MemoryTask(kind, "document", FOREIGN.name, question, 0, truth, solution, after)


def _only_judged(kind: str, what: str) -> InputError:
    return InputError(f"{kind} without {what}: set environment.judge, with {kind} in environment.judge_decides")


def _answer(gold: str) -> Answer:
    """The answer of the type that its text looks like."""
    if plain(gold) in ("true", "yes", "false", "no"):
        return Answer("truth", "yes" if plain(gold) in ("true", "yes") else "no", "answer")
    fits = [known for known in ("date", "money", "email", "phone", "number") if canonical(known, gold) is not None]
    type_ = fits[0] if fits and fits[0] in FINDABLE else "text"
    return Answer(type_, canonical(type_, gold) or "", "answer")


_NO_TOPICS = frozenset(
    re.findall(
        r"\S+",
        "a about again am an are at be by can could did do does for from had has have he her his how i in is it know many "
        "me much my of on or our please should tell that the their them there these they this those to us was we were "
        "what when where which while who whom whose why will with would you your",
    )
)
"""Words of a question that do not say what it is about."""
