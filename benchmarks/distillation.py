"""On-policy distillation against reinforcement learning: episodes until a model succeeds as often as its teacher.

    python benchmarks/distillation.py --seeds 5 --out /tmp/distillation

For each seed, a small model learns from rows whose answers are right in one of three cases. That is the start. Reinforcement
learning from the start gives the teacher. The teacher is then distilled into the same start, once by each loss. All runs are evaluated on
the same held-out prompts. The table shows how many sampled episodes each needed to reach a share of the teacher's success.
"""

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import posttrain
from posttrain.runs.intervals import seed_mean

TASK = Path(__file__).with_name("toy") / "named_letter.py"
VARIANTS: dict[str, dict[str, Any]] = {
    "reverse KL at sampled tokens": {"type": "reverse_kl"},
    "reverse KL over the teacher's 16 tokens": {"type": "jsd", "beta": 1.0, "top_k": 16},
}
LIMITS = {"tokens_per_turn": 3, "tokens_per_episode": 64}
RL_EPISODES = {"groups_per_step": 16, "episodes_per_group": 4} | LIMITS
"""The baseline compares the four answers to a prompt."""
DISTILL_EPISODES = {"groups_per_step": 16, "episodes_per_group": 1} | LIMITS
"""The teacher scores each answer on its own, so that one for each prompt is enough."""
CURVE, FINAL = 128, 256
"""Held-out prompts of the learning curve, and of the final numbers."""


def small_model(directory: Path, seed: int) -> Path:
    """Write a decoder with random weights and a tokenizer of bytes and a few words."""
    from tokenizers import ByteLevelBPETokenizer
    from toy.named_letter import WORDS
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

    bpe = ByteLevelBPETokenizer()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    corpus = [" ".join(WORDS), "user assistant Name the letter:"]
    bpe.train_from_iterator(corpus * 4, vocab_size=360, min_frequency=2, special_tokens=special, show_progress=False)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer, eos_token="<|im_end|>", bos_token="<|im_start|>", pad_token="<|endoftext|>"
    )
    # No roles: the answer follows the prompt's end directly, which a model of this size learns to use in a minute.
    tokenizer.chat_template = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}"
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        initializer_range=0.1,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def rows_of(file: Path, count: int, right: float, seed: int) -> Path:
    """Write conversations whose answer is the right letter with probability `right`, else a random one."""
    from posttrain.recipe.components import environment_class

    draws = np.random.default_rng(seed)
    kind = environment_class(str(TASK))
    task = kind(kind.Recipe(type=str(TASK)))
    with file.open("w") as out:
        for number in range(count):
            prompt = task.reset(200_000 + number).messages
            answer = task.expert() if draws.random() < right else task.random_answer(draws.random())
            out.write(json.dumps({"messages": [*prompt, {"role": "assistant", "content": answer}]}) + "\n")
    return file


def curve_of(run: Path) -> list[tuple[int, float]]:
    """(episodes sampled so far, held-out success) at each evaluation."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    episodes, found = 0, []
    for line in lines:
        episodes += int(line.get("rollout/episodes", 0))
        found += [(episodes, line["success"])] if line["kind"] == "evaluation" else []
    return found


def final_of(run: Path, player: str) -> float:
    """Held-out success of `player` in the final table."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return next(line["success"] for line in lines if line.get("policy") == player)


def needed(curve: list[tuple[int, float]], target: float) -> float:
    """Episodes at the first evaluation with at least `target`; infinite if there is none."""
    return next((float(episodes) for episodes, success in curve if success >= target), math.inf)


def interval(values: list[float]) -> str:
    """Mean and 95% interval over seeds; where some runs did not get there, over those that did."""
    if (reached := [value for value in values if math.isfinite(value)]) != values:
        return f"{len(reached)} of {len(values)} runs: {interval(reached)}" if reached else "none"
    value, low, high = seed_mean(values).limits
    return f"{value:.3g}" if math.isnan(low) else f"{value:.3g} [{low:.3g}, {high:.3g}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rows", type=int, default=6400, help="that the start has learned from")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--share", type=float, default=0.95, help="of the teacher's success, which is the target")
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    begun, rows = time.process_time(), []
    for seed in range(chosen.seeds):
        runs = chosen.out / f"seed{seed}"
        if not (runs / f"distill{len(VARIANTS) - 1}" / "results.json").is_file():
            train(runs, seed, chosen)
        rows.append(row_of(runs, chosen.share))
        print(seed, json.dumps(rows[-1]), flush=True)
    starts = interval([row["start"] for row in rows])
    print(f"\nstart {starts}; random 0.125; optimal 1; {FINAL} held-out prompts for each of {len(rows)} seeds")
    print(
        f"| method | held-out success | episodes to {chosen.share:.0%} of RL's best success | share of RL's episodes |"
    )
    print("|---|---|---|---|")
    for name in ["RL", *VARIANTS]:
        cells = [interval([row[name][key] for row in rows]) for key in ("success", "episodes")]
        # Where RL never left its start, there is nothing to compare with.
        shares = interval([row[name]["episodes"] / (row["RL"]["episodes"] or math.nan) for row in rows])
        print(f"| {name} | {' | '.join(cells)} | {shares} |")
    print(f"{time.process_time() - begun:.0f} s of processor time")


def train(runs: Path, seed: int, chosen: argparse.Namespace) -> None:
    """The start, its teacher, and the distillations of one seed."""
    common: dict[str, Any] = {
        "runs": str(runs),
        "seed": seed,
        "environment": {"type": str(TASK)},
        "rollout": LIMITS,
        "checkpoint": {"every": 1000},
        "overwrite": True,
    }
    held_out = {
        "sampling": {"temperature": 1.0},
        "seeds": {"start": 1_000_000, "count": CURVE},
        "final_seeds": {"start": 2_000_000, "count": FINAL},
    }
    start = posttrain.sft(
        **common,
        name="start",
        model={"path": str(small_model(runs / "random", seed)), "threads": 1},
        data={"train": str(rows_of(runs / "rows.jsonl", chosen.rows, 0.3, seed)), "cache": str(runs / "cache")},
        rows_per_update=64,
        epochs=1,
        optimizer={"learning_rate": 1e-2, "schedule": "cosine", "warmup_updates": 20},
        evaluation=held_out | {"every": 0},
    )
    learning: dict[str, Any] = common | {
        "model": {"path": str(start.model), "threads": 1},
        "steps": chosen.steps,
        "optimizer": {"learning_rate": chosen.learning_rate},
        "evaluation": held_out | {"every": 3},
    }
    by_rl = learning | {"rollout": RL_EPISODES, "credit": {"type": "rloo"}, "loss": {"type": "ppo"}}
    teacher = posttrain.rl(**by_rl, name="rl")
    for number, loss in enumerate(VARIANTS.values()):
        keys = learning | {"rollout": DISTILL_EPISODES, "loss": loss, "name": f"distill{number}"}
        posttrain.distill(**keys, teacher={"path": str(teacher.model)})


def row_of(runs: Path, share: float) -> dict[str, Any]:
    """What the runs of one seed came to."""
    target = share * max(success for _, success in curve_of(runs / "rl"))
    row: dict[str, Any] = {"start": final_of(runs / "rl", "start of this run")}
    runs_of = {"RL": "rl"} | {name: f"distill{number}" for number, name in enumerate(VARIANTS)}
    for name, run in runs_of.items():
        row[name] = {"success": final_of(runs / run, "trained"), "episodes": needed(curve_of(runs / run), target)}
    return row


if __name__ == "__main__":
    main()
