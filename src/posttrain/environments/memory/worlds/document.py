"""Records of the published memory agent: `context_messages`, and a label of three parts.

The label is the kind of task, the name of a memory, and the answer, with a line of `~/~/…~` between them. Memories lie in
files `base_memory.json`: their name, `user_md`, and `entities` with `entity_file_path` and `entity_file_content`.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posttrain.environments.memory.worlds.graph import USER
from posttrain.environments.memory.worlds.replies import Answer
from posttrain.environments.memory.worlds.task import MemoryTask
from posttrain.environments.memory.worlds.themes import FOREIGN
from posttrain.environments.memory.worlds.values import FINDABLE, canonical, plain
from posttrain.errors import InputError

_SEPARATOR = re.compile(r"\s*\n*(?:~/){3,}~\n*\s*")
_FILTERED = re.compile(r"\s*<filter>(?P<rule>.*?)</filter>\s*<answer>(?P<answer>.*)</answer>\s*", re.DOTALL)


def is_document_row(row: Mapping[str, Any]) -> bool:
    """Whether a record is of this form, and not of `dataset.row_of`."""
    return isinstance(row.get("label"), str) and len(_SEPARATOR.split(row["label"])) == 3


def read_document_row(
    row: Mapping[str, Any], memories: Mapping[str, Mapping[str, str]]
) -> tuple[MemoryTask, dict[str, str]]:
    """The task of a record and its vault, which is looked up in `memories` by name.

    A retrieval answer is compared as the type that it looks like. An update has no truth here but the message, so only
    a judge can say that it is done. A clarification is right where the reply asks and takes up a word of the question. InputError for other
    records, and for a memory that is not there.
    """
    parts = _SEPARATOR.split(row["label"])
    if len(parts) != 3:
        raise InputError(f"a label has {len(parts)} parts between lines of ~/~, not kind, memory and answer")
    kind, name, text = (part.strip() for part in parts)
    if name not in memories:
        raise InputError(f"the memory {name} of a record is not among the base_memory.json files; name their folder")
    asked = [message["content"] for message in row["context_messages"] if message["role"] == "user"]
    if kind not in ("retrieval", "update", "clarification") or not asked:
        raise InputError(f"a record of the kind {kind!r} with {len(asked)} user messages is no memory task")
    question, truth = asked[-1], _truth(kind, asked[-1], text)
    if "rule" in truth:
        kind = "filter"
        rule = _FILTERED.fullmatch(text)
        if rule and "<filter>" not in question:
            question = f"{question}\n<filter>{rule['rule'].strip()}</filter>"
    return MemoryTask(kind, "document", FOREIGN.name, question, 0, truth, [text]), dict(memories[name])


def read_memories(folder: Path) -> dict[str, dict[str, str]]:
    """Name -> vault (path -> text), of all files `base_memory.json` in a folder and below; InputError for one that is none."""
    found = {}
    for file in sorted(folder.rglob("base_memory.json")):
        try:
            memory = json.loads(file.read_text(encoding="utf-8"))
            name = memory["mem_id" if "mem_id" in memory else "memory_id"]
            entities = {_path(item["entity_file_path"]): item["entity_file_content"] for item in memory["entities"]}
            found[str(name)] = {USER: memory["user_md"], **entities}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{file} holds no memory ({error}); it needs mem_id, user_md and entities") from error
    return found


def _path(text: str) -> str:
    """The path of a note within its vault."""
    place = text.find("entities/")
    path = text[place:] if place >= 0 else f"entities/{text.rsplit('/', 1)[-1]}"
    return path if path.endswith(".md") else f"{path}.md"


def _truth(kind: str, question: str, text: str) -> dict[str, Any]:
    if kind == "update":
        return {"judge": question}
    if kind == "clarification":
        words = [word for word in plain(question).split() if len(word) > 4]
        return {"point": words or [plain(question)], "type": "text", "key": "answer", "values": []}
    filtered = _FILTERED.fullmatch(text)
    gold = filtered["answer"].strip() if filtered else text
    fits = [known for known in ("date", "money", "email", "phone", "number") if canonical(known, gold) is not None]
    type_ = fits[0] if fits and fits[0] in FINDABLE else "text"
    answers = [Answer(type_, canonical(type_, gold) or "", "answer").to_json()]
    return {"answers": answers, **({"rule": {}, "hidden": []} if filtered else {})}
