"""Convert commands of OpenRLHF, TRL, verl and RAGEN to recipes: `posttrain import`."""

import json
import os
import re
import shlex
import textwrap
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise
from pathlib import Path
from typing import Any

from posttrain.errors import InputError
from posttrain.recipe.compose import typed_recipe
from posttrain.recipe.sources import Layer, dump_values, merge, read_file
from posttrain.recipe.stages import Recipe
from posttrain_import.rows import Answer, Row, count_rows, data_path
from posttrain_import.rules import Program, find, programs
from posttrain_import.shell import LONGEST, Command, read_commands

_MOST_SCRIPTS = 100
_UNREADABLE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028\u2029\ufeff\ud800-\udfff\ufffe\uffff]")
"""Control characters, which terminals interpret, and lone surrogates. YAML allows neither."""
_ORDER = [
    "name", "steps", "epochs", "seeds", "model", "data", "experts", "environment", "reward", "rollout", "engine", "credit",
    "unit_credit", "critic", "loss", "kl", "entropy", "optimizer", "rows_per_update", "learner", "evaluation", "checkpoint",
]  # fmt: skip
"""Sections of a recipe file, in this order; others follow."""


@dataclass(frozen=True)
class Imported:
    """The conversion of one command. `values`: nested keys of the recipe."""

    text: str
    program: Program
    rows: Sequence[Row]
    values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def stage(self) -> str:
        return self.program.stage

    @property
    def name(self) -> str:
        return str(self.values.get("name", self.stage))

    @property
    def unknown(self) -> list[Row]:
        return [row for row in self.rows if row.answer.outcome == "unknown"]

    @property
    def missing(self) -> list[Row]:
        """Rows of the command that the recipe cannot express."""
        return [row for row in self.rows if row.answer.outcome == "not supported"]

    @property
    def replacement(self) -> str:
        """The equivalent command of this package, if it needs no recipe: options, arguments and recipe keys of the rows."""
        values = {key: value for row in self.rows for key, value in row.answer.keys.items()}
        words = [self.program.command, *(shlex.quote(str(value)) for key, value in values.items() if key.isupper())]
        for key, value in values.items():
            text = str(value).lower() if isinstance(value, bool) else str(value)
            if key.startswith("--"):
                words += [key, shlex.quote(text)] if text else [key]
            elif not key.isupper():
                words.append(shlex.quote(f"{key}={text}"))
        return " ".join(words) if self.program.command else ""

    def recipe(self) -> Recipe:
        """The typed recipe. Raises InputError if a key has a value that is not allowed."""
        return typed_recipe(self._merged(), self.stage)

    def _merged(self) -> Layer:
        return merge([*map(read_file, self.program.files), Layer(dict(self.values))])

    def recipe_text(self) -> str:
        """The recipe as YAML, with the flag of each key beside it."""
        values = self._merged().values
        values.pop("stage", None)
        values = {key: values[key] for key in [*filter(values.__contains__, _ORDER), *values]}
        flags = {key: row.label for row in self.rows for key in row.answer.keys}
        command = [
            f"#   {line}" for line in textwrap.wrap(self.text, 110, break_long_words=False, break_on_hyphens=False)
        ]
        head = [f"# Imported from a command of {self.program.framework}:", *command, f"stage: {self.stage}"]
        return "\n".join(head + _yaml_lines(values, flags)) + "\n"

    def command(self, file: str) -> str:
        """The equivalent command of this package."""
        return self.replacement or f"posttrain {self.stage} {shlex.quote(file)}"


def import_commands(
    source: str, variables: Mapping[str, str], rows: int | None = None
) -> tuple[list[Imported], list[Command]]:
    """The converted commands of `source` (a command line or a file), and the commands that were not converted.

    `variables`: values of shell variables that the text does not set. `rows`: number of training rows or prompts, if
    the file is not on this machine.

    Raises:
        InputError: the text cannot be read, a flag has a value that is not allowed, or there is no command to import.
    """
    converted = list(_converted(source, variables, rows, (), count()))
    others = [command for command, imported in converted if imported is None]
    if len(others) == len(converted):
        shown = " ".join(others[0].words)[:100] if others else source[:100]
        raise InputError(
            f"{shown!r} is not a command that the importer supports; it reads openrlhf.cli.train_*, trl and examples/scripts of TRL, "
            "verl.trainer.main_ppo, and train.sh or train.py of RAGEN"
        )
    return [imported for _, imported in converted if imported is not None], others


def _converted(
    source: str,
    variables: Mapping[str, str],
    rows: int | None,
    callers: tuple[Path, ...],
    scripts_before: Iterator[int],
) -> Iterator[tuple[Command, Imported | None]]:
    """Each command of `source` and of the scripts that it runs, with its conversion. `callers`: the scripts that run it."""
    if next(scripts_before) > _MOST_SCRIPTS:
        raise InputError(
            f"{callers[0]} runs more than {_MOST_SCRIPTS} scripts; import the one with the training command"
        )
    text = _text_of(source)
    if odd := _UNREADABLE.search(text):
        raise InputError(f"the command has the character {odd[0]!r}, which a recipe cannot have; remove it")
    for command in read_commands(text, variables):
        imported, words = import_command(command, rows), command.words
        runs_script = len(words) == 2 and words[0] in ("bash", "sh", "source") and os.path.isfile(words[1])
        if imported is not None or not runs_script:
            yield command, imported
            continue
        file = Path(words[1]).resolve()
        if file in callers:
            raise InputError(
                f"{words[1]} runs itself, directly or through another script; remove the command `{' '.join(words)}`"
            )
        yield from _converted(words[1], {**variables, **command.assignments}, rows, (*callers, file), scripts_before)


def import_command(command: Command, rows: int | None = None) -> Imported | None:
    """The conversion of one command. None if it belongs to none of the frameworks."""
    for position, word in enumerate(command.words):
        if match := find(word, command.words[position + 1 :]):
            break
    else:
        return None
    program, taken, named = match
    words, text = list(command.words[position + 1 + taken :]), shlex.join(command.words)
    options, launcher = _options(command.words[:position]), programs()["launcher"]
    flags = list(named.items())
    if "num_processes" in program.rules:  # the number of processes is part of the arithmetic
        counts = [option for option in options if launcher.name_of(option[0]) == "num_processes"]
        flags += [("num_processes", value) for _, value in counts]
        options = [option for option in options if option not in counts]
    flags += _flags(words, program)
    for value in (value for name, value in flags if program.is_secret(name, value)):
        text = text.replace(shlex.quote(value), "...")
    values = {program.name_of(name): value for name, value in flags}
    if rows is None and program.rows_of:
        rows = _rows_of(values, program)
    of_scripts = program.command or program.files  # the devices are those of their recipes
    table = [
        *programs()["environment"].table(list(command.assignments.items())),
        *(programs()["script launcher"] if of_scripts else launcher).table(options),
        *program.table(flags, rows),
    ]
    if program.command:
        return Imported(text, program, table)
    keys = values_of(table)
    if not program.files:
        needed = {"model.path": "model"}
        needed |= {"environment.type": "environment"} if program.stage == "rl" else {}
        needed |= {"data.train": "data"} if program.stage in ("dpo", "reward") else {}
        for key, name in needed.items():
            answer = Answer("not supported", {}, f"the command does not name it: set `{key}`")
            table += [Row(name, "in the script", answer, True)] if key not in keys else []
    keys.setdefault("name", f"{program.framework.lower()}-{program.stage}")
    return Imported(text, program, table, _nested(keys))


def _options(words: Sequence[str]) -> list[tuple[str, str]]:
    """The options of a launcher, such as `accelerate launch --config_file FILE`."""
    options = []
    for word, following in pairwise([*words, ""]):
        flag, equals, value = word.partition("=")
        if flag.startswith("--") and flag not in ("--", "--module"):
            options.append((flag[2:], value if equals else following if not following.startswith("-") else ""))
    return options


def _flags(words: list[str], program: Program) -> list[tuple[str, str]]:
    """(flag, value) of `--flag value`, `--flag=value` and `key=value` words, of the file that `config` names, and of
    positional words; a flag without a value has an empty one."""
    if program.positions:
        if len(words) > len(program.positions):
            raise InputError(
                f"the script has {len(program.positions)} arguments, and the command {len(words)}; remove the others"
            )
        return list(zip(program.positions, words, strict=False))
    flags: list[tuple[str, str]] = []
    configured: list[tuple[str, str]] = []
    remaining = deque(words)
    while remaining:
        word = remaining.popleft()
        if not program.prefix:
            key, equals, value = word.lstrip("+~").partition("=")
            if word.startswith("--"):
                value = remaining.popleft() if not equals and remaining else value
            elif not equals:
                raise InputError(f"{word} is not KEY=VALUE; remove it")
            flags.append((key, value or "null"))
            continue
        if not word.startswith("--"):
            raise InputError(f"{word} belongs to no flag; remove it, or quote the value that it is part of")
        flag, equals, value = word[2:].partition("=")
        values = [value] if equals else []
        while not equals and remaining and not remaining[0].startswith("--"):
            values.append(remaining.popleft())
        name = program.name_of(flag)
        if name in program.rules and len(values) > 1 and name not in program.several:
            raise InputError(
                f"--{flag} has the values {' '.join(values)}; it takes one, so quote it or remove the others"
            )
        if name in program.rules and not any(values) and name not in program.switches:
            raise InputError(f"--{flag} has no value; give it one, or remove it")
        if name == program.config:
            for key, setting in read_file(" ".join(values)).values.items():
                configured.append((key, " ".join(map(str, setting)) if isinstance(setting, list) else str(setting)))
        else:
            flags.append((flag, " ".join(values)))
    return configured + flags


def _rows_of(given: Mapping[str, str], program: Program) -> int | None:
    """Number of training rows: those of local files, at most the limit of the command; without files, the limit."""
    paths = data_path(given.get(program.rows_of, ""))
    counts = [count_rows(path) for path in ([paths] if isinstance(paths, str) else paths)]
    limit = [int(float(given[program.limit]))] if given.get(program.limit) else []
    total = [sum(filter(None, counts))] if counts and None not in counts else []
    return min(total + limit, default=None)


def values_of(rows: Iterable[Row]) -> dict[str, Any]:
    """Dotted keys of the recipe with their values. Raises InputError if two flags set a key to different values."""
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for row in rows:
        for key, value in row.answer.keys.items():
            if key in values and values[key] != value and not isinstance(value, list):
                raise InputError(
                    f"{origin[key]} sets {key} to {values[key]} and {row.flag} to {value}; remove one of the flags"
                )
            if key in values and isinstance(value, list) and isinstance(values[key], list):
                value = [*values[key], *(item for item in value if item not in values[key])]
            values[key], origin[key] = value, row.flag
    return values


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys as sections."""
    nested: dict[str, Any] = {}
    for key, value in values.items():
        *sections, last = key.split(".")
        inside = nested
        for section in sections:
            inside = inside.setdefault(section, {})
        inside[last] = value
    return nested


def _text_of(source: str) -> str:
    """The text of a file, or the command line itself. In a Markdown file, commands are in code blocks."""
    looks_like_a_file = "\n" not in source and len(source) < 1000 and " " not in source.strip()
    file = Path(source).expanduser()
    if not looks_like_a_file and not (len(source) < 255 and "\n" not in source and file.is_file()):
        return source
    if not os.path.isfile(file):  # false for a name that is too long
        raise InputError(f"{source}: there is no such file; name a script, or quote the whole command")
    try:
        with file.open(encoding="utf-8") as content:
            text = content.read(LONGEST + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{source} cannot be read as a text in UTF-8 ({error}); name a script") from None
    if file.suffix == ".md":
        text = "\n".join(re.findall(r"^```(?:bash|sh|shell|console)?[ \t]*\n(.*?)^[ \t]*```", text, re.M | re.S))
    return text


def _yaml_lines(values: Mapping[str, Any], flags: Mapping[str, str], place: str = "") -> list[str]:
    """Lines of YAML; each key has the flag that it comes from as a comment."""
    lines = []
    for key, value in values.items():
        path, indent = f"{place}{key}", "  " * place.count(".")
        if isinstance(value, Mapping) and value:
            lines += [f"{indent}{key}:", *_yaml_lines(value, flags, f"{path}.")]
            continue
        comment = f"  # {' '.join(flags[path].split())}" if path in flags else ""
        lines.append(f"{indent}{key}: {shown_value(value)}{comment}")
    return lines


def shown_value(value: Any) -> str:
    """A value as YAML writes it, on one line."""
    text = dump_values({"value": value}).partition(":")[2].strip()
    if isinstance(value, list | dict) or "\n" in text:
        return json.dumps(value, ensure_ascii=False)
    return text
