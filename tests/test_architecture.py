"""The layout of the package: dependencies point one way, files stay short, and importing is light."""

import ast
import functools
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "posttrain"
FILES = sorted(SOURCE.rglob("*.py"))
MODULES = {".".join(file.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__") for file in FILES}
LAYERS = [
    {"episode", "errors", "images", "locks", "seeds", "plugins", "loopback", "redaction", "terminal"},
    {"recipe", "runs"},
    {"data", "models", "environments", "engines", "credit", "losses", "distributed", "planning"},
    {"serving"},
    {"rollout"},
    {"training", "evaluation", "distributed.ray", "view", "figures", "publishing"},
    {"stages", "pipelines", "tune"},
    {"verbs", "result"},
    {"cli", "doctor", "posttrain"},
]
"""Packages and top-level modules, the lowest layer first. A package may import its own layer and those below.
`posttrain` is the public interface, `posttrain/__init__.py`."""
PURE = {
    "credit": {"posttrain.recipe.credit", "posttrain.recipe.metrics", "posttrain.recipe.units"},
    "losses": {"posttrain.recipe.loss", "posttrain.recipe.metrics", "posttrain.recipe.needs"},
}
"""Package -> the settings it may import besides itself, `episode`, `errors` and `seeds`."""
TYPICAL_LINES, MOST_LINES = 200, 600


def package_of(module: str) -> str:
    """The package of a module: `posttrain.distributed.ray.watch` -> `distributed.ray`."""
    names = module.split(".")[1:]
    if names[:2] == ["distributed", "ray"]:
        return "distributed.ray"
    return names[0] if names else "posttrain"


def module_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def imported(file: Path) -> list[tuple[int, str]]:
    """(line, module) of every import in `file`, those inside functions included."""
    modules = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file}:{node.lineno}: relative import"
            assert node.module
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            modules += [(node.lineno, name if name in MODULES else node.module) for name in full]
    return modules


def dependencies() -> dict[tuple[str, str], list[str]]:
    """(importing package, imported package) -> where, for imports between two packages of posttrain."""
    places = defaultdict(list)
    for file in FILES:
        package = package_of(module_of(file))
        for line, name in imported(file):
            # `from posttrain import __version__` depends on nothing: the public interface is loaded lazily.
            if name.startswith("posttrain.") and package_of(name) != package:
                places[package, package_of(name)].append(f"{file.relative_to(ROOT)}:{line} imports {name}")
    return places


def circles(edges: set[tuple[str, str]]) -> list[set[str]]:
    """The strongly connected components of more than one package."""
    after = defaultdict(set)
    for source, target in edges:
        after[source].add(target)

    def reachable(start: str) -> set[str]:
        seen, remaining = set(), [start]
        while remaining:
            fresh = after[remaining.pop()] - seen
            seen |= fresh
            remaining += fresh
        return seen

    reach = {package: reachable(package) for package in list(after)}
    components = {
        frozenset(other for other in reach if other in reach[package] and package in reach[other]) for package in reach
    }
    return [set(component) for component in components if len(component) > 1]


def test_every_package_has_a_layer_and_arrows_point_one_way():
    packages = {package_of(module_of(file)) for file in FILES}
    assert packages - set().union(*LAYERS) == set(), "add the package to LAYERS"
    level = {package: number for number, layer in enumerate(LAYERS) for package in layer}
    places = dependencies().items()
    wrong = [place for (package, other), found in places if level[other] > level[package] for place in found]
    assert not wrong, "\n".join(wrong)


def test_no_import_cycle_between_packages():
    assert circles({("a", "b"), ("b", "c"), ("c", "a"), ("c", "d")}) == [{"a", "b", "c"}]
    assert circles({("a", "b"), ("b", "c"), ("a", "c")}) == []
    places = dependencies()
    wrong = [
        f"{package} -> {other}: {place}"
        for circle in circles(set(places))
        for package, other in sorted(places)
        if {package, other} <= circle
        for place in places[package, other]
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", PURE)
def test_credit_and_losses_import_only_episodes_and_their_settings(package):
    allowed = PURE[package] | {"posttrain.episode", "posttrain.errors", "posttrain.seeds"}
    wrong = [
        f"{file.relative_to(ROOT)}:{line} imports {name}"
        for file in FILES
        if package_of(module_of(file)) == package
        for line, name in imported(file)
        if name.split(".")[0] == "posttrain" and package_of(name) != package and name not in allowed
    ]
    assert not wrong, "\n".join(wrong)


def test_environments_need_no_model_library():
    environments = [file for file in FILES if package_of(module_of(file)) == "environments"]
    wrong = [
        f"{file.relative_to(ROOT)}:{line} imports {name}"
        for file in environments
        for line, name in imported(file)
        if name.split(".")[0] in ("torch", "transformers")
    ]
    assert not wrong, "\n".join(wrong)
    assert heavy_modules("; ".join(f"import {module_of(file)}" for file in environments)) == []


def test_the_core_names_no_plugin():
    plugins = [file.parent.name for file in ROOT.glob("plugins/*/src/*/__init__.py")]
    assert set(plugins) == {"posttrain_environments", "posttrain_images", "posttrain_import", "posttrain_memory"}
    wrong = [
        f"{file.relative_to(ROOT)} names {name}"
        for file in SOURCE.rglob("*")
        if file.is_file() and file.suffix != ".pyc"
        for name in plugins
        if name in file.read_text(encoding="utf-8")
    ]
    assert not wrong, "\n".join(wrong)


def test_files_are_short():
    lengths = {file: len(file.read_text(encoding="utf-8").splitlines()) for file in FILES}
    of_tests = {file: len(file.read_text(encoding="utf-8").splitlines()) for file in (ROOT / "tests").rglob("*.py")}
    assert [f"{file}: {lines}" for file, lines in (lengths | of_tests).items() if lines > MOST_LINES] == []
    assert sorted(lengths.values())[len(lengths) // 2] <= TYPICAL_LINES


def heavy_modules(code: str) -> list[str]:
    """Which of the large libraries are loaded after `code` ran in a fresh interpreter."""
    heavy = ("torch", "transformers", "matplotlib", "wandb", "ray", "vllm")
    program = f"import sys\n{code}\nprint(*[name for name in {heavy} if name in sys.modules])"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()


def test_importing_is_light():
    modules = ("recipe.stages", "environments.sokoban", "cli.main", "cli.runs", "evaluation.summary", "rollout.store")
    modules = (*modules, *(f"runs.{name}" for name in ("directory", "metrics", "report", "tables")), "view.terminal")
    assert heavy_modules("; ".join(f"import posttrain.{module}" for module in modules)) == []


def test_one_process_imports_no_sharding():
    code = "import sys, posttrain; posttrain.Policy; print(*[name for name in sys.modules if 'fsdp' in name])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"
