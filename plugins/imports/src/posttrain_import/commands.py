"""Convert commands of OpenRLHF, TRL, verl and RAGEN to recipes: `posttrain import`."""

import json
import os
import re
import shlex
import textwrap
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count, pairwise
from pathlib import Path
from typing import Any

from posttrain.errors import InputError
from posttrain.recipe.compose import plain_values, typed_recipe
from posttrain.recipe.sources import Layer, dump_values, merge, read_file, required_keys
from posttrain.recipe.stages import Recipe
from posttrain_import.rows import SET, Row, count_rows, data_path
from posttrain_import.rules import Flags, Program, find, programs
from posttrain_import.shell import LONGEST, Command, read_commands

_MOST_SCRIPTS = 100
_UNREADABLE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028\u2029\ufeff\ud800-\udfff\ufffe\uffff]")
"""Control characters, which terminals interpret, and lone surrogates. YAML allows neither."""
_ORDER = [
    "name", "steps", "epochs", "seeds", "model", "data", "experts", "environment", "reward", "rollout", "engine", "credit",
    "unit_credit", "critic", "loss", "kl", "entropy", "optimizer", "rows_per_update", "learner", "evaluation", "checkpoint",
]  # fmt: skip
"""Sections of a recipe file, in this order; others follow."""
_MODELS = re.compile(r"(.+\.)?(path|normalizer)|--model|RUN")
"""Keys, options and arguments that name a model or a run."""


@dataclass(frozen=True)
class Imported:
    """The conversion of one command.

    `values`: dotted keys of the recipe. `written`: the folders that the command saves its model to, each with the run that
    replaces it (`run`: its own).
    """

    text: str
    program: Program
    rows: Sequence[Row]
    values: Mapping[str, Any] = field(default_factory=dict)
    written: Mapping[str, str] = field(default_factory=dict)

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
            text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
            if key.startswith("--"):
                words += [key] if value is True else [key, shlex.quote(text)]
            elif not key.isupper():
                words.append(shlex.quote(f"{key}={text}"))
        return " ".join(words) if self.program.command else ""

    def recipe(self) -> Recipe:
        """The typed recipe, with stand-ins for the keys that it requires. Raises InputError if a key has a value that is not
        allowed."""
        given = {key: "required:function" if key in self.required else value for key, value in self.values.items()}
        values = self._merged(given).values
        for key in filter(re.compile(r"\w+\.type").fullmatch, self.required):
            del values[key.removesuffix(".type")]  # nothing is known about its other keys
        return typed_recipe(Layer(values), self.stage)

    @property
    def required(self) -> list[str]:
        """Keys whose values the user must give."""
        return [key for key, value in self.values.items() if required_keys(value)]

    def _merged(self, values: Mapping[str, Any]) -> Layer:
        return merge([*map(read_file, self.program.files), Layer(plain_values(values))])

    def recipe_text(self) -> str:
        """The recipe as YAML, with the flag of each key beside it."""
        values = self._merged(self.values).values
        values.pop("stage", None)
        values = {key: values[key] for key in [*filter(values.__contains__, _ORDER), *values]}
        flags = {key: row.label for row in self.rows for key in row.answer.keys}
        command = [
            f"#   {line}" for line in textwrap.wrap(self.text, 110, break_long_words=False, break_on_hyphens=False)
        ]
        head = [f"# Imported from a command of {self.program.framework}:", *command, f"stage: {self.stage}"]
        return "\n".join(head + _yaml_lines(values, flags)) + "\n"

    def command(self, file: str) -> str:
        """The equivalent commands of this package."""
        before = dict.fromkeys(row.answer.before for row in self.rows if row.answer.before)
        words = [f"posttrain {self.stage} {shlex.quote(file)}", *(f"{key}=VALUE" for key in self.required)]
        return " && ".join([*before, self.replacement or " ".join(words)])


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
    return list(_connected(imported for _, imported in converted if imported is not None)), others


def _connected(commands: Iterable[Imported]) -> Iterator[Imported]:
    """The commands with a name each. Where one reads a model that an earlier one saves, it has the path of that run."""
    runs: dict[str, str] = {}
    names: set[str] = set()
    for imported in commands:
        short = imported.name[:100]  # names of files have at most 255 bytes
        name = next(one for one in chain([short], map(f"{short}-{{}}".format, count(2))) if one not in names)
        names |= {name} if imported.values else set()
        rows = [_linked(row, imported.program, runs, name if imported.values else "") for row in imported.rows]
        values = {**imported.values, **values_of(rows), "name": name} if imported.values else {}
        for path, run in imported.written.items():
            if run and _place(path):
                runs[_place(path)] = f"runs/{name}" if run == "run" else run
        yield replace(imported, rows=rows, values=values)


def _linked(row: Row, program: Program, runs: Mapping[str, str], name: str) -> Row:
    """A row of the run `name` whose models are those of the last command that saved them."""
    keys, note = dict(row.answer.keys), row.answer.note
    for key, value in row.answer.keys.items():
        path = program.reads.get(key, row.value)
        saved = [run for folder, run in runs.items() if f"{_place(path)}/".startswith(f"{folder}/")]
        if key == "name" and name:
            keys, note = keys | {key: name}, note.replace(f"runs/{value}/", f"runs/{name}/")
        elif saved and _MODELS.fullmatch(key) and isinstance(value, str):
            keys[key] = f"{saved[-1]}/model" if value == path else re.sub(r"^runs/[^/]+", saved[-1], value)
            note = note or "the model of an earlier command"
    outcome = row.answer.outcome if keys == row.answer.keys else "converted"
    return replace(row, answer=replace(row.answer, outcome=outcome, keys=keys, note=note))


def _place(path: str) -> str:
    """A path without what depends on the working directory or names the last weights of a run."""
    return re.sub(r"^(\.{0,2}/)+|(/final(_model)?)?/*$", "", path)


def _converted(
    source: str,
    variables: Mapping[str, str],
    rows: int | None,
    callers: tuple[Path, ...],
    scripts_before: Iterator[int],
) -> Iterator[tuple[Command, Imported | None]]:
    """Each command of `source` and of the scripts that it runs, with its conversion. `callers`: the scripts that run it."""
    if next(scripts_before) > _MOST_SCRIPTS:
        raise InputError(f"{callers[0]} runs more than {_MOST_SCRIPTS} scripts; import the one that trains")
    text = _text_of(source)
    if odd := _UNREADABLE.search(text):
        raise InputError(f"the command has the character {odd[0]!r}, which a recipe cannot have; remove it")
    for command in read_commands(text, variables):
        imported, words = import_command(command, rows, variables), command.words
        runs_script = len(words) == 2 and words[0] in ("bash", "sh", "source") and os.path.isfile(words[1])
        if imported is not None or not runs_script:
            yield command, imported
            continue
        file = Path(words[1]).resolve()
        if file in callers:
            raise InputError(f"{words[1]} runs itself, directly or through another script; remove that command")
        yield from _converted(words[1], {**variables, **command.assignments}, rows, (*callers, file), scripts_before)


def import_command(command: Command, rows: int | None, variables: Mapping[str, str]) -> Imported | None:
    """The conversion of one command. None if it belongs to none of the frameworks."""
    for position, word in enumerate(command.words if "install" not in command.words[:4] else ()):
        if match := find(word, command.words[position + 1 :]):
            break
    else:
        return None
    program, taken, named = match
    words, text = list(command.words[position + 1 + taken :]), shlex.join(command.words)
    options, launcher = _options(command.words[:position]), programs()["launcher"]
    flags: list[tuple[str, str | None]] = list(named.items())
    assigned = {**variables, **command.assignments}
    flags += [(name, value) for name, value in assigned.items() if name.isupper() and name in program.rules]
    if "num_processes" in program.rules:  # the number of processes is part of the arithmetic
        processes = [option for option in options if launcher.name_of(option[0]) == "num_processes"]
        flags += [("num_processes", value) for _, value in processes]
        options = [option for option in options if option not in processes]
    flags += _flags(words, program)
    for value in (value for name, value in flags if value and program.is_secret(name, value)):
        text = text.replace(shlex.quote(value), "...")
    values = {program.name_of(name): SET if value is None else value for name, value in flags}
    if rows is None and program.rows_of:
        # Those of local files, at most the limit of the command; without files, the limit.
        paths = data_path(values.get(program.rows_of, ""))
        counts = [count_rows(path) for path in ([paths] if isinstance(paths, str) else paths)]
        limit = [int(float(values[program.limit]))] if values.get(program.limit) else []
        rows = min(([sum(filter(None, counts))] if counts and None not in counts else []) + limit, default=None)
    of_scripts = program.command or program.positions  # the devices are those of their recipes
    table = [
        *programs()["environment"].table([item for item in command.assignments.items() if item not in flags]),
        *(programs()["script launcher"] if of_scripts else launcher).table(options),
        *program.table(flags, rows),
    ]
    given = Flags(program, values, rows)
    written = {given.evaluate(path): given.note(run) for path, run in program.writes.items()}
    if program.command:
        return Imported(text, program, table, {}, written)
    keys = {"name": f"{program.framework.lower()}-{program.stage}", **values_of(table)}
    return Imported(text, program, table, keys, written)


def _options(words: Sequence[str]) -> list[tuple[str, str | None]]:
    """The options of a launcher, such as `accelerate launch --config_file FILE`. An option without a value has None."""
    options: list[tuple[str, str | None]] = []
    for word, following in pairwise([*words, "--"]):
        flag, equals, value = word.partition("=")
        if flag.startswith("--") and flag not in ("--", "--module"):
            options.append((flag[2:], value if equals else None if following.startswith("-") else following))
    return options


def _flags(words: list[str], program: Program) -> list[tuple[str, str | None]]:
    """(flag, value) of `--flag value`, `--flag=value` and `key=value` words, of the file that `config` names, and of
    positional words; a flag without a value has None."""
    if program.positions:
        if len(words) > len(program.positions):
            raise InputError(f"the script has {len(program.positions)} arguments, not {len(words)}; remove the others")
        return list(zip(program.positions, words, strict=False))
    flags: list[tuple[str, str | None]] = []
    configured: list[tuple[str, str | None]] = []
    remaining = deque(words)
    while remaining:
        word = remaining.popleft()
        if not program.prefix:
            key, equals, value = word.lstrip("+~").partition("=")
            if word.startswith("--"):
                value = remaining.popleft() if not equals and remaining else value
            elif not equals:
                raise InputError(f"{word} is not KEY=VALUE; remove it")
            flags.append((key, value))
            continue
        if not word.startswith("--"):
            raise InputError(f"{word} belongs to no flag; remove it, or quote the value that it is part of")
        flag, equals, value = word[2:].partition("=")
        values = [value] if equals else []
        while not equals and remaining and not remaining[0].startswith("--"):
            values.append(remaining.popleft())
        name = program.name_of(flag)
        if name in program.rules and len(values) > 1 and name not in program.several:
            raise InputError(f"--{flag} has the values {' '.join(values)}; it takes one, so quote it, or keep one")
        if name in program.rules and not any(values) and (values or name not in program.switches):
            raise InputError(f"--{flag} has no value; give it one, or remove it")
        if name == program.config:
            for key, setting in read_file(" ".join(values)).values.items():
                configured.append((key, " ".join(map(str, setting)) if isinstance(setting, list) else str(setting)))
        else:
            flags.append((flag, " ".join(values) if values else None))
    return configured + flags


def values_of(rows: Iterable[Row]) -> dict[str, Any]:
    """Dotted keys of the recipe with their values. Raises InputError if two flags set a key to different values."""
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for row in rows:
        for key, value in row.answer.keys.items():
            if key in values and required_keys(value):
                continue
            clash = key in values and values[key] != value and not required_keys(values[key])
            if clash and not isinstance(value, list):
                first = f"{origin[key]} sets {key} to {values[key]}"
                raise InputError(f"{first} and {row.flag} to {value}; remove one of the flags")
            if key in values and isinstance(value, list) and isinstance(values[key], list):
                value = [*values[key], *(item for item in value if item not in values[key])]
            values[key], origin[key] = value, row.flag
    return values


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
        blocks = re.findall(r"^```(\w*)[^\n]*\n(.*?)^[ \t]*```", text, re.M | re.S)
        shells = ("", "bash", "sh", "shell", "console")
        text = "\n".join(
            block for language, block in blocks if language in shells and "── " not in block
        )  # no folder trees
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
