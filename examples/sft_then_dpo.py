"""Supervised fine-tuning, then preference optimization from the model that it exported.

`python examples/sft_then_dpo.py` runs it on a few rows that it writes itself.
"""

import json
import sys
import tempfile
from pathlib import Path

import posttrain

NAMES = ["Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana", "Ivo", "Jana", "Kai", "Lena"]


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


if __name__ == "__main__":
    model = sys.argv[1] if len(sys.argv) > 1 else "packaged:smollm2-135m"
    folder = Path(tempfile.mkdtemp())
    conversations = [{"prompt": f"Greet {name}.", "completion": f"Hello, {name}!"} for name in NAMES]
    pairs = [{"prompt": f"Greet {n}.", "chosen": f"Dear {n}, good day.", "rejected": f"Hello, {n}!"} for n in NAMES]
    first = posttrain.sft(
        name="greet_sft",
        model={"path": model, "lora": {"rank": 8}},
        data={"train": write(folder / "conversations.jsonl", conversations), "held_out": 4},
        steps=2,
        optimizer={"learning_rate": 1e-3},
        overwrite=True,
    )
    second = posttrain.dpo(
        name="greet_dpo",
        model={"path": first.model, "lora": {"rank": 8}},
        data={"train": write(folder / "pairs.jsonl", pairs), "held_out": 4},
        loss={"type": "dpo", "beta": 0.1},
        steps=2,
        optimizer={"learning_rate": 1e-3},
        overwrite=True,
    )
    for row in second.evaluation:
        print({key: value for key, value in row.items() if "accuracy" in key or key in ("policy", "n", "rows")})
    print(f"model in {second.model}")
