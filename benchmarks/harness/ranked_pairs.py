"""A task with known quality: repeat the words of the prompt. Pairs of a policy's own answers, and reward models of them."""

from collections.abc import Sequence
from functools import lru_cache, partial
from itertools import combinations, product
from pathlib import Path
from typing import Any

import posttrain
from harness.made_model import fine_tuned
from harness.table import read_lines, write_lines
from harness.verified_units import WORDS
from posttrain.seeds import random_stream
from posttrain.training.reward_scorer import AnswerRewards

Keys = dict[str, Any]

LENGTH = 5
"""Words of a prompt."""
REPLACED, WRONG_LENGTH = 0.4, 0.05
"""Shares of the imitated words that are random, and that are left out or written twice (each)."""
IMITATED = 4000
SETS = {**dict.fromkeys(("0", "1", "2", "3", "4", "10"), 300), "held_out": 400, "tuning": 400}
"""Prompts of each set of pairs."""
MODELS = {"first": ("0", "1", "2"), "second": ("3", "4", "10")}
"""The sets that a reward model learns from."""
ANSWERS = 4
"""To a prompt. For training, each is paired with each other one; for tests, the first two and the last two are pairs."""
FLIPPED = 0.1
"""Share of the training pairs whose order is wrong."""
REWARD: Keys = {
    "steps": 450,
    "rows_per_update": 16,
    "optimizer": {"learning_rate": 1e-3, "warmup_updates": 10, "schedule": "cosine"},
    "evaluation": {"every": 0},
    "export": "last",
}


def prompt_of(*names: Any) -> str:
    """Random words."""
    return " ".join(random_stream("ranked", *names).choice(WORDS, LENGTH))


def quality(prompt: Any, answer: str, **_: Any) -> float:
    """Share of places with the same word in the prompt and the answer, of as many as the longer one has."""
    text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    wanted, given = text.split(), answer.split()
    return sum(one == other for one, other in zip(wanted, given, strict=False)) / max(len(wanted), len(given))


def random_answer(*names: Any) -> str:
    """Random words, as many as are right."""
    return prompt_of("random", *names)


def asked(text: str) -> list[Keys]:
    """A prompt as messages."""
    return [{"role": "user", "content": text}]


def noisy_copy(number: int) -> list[Keys]:
    """A prompt and an imperfect answer."""
    draws, words = random_stream("ranked", "noise", number), []
    for word in prompt_of("imitated", number).split():
        drawn = draws.random()
        word = str(draws.choice(WORDS)) if draws.random() < REPLACED else word
        words += [] if drawn < WRONG_LENGTH else [word, word] if drawn < 2 * WRONG_LENGTH else [word]
    return [*asked(prompt_of("imitated", number)), {"role": "assistant", "content": " ".join(words)}]


def write_in(file: Path, rows: Sequence[Keys]) -> str:
    """Write a JSON lines file, unless it is there: another process may be reading it."""
    return str(file if file.exists() else write_lines(file, rows))


def copier(out: Path) -> Path:
    """The policy before RL, which repeats words with errors, fine-tuned from random weights; made once."""
    rows = [{"messages": noisy_copy(number)} for number in range(IMITATED)]
    keys = {
        "data": {"train": write_in(out / "data" / "copies.jsonl", rows)},
        "epochs": 4,
        "rows_per_update": 48,
        "optimizer": {"learning_rate": 3e-3, "warmup_updates": 20, "schedule": "cosine"},
    }
    messages = [message for row in rows for message in row["messages"]]
    return fine_tuned(out / "models" / "copier", 10, messages, keys, hidden=128)


def pairs(name: str, out: Path) -> list[Keys]:
    """The pairs of a set, from answers that the copier samples once. A row has `prompt`, `chosen`, `rejected`, and the
    `lengths` of both in words. Those for training are wrong with the probability `FLIPPED`. Answers of equal quality are no pair.
    """
    answers = out / "data" / "answers.jsonl"
    if not answers.exists():
        prompts = [
            {"prompt": asked(prompt_of(key, n)), "set": key} for key, count in SETS.items() for n in range(count)
        ]
        posttrain.generate(
            data={"test": write_in(out / "data" / "pair_prompts.jsonl", prompts)},
            keep_columns=["set"],
            model={"path": str(copier(out)), "threads": 1},
            rollout={"tokens_per_turn": 24},
            sampling={"temperature": 1.0},
            samples=ANSWERS,
            out=str(answers),
            name="answers",
            runs=str(out),
            overwrite=True,
        )
    rows, training = [row for row in read_lines(answers) if row["set"] == name], name.isdigit()
    draws = random_stream("ranked", "flipped", name)
    places = list(combinations(range(ANSWERS), 2)) if training else [(0, 1), (2, 3)]
    found = []
    for start, place in product(range(0, len(rows), ANSWERS), places):
        prompt = rows[start]["prompt"]
        pair = sorted((rows[start + k]["prediction"] for k in place), key=partial(quality, prompt), reverse=True)
        if quality(prompt, pair[0]) > quality(prompt, pair[1]):
            chosen, rejected = reversed(pair) if training and draws.random() < FLIPPED else pair
            lengths = [len(text.split()) for text in (chosen, rejected)]
            found.append({"prompt": prompt, "chosen": chosen, "rejected": rejected, "lengths": lengths})
    return found


def reward_model(name: str, out: Path) -> Path:
    """A reward model of `MODELS`, from the copier, with its own training seed; made once."""
    model = out / "models" / f"reward-{name}" / "model"
    if not (model / "config.json").exists():
        rows = [row for part in MODELS[name] for row in pairs(part, out)]
        data = {"train": write_in(out / "data" / f"pairs-{name}.jsonl", rows), "max_tokens": 64}
        common = {
            "model": {"path": str(copier(out)), "threads": 1},
            "checkpoint": {"every": 100_000},
            "overwrite": True,
        }
        keys = {**REWARD, **common, "data": data, "seed": list(MODELS).index(name)}
        posttrain.reward(**keys, name=f"reward-{name}", runs=str(out / "models"))
    return model


@lru_cache
def opened(model: Path) -> AnswerRewards:
    """A reward model in memory."""
    return AnswerRewards(str(model))


def rewards(model: Path, prompts: Sequence[str], answers: Sequence[str]) -> list[float]:
    """Rewards of answers, in units of the model."""
    rows = [[*asked(p), {"role": "assistant", "content": text}] for p, text in zip(prompts, answers, strict=True)]
    return [round(value, 4) for value in opened(model).scores(rows, [False] * len(rows))]


def ranked(model: Path, rows: Sequence[Keys]) -> list[int]:
    """Whether each pair is ranked rightly. Ties are wrong."""
    prompts = [row["prompt"][-1]["content"] for row in rows]
    chosen, rejected = (rewards(model, prompts, [row[side] for row in rows]) for side in ("chosen", "rejected"))
    return [int(one > other) for one, other in zip(chosen, rejected, strict=True)]
