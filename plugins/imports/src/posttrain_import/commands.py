"""Convert commands of OpenRLHF, TRL, verl and RAGEN to recipes: `posttrain import`."""

import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, pairwise
from pathlib import Path
from typing import Any

from posttrain.errors import InputError
from posttrain.recipe.compose import typed_recipe
from posttrain.recipe.sources import Layer, dump_values, merge, read_file
from posttrain.recipe.stages import Recipe
from posttrain_import.find import PROCESSES, find
from posttrain_import.programs import Program, nested, values_of
from posttrain_import.rows import HIDDEN, SET, Answer, Row, count_rows, data_path, literal
from posttrain_import.shell import LONGEST, Command, read_commands

_UNREADABLE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028\u2029\ufeff\ud800-\udfff\ufffe\uffff]")
"""Control characters, which terminals interpret, and lone surrogates. YAML allows neither."""
_ORDER = [
    "name", "steps", "epochs", "seeds", "model", "data", "experts", "environment", "reward", "rollout", "engine", "credit",
    "unit_credit", "critic", "loss", "kl", "entropy", "optimizer", "rows_per_update", "learner", "evaluation", "checkpoint",
]  # fmt: skip
"""Sections of a recipe file, in this order; others follow."""


@dataclass(frozen=True)
class Imported:
    """The conversion of one command.

    `values`: nested keys of the recipe of `stage`. `files`: recipes of this package that the command modifies.
    `replacement`: the equivalent command of this package, if it needs no recipe.
    """

    text: str
    framework: str
    stage: str
    rows: Sequence[Row]
    values: Mapping[str, Any] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    replacement: str = ""

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

    def recipe(self) -> Recipe:
        """The typed recipe. Raises InputError if a key has a value that is not allowed."""
        layers = [*(read_file(file) for file in self.files), Layer(dict(self.values))]
        return typed_recipe(merge(layers), self.stage)

    def recipe_text(self) -> str:
        """The recipe as YAML, with the flag of each key beside it."""
        values = merge([*(read_file(file) for file in self.files), Layer(dict(self.values))]).values
        values = {key: values[key] for key in sorted(values, key=_place)}
        flags = {key: row.label for row in self.rows for key in row.answer.keys}
        lines = [f"# Imported from a command of {self.framework}:", *_wrapped(self.text), f"stage: {self.stage}"]
        return "\n".join(lines + _yaml_lines({k: v for k, v in values.items() if k != "stage"}, flags)) + "\n"

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
    found: list[Imported] = []
    others: list[Command] = []
    for command, imported in _converted(source, variables, rows, (), count()):
        if imported is None:
            others.append(command)
        else:
            found.append(imported)
    if not found:
        shown = " ".join(others[0].words)[:100] if others else source[:100]
        raise InputError(
            f"{shown!r} is not a command that the importer supports; it reads openrlhf.cli.train_*, trl and examples/scripts of TRL, "
            "verl.trainer.main_ppo, and train.sh or train.py of RAGEN"
        )
    return found, others


_MOST_SCRIPTS = 100


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
        imported = import_command(command, rows)
        script = _script_of(command) if imported is None else None
        if script is None:
            yield command, imported
            continue
        file = Path(script).resolve()
        if file in callers:
            raise InputError(
                f"{script} runs itself, directly or through another script; remove the command `{' '.join(command.words)}`"
            )
        yield from _converted(script, {**variables, **command.assignments}, rows, (*callers, file), scripts_before)


def _script_of(command: Command) -> str | None:
    """The file of `bash FILE` without arguments, whose commands are imported; None for other commands."""
    words = command.words
    if len(words) == 2 and words[0] in ("bash", "sh", "source") and os.path.isfile(words[1]):
        return words[1]
    return None


def import_command(command: Command, rows: int | None = None) -> Imported | None:
    """The conversion of one command. None if it belongs to none of the frameworks."""
    words, text = list(command.words), shlex.join(command.words)
    for position, word in enumerate(words):
        before, after = words[:position], words[position + 1 :]
        outside = [*_environment(command.assignments), *_launcher(before)]
        if (found := find(word, after, before)) is None:
            continue
        program, given = found.program, found.given
        flags = program.positional(found.words) if program.positions else [*given, *_flags(found.words, program)]
        if program.scripts and (program.command or program.files):
            outside = [replace(row, answer=_STARTS) if row.answer.keys else row for row in outside]
        if any(name == "num_processes" for name, _ in given):  # it has a row already
            outside = [row for row in outside if not row.answer.keys]
        return _imported(text, program, flags, rows, outside)
    return None


def _environment(assignments: Mapping[str, str]) -> list[Row]:
    """Rows of the variables that are set in front of a command."""
    note = "a variable of the original's libraries"
    devices = "set it for `posttrain` too"
    return [
        Row(
            name,
            HIDDEN if _SECRET.search(name) else value,
            Answer("no effect", {}, devices if name == "CUDA_VISIBLE_DEVICES" else note),
        )
        for name, value in assignments.items()
    ]


_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD", re.I)
_MACHINES = "`hardware.processes` counts those of one machine; `hardware.ray` runs on several"
_LAUNCHER = {
    "--config_file": "it is not read: set `hardware.processes` to the devices that it names",
    "--include": "set CUDA_VISIBLE_DEVICES, and `hardware.processes` to the number of devices",
    "--exclude": "set CUDA_VISIBLE_DEVICES, and `hardware.processes` to the number of devices",
    "--hostfile": _MACHINES,
    "--nnodes": _MACHINES,
    "--num_nodes": _MACHINES,
    "--num_machines": _MACHINES,
}
"""Options of launchers that change the devices of the run, with what to do instead."""


_STARTS = Answer("no effect", {}, "an option of the launcher")


def _launcher(before: list[str]) -> list[Row]:
    """Rows of the options of a launcher, such as `accelerate launch --config_file FILE`."""
    rows = []
    for word, following in pairwise([*before, ""]):
        flag, equals, value = word.partition("=")
        if not flag.startswith("--") or flag in ("--", "--module"):
            continue
        value = value if equals else following if not following.startswith("-") else SET
        remedy = _LAUNCHER.get(flag.replace("-", "_").replace("__", "--", 1))
        if PROCESSES.fullmatch(flag):
            answer = Answer("equal", {"hardware.processes": literal(value)})
        elif remedy is not None and value != "1":
            answer = Answer("not supported", {}, remedy)
        else:
            answer = _STARTS
        rows.append(Row(flag, value, answer))
    return rows


def _flags(words: list[str], program: Program) -> list[tuple[str, str]]:
    """(flag, value) of `--flag value`, `--flag=value` and `key=value` words; a flag without a value has an empty one."""
    found: list[tuple[str, str]] = []
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if not program.prefix:
            key, equals, value = word.lstrip("+~").partition("=")
            if word.startswith("--"):
                value = words[position] if not equals and position < len(words) else value
                position += not equals
            elif not equals:
                raise InputError(f"{word} is not KEY=VALUE; remove it")
            found.append((key, value if value else "null"))
            continue
        if not word.startswith("--"):
            raise InputError(f"{word} belongs to no flag; remove it, or quote the value that it is part of")
        flag, equals, value = word[2:].partition("=")
        values = [value] if equals else []
        while not equals and position < len(words) and not words[position].startswith("--"):
            values.append(words[position])
            position += 1
        rule = program.rules.get(program.name_of(flag))
        if rule is not None and len(values) > 1 and not rule.many:
            raise InputError(
                f"--{flag} has the values {' '.join(values)}; it takes one, so quote it or remove the others"
            )
        if rule is not None and not any(values) and not rule.switch:
            raise InputError(f"--{flag} has no value; give it one, or remove it")
        found.append((flag, " ".join(values)))
    return found


def _imported(
    text: str,
    program: Program,
    flags: list[tuple[str, str]],
    rows: int | None,
    outside: Sequence[Row] = (),
) -> Imported:
    for value in (value for name, value in flags if program.is_secret(name, value)):
        text = text.replace(shlex.quote(value), HIDDEN)
    given = {program.name_of(name): value for name, value in flags}
    if rows is None and program.rows_of:
        rows = _rows_of(given, program)
    table = [*outside, *program.table(flags, rows)]
    if program.command:
        return Imported(text, program.framework, program.stage, table, replacement=program.replacement(table))
    values = values_of(table)
    if not program.files:
        table += [row for key, row in _required(program.stage).items() if key not in values]
    values.setdefault("name", f"{program.framework.lower()}-{program.stage}")
    return Imported(text, program.framework, program.stage, table, nested(values), program.files)


def _required(stage: str) -> dict[str, Row]:
    """Keys that the experiment depends on -> the row that says that the command does not set them."""
    keys = {"model.path": "model"}
    keys |= {"environment.type": "environment"} if stage == "rl" else {}
    keys |= {"data.train": "data"} if stage in ("dpo", "reward") else {}
    answer = {key: Answer("not supported", {}, f"the command does not name it: set `{key}`") for key in keys}
    return {key: Row(name, "in the script", answer[key], True) for key, name in keys.items()}


def _rows_of(given: Mapping[str, str], program: Program) -> int | None:
    """Number of training rows: those of local files, at most the limit of the command; without files, the limit."""
    paths = data_path(given.get(program.rows_of, ""))
    counts = [count_rows(path) for path in ([paths] if isinstance(paths, str) else paths)]
    limit = int(float(given[program.limit])) if given.get(program.limit) else None
    if counts and all(count is not None for count in counts):
        total = sum(count for count in counts if count is not None)
        return min(total, limit) if limit is not None else total
    return limit


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


def _place(key: str) -> int:
    """The sort key of a section in a recipe file."""
    return _ORDER.index(key) if key in _ORDER else len(_ORDER)


def _wrapped(text: str, width: int = 110) -> list[str]:
    """The command as comment lines, including each line of a quoted text."""
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) > width and lines[-1]:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return [f"#   {line}" for line in lines]


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
