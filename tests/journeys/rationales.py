"""The journey of docs/migrating/openrlhf.md and docs/migrating/openrlhf_evaluation.md: from rows in the author's columns to one table of all models."""

import csv
import json
import re
import subprocess
from itertools import pairwise, product
from pathlib import Path

import pytest

from posttrain.data.files import write_rows
from posttrain.evaluation.results import read_results
from posttrain.evaluation.statistics import estimate
from posttrain.runs.metrics import read_metrics
from tests.conftest import make_tokenizer
from tests.evaluation.judge_server import serving as judging
from tests.journeys import commands, dry, place_model, place_recipes, run, with_values
from tests.rollout.chat_server import Reply, serving

TRAINING, EVALUATION = "docs/migrating/openrlhf.md", "docs/migrating/openrlhf_evaluation.md"
SIZES = {"train": 24, "val": 6, "test": 8}
STAGES = ["sft", "dpo", "reward", "ppo", "drca", "unit_reward", "unit_ppo", "unit_ppo_outcome"]
PLAYED = ["ppo", "drca", "unit_ppo", "unit_ppo_outcome"]
MODELS = ["sft", "dpo", "ppo", "claude"]
METRICS = ["bleu", "bertscore_precision", "bertscore_recall", "bertscore_f1", "perplexity_reference"]
METRICS += ["perplexity_prediction", "efficiency", "factual_accuracy", "logical_soundness"]
METRICS += ["reward"]
SMALLER = {
    "name": "rlhf",
    **{f"stages.{stage}.steps": 1 for stage in PLAYED},
    **{f"stages.{stage}.rollout.groups_per_step": 8 for stage in PLAYED},
    **{f"stages.{stage}.rollout.tokens_per_turn": 12 for stage in PLAYED},
}
"""Values of keys that the command for a small machine shows."""


def author_files(folder):
    """The nine files with the author's names and columns and no others, linked as the page says: procedures for borrowing tools."""
    number = 0
    for split, count in SIZES.items():
        chats, pairs, prompts = [], [], []
        for _ in range(count):
            number += 1
            prompt = [{"role": "user", "content": f"Write steps to lend tool {number} for {number % 5} days."}]
            good = f"A. Is tool {number} free? If YES, go to Step B. If NO, DENY.\nB. Sign it out.\n"
            good += "Rationale: free first."
            bad = f"A. Sign tool {number} out.\nRationale: none."
            chats.append({"messages": [*prompt, {"role": "assistant", "content": good}]})
            prompts.append({"context_messages": prompt})
            sides = {"chosen": good, "rejected": bad}
            pairs.append({key: [*prompt, {"role": "assistant", "content": text}] for key, text in sides.items()})
        for kind, made in {"sft/rationales_sft": chats, "preferences/rationales_preference": pairs}.items():
            write_rows(folder / f"data_processing/{kind}_{split}.parquet", made)
        write_rows(folder / f"data_processing/prompts/rationales_prompts_{split}.parquet", prompts)
    (link,) = commands(TRAINING, program="mkdir")
    subprocess.run(link, shell=True, cwd=folder, check=True)


def place_encoder(folder):
    """A tiny random RoBERTa under the name of the real one."""
    from transformers import RobertaConfig, RobertaModel

    tokenizer = make_tokenizer()
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = RobertaConfig(vocab_size=len(tokenizer), max_position_embeddings=514, pad_token_id=0, **sizes)
    for part in (RobertaModel(config), tokenizer):
        part.save_pretrained(folder / "FacebookAI/roberta-large")


def teach_to_write(model):
    """Train the model briefly on words, because greedy answers of random weights may consist of line breaks."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, policy = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    prompt = {"role": "user", "content": "Write steps to lend tool 3 for 3 days."}
    said = "A. Sign out the tool, then lend it to him. B. Ask him to bring it."
    chat = [prompt, {"role": "assistant", "content": said}]
    ids = torch.tensor([tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False)])
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    for _ in range(200):
        optimizer.zero_grad()
        policy(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    policy.save_pretrained(model)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder with the recipes, the author's files, and a tiny model under the name of the real one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ANTHROPIC_API_KEY", "of-mine")
    place_recipes(tmp_path)
    place_model(tmp_path, "Qwen/Qwen3-4B", "qwen3")
    teach_to_write(tmp_path / "Qwen/Qwen3-4B")
    author_files(tmp_path)
    return tmp_path


def lines_of(file):
    return [json.loads(line) for line in Path(file).read_text().splitlines()]


def small_pipeline():
    """The command of all stages on a small machine."""
    (command,) = [one for one in commands(TRAINING, "On a small machine") if "stages.unit_ppo_outcome.steps" in one]
    return command


def of_kind(*words):
    """The commands of the evaluation page that begin with these words."""
    return [command for command in commands(EVALUATION) if command.split()[1 : 1 + len(words)] == list(words)]


def test_the_commands_of_the_pages_resolve(folder, monkeypatch):
    said = run(dry(with_values(small_pipeline(), {"stages.sft.model.path": folder / "Qwen/Qwen3-4B"})))
    assert "stage unit_ppo_outcome: would run" in said
    monkeypatch.setenv("ANTHROPIC_API_KEY", "a-key")
    with serving(claude) as chat:
        for command in of_kind("generate"):
            values = {"model.path": folder / "Qwen/Qwen3-4B", "engine.url": chat.url}
            assert "predictions:" in run(dry(with_values(command, values)))
    predictions = folder / "evaluation/generated_data/sft.jsonl"
    predictions.parent.mkdir(parents=True)
    predictions.write_text(json.dumps({"id": 0, "prompt": "p", "prediction": "x", "reference": "y"}) + "\n")
    for command in of_kind("evaluate", "judge"):
        assert "1 requests" in run(dry(command))
    assert not (folder / "runs").exists()


def test_every_flag_of_the_document_is_in_a_table():
    text = (Path(__file__).parents[2] / EVALUATION).read_text()
    sections = re.split(r"^## ", text, flags=re.M)[1:-1]
    assert len(sections) == 5
    for section in sections:
        block = re.search(r"^```\n(.*?)^```", section, re.M | re.S)[1]
        theirs = block.split("\nposttrain ")[0]
        shown = re.findall(r"^\| `([^`]+)`", section, re.M) + re.findall(r"^\| (\d) \|", section, re.M)
        flags = re.findall(r"(--[\w-]+)", theirs)
        positions = [] if flags else [str(place) for place in range(1, len(theirs.split("\\\n")))]
        assert positions or flags
        assert set(flags) | set(positions) <= set(shown), section.splitlines()[0]


def judge(frames, number):
    """Claims for rows with a reference, else points by the number of words."""
    if "reference" in frames:
        supported = [word in frames["reference"] for word in frames["prediction"].split()[:4]] or [False]
        return {"reason": "r", "claims": [{"claim": "c", "supported": one} for one in supported]}
    return {"reason": "r", "score": 1 + len(frames["prediction"].split()) % 5}


def claude(request):
    """Anthropic's address, as documented: a token limit is required; this model rejects a temperature."""
    if "max_tokens" not in request or "temperature" in request:
        return Reply(status=400, body='{"error": {"message": "invalid request"}}')
    tool = re.search(r"tool (\d+)", request["messages"][-1]["content"])[1]
    return Reply(f"A. Is tool {tool} free? If YES, go to Step B. If NO, DENY.\nB. Give it.\nRationale: free first.")


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.figures
def test_from_the_authors_files_to_the_table(folder):
    from transformers import AutoModelForCausalLM

    # Training: every stage of the document, on the author's prompts without labels.
    run(with_values(small_pipeline(), {**SMALLER, "stages.sft.model.path": folder / "Qwen/Qwen3-4B"}))
    runs = folder / "runs/rlhf"
    for stage in STAGES:
        assert (runs / stage / "model/model.safetensors").is_file()
        assert list((runs / stage / "logs/tensorboard").glob("events.*"))
        assert list((runs / stage / "plots").glob("*.png"))
        trained = [line for line in read_metrics(runs / stage / "metrics.jsonl") if line["kind"] == "train"]
        assert [line["step"] for line in trained] == ([1] if stage in PLAYED else [1, 2, 3] if stage != "dpo" else [1])
    params = json.loads((runs / "unit_reward/normalizer/params.json").read_text())
    assert len(params["unit_reward"]["rationales_preference_val"]["peak"]["avg"]["1.5"]) == 4
    assert {"mean", "std"} <= set(json.loads((runs / "reward/model/config.json").read_text()))
    assert AutoModelForCausalLM.from_pretrained(runs / "ppo/model").config.model_type == "qwen3"

    # Batch inference and the baseline: the author's test rows, in order.
    with serving(claude) as chat:
        values = {"rollout.tokens_per_turn": 16, "engine.url": f"{chat.url}/"}
        for command in of_kind("generate"):
            run(with_values(command, values))
        assert {request["key"] for request in chat.asked} == {"Bearer of-mine"}
    for name in MODELS:
        rows = lines_of(f"evaluation/generated_data/{name}.jsonl")
        assert [row["id"] for row in rows] == list(range(SIZES["test"]))
        assert all(row["reference"].startswith("A. Is tool") for row in rows)
    tools = [row["prompt"][0]["content"].split()[5] for row in lines_of("evaluation/generated_data/claude.jsonl")]
    assert [int(b) - int(a) for a, b in pairwise(tools)] == [1] * (SIZES["test"] - 1)

    # Metrics, three judges and the reward of each model; the page shows the commands of one.
    place_encoder(folder)
    with judging(judge) as server:
        for name in MODELS:
            for command in (one for kind in ("text", "judge", "reward") for one in of_kind("evaluate", kind)):
                own = re.sub(r"(generated_data|results)/sft", rf"\1/{name}", command)
                run(with_values(own, {"judge.url": server.url, "--encoder": "FacebookAI/roberta-large"}))
    rows = lines_of("evaluation/generated_data/claude.jsonl")
    points = [1 + len(row["prediction"].split()) % 5 for row in rows]
    records = lines_of("evaluation/results/claude/efficiency.jsonl")
    assert [record["score"] for record in records] == points

    # The one table.
    (command,) = of_kind("compare")
    run(command)
    table = list(csv.DictReader(Path("evaluation/table.csv").read_text(encoding="utf-8").splitlines()))
    assert {(row["model"], row["metric"]) for row in table} == set(product(MODELS, METRICS))
    for row in table:
        found = {}
        for file in (folder / "evaluation/results" / row["model"]).glob("*.json"):
            found |= read_results(file)[0]
        value = estimate(found[row["metric"]].scores)
        assert float(row["value"]) == pytest.approx(value.value)
        assert (row["difference"] == "") == (row["model"] == "sft")
        assert int(row["n"]) <= SIZES["test"]
    bleu = {row["model"]: float(row["value"]) for row in table if row["metric"] == "bleu"}
    assert bleu["claude"] > 60 > bleu["sft"]
    judged = next(row for row in table if (row["model"], row["metric"]) == ("claude", "efficiency"))
    assert float(judged["value"]) == pytest.approx(sum(points) / len(points))
    text = Path("evaluation/table.md").read_text()
    assert all(model in text for model in MODELS)
