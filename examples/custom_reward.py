"""A Python function as the reward: train a model to answer in few words that contain a given one.

`python examples/custom_reward.py` runs it. On the command line, name the function:
`posttrain rl environment.type=text_task environment.prompts=FILE environment.reward=examples/custom_reward.py:short_with_word`.
"""

import json
import sys
import tempfile
from pathlib import Path

import posttrain


def short_with_word(prompt: str, answer: str, word: str, **row) -> dict[str, float]:
    """`score` is the reward. The other numbers are reported in the metrics and the final table."""
    words = answer.split()
    contains = float(word in answer.lower())
    return {"score": contains - 0.05 * len(words), "contains": contains, "words": len(words)}


class PrintReturns(posttrain.Callback):
    def on_step(self, step, metrics) -> None:
        print(f"step {step}: return {metrics['rollout/return']:.2f}")


if __name__ == "__main__":
    model = sys.argv[1] if len(sys.argv) > 1 else "packaged:smollm2-135m"
    things = ["cat", "river", "moon", "bread", "train", "snow", "violin", "garden"]
    rows = [{"prompt": f"Write about a {thing}.", "word": thing} for thing in things]
    prompts = Path(tempfile.mkdtemp()) / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = posttrain.rl(
        name="short_answers",
        steps=2,
        model={"path": model, "lora": {"rank": 8}},
        environment={"prompts": prompts, "success_reward": None},
        reward=short_with_word,
        seeds={"start": 0, "count": 4},
        rollout={"groups_per_step": 4, "episodes_per_group": 4, "tokens_per_turn": 16, "environment_timeout": 10},
        evaluation={"every": 0, "seeds": {"start": 4, "count": 2}, "final_seeds": {"start": 6, "count": 2}},
        callbacks=[PrintReturns()],
        overwrite=True,
    )
    for row in result.evaluation:
        print(f"{row['policy']}: return {row['return']:.2f}, words {row['score/words']:.1f}, n = {row['n']}")
