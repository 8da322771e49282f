"""Small preference and supervised data for whole runs."""

import json
from pathlib import Path

WORDS = ["Up", "Down", "Left", "Right", "Goal", "Holes", "dragon", "phoenix", "row", "column"]


def pair_rows(count: int, start: int = 0) -> list[dict]:
    """The better answer repeats the requested word; the worse one has others."""
    rows = []
    for number in range(start, start + count):
        word, other = WORDS[number % 10], WORDS[(number * 7 + 3) % 10]
        prompt = {"role": "user", "content": f"Task {number}: say {word}."}
        good = " ".join([word] * (1 + number % 4))
        bad = " ".join([other, WORDS[(number * 3 + 1) % 10]] * (1 + number % 3))
        chosen, rejected = ([prompt, {"role": "assistant", "content": text}] for text in (good, bad))
        row = {"chosen": chosen, "rejected": rejected, "margin": number % 3}
        rows.append(row | {"domain": "even" if number % 2 == 0 else "odd"})
    return rows


def write_jsonl(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def unpaired_rows(count: int) -> list[dict]:
    """The two answers of each pair as separate rows."""
    return [
        {"prompt": row[side][:1], "completion": row[side][1:], "label": side == "chosen", "domain": row["domain"]}
        for row in pair_rows(count)
        for side in ("chosen", "rejected")
    ]


def recipe_values(stage: str, tiny: Path, folder: Path, **changes) -> dict:
    """A run of a stage on small data, with everything that has state."""
    train, validation = pair_rows(26), pair_rows(8, 100)
    if stage == "sft":
        rows = [{"messages": row["chosen"], "domain": row["domain"]} for row in pair_rows(34)]
        train, validation = rows[:26], rows[26:]
    values: dict = {"stage": stage, "name": "small", "runs": str(folder), "model": {"path": str(tiny), "threads": 1}}
    values["data"] = {"train": write_jsonl(folder / "train.jsonl", train), "max_tokens": 200}
    values["data"]["validation"] = write_jsonl(folder / "validation.jsonl", validation)
    values["data"]["cache"] = str(folder / "cache" / "tokens")
    values |= {"epochs": 2, "rows_per_update": 8, "learner": {"tokens_per_batch": 500}, "evaluation": {"every": 3}}
    values["optimizer"] = {"learning_rate": 3e-3, "weight_decay": 0.1, "schedule": "cosine", "warmup_updates": 2}
    values["checkpoint"] = {"every": 1, "keep": 2, "keep_state": "always"}
    return values | changes
