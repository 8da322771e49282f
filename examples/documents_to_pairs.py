"""Preference pairs from documents: sample answers to a prompt about each, and keep the best and the worst.

`python examples/documents_to_pairs.py` runs it on a few documents that it writes itself. `posttrain dpo data.train=pairs.jsonl`
trains on the pairs. `posttrain evaluate judge answers.jsonl` writes the score of a judge for each answer, to use in place of `score`.
"""

import json
import sys
from collections import defaultdict
from pathlib import Path

import posttrain

TEMPLATE = "Summarize this rule in a few words: {document}"


def score(document: str, answer: str) -> float:
    """Words of the document in the answer, less a tenth of the answer's words."""
    words = answer.lower().split()
    return len(set(words) & set(document.lower().split())) - 0.1 * len(words)


def pairs_of(documents: dict[str, str], predictions: Path) -> list[dict]:
    """A pair of complete answers for each document that has two with different scores."""
    answers = defaultdict(list)
    for line in predictions.read_text().splitlines():
        row = json.loads(line)
        if row["stop_reason"] == "end_token" and row["prediction"].strip():
            answers[row["id"]].append((score(documents[row["id"]], row["prediction"]), row["prediction"]))
    pairs = []
    for name, scored in answers.items():
        (low, worst), (high, best) = min(scored), max(scored)
        if low < high:
            prompt = TEMPLATE.replace("{document}", documents[name])
            pairs.append({"document": name, "prompt": prompt, "chosen": best, "rejected": worst})
    return pairs


if __name__ == "__main__":
    model = sys.argv[1] if len(sys.argv) > 1 else "packaged:smollm2-135m"
    folder = Path("rules")
    folder.mkdir(exist_ok=True)
    for place in ("gate", "garden", "kitchen", "cellar"):
        (folder / f"{place}.txt").write_text(f"Whoever leaves the {place} last turns off its light and locks its door.")
    documents = {file.name: file.read_text() for file in sorted(folder.glob("*.txt"))}
    prompts = [{"document": name, "prompt": TEMPLATE.replace("{document}", text)} for name, text in documents.items()]
    Path("prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    posttrain.generate(
        name="rule_answers",
        model={"path": model},
        data={"test": "prompts.jsonl", "id": "document"},
        samples=4,
        sampling={"temperature": 1},
        rollout={"tokens_per_turn": 64},
        out="answers.jsonl",
        overwrite=True,
    )
    pairs = pairs_of(documents, Path("answers.jsonl"))
    Path("pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    print(f"pairs.jsonl: {len(pairs)} pairs of {len(documents)} documents")
