"""Supervised fine-tuning against TRL: real tokens a second, and peak memory.

Rows are prompts and answers of lognormal length (mean 172 tokens); the loss is on the answers on both sides.
"""

from harness.data import ROWS, chat_rows
from harness.table import show
from learners.compare import Size, compare, options
from learners.job import LONGEST, OURS, TRL_DEFAULT, tuned


def main() -> None:
    """Run the sides in turn and print the table."""
    chosen = options(__doc__, {"qwen3": Size(8, 2, 8, 3), "smollm2": Size(8, 1, 1, 2)})
    mean = ROWS.median * 1.22
    packed = {"packing": True, "per_device_train_batch_size": max(1, round(chosen.rows * mean / LONGEST))}
    sides = [
        *OURS,
        TRL_DEFAULT,
        tuned("grouped", "mixed", train_sampling_strategy="group_by_length"),
        tuned("grouped float32", "float32", train_sampling_strategy="group_by_length"),
        tuned("packed", "mixed", gradient_accumulation_steps=1, **packed),
        tuned("packed float32", "float32", gradient_accumulation_steps=1, **packed),
    ]
    show("Supervised fine-tuning", *compare("sft", chosen, sides, chat_rows, "rows"), chosen.json)


if __name__ == "__main__":
    main()
