"""The house: arrows point one way, files stay short, and importing the package is light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "posttrain"
FILES = sorted(SOURCE.rglob("*.py"))
ALLOWED = {
    "recipe": set(),
    "distribution": {"recipe"},
    "runs": {"recipe", "distribution"},
    "environments": {"recipe", "data.examples", "data.problems", "data.rows"},
    "credit": {"recipe", "rollout.streams"},
    "losses": {"recipe", "credit.types"},
    "data": {"recipe"},
    "models": {"recipe", "distribution"},
    "engines": {"recipe", "models", "distribution", "rollout.streams", "runs.notices"},
    "rollout": {
        "recipe",
        "runs",
        "environments",
        "engines",
        "data",
        "credit.types",
        "credit.units",
        "models",
        "distribution",
    },
    "evaluation": {"recipe", "runs", "environments", "data", "models", "rollout"},
    "training": {
        "recipe",
        "distribution",
        "runs",
        "environments",
        "engines",
        "data",
        "models",
        "credit",
        "losses",
        "rollout",
        "evaluation",
        "cluster.launch",
    },
    "cluster": {"recipe", "runs", "distribution", "environments", "data", "models", "engines", "rollout", "training"},
    "tune": {"recipe", "runs", "training", "evaluation"},
    "reports": {"recipe", "runs", "rollout", "credit.units", "models.load", "training.table"},
}
"""Folder -> what it may import of the package besides itself and `errors` and `seeds`."""


def imports(file: Path) -> set[str]:
    """Modules of the package that `file` imports anywhere, without the leading `posttrain.`."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names = [node.module]
        found |= {name.removeprefix("posttrain.") for name in names if name.startswith("posttrain.")}
    return found


@pytest.mark.parametrize("folder", ALLOWED)
def test_arrows_point_one_way(folder):
    wrong = [
        f"{file.relative_to(SOURCE)} imports {name}"
        for file in FILES
        if file.relative_to(SOURCE).parts[0] == folder
        for name in imports(file)
        if name.split(".")[0] not in (folder, "errors", "placing", "plugins", "seeds")
        and not any(name == allowed or name.startswith(f"{allowed}.") for allowed in ALLOWED[folder])
    ]
    assert not wrong, "\n".join(wrong)


def test_files_are_short():
    lengths = {file: len(file.read_text().splitlines()) for file in [*FILES, *(ROOT / "tests").rglob("*.py")]}
    assert max(lengths.values()) <= 600, max(lengths, key=lambda file: lengths[file])
    of_source = sorted(lengths[file] for file in FILES)
    assert of_source[len(of_source) // 2] <= 150
    assert of_source[int(len(of_source) * 0.9)] <= 350


@pytest.mark.parametrize(
    "module",
    [
        "posttrain",
        "posttrain.recipe.stages",
        "posttrain.environments.sokoban",
        "posttrain.cli.main",
        "posttrain.runs.metrics",
    ],
)
def test_importing_is_light(module):
    code = f"import sys, {module}; print([m for m in ('torch', 'transformers', 'wandb', 'ray', 'vllm') if m in sys.modules])"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "[]"
