"""Which values of a recipe need trust, and which of them this user's own commands have used in the current folder.

The recipe of a run may come from somebody else, and resuming the run would execute, load, connect to and write what it
names. The marks of `recipe.base` say which keys do so.
"""

import errno
import hashlib
import json
import os
import re
import sys
import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union

from pydantic import SerializeAsAny

from posttrain.errors import InputError
from posttrain.plugins import restricted, trust_also
from posttrain.recipe.base import BaseConfig, Mark
from posttrain.recipe.components import EnvironmentRecipe, environment_class, environment_names
from posttrain.recipe.reference import sections_of, tags_of
from posttrain.recipe.registry import REGISTRIES
from posttrain.recipe.sources import Layer, texts
from posttrain.recipe.stages import STAGES

_LARGEST = 16 * 2**20
"""Bytes of a file that is not executable, above which it is no code."""


@dataclass(frozen=True)
class Use:
    """A value that needs trust. `does`: as in `Mark`."""

    key: str
    does: str
    value: Any

    @property
    def digest(self) -> str:
        """SHA-256 of the value."""
        return hashlib.sha256(json.dumps([self.does, self.value], sort_keys=True, default=str).encode()).hexdigest()

    def digest_of_files(self) -> str:
        """SHA-256 of the value, and of the files and the code in the folders that it names."""
        total, names = hashlib.sha256(self.digest.encode()), set()
        for text in texts(self.value) if self.does in ("executes", "loads") else ():
            # Folders may have `.py`, colons and spaces in their names: every end of a file's name counts. A shell has
            # more signs between words.
            for part in (text, *re.split(r"[\s'\"]+", text), *re.split(r"[\s'\"=;&|(),<>`]+", text)):
                names |= {part, *(part[: match.end()] for match in re.finditer(r"\.py", part))}
            for module in re.findall(r"-m\s*([\w.]+)", text):
                names |= {f"{module.replace('.', '/')}{end}" for end in (".py", "/__main__.py", "/__init__.py")}
        # A command may go to a folder first, and name a file in it.
        names |= {os.path.join(folder, name) for folder in filter(os.path.isdir, names) for name in names}
        for folder in map(Path, filter(os.path.isdir, sorted(names))):
            deep = "**/" if (folder / "config.json").is_file() else ""  # a model, whose files say which code is loaded
            ends = (f"{deep}*.py", "*.yaml", *(["*.json"] if deep else []))
            names |= {str(file) for end in ends for file in folder.glob(end)}
        for path in filter(os.path.isfile, sorted(names)):
            if os.path.getsize(path) <= _LARGEST or os.access(path, os.X_OK) or path.endswith(".py"):
                with open(path, "rb") as content:
                    total.update(hashlib.file_digest(content, "sha256").digest())
        return total.hexdigest()


def uses(part: Any, value: Any, key: str = "") -> Iterator[Use]:
    """What needs trust in `value`, which a recipe gives for the annotation `part`. Imports nothing that the recipe names.

    The value is that of a file, so it may be malformed, and may have the short forms of sections. Defaults need no
    trust. All keys of an environment that is neither built in nor a plug-in may be code.
    """
    origin, members = typing.get_origin(part), typing.get_args(part)
    mark = next((member for member in members[1:] if isinstance(member, Mark)), None) if origin is Annotated else None
    if mark is not None:
        if mark.needs_trust and (members[0] is not str or isinstance(value, str)):
            yield Use(key, mark.does, value)
    elif origin in (Annotated, SerializeAsAny):
        yield from uses(members[0], value, key)
    elif origin in (Union, types.UnionType):
        if not any(typing.get_origin(one) is Literal and value in typing.get_args(one) for one in members):
            for member in members:
                yield from uses(member, value, key)
    elif origin in (list, tuple):
        for number, item in enumerate(value if isinstance(value, list) else [value]):
            yield from uses(members[0], item, f"{key}.{number}" if isinstance(value, list) else key)
    elif origin is dict and isinstance(value, dict):
        for name, item in value.items():
            yield from uses(members[1], item, f"{key}.{name}")
    elif sections := _sections(part, value):
        for section in sections:
            yield from _in_section(section, value, key)
    elif part not in (bool, int, float, type(None)) and origin is not Literal:
        for name, item in ((f"{key}.{n}", v) for n, v in value.items()) if isinstance(value, dict) else [(key, value)]:
            if any(texts(item)):
                yield Use(name, "executes", item)


def _in_section(section: type[BaseConfig], value: Any, key: str) -> Iterator[Use]:
    tags = tags_of(section)
    if tags and isinstance(value, dict) and value.get("type", tags[0]) not in tags:
        return
    for name, info in section.model_fields.items():
        if name == "type" and issubclass(section, EnvironmentRecipe):
            continue
        part = Annotated[info.annotation, *info.metadata] if info.metadata else info.annotation
        if not isinstance(value, dict):  # a text in place of the section: any of its keys
            yield from uses(part, value, key) if isinstance(value, str) else ()
        elif name in value and value[name] != info.get_default(call_default_factory=True):
            beside = next((mark.beside for mark in info.metadata if isinstance(mark, Mark)), "")
            given = {name: value[name], beside: value.get(beside)} if beside else value[name]
            yield from uses(part, given, f"{key}.{name}" if key else name)


def _sections(part: Any, value: Any) -> list[type[BaseConfig]]:
    """The sections that `value` may be; empty if `part` is no section, or one whose keys are unknown."""
    name = value.get("type") if isinstance(value, dict) else None
    if part is EnvironmentRecipe:
        return [environment_class(name).Recipe] if name in environment_names() else []
    if part in REGISTRIES:
        REGISTRIES[part].find(str(name))
    return sections_of(part)


def require_trust_of_run(file: Path, values: dict[str, Any], stage: str, named: Sequence[Layer] = ()) -> None:
    """Raises InputError, which lists what the recipe `values` of a run would do, unless this user's commands have done the
    same in the current folder, with the same files. `--trust` allows everything; `named` are allowed overrides of the command.

    Args:
        file: the file with `values`; nothing is refused if it is not in a run.
        stage: the stage to run; a recipe that declares another one may have keys of both.
    """
    if not restricted() or not file.with_name("environment.json").is_file():
        return
    schemas = {STAGES[stage], STAGES.get(str(values.get("stage")), STAGES[stage])}
    used = {use.digest: use for schema in schemas for use in uses(schema, values)}
    allowed = {use.digest for layer in named for schema in schemas for use in uses(schema, layer.values)}
    remembered = _remembered()
    refused = []
    for digest, use in used.items():
        changed = digest in remembered
        if digest in allowed or (changed and use.digest_of_files() in remembered):
            continue
        value = use.value if isinstance(use.value, str) else json.dumps(use.value, default=str)
        refused.append(f"{use.key}: {value} ({use.does}{', changed since your last run' if changed else ''})")
    if refused:
        raise InputError(
            f"{file} names what your own runs have not used in this folder: {', '.join(refused)}; read it, then add --trust "
            "or repeat the key in the command; a run of yours needs this once where the folder or your home is another"
        )
    trust_also(texts([use.value for use in used.values()]))


def remember(recipe: BaseConfig) -> None:
    """Record what `recipe` uses as used by this user in the current folder, so that its run can be resumed without `--trust`.

    The digests are in `$XDG_STATE_HOME/posttrain/trusted` (`~/.local/state` by default), where no run is written.
    """
    used = list(uses(type(recipe), recipe.model_dump(mode="json")))
    if not used:
        return
    try:
        lines = {digest for use in used for digest in (use.digest, use.digest_of_files())} - _remembered()
        _ledger().parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(os.open(_ledger(), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "w") as file:
            file.write("".join(f"{line}\n" for line in sorted(lines)))
    except OSError as error:
        print(f"warning: {error.filename}: {error.strerror}; resuming this run will need --trust", file=sys.stderr)


def _remembered() -> set[str]:
    try:
        return set(_ledger().read_text().split())
    except (OSError, UnicodeDecodeError):
        return set()


def _ledger() -> Path:
    state = os.environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(state):
        state = os.path.expanduser("~/.local/state")
    if not os.path.isabs(state):  # a relative folder may come with a run of somebody else
        raise FileNotFoundError(errno.ENOENT, "the home directory is unknown", state)
    return Path(state) / "posttrain" / "trusted" / hashlib.sha256(os.fsencode(Path.cwd())).hexdigest()
