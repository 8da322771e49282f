"""The memory agent is a plug-in: its entry points load, and importing it is light."""

import ast
import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1]
PACKAGE = FOLDER / "src" / "posttrain_memory"
POINTS = tomllib.loads((FOLDER / "pyproject.toml").read_text())["project"]["entry-points"]
MAY_IMPORT = {
    "vault": set(),
    "worlds": {"vault"},
    "privacy": {"vault", "worlds"},
    "interpreter": {"vault", "privacy", "prompts"},
    "agent": {"vault", "interpreter", "privacy", "prompts", "parser", "recipe"},
    "mcp": {"agent", "vault", "interpreter", "privacy", "recipe"},
}
"""Folder -> what it may import of the package besides itself."""


@pytest.mark.parametrize("group", POINTS)
def test_entry_points_load(group):
    for name, value in POINTS[group].items():
        module, _, attribute = value.partition(":")
        found = importlib.import_module(module)
        assert not attribute or getattr(found, attribute), name


def imports(file):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("posttrain_memory."):
            yield node.module.split(".")[1]


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_arrows_point_one_way(folder):
    for file in (PACKAGE / folder).rglob("*.py"):
        assert set(imports(file)) <= MAY_IMPORT[folder] | {folder}, file


def test_importing_is_light():
    heavy = ("torch", "transformers", "mcp", "pydantic_monty", "openai")
    modules = ", ".join(f"posttrain_memory.{name}" for name in ("cli", "environment", "mcp.server"))
    code = f"import sys, {modules}; print([m for m in {heavy} if m in sys.modules])"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "[]"
