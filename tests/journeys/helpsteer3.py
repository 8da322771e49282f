"""The journey of docs/migrating/helpsteer3.md: from the published files to a reward model and a policy, in one command."""

import gzip
import json
from pathlib import Path

import pytest

from posttrain.runs.metrics import read_metrics
from tests.conftest import save_tiny_model
from tests.journeys import commands, dry, place_model, place_recipes, run, with_values

PAGE = "docs/migrating/helpsteer3.md"
SMALL = "On a small machine"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""A chat template with the switch of Qwen3."""
ROWS, VALIDATION = 60, 24
ENOUGH = 1_500
"""Enough rows to hold out the published numbers of rows."""
_REWARD = {"steps": 20, "rows_per_update": 4, "data.held_out": 8, "optimizer.warmup_updates": 2, "evaluation.every": 10}
_RL = {"steps": 3, "rollout.tokens_per_turn": 12, "rollout.tokens_per_episode": 160, "evaluation.every": 2}
_RL |= {"evaluation.held_out": 10, "evaluation.seeds.count": 4}
SMALLER = {f"stages.reward.{key}": value for key, value in (_REWARD | {"optimizer.learning_rate": 2e-2}).items()}
SMALLER |= {f"stages.rl.{key}": value for key, value in _RL.items()}
"""Keys of the small command with values for a tiny model and a few rows."""


def rows(start, count):
    """Rows of all kinds: the better answer names the place that was requested; some are neutral or in another language."""
    made = []
    for number in range(start, start + count):
        context = [{"role": "user", "content": f"Case {number}: which place has {number % 7} boats?"}]
        if number % 6 == 5:
            context.append({"role": "assistant", "content": "Do you mean the lake?"})
            context.append({"role": "user", "content": "Yes, the lake."})
        answers = [f"Goal, the lake with {number % 7} boats.", "Holes Holes Holes."]
        first = number % 2 == 0  # response 1 is the better one, which is a negative preference
        preference = (0 if number % 10 == 7 else 1 + number % 3) * (-1 if first else 1)
        why = f"@Response {1 if first else 2} is better than @Response {2 if first else 1}: it names the place."
        opinion = {"score": preference, "reasoning": why, "feedback1": "", "feedback2": ""}
        row = {"domain": "stem" if number % 3 else "general", "language": "german" if number % 10 == 4 else "english"}
        row |= {"context": context, "response1": answers[not first], "response2": answers[first]}
        made.append(row | {"overall_preference": preference, "individual_preference": [opinion] * 3})
    return made


def write_split(file, rows):
    """Write rows as gzipped JSON lines, the format of the published files."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(file, "wt", encoding="utf-8") as out:
        out.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def author_files(folder, count=ROWS):
    """The published files with `count` rows, and another part of the published repository, which must not be read."""
    write_split(folder / "HelpSteer3/preference/train.jsonl.gz", rows(0, count))
    write_split(folder / "HelpSteer3/preference/validation.jsonl.gz", rows(10_000, VALIDATION))
    write_split(folder / "HelpSteer3/feedback/train.jsonl.gz", [{"context": [], "feedback": ["other"]}])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder with the recipes, the published files, and a tiny model under the name of the real one."""
    monkeypatch.chdir(tmp_path)
    place_recipes(tmp_path)
    place_model(tmp_path, "Qwen/Qwen3-8B", "qwen3")
    (tmp_path / "Qwen/Qwen3-8B/chat_template.jinja").write_text(TEMPLATE)
    author_files(tmp_path)
    return tmp_path


def usable(made):
    return [row for row in made if row["language"] == "english" and row["overall_preference"]]


def read_lines(file):
    return [json.loads(line) for line in Path(file).read_text().splitlines()]


def test_the_commands_of_the_page_resolve(folder):
    author_files(folder, ENOUGH)
    shown = commands(PAGE)
    assert [command for command in shown if "pipeline.yaml data=HelpSteer3" in command and "name=" not in command]
    for command in shown:
        # The first one is the beginning of the others.
        if command.startswith("posttrain pipeline") and not any(other.startswith(f"{command} ") for other in shown):
            said = run(dry(command))
            assert f"pairs_train.jsonl: {ENOUGH:,} rows read, {len(usable(rows(0, ENOUGH))):,} to write" in said
            assert "stage rl: would run (not run yet)" in said
            assert "warning:" not in said
    assert not (folder / "runs").exists()


def test_too_few_rows_are_found_before_anything_is_trained(folder):
    said = run(dry("posttrain pipeline recipes/helpsteer3/pipeline.yaml data=HelpSteer3"), code=2)
    assert "stage reward: data.held_out: 1000 rows would leave none of the 48 usable rows" in said
    assert "stage rl: environment.prompts has 54 tasks" in said
    assert "posttrain-" not in said  # the folder that the files are written to meanwhile
    assert not (folder / "runs").exists()
    missing = dry("posttrain pipeline recipes/helpsteer3/pipeline.yaml data=nosuch")
    assert "no such file or folder" in run(missing, code=2)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.figures
def test_the_small_command_writes_the_files_of_the_author(folder):
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    tiny = save_tiny_model(folder / "tiny")
    (command,) = commands(PAGE, SMALL)
    command = with_values(command, {**SMALLER, "common.model.path": tiny, "common.model.dtype": "float32"})
    runs = folder / "runs" / "helpsteer3-small"
    said = run(f"{command} --only data") + run(f"{command} --only reward")
    assert not (runs / "rl").exists()
    said += run(f"{command} --from rl")

    # The pairs: English, not neutral, the better answer chosen.
    expected = usable(rows(0, ROWS))
    pairs = read_lines(runs / "data/pairs_train.jsonl")
    assert len(pairs) == len(expected)
    assert all(pair["chosen"][-1]["content"].startswith("Goal") for pair in pairs)
    assert [pair["margin"] for pair in pairs] == [abs(row["overall_preference"]) for row in expected]
    assert len(read_lines(runs / "data/pairs_validation.jsonl")) == len(usable(rows(10_000, VALIDATION)))
    english = [row for row in rows(0, ROWS) if row["language"] == "english"]
    prompts = read_lines(runs / "data/prompts.jsonl")
    asked = sorted(prompt["context_messages"][0]["content"] for prompt in prompts)
    assert asked == sorted(row["context"][0]["content"] for row in english)
    assert "skipped: neutral preference" in (runs / "data/report.md").read_text()

    # The reward model loads in transformers and scores chosen answers higher.
    model = AutoModelForSequenceClassification.from_pretrained(runs / "reward/model").eval()
    tokenizer = AutoTokenizer.from_pretrained(runs / "reward/model")
    assert model.config.num_labels == 1

    def score(messages):
        # The end token of the answer is the last one that is read; the template adds a line break.
        text = tokenizer.apply_chat_template(messages, tokenize=False).rstrip("\n")
        with torch.no_grad():
            return model(**tokenizer(text, add_special_tokens=False, return_tensors="pt")).logits[0, 0].item()

    held_out = read_lines(runs / "data/pairs_validation.jsonl")
    right = [score(pair["chosen"]) > score(pair["rejected"]) for pair in held_out]
    assert sum(right) / len(right) > 0.9
    report = (runs / "reward/report.md").read_text()
    assert "accuracy" in report
    assert "stem" in report
    assert "scored pairs" in said

    # The policy loads, and its training was paid by that reward model.
    assert AutoModelForCausalLM.from_pretrained(runs / "rl/model").config.vocab_size == len(tokenizer)
    trained = [line for line in read_metrics(runs / "rl/metrics.jsonl") if line["kind"] == "train"]
    assert [line["step"] for line in trained] == [1, 2, 3]
    assert all(line["kl/coefficient"] == 0.05 for line in trained)
    for stage in ("reward", "rl"):
        assert (runs / stage / "lineage.json").is_file()
        assert list((runs / stage / "plots").glob("*.png"))
    assert "| trained" in (runs / "report.md").read_text() or "after rl" in (runs / "report.md").read_text()
    assert "report: runs/helpsteer3-small/report.md" in said

    # Again: nothing is left to do. Other rows: everything follows.
    done = [f"stage {name}: finished, nothing has changed" for name in ("data", "reward", "rl")]
    assert "\n".join(done) in run(command)
    write_split(folder / "HelpSteer3/preference/train.jsonl.gz", rows(0, ROWS - 1))
    planned = run(dry(command))
    assert "stage data: would run (the data has changed)" in planned
    assert "stage reward: would run if data makes different files" in planned

    # The policy answers prompts.
    (generate,) = [command for command in commands(PAGE) if command.startswith("posttrain generate")]
    values = {"data.test": runs / "data/prompts.jsonl", "data.max_rows": 3, "rollout.tokens_per_turn": 8}
    values |= {"model.path": runs / "rl/model", "model.dtype": "float32"}
    run(with_values(generate, values))
    assert len(read_lines("answers.jsonl")) == 3
