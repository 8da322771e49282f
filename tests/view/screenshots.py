"""`make screenshots`: every page of `posttrain view` at two widths, light and dark, in build/screenshots; some in docs/figures.

Trains the runs that the pages show, unless their folder is given: `python -m tests.view.screenshots FOLDER`.
"""

import shutil
import subprocess
import sys
from pathlib import Path

from tests.view.browsing import browsed, command, served

ROOT = Path(__file__).parents[2]
OUT, PUBLISHED = ROOT / "build" / "screenshots", ROOT / "docs" / "figures"
PAGES = {
    "runs": "/",
    "run": "/run/lake",
    "episodes": "/episodes/lake?step=4",
    "group": "/group/lake?step=4&group=1",
    "compare": "/compare?run=bandit-s1&run=bandit-s2&run=lake",
    "pipeline": "/pipeline/demo",
    "play": "/play/lake",
}
SHOTS = ((1280, False), (400, True), (1280, True), (400, False))
"""Width in pixels, and whether it is dark."""
IN_DOCS = {"runs-1280-light", "run-1280-light", "group-1280-light", "run-400-dark"}
_WEIGHT = 150_000
"""Bytes of the largest picture in the pages."""

_PIPELINE = """
stage: pipeline
name: demo
common: {environment: {type: bandit}, model: {path: "made:small"}}
stages:
  - {name: sft, stage: sft, steps: 10, experts: {expert: optimal, seeds: {count: 64}}}
  - {name: rl, stage: rl, steps: 10, from: sft}
"""


def train(folder: Path) -> None:
    """The runs of the pages: a group of seeds, a game, a pipeline."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pipeline.yaml").write_text(_PIPELINE)
    shared = ["model.path=made:small", f"runs={folder}"]
    words = [
        ["rl", "environment.type=bandit", "steps=30", f"name=bandit-s{s}", f"seed={s}", *shared] for s in (1, 2, 3)
    ]
    words.append(["rl", "environment.type=frozen_lake", "steps=25", "name=lake", *shared])
    words.append(["pipeline", str(folder / "pipeline.yaml"), f"runs={folder}"])
    for one in words:
        subprocess.run(command(*one), check=True)


def open_page(page, root: str, name: str) -> None:
    """Open a page and wait until it is complete."""
    page.goto(root + PAGES[name])
    if name in ("run", "compare"):
        page.wait_for_selector("#charts[data-ready]")
    if name == "compare":
        page.wait_for_selector("#results > :not(.note)")
    if name == "play":
        page.get_by_role("button", name="Begin").click()
        page.get_by_role("button", name="Next turn").click(timeout=120_000)
        page.wait_for_selector(".tokens", timeout=120_000)
    page.wait_for_timeout(700)  # server-sent events keep the network busy, so there is no idle moment to wait for


def shoot(folder: Path) -> None:
    """Write the pictures."""
    from PIL import Image

    OUT.mkdir(parents=True, exist_ok=True)
    with served(folder) as server:
        for width, dark in SHOTS:
            with browsed(width, dark) as page:
                page.goto(server.address)
                for name in PAGES:
                    open_page(page, server.root, name)
                    label = f"{name}-{width}-{'dark' if dark else 'light'}"
                    file = OUT / f"{label}.png"
                    page.screenshot(path=file)
                    print(file)
                    if label in IN_DOCS:
                        target = PUBLISHED / f"view_{label.replace('-', '_')}.png"
                        Image.open(file).convert("RGB").quantize(64).save(target, optimize=True)
                        assert target.stat().st_size < _WEIGHT, target


if __name__ == "__main__":
    given = Path(sys.argv[1]) if len(sys.argv) > 1 else OUT / "runs"
    if len(sys.argv) == 1 and not (given / "demo" / "rl" / "results.json").exists():  # the last of them
        shutil.rmtree(given, ignore_errors=True)
        train(given)
    shoot(given)
