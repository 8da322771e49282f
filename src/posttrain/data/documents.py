"""Rows from a folder of documents: a prompt for each from a template, and answers that were written or sampled.

The files have the names and columns of `posttrain data rationales`, so the same recipes train on them.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.data.files import write_rows
from posttrain.data.held_out import as_count, divide, hash_order
from posttrain.data.messages import Message
from posttrain.data.rationales.dataset import FOLDERS
from posttrain.errors import InputError

_FIELD = re.compile(r"\{(document|name)\}")
_SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class Document:
    """A document with its prompt."""

    name: str
    """Path in the folder, with forward slashes."""
    prompt: str
    answer: str | None
    """The answer written for the document, if there is one."""

    @property
    def messages(self) -> list[Message]:
        """The prompt as a conversation."""
        return [{"role": "user", "content": self.prompt}]


@dataclass(frozen=True)
class Sampled:
    """The best and the worst sampled answer to a prompt with their scores; equal if there is only one."""

    best: str
    best_score: float | None
    worst: str
    worst_score: float | None

    @property
    def differs(self) -> bool:
        """Whether the best answer scores higher than the worst."""
        return self.best_score is not None and self.worst_score is not None and self.best_score > self.worst_score


def read_documents(folder: Path, template: Path, answers: Path | None = None) -> list[Document]:
    """Read every file in `folder` and its subfolders as a document, in the order of the names. Hidden files are
    skipped.

    Args:
        template: a text file with `{document}` and optionally `{name}`. Other braces are plain text.
        answers: a folder with a file of the same name, suffix aside, for some or all documents.

    Raises:
        InputError: a file is not text or empty, two documents have the same text, an answer belongs to no document, or
            the template has no `{document}`.
    """
    pattern = _text(template, "--template")
    if "{document}" not in pattern:
        raise InputError(f"--template: {template} has no {{document}}; write it where the text of the document belongs")
    written = {} if answers is None else {_stem(name): text for name, text in _texts(answers, "--answers").items()}
    documents: list[Document] = []
    seen: dict[str, str] = {}
    for name, text in _texts(folder, "FOLDER").items():
        if text in seen:
            raise InputError(f"{folder}: {name} and {seen[text]} have the same text; remove one of them")
        seen[text] = name
        fields = {"document": text, "name": name}
        # One pass, so a field in the text of a document stays text.
        prompt = _FIELD.sub(lambda found: fields[found[1]], pattern)  # noqa: B023
        documents.append(Document(name, prompt, written.pop(_stem(name), None)))
    if written:
        raise InputError(
            f"--answers: {next(iter(written))} in {answers} belongs to no document of {folder}; rename or remove it"
        )
    return documents


def write_prompts(path: Path, documents: Sequence[Document]) -> None:
    """Write one row per document for `posttrain generate`. The column `document` has its name."""
    write_rows(path, _prompt_rows(documents))


def holds_prompts(path: Path, documents: Sequence[Document]) -> bool:
    """Whether `path` has the rows that `write_prompts` writes for `documents`."""
    return path.is_file() and _read_lines(path) == _prompt_rows(documents)


def split_documents(documents: Sequence[Document], val: float, test: float) -> dict[str, str]:
    """Name of each document -> `train`, `val` or `test`; `val` and `test` are numbers (int) or shares (float).

    Documents are ordered by hashes of their prompts, so the split does not depend on names.

    Raises:
        InputError: no document is left for training.
    """
    keys = [one.prompt for one in documents]
    counts = (as_count(val, len(keys)), as_count(test, len(keys)))
    parts = divide(keys, hash_order(keys), *counts)
    if not parts[0]:
        raise InputError(
            f"--val {val} and --test {test} leave none of {len(keys)} documents for training; lower them, or add some"
        )
    return {documents[place].name: split for split, part in zip(_SPLITS, parts, strict=True) for place in part}


def write_documents(
    out: Path, name: str, documents: Sequence[Document], splits: Mapping[str, str], sampled: Mapping[str, Sampled]
) -> dict[Path, int]:
    """Write the prompts, the conversations and the pairs of each split under `out`; returns files and their numbers of
    rows.

    A conversation has the written answer of the document, or else its best sampled answer. A pair has its best and its
    worst sampled answers if their scores differ. Files without rows are not written, and an older file of that name is
    removed.
    """
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {(kind, split): [] for kind in FOLDERS for split in _SPLITS}
    for one in documents:
        split, about = splits[one.name], {"document": one.name}
        answers = sampled.get(one.name)
        answer = one.answer if one.answer is not None or answers is None else answers.best
        known = {} if answer is None else {"completion": answer}
        rows["prompts", split].append({"context_messages": one.messages, **known, **about})
        if answer is not None:
            rows["sft", split].append({"messages": _answered(one, answer), **about})
        if answers is not None and answers.differs:
            pair = {"chosen": _answered(one, answers.best), "rejected": _answered(one, answers.worst)}
            scores = {"chosen_score": answers.best_score, "rejected_score": answers.worst_score}
            rows["preference", split].append({**pair, **scores, **about})
    files = {}
    for (kind, split), of_file in rows.items():
        path = out / FOLDERS[kind] / f"{name}_{kind}_{split}.parquet"
        if of_file:
            write_rows(path, of_file)
            files[path] = len(of_file)
        else:
            path.unlink(missing_ok=True)
    return files


def has_all_answers(path: Path, documents: Sequence[Document], samples: int) -> bool:
    """Whether the file of predictions has all answers to the documents."""
    present = {(row["id"], row["sample"]) for row in _read_lines(path)} if path.is_file() else set()
    return present == {(one.name, sample) for one in documents for sample in range(samples)}


def _prompt_rows(documents: Sequence[Document]) -> list[dict[str, Any]]:
    return [{"document": one.name, "prompt": one.messages, "completion": one.answer} for one in documents]


def _read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def _answered(document: Document, answer: str) -> list[Message]:
    return [*document.messages, {"role": "assistant", "content": answer}]


def _texts(folder: Path, key: str) -> dict[str, str]:
    """Name in the folder -> text of each file."""
    if not folder.is_dir():
        raise InputError(f"{key}: {folder} is not a folder; give one with text files")
    names = sorted(file.relative_to(folder) for file in folder.rglob("*") if file.is_file())
    visible = [name for name in names if not any(part.startswith(".") for part in name.parts)]
    if not visible:
        raise InputError(f"{key}: {folder} has no files; add text files")
    return {name.as_posix(): _text(folder / name, key) for name in visible}


def _text(file: Path, key: str) -> str:
    try:
        text = file.read_text(encoding="utf-8-sig").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise InputError(f"{key}: {file} cannot be read ({reason}); convert it to text, or move it away") from error
    if not text:
        raise InputError(f"{key}: {file} is empty; write it, or remove it")
    return text


def _stem(name: str) -> str:
    return str(Path(name).with_suffix(""))
