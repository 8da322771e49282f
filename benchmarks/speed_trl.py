"""Training against TRL: real tokens, rows, pairs or answers a second, and peak memory.

    python benchmarks/speed_trl.py sft|reward|dpo|rl

`sft`: prompts and answers of lognormal length (mean 172 tokens), with the loss on the answers. `reward` and `dpo`: two
answers of different lengths to one prompt. `dpo` makes one pass over the pairs: the reference log-probabilities, which
posttrain computes before the first step, are charged to the steps that use them, and none is read from a cache.

`rl`: whole steps of RLOO and GRPO, which sample answers to a few prompts, score them by a rule and make one update.
Answers end at seeded lognormal lengths (mean 65 tokens, the same on both sides), since a random model ends none. RLOO has
a reference model (KL coefficient 0.05), GRPO has none, as TRL has it by default.
"""

from harness.data import ROWS, chat_rows, preference_rows, prompt_rows
from harness.table import show
from learners.compare import Size, compare, options
from learners.job import LONGEST, OURS, TRL_DEFAULT, Stage, tuned

PARTS: dict[str, tuple[str, tuple[Stage, ...]]] = {
    "sft": ("Supervised fine-tuning", ("sft",)),
    "reward": ("Reward model", ("reward",)),
    "dpo": ("Direct preference optimisation", ("dpo",)),
    "rl": ("RLOO and GRPO, end to end", ("rloo", "grpo")),
}
"""Word of the command line -> title of its table, stages."""
ROWS_OF = {"sft": (chat_rows, "rows"), "rl": (prompt_rows, "answers")}
"""What a part is trained on, if not pairs."""
SIZES = {
    "sft": {"qwen3": Size(8, 2, 8, 3), "smollm2": Size(8, 1, 1, 2)},
    "reward": {"qwen3": Size(8, 2, 8, 3), "smollm2": Size(4, 1, 1, 2)},
    "dpo": {"qwen3": Size(8, 2, 8, 2), "smollm2": Size(4, 1, 1, 2)},
    "rl": {"qwen3": Size(16, 1, 2, 2), "smollm2": Size(8, 1, 1, 1)},
}


def main() -> None:
    """Run the sides of one part in turn and print the table."""
    chosen = options(__doc__, SIZES)
    sides = [*OURS, TRL_DEFAULT]
    if chosen.part == "rl":
        sides += [tuned("tuned", "mixed"), tuned("tuned float32", "float32")]
    else:
        grouped = {"train_sampling_strategy": "group_by_length"}
        sides += [tuned("grouped", "mixed", **grouped), tuned("grouped float32", "float32", **grouped)]
    if chosen.part == "sft":
        size = max(1, round(chosen.rows * ROWS.median * 1.22 / LONGEST))
        packed = {"packing": True, "per_device_train_batch_size": size, "gradient_accumulation_steps": 1}
        sides += [tuned("packed", "mixed", **packed), tuned("packed float32", "float32", **packed)]
    title, stages = PARTS[chosen.part]
    make_rows, unit = ROWS_OF.get(chosen.part, (preference_rows, "pairs"))
    rows, notes = [], []
    for stage in stages:
        more, about = compare(stage, chosen, sides, make_rows, unit)
        rows += more
        notes += [f"{stage}: {note}" if len(stages) > 1 else note for note in about]
    show(title, rows, notes, chosen.json)


if __name__ == "__main__":
    main()
