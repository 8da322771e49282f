"""The examples run as a user runs them: as scripts, in an empty folder."""

import json
import re
import runpy
from pathlib import Path

import pytest

from tests.forked import run_script

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name: str, *words: str, folder: Path) -> str:
    """The output of the example."""
    code, printed = run_script(EXAMPLES / name, list(words), folder)
    assert code == 0, printed
    return printed


def test_every_example_has_a_test():
    tested = set(re.findall(r"run\(\s*\"(\w+\.py)\"", Path(__file__).read_text()))
    assert {file.name for file in EXAMPLES.glob("*.py")} == tested


@pytest.mark.slow
def test_the_loop_learns_its_task(tmp_path):
    printed = run("rl_loop.py", folder=tmp_path)
    rates = [int(rate) for rate in re.findall(r"success (\d+)%, 95% interval \[\d+%, \d+%\], n = 32", printed)]
    assert len(rates) == 2
    assert rates[1] >= rates[0] + 40


def test_custom_environment(tiny_model, tmp_path):
    printed = run("custom_environment.py", str(tiny_model), folder=tmp_path)
    assert "n = 14" in printed
    recipe = (tmp_path / "runs" / "guess" / "recipe.yaml").read_text()
    assert "custom_environment.py:Guess" in recipe


def test_custom_tools(tiny_model, tmp_path):
    printed = run("custom_tools.py", str(tiny_model), folder=tmp_path)
    assert "What is the capital of Kenya?\ntool Nairobi" in printed
    assert "n = 6" in printed
    shown = (EXAMPLES / "custom_tools.py").read_text()
    page = (EXAMPLES.parent / "docs" / "how-to" / "tools.md").read_text()
    assert shown[shown.index("class Capitals") : shown.index("\n\nif __name__")].strip() in page


def test_custom_reward_and_the_tables_of_its_run(tiny_model, tmp_path):
    printed = run("custom_reward.py", str(tiny_model), folder=tmp_path)
    assert "step 2: return" in printed
    assert re.search(r"words \d", printed)
    printed = run("analyse_run.py", "runs/short_answers", folder=tmp_path)
    assert "rollout/return" in printed
    assert "best step" in printed


def test_custom_loss(tiny_model, tmp_path):
    printed = run("custom_loss.py", str(tiny_model), folder=tmp_path)
    assert len(re.findall(r"bounded \d\.\d+", printed)) == 2


def test_sft_then_dpo(tiny_model, tmp_path):
    printed = run("sft_then_dpo.py", str(tiny_model), folder=tmp_path)
    assert "model in runs/greet_dpo/model" in printed


def test_pairs_from_documents(tiny_model, tmp_path):
    printed = run("documents_to_pairs.py", str(tiny_model), folder=tmp_path)
    names = {"gate.txt", "garden.txt", "kitchen.txt", "cellar.txt"}
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert sorted(row["id"] for row in answers) == sorted(4 * [*names])
    pairs = [json.loads(line) for line in (tmp_path / "pairs.jsonl").read_text().splitlines()]
    assert f"{len(pairs)} pairs of 4 documents" in printed
    texts = {"lock": "end_token", "the the": "end_token", "lock door": "turn_budget", "  ": "end_token"}
    lines = [{"id": "a", "prediction": text, "stop_reason": reason} for text, reason in texts.items()]
    (tmp_path / "known.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    made = runpy.run_path(str(EXAMPLES / "documents_to_pairs.py"))["pairs_of"]
    (pair,) = made({"a": "Lock the door"}, tmp_path / "known.jsonl")
    assert (pair["document"], pair["chosen"], pair["rejected"]) == ("a", "lock", "the the")
