"""Every command and every block of code of the tutorials and of the README runs, with a tiny model and small numbers."""

import re

import pytest

from tests.docs.walk import ROOT, blocks, commands_of, walk

TUTORIALS = sorted(file.stem for file in (ROOT / "docs/tutorials").glob("*.md") if file.stem != "index")
SMALLER = {
    "stages.rl.steps": 1,
    "steps": 1,
    "epochs": 1,
    "--train": 12,
    "--val": 4,
    "--test": 4,
    "data.held_out": 4,
    "data.max_rows": 2,
    "rollout.tokens_per_turn": 8,
    "evaluation.final_seeds.count": 4,
    "evaluation.seeds.count": 4,
    "evaluation.every": 0,
    "rollout.groups_per_step": 2,
    "experts.seeds.count": 8,
    "--step": 1,
}
QUICK = ("own_reward", "learning_or_gaming", "laptop_to_gpu", "memory_agent")


@pytest.fixture(autouse=True)
def _tiny_packaged_model(tiny_model, tmp_path, monkeypatch):
    """The packaged model is the tiny one, and the memory agent that a tutorial takes 90 minutes to train is there."""
    monkeypatch.setattr("posttrain.models.load.converted_gguf", lambda file: tiny_model)
    monkeypatch.setenv("COLUMNS", "80")
    trained = tmp_path / "runs" / "memory" / "rl"
    trained.mkdir(parents=True)
    (trained / "model").symlink_to(tiny_model)


@pytest.mark.parametrize(
    "page", [pytest.param(name, marks=() if name in QUICK else (pytest.mark.slow,)) for name in TUTORIALS]
)
@pytest.mark.timeout(900)
def test_a_tutorial_can_be_followed(page, tmp_path, monkeypatch):
    smaller = dict(SMALLER)
    if page == "memory_agent":
        smaller |= {"--train": 2, "--dev": 0, "--test": 0}
    if page == "learning_or_gaming":  # an audit needs the curve
        smaller["evaluation.every"] = 1
    said = walk(f"docs/tutorials/{page}.md", tmp_path, monkeypatch, smaller)
    if page == "sft_to_dpo":
        assert "runs/library-dpo/model" in said
        assert "exact" in said
    if page == "learning_or_gaming":
        assert "differ most" in said
        assert (tmp_path / "runs" / "gamed" / "audit" / "step_000001.json").is_file()
    if page == "images":
        assert "100 answers to 100 rows" in said
        assert len(re.findall(r"^(?:seen|rewarded) \d+ of 100$", said, re.M)) == 2
        assert len(list((tmp_path / "runs" / "rewarded" / "images").iterdir())) > 1
    if page == "own_reward":
        assert (tmp_path / "runs" / "short-python" / "metrics.jsonl").is_file()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_readme_can_be_followed(tmp_path, monkeypatch):
    """The loop, the user's environment and the user's reward, as a reader of the README alone would run them."""
    import json

    rows = [{"prompt": f"Say {n}.", "completion": f"{n}"} for n in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = [{"prompt": f"Write about a cat, {n}.", "word": "cat"} for n in range(20)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    pipeline = {"posttrain pipeline board/bandit": "posttrain pipeline board/bandit stages.rl.steps=1"}
    monkeypatch.setattr(
        "tests.docs.walk.commands_of", lambda text: [pipeline.get(line, line) for line in commands_of(text)]
    )
    walk("README.md", tmp_path, monkeypatch, {**SMALLER, "range": 1})
    assert (tmp_path / "my_model" / "config.json").is_file()
    for name in ("mine", "larger", "short"):
        assert (tmp_path / "runs" / name / "model").is_dir()


def test_every_tutorial_has_commands():
    assert len(TUTORIALS) == 9
    for name in TUTORIALS:
        shown = [text for language, _, text in blocks(f"docs/tutorials/{name}.md") if language == "console"]
        assert sum(len(commands_of(text)) for text in shown) >= 3, name
