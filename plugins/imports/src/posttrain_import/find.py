"""Find the program that a command runs, and the words of its flags."""

import re
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from posttrain.errors import InputError
from posttrain.recipe.sources import read_file
from posttrain_import.programs import Program
from posttrain_import.rules import programs

PROCESSES = re.compile(r"--(?:num_processes|nproc[_-]per[_-]node|num_gpus)")
"""Options of launchers that set the number of processes."""
_SUBCOMMANDS = ("sft", "dpo", "reward", "grpo", "rloo")
"""Trainers of the command `trl`."""
_OLD_RLOO = {
    "rloo_k", "total_episodes", "num_ppo_epochs", "num_mini_batches", "local_rollout_forward_batch_size", "kl_coef", "cliprange",
    "missing_eos_penalty", "response_length", "reward_model_path",
}  # fmt: skip
"""Flags of TRL's RLOO that later versions do not have."""


class Found(NamedTuple):
    """`words`: those of the flags. `given`: flags in another form, such as those of a launcher."""

    program: Program
    words: list[str]
    given: list[tuple[str, str]] = []


@cache
def _scripts() -> tuple[dict[str, list[Program]], list[Program]]:
    """Name of a script -> the programs that it may be; and the programs whose scripts are patterns."""
    exact: dict[str, list[Program]] = {}
    patterns = []
    for program in programs().values():
        for script in program.scripts:
            exact.setdefault(script, []).append(program)
        if any("*" in script for script in program.scripts):
            patterns.append(program)
    return exact, patterns


def find(word: str, after: list[str], before: list[str]) -> Found | None:
    """The program that `word` names. `before`, `after`: the other words of the command.

    Raises:
        InputError: the word names a program of a framework that has no importer.
    """
    name = "main_ppo.py" if word == "verl.trainer.main_ppo" else Path(word).name
    if match := re.fullmatch(r"openrlhf\.cli\.(\w+)|.*openrlhf/cli/(\w+)\.py", word):
        return Found(_of_openrlhf(match[1] or match[2], word), after)
    if name == "trl" and after:
        if after[0] not in _SUBCOMMANDS:
            raise InputError(f"trl {after[0]} has no importer; those of TRL with one are {', '.join(_SUBCOMMANDS)}")
        return _of_trl(programs()[after[0]], after[1:], before)
    if name == "train.sh":
        return _of_ragen(after)
    if name == "train.py" and any("=" in one or one.startswith("--config-name") for one in after):
        return Found(_later_ragen(after), after)
    exact, patterns = _scripts()
    for program in exact.get(name) or (one for one in patterns if any(fnmatch(name, script) for script in one.scripts)):
        if all(after[place : place + 1] == [value] for place, value in program.arguments):
            return _of_trl(program, after, before) if program.framework == "TRL" else Found(program, after)
    if "examples/scripts/" in word and word.endswith(".py"):
        names = [script for program in programs().values() if program.framework == "TRL" for script in program.scripts]
        raise InputError(f"{word} has no importer; those of examples/scripts with one are {', '.join(names)}")
    return None


def _of_openrlhf(name: str, word: str) -> Program:
    known = {key: program for key, program in programs().items() if program.framework == "OpenRLHF"}
    if name not in known:
        raise InputError(f"{word} has no importer; those of openrlhf.cli with one are {', '.join(known)}")
    return known[name]


def _of_trl(program: Program, after: list[str], before: list[str]) -> Found:
    """A trainer of TRL, with the number of processes of its launcher and the flags of its `--config`."""
    given = [("num_processes", count) for count in _processes(before)]
    words, config = _config(after)
    flags = {word.partition("=")[0].lstrip("-") for word in words if word.startswith("--")}
    if program is programs()["rloo"] and flags & _OLD_RLOO:
        program = programs()["old_rloo"]
    return Found(program, words, [*given, *config])


def _processes(before: list[str]) -> Iterator[str]:
    """The number of processes that a launcher starts."""
    for word, following in pairwise([*before, ""]):
        flag, equals, value = word.partition("=")
        if PROCESSES.fullmatch(flag):
            yield value if equals else following


def _config(words: list[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """The words without `--config`, and the flags of the YAML file that it names."""
    for place, word in enumerate(words):
        option, equals, path = word.partition("=")
        if option == "--config":
            end = place + (1 if equals else 2)
            values = read_file(path or "".join(words[place + 1 : end])).values
            return words[:place] + words[end:], [(key, _text(value)) for key, value in values.items()]
    return words, []


def _text(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


_GAMES = ("sokoban", "frozenlake", "two_armed_bandit")


def _of_ragen(after: list[str]) -> Found:
    """`train.sh ENVIRONMENT KEY=VALUE ...` of the first version of RAGEN."""
    environment, rest = ("sokoban", after) if not after or "=" in after[0] else (after[0], after[1:])
    if environment not in _GAMES:
        raise InputError(
            f"the environment {environment} has no importer; those of train.sh with one are {', '.join(_GAMES)}; "
            "`posttrain env list` has all environments"
        )
    kind = next((word.partition("=")[2] for word in rest if word.startswith("rl_or_sft=")), "rl")
    if kind not in ("rl", "sft"):
        raise InputError(f"rl_or_sft={kind}; it must be rl or sft")
    return Found(programs()["ragen" if kind == "rl" else "ragen_sft"], rest, [("env", environment)])


def _later_ragen(after: list[str]) -> Program:
    """The program with the values of the file that `--config-name` names."""
    names = [following for word, following in pairwise([*after, ""]) if word == "--config-name"]
    names += [word.partition("=")[2] for word in after if word.startswith("--config-name=")]
    later = programs()["ragen_later"]
    return programs().get(names[-1], later) if names and names[-1].startswith("_") else later
