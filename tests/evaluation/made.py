"""Small files of predictions."""

import json
from pathlib import Path

import numpy as np

WORDS = [
    *("the", "model", "reads", "a", "long", "text", "and", "gives"),
    *("an", "answer", "that", "nobody", "expected", "to", "be", "right"),
]


def predictions(path: Path, wrong: float, items: int = 30, samples: int = 1, seed: int = 0) -> Path:
    """Write predictions that have a share `wrong` of their words, and the same references for every seed."""
    texts = np.random.default_rng(99)
    generator = np.random.default_rng(seed)
    lines = []
    for item in range(items):
        reference = " ".join(texts.choice(WORDS, size=10))
        for sample in range(samples):
            words = [str(generator.choice(WORDS)) if generator.random() < wrong else word for word in reference.split()]
            row = {"id": item, "prompt": f"Question {item}?", "prediction": " ".join(words)}
            lines.append(row | {"reference": reference, "sample": sample})
    return write(path, lines)


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
