"""Reward models of short procedures: pairs are the policy's own answers, ranked by the verifier."""

from itertools import combinations
from pathlib import Path
from typing import Any

import posttrain
from harness.ranked_pairs import REWARD, opened, write_in
from harness.table import read_lines
from posttrain_environments.rationales.policies import Policy
from posttrain_environments.rationales.verifier import verify

Keys = dict[str, Any]

ANSWERS, MODELLED, HELD_OUT = 4, 3000, 200
"""Answers to a prompt; the prompts of imitation whose answers train reward models, and those of RL whose answers test them."""
UPDATES = 1500
UNITS: Keys = {"segmenter": {"type": "steps", "closing": "^Rationale:"}}
MODELS: dict[str, Keys] = {
    "answers": {},
    "steps": {"units": {**UNITS, "entropy_coefficient": 0.0}},
    "even steps": {"units": {**UNITS, "entropy_coefficient": 0.02}},
}
"""Reward models of whole answers, and of steps without and with the regularizer of the published command."""


def pairs(model: Path, out: Path) -> dict[str, list[Keys]]:
    """All pairs of unequal answers for training (`train`), and the pairs of the first two answers for tests (`validation`)."""
    sampled, rows = out / "data" / "procedures.jsonl", []
    for name, count in (("imitated", MODELLED), ("prompts", HELD_OUT)):
        rows += read_lines(out / "data" / f"{name}.jsonl")[:count]
    if not sampled.exists():
        posttrain.generate(
            data={"test": write_in(out / "data" / "procedure_prompts.jsonl", rows)},
            model={"path": str(model), "threads": 1},
            rollout={"tokens_per_turn": 64},
            sampling={"temperature": 1.0},
            samples=ANSWERS,
            out=str(sampled),
            name="procedures",
            runs=str(out),
            overwrite=True,
        )
    answers = [row["prediction"] for row in read_lines(sampled)]
    sets: dict[str, list[Keys]] = {"train": [], "validation": []}
    for number, row in enumerate(rows):
        known, name = Policy.from_json(row["label"]), "train" if number < MODELLED else "validation"
        texts = answers[number * ANSWERS : (number + 1) * ANSWERS]
        for pair in combinations(texts if name == "train" else texts[:2], 2):
            low, high = sorted((verify(text, known).reward, text) for text in pair)
            if low[0] < high[0]:
                sets[name].append({"prompt": row["prompt"], "chosen": high[1], "rejected": low[1]})
    return sets


def reward_model(name: str, model: Path, out: Path) -> Path:
    """The run of a reward model of `MODELS`, from the writer; made once."""
    run = out / "models" / f"procedures-{name.replace(' ', '-')}"
    if not (run / "model" / "config.json").exists():
        # The pairs for tests also give the statistics that rewards are scaled by.
        files = pairs(model, out).items()
        data = {key: write_in(out / "data" / f"procedure_{key}.jsonl", rows) for key, rows in files}
        keys = {
            **REWARD,
            "steps": UPDATES,
            **MODELS[name],
            "data": {**data, "max_tokens": 160},
            "model": {"path": str(model), "threads": 1},
        }
        keys |= {"checkpoint": {"every": 100_000}, "name": run.name, "runs": str(run.parent), "overwrite": True}
        posttrain.reward(**keys)
    return run


def ranked(run: Path, out: Path) -> list[int]:
    """Whether each pair for tests is ranked rightly. Ties are wrong."""
    rows, scorer = read_lines(out / "data" / "procedure_validation.jsonl"), opened(run / "model")
    chosen, rejected = (
        scorer.scores(
            [[*row["prompt"], {"role": "assistant", "content": row[side]}] for row in rows], [False] * len(rows)
        )
        for side in ("chosen", "rejected")
    )
    return [int(one > other) for one, other in zip(chosen, rejected, strict=True)]
