"""RLOO and GRPO from end to end against TRL: sampled answers a second, and peak memory.

A step samples answers to a few prompts, scores them by a rule and makes one update. Answers end at seeded lognormal
lengths (mean 65 tokens, the same on both sides), since a random model ends none. RLOO has a reference model (KL
coefficient 0.05), GRPO has none, as TRL has it by default.
"""

from harness.data import prompt_rows
from harness.table import show
from learners.compare import Size, compare, options
from learners.job import OURS, TRL_DEFAULT, Stage, tuned


def main() -> None:
    """Run the sides of both algorithms in turn and print one table."""
    chosen = options(__doc__, {"qwen3": Size(16, 1, 2, 2), "smollm2": Size(8, 1, 1, 1)}, group=4)
    sides = [*OURS, TRL_DEFAULT, tuned("tuned", "mixed"), tuned("tuned float32", "float32")]
    rows, notes = [], []
    stages: tuple[Stage, ...] = ("rloo", "grpo")
    for stage in stages:
        more, about = compare(stage, chosen, sides, prompt_rows, "answers")
        rows += more
        notes += [f"{stage}: {note}" for note in about]
    show("RLOO and GRPO, end to end", rows, notes, chosen.json)


if __name__ == "__main__":
    main()
