"""What a reader of one training step has to open: files, functions and calls between files; and the size of the house.

A step of `rl`, `sft` and `dpo` is traced on a small random model with `sys.setprofile`. A *hop* is a call from a function of
one file of the package to a function of another one, counted once for each pair of functions.
"""

import argparse
import ast
import io
import json
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from harness.models import model_directory
from harness.table import show

import posttrain
from posttrain.training.trainer import Callback

SOURCE = Path(__file__).resolve().parents[1] / "src"
ROOT = SOURCE.parent
CORE = SOURCE / "posttrain"
STAGES = ("rl", "sft", "dpo")


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--stages", default=",".join(STAGES), help="stages to trace, separated by commas; '' for none")
    parser.add_argument("--files", action="store_true", help="also list the files that each step enters")
    parser.add_argument("--json", metavar="FILE", help="also write the tables there")
    return parser.parse_args()


def main() -> None:
    """Trace the stages, count the source, and print both tables."""
    chosen = options()
    check_source()
    rows = []
    for stage in [name for name in chosen.stages.split(",") if name]:
        trace = traced_step(stage)
        rows.append({"step of": stage, "files": len(trace.files), "functions": len(trace.functions)})
        rows[-1] |= {"hops": len(trace.hops), "calls between files": sum(trace.hops.values())}
        if chosen.files:
            print(f"{stage}:", *(f"{name} ({count})" for name, count in sorted(trace.files.items())), sep="\n  ")
    if rows:
        show("One training step, on a small random model", rows)
    distributions = distribution_counts()
    show("Distributions, lines of Python", distributions)
    source = source_counts()
    show("The core", [{"what": name, "count": count} for name, count in source.items()])
    if chosen.json:
        Path(chosen.json).write_text(
            json.dumps({"steps": rows, "distributions": distributions, "source": source}, indent=1) + "\n"
        )


def check_source() -> None:
    """Exit unless the imported package is the one whose files are counted: a trace of another one would be empty."""
    imported = Path(posttrain.__file__).resolve().parent
    if imported != CORE:
        sys.exit(f"posttrain is imported from {imported}, not from {CORE}: set PYTHONPATH={SOURCE}")


# -- one step -----------------------------------------------------------------------------------------------------------


class Trace(Callback):
    """Counts what the second step enters of the package. A callback of the run switches the profile function on and off."""

    def __init__(self) -> None:
        self.functions: set[CodeType] = set()
        self.hops: dict[tuple[CodeType, CodeType], int] = defaultdict(int)
        """(caller, called) -> calls, for functions of two files."""

    def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Trace from the end of the first step to the end of the second one."""
        profile = self._profile if step == 1 else None
        threading.setprofile(profile)
        sys.setprofile(profile)

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(str(CORE)):
            return
        self.functions.add(code)
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(str(CORE)):
            caller = caller.f_back
        if caller is not None and caller.f_code.co_filename != code.co_filename:
            self.hops[caller.f_code, code] += 1

    @property
    def files(self) -> dict[str, int]:
        """File of the package -> functions of it that were entered."""
        found: dict[str, int] = defaultdict(int)
        for code in self.functions:
            found[str(Path(code.co_filename).relative_to(CORE))] += 1
        return dict(found)


def traced_step(stage: str) -> Trace:
    """What the second of three steps of a small run of `stage` enters."""
    from pydantic import TypeAdapter
    from rich.console import Console

    from posttrain.recipe.stages import Recipe
    from posttrain.stages import run_stage

    trace = Trace()
    with tempfile.TemporaryDirectory() as folder:
        recipe = TypeAdapter(Recipe).validate_python(recipe_values(stage, Path(folder)))
        with redirect_stdout(io.StringIO()):
            run_stage(recipe, console=Console(file=io.StringIO()), callbacks=[trace])
    return trace


def recipe_values(stage: str, folder: Path) -> dict[str, Any]:
    """A run of three steps with the defaults of the stage, but for its sizes."""
    values: dict[str, Any] = {"stage": stage, "runs": str(folder), "model": {"path": str(model_directory("qwen3"))}}
    values["checkpoint"] = {"every": 2}
    if stage == "rl":
        held_out = {"seeds": {"start": 1_000_000, "count": 1}, "final_seeds": {"start": 2_000_000, "count": 1}}
        return values | {
            "environment": {"type": "bandit"},
            "steps": 3,
            # So that the policy learns although a random model's answers all have the same reward.
            "entropy": {"coefficient": 0.01},
            "rollout": {"groups_per_step": 2, "episodes_per_group": 2, "tokens_per_turn": 8},
            "evaluation": {"every": 0, **held_out},
        }
    rows = folder / "rows.jsonl"
    lines = [(f"Question {number}?", f"Answer {number}.", "No.") for number in range(8)]
    if stage == "sft":
        written = [{"messages": _turns(question, answer)} for question, answer, _ in lines]
    else:
        written = [
            {"prompt": _turns(question), "chosen": _reply(good), "rejected": _reply(bad)}
            for question, good, bad in lines
        ]
    rows.write_text("".join(json.dumps(row) + "\n" for row in written))
    return values | {"data": {"train": [str(rows)]}, "steps": 3, "rows_per_update": 4, "evaluation": {"every": 0}}


def _turns(question: str, answer: str | None = None) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, *(_reply(answer) if answer is not None else [])]


def _reply(answer: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": answer}]


# -- the source ---------------------------------------------------------------------------------------------------------


def distribution_counts() -> list[dict[str, Any]]:
    """Files and lines of the source and lines of the tests of each distribution, and the lines of the benchmarks."""
    plugins = sorted(folder for folder in ROOT.glob("plugins/*") if (folder / "pyproject.toml").is_file())
    folders = {"posttrain": (CORE, ROOT / "tests")} | {p.name: (p / "src", p / "tests") for p in plugins}
    rows = []
    for name, (source, tests) in folders.items():
        files = sorted(source.rglob("*.py"))
        rows.append({"what": name, "files": len(files), "lines": sum(map(_lines, files)), "tests": _lines_below(tests)})
    rows.append({"what": "all", **{key: sum(row[key] for row in rows) for key in ("files", "lines", "tests")}})
    rows.append({"what": "benchmarks", "files": None, "lines": _lines_below(ROOT / "benchmarks"), "tests": None})
    return rows


def source_counts() -> dict[str, Any]:
    """Sizes of the core: its source, its recipe, its command line, and whether packages import one another in a circle."""
    files = sorted(CORE.rglob("*.py"))
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))]
    functions = sum(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for node in nodes)
    lines = sum(map(_lines, files))
    commands = options_of_commands()
    return {
        "files": len(files),
        "lines": lines,
        "functions per 1,000 lines": round(1000 * functions / lines, 1),
        "isinstance of a recipe": sum(map(_asks_for_a_recipe, nodes)),
        "recipe keys": len(recipe_keys()),
        "commands": len(commands),
        "options": sum(map(len, commands.values())),
        "import circles": int(import_circle() != []),
    }


def import_circle() -> list[str]:
    """Packages of the core that import one another in a circle, inside functions too; empty if there is none.

    `distributed.ray` is a separate package: it runs stages, and `distributed` is below the models.
    """
    imports: dict[str, set[str]] = defaultdict(set)
    for file in CORE.rglob("*.py"):
        package = _package(file.relative_to(CORE).with_suffix("").parts)
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("posttrain."):
                imports[package] |= {_package(str(node.module).split(".")[1:])} - {package}
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def _package(parts: Sequence[str]) -> str:
    return ".".join(parts[: 2 if list(parts[:2]) == ["distributed", "ray"] else 1])


def _asks_for_a_recipe(node: ast.AST) -> bool:
    """Whether `node` is a call of `isinstance` for a class whose name ends in `Recipe`."""
    if not isinstance(node, ast.Call) or getattr(node.func, "id", "") != "isinstance" or len(node.args) != 2:
        return False
    names = {getattr(part, "id", getattr(part, "attr", "")) for part in ast.walk(node.args[1])}
    return any(name.endswith("Recipe") for name in names)


def recipe_keys() -> set[str]:
    """Dotted names of the keys of all stages, without those that only the environments of plug-ins have."""
    from posttrain.plugins import entry_points
    from posttrain.recipe.reference import keys_of
    from posttrain.recipe.stages import STAGES

    added = set(entry_points("posttrain.environments"))
    keys = [key for stage in STAGES.values() for key in keys_of(stage)]
    return {key.path for key in keys if not key.variant or not set(key.variant.split(", ")) <= added}


def options_of_commands() -> dict[str, list[str]]:
    """Every command of the core -> its options, without `--help`."""
    from typer.main import get_command

    from posttrain.cli.main import app

    found: dict[str, list[str]] = {}

    def visit(command: Any, name: str) -> None:
        for word, other in getattr(command, "commands", {}).items():  # without those of plug-ins
            visit(other, f"{name} {word}".strip())
        if not hasattr(command, "commands"):
            options = [part for part in command.params if part.param_type_name == "option"]
            found[name] = [part.opts[-1] for part in options if part.name != "help"]

    visit(get_command(app), "")
    return found


def _lines_below(folder: Path) -> int:
    return sum(map(_lines, folder.rglob("*.py")))


def _lines(file: Path) -> int:
    return len(file.read_text(encoding="utf-8").splitlines())


if __name__ == "__main__":
    main()
