"""The wheels: they hold their recipes and the examples, and work in an empty folder without a checkout."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.cli.test_extras import PACKAGES

ROOT = Path(__file__).parents[2]
MONTY = Path(sys.executable).with_name("monty")


def done(*command, folder, **variables):
    """The standard output of a command that has to succeed, in `folder` and without this checkout on the path."""
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    found = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env=kept | {"COLUMNS": "200", "OMP_NUM_THREADS": "1"} | variables,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The Python of an environment with all wheels, which sees the other packages of this environment."""
    pytest.importorskip("hatchling", reason="needs the package hatchling: pip install 'posttrain[dev]'")
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    places = [ROOT, *(file.parent for file in ROOT.glob("plugins/*/pyproject.toml"))]
    done(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, *places, folder=folder)
    wheels = list(folder.glob("posttrain*.whl"))
    assert len(wheels) == len(places)
    done(sys.executable, "-m", "venv", "--without-pip", folder / "venv", folder=folder)
    python = folder / "venv" / "bin" / "python"
    done(*pip, "--python", python, "install", "--no-deps", "--no-index", *wheels, folder=folder)
    (packages,) = (folder / "venv" / "lib").glob("python*/site-packages")
    # The packages of this environment come after the wheel's, so `posttrain` is the wheel's.
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


@pytest.mark.slow
def test_the_wheel_contains_the_recipes_and_its_extras(installed, tmp_path):
    command = installed.with_name("posttrain")
    where = done(installed, "-c", "import posttrain; print(posttrain.__file__)", folder=tmp_path)
    assert where.startswith(str(installed.parents[1]))
    listed = done(command, "recipe", "list", folder=tmp_path)
    for file in (ROOT / "recipes").rglob("*.yaml"):
        assert file.relative_to(ROOT / "recipes").with_suffix("").as_posix() in listed
    for name in ("memory/gspo", "board/tools", "results/rationales"):
        assert name in listed
    assert "frozen_lake" in done(command, "pipeline", "demo/pipeline", "--dry-run", folder=tmp_path)
    small = ("model.path=packaged:smollm2-135m", "--dry-run")
    assert "ragen-bandit" in done(command, "rl", "ragen/bandit", *small, folder=tmp_path)
    assert "ragen-bandit" in done(command, "rl", "--recipe", "ragen/bandit", *small, folder=tmp_path)
    assert "grpo" in done(command, "import", "trl grpo --max_steps 3", "--markdown", folder=tmp_path)
    for name in ("memory", "json_answer"):
        # The interpreter of the memory agent is a program beside the Python of the other packages.
        found = done(command, "env", "validate", name, "--seeds", "2", folder=tmp_path, MONTY_BIN=str(MONTY))
        assert f"{name}: valid on 2 seeds" in found
    assert not list(tmp_path.iterdir())
    ask = "from posttrain.plugins import pip_command as c; import sys; print(*map(c, sys.argv[1:]), sep='\\n')"
    told = done(installed, "-c", ask, *PACKAGES.values(), folder=tmp_path)
    assert told.splitlines() == [f"pip install 'posttrain[{extra}]'" for extra in PACKAGES]


@pytest.mark.slow
def test_the_core_names_the_extras_of_what_it_lacks(installed, tmp_path):
    """In an environment with the core's wheel and other packages, but none of the plug-ins."""
    alone = tmp_path / "alone"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    done(sys.executable, "-m", "venv", "--without-pip", alone, folder=tmp_path)
    (wheel,) = installed.parents[2].glob("posttrain-*.whl")
    done(*pip, "--python", alone / "bin/python", "install", "--no-deps", "--no-index", wheel, folder=tmp_path)
    (packages,) = (alone / "lib").glob("python*/site-packages")
    others = tmp_path / "others"
    others.mkdir()
    for place in Path(sysconfig.get_path("purelib")).iterdir():
        if "posttrain" not in place.name:
            (others / place.name).symlink_to(place)
    (packages / "others.pth").write_text(f"{others}\n")
    for words in (["env", "validate", "memory"], ["import", "trl sft"], ["pipeline", "memory/board"]):
        run = subprocess.run(
            [alone / "bin" / "posttrain", *words], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert run.returncode == 2
        assert "adds posttrain-environments, posttrain-images, posttrain-import, posttrain-memory" in run.stderr


@pytest.mark.slow
@pytest.mark.parametrize("example", ["rl_loop.py", "custom_reward.py"])
def test_examples_of_the_wheel_run(example, installed, tmp_path):
    ask = "from posttrain.recipe.catalogue import shipped; print(shipped('examples'))"
    folder = Path(done(installed, "-c", ask, folder=tmp_path).strip())
    assert folder.is_relative_to(installed.parents[1])
    done(installed, folder / example, folder=tmp_path)
