"""Training of reward models against TRL: pairs a second, and peak memory.

Both sides minimise the Bradley-Terry loss; the two answers of a pair have one prompt and lengths of their own.
"""

from harness.data import preference_rows
from harness.table import show
from learners.compare import Size, compare, options
from learners.job import OURS, TRL_DEFAULT, tuned


def main() -> None:
    """Run the sides in turn and print the table."""
    chosen = options(__doc__, {"qwen3": Size(8, 2, 8, 3), "smollm2": Size(4, 1, 1, 2)})
    sides = [
        *OURS,
        TRL_DEFAULT,
        tuned("grouped", "mixed", train_sampling_strategy="group_by_length"),
        tuned("grouped float32", "float32", train_sampling_strategy="group_by_length"),
    ]
    show("Reward model", *compare("reward", chosen, sides, preference_rows, "pairs"), chosen.json)


if __name__ == "__main__":
    main()
