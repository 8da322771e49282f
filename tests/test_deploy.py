"""The files under deploy/ name what exists. What they do needs Docker."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()


def test_the_image_copies_what_exists_and_the_build_context_holds_it():
    copied = [word for line in re.findall(r"^COPY (.+) \S+$", DOCKERFILE, re.MULTILINE) for word in line.split()]
    assert copied
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert sorted(copied) == sorted(kept)
    assert all((ROOT / name).exists() for name in copied)


def test_what_the_wheel_is_built_from_is_in_the_image():
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = build["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = [
        *wheel["packages"],
        *wheel["force-include"],
        build["project"]["readme"],
        *build["project"]["license-files"],
    ]
    copied = re.findall(r"^COPY (.+) \S+$", DOCKERFILE, re.MULTILINE)
    assert {Path(name).parts[0] for name in needed} <= {word for line in copied for word in line.split()}


def test_the_extras_of_the_image_exist():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = re.findall(r"EXTRAS=([\w,]+)", DOCKERFILE)
    assert len(named) == 2  # for processors and for CUDA
    assert {extra for line in named for extra in line.split(",")} <= set(project["optional-dependencies"])


def test_the_container_does_not_run_as_root():
    assert re.findall(r"^USER (\S+)$", DOCKERFILE, re.MULTILINE) == ["1000"]
