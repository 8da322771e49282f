"""`make screenshots`: every page of `posttrain view`, and a report, at three widths, light and dark, in build/screenshots; some in docs/figures.

Trains the runs that the pages show, unless their folder is given: `python -m tests.view.screenshots FOLDER`.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.harness import made_model

from tests.view.browsing import browsed, command, served, trained

ROOT = Path(__file__).parents[2]
OUT, PUBLISHED = ROOT / "build" / "screenshots", ROOT / "docs" / "figures"
PAGES = {
    "runs": "/",
    "columns": "/?columns=state+result+optimizer.learning_rate+seed&seeds=apart",
    "run": "/run/sort-s1",
    "supervised": "/run/pairs",
    "pipeline": "/pipeline/demo",
    "episodes": "/episodes/lake?step=4",
    "group": "/group/lake?step=4&group=1",
    "compare": "/compare?run=sort-s1&run=sort-s2&run=sort-s3&run=slow-s1&run=slow-s2&run=slow-s3",
}
SHOTS = ((1280, False), (400, True), (1280, True), (400, False), (2560, False), (2560, True))
"""Width in pixels, and whether it is dark."""
IN_DOCS = {"runs-1280-light", "run-1280-light", "group-1280-light"}
_WEIGHT = 150_000
"""Bytes of the largest picture in the pages."""

_PIPELINE = """
stage: pipeline
name: demo
common: {environment: {type: bandit}, model: {path: "MODEL"}, evaluation: {sampling: {temperature: 1.0}, final_seeds: {count: 64}}}
stages:
  - {name: warm-up, stage: sft, steps: 6, experts: {expert: random, seeds: {count: 64}}}
  - {name: sft, stage: sft, steps: 10, from: warm-up, experts: {expert: optimal, seeds: {count: 64}}, optimizer: {learning_rate: 1.0e-3}}
  - {name: rl, stage: rl, steps: 10, from: warm-up, optimizer: {learning_rate: 5.0e-4}}
"""
_SHARED = ["rollout.episodes_per_group=8", "rollout.tokens_per_turn=10", "learner.updates_per_step=2"]
_SHARED += ["optimizer.warmup_updates=10", "evaluation.sampling.temperature=1.0", "evaluation.every=4"]
_SORT = ["environment.type=word_sort", "credit.type=grpo", "rollout.groups_per_step=16"]
_SORT += ["kl={coefficient: 0.02, estimator: k2}", "evaluation.seeds={start: 1000000, count: 128}"]
_SORT += ["evaluation.final_seeds={start: 2000000, count: 256}", "steps=28"]
_LAKE = ["environment={type: frozen_lake, slippery: false, max_turns: 6, observation: local}"]
_LAKE += ["rollout.tokens_per_episode=900", "rollout.groups_per_step=8", "evaluation.seeds.count=32"]
_LAKE += ["evaluation.final_seeds.count=64", "steps=12", "name=lake"]
_BROKEN = "def score(prompt, answer):\n    raise ValueError('the parser found no number in the answer')\n"


def train(folder: Path) -> None:
    """The runs of the pages: two groups of seeds, a game, a pipeline, and a run that fails."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pipeline.yaml").write_text(_PIPELINE.replace("MODEL", str(made_model.small())))
    (folder / "broken.py").write_text(_BROKEN)
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"{i} + 1 ="}) + "\n" for i in range(20)))
    task = "{type: text_task, prompts: prompts.jsonl, reward: broken.py:score}"
    runs, model = f"runs={folder}", f"model.path={made_model.small()}"
    words = [
        ["rl", model, *_SHARED, *_SORT, f"optimizer.learning_rate={rate}", f"name={name}-s{seed}", f"seed={seed}", runs]
        for name, rate in (("sort", 1e-3), ("slow", 1e-4))
        for seed in (1, 2, 3)
    ]
    words.append(["rl", model, *_SHARED, *_LAKE, "optimizer.learning_rate=0.0005", runs])
    words.append(["pipeline", str(folder / "pipeline.yaml"), runs])
    pairs = [{"prompt": f"{i} + 1?", "chosen": f"It is {i + 1}.", "rejected": f"It is {i + 2}."} for i in range(120)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    data = ["data.train=pairs.jsonl", "data.held_out=40", "epochs=4", "rows_per_update=8", "evaluation.every=4"]
    words.append(["dpo", model, *data, "name=pairs", "optimizer.learning_rate=1e-4", runs])
    for one in words:
        subprocess.run(command(*one), check=True, cwd=folder)
    failing = ["rl", model, f"environment={task}", "steps=4", "name=sums", runs]
    assert subprocess.run(command(*failing), cwd=folder).returncode == 1


def open_page(page, root: str, name: str) -> None:
    """Open a page and wait until it is complete."""
    page.goto(root + PAGES[name])
    if name in ("runs", "columns"):
        page.wait_for_selector("#list[data-unread='0']")
        page.wait_for_selector("tr[data-state=running]", timeout=120_000)
    if name in ("run", "supervised", "compare"):
        page.wait_for_selector("#charts[data-ready]")
    if name == "compare":
        page.wait_for_selector("#results > :not(.note)")
    page.wait_for_timeout(700)  # server-sent events keep the network busy, so there is no idle moment to wait for


def shoot(folder: Path) -> None:
    """Write the pictures."""
    from PIL import Image

    OUT.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder / "live", ignore_errors=True)
    for name in ("lake", "pairs"):
        subprocess.run(command("report", folder / name), check=True)
    with trained(folder, made_model.small(), steps=2000), served(folder) as server:
        for width, dark in SHOTS:
            with browsed(width, dark) as page:
                for name in ("lake", "pairs"):
                    page.goto((folder / name / "report.html").as_uri())
                    page.screenshot(
                        path=OUT / f"report-{name}-{width}-{'dark' if dark else 'light'}.png", full_page=True
                    )
                page.goto(server.address)
                for name in PAGES:
                    open_page(page, server.root, name)
                    label = f"{name}-{width}-{'dark' if dark else 'light'}"
                    file = OUT / f"{label}.png"
                    page.screenshot(path=file, full_page=width != 1280 or label not in IN_DOCS)
                    print(file)
                    if label in IN_DOCS:
                        target = PUBLISHED / f"view_{label.replace('-', '_')}.png"
                        colors = Image.open(file).convert("RGB").quantize(128, Image.Quantize.MAXCOVERAGE)
                        colors.save(target, optimize=True)
                        assert target.stat().st_size < _WEIGHT, target


if __name__ == "__main__":
    given = Path(sys.argv[1]) if len(sys.argv) > 1 else OUT / "runs"
    if len(sys.argv) == 1 and not (given / "sums" / "failure.txt").exists():  # the last of them
        shutil.rmtree(given, ignore_errors=True)
        train(given)
    shoot(given)
