"""GSM8K pairs in the published format of HelpSteer3, for a run from its files to a policy on text that is at hand.

A pair of a right and a wrong solution becomes a row of the preference subset. The side of the right one alternates. The strength of
the preference follows the wrong result: 1 where it is within a tenth of the right one, 2 where it is within its size, else 3.
The three opinions state that strength and which response is right.
"""

import argparse
import gzip
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

NUMBER = re.compile(r"-?\d[\d,]*\.?\d*")


def preference_row(
    context: list[dict[str, str]], better: str, worse: str, first: bool, strength: int, why: str, **more: Any
) -> dict[str, Any]:
    """A row as HelpSteer3 publishes it.

    Args:
        first: whether response 1 is the better one, which is a negative preference.
        strength: 0 (about equal) to 3.
        why: what the opinions say about the better response.
        more: other values of columns, such as `language`.
    """
    preference = -strength if first else strength
    reasoning = f"@Response {1 if first else 2} is better than @Response {2 if first else 1}: {why}"
    return {
        "domain": "general",
        "language": "english",
        "context": context,
        "response1": better if first else worse,
        "response2": worse if first else better,
        "overall_preference": preference,
        "individual_preference": [
            {"score": preference, "reasoning": reasoning, "feedback1": "", "feedback2": ""} for _ in range(3)
        ],
        **more,
    }


def write_split(file: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write rows as gzipped JSON lines, the format of the published files."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(file, "wt", encoding="utf-8") as out:
        out.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def strength_of(right: str, wrong: str) -> int:
    """Strength of the preference from the last numbers of both solutions."""
    numbers = [[float(found.replace(",", "")) for found in NUMBER.findall(text)] for text in (right, wrong)]
    if not all(numbers):
        return 3
    away = abs(numbers[1][-1] - numbers[0][-1]) / max(abs(numbers[0][-1]), 1)
    return 1 if away <= 0.1 else 2 if away <= 1 else 3


def main() -> None:
    """Write `preference/train.jsonl.gz` and `preference/validation.jsonl.gz`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gsm8k", type=Path, help="folder with pairs_train.jsonl and pairs_val.jsonl")
    parser.add_argument("out", type=Path, help="folder to write")
    chosen = parser.parse_args()
    for name, split in (("pairs_train", "train"), ("pairs_val", "validation")):
        pairs = [json.loads(line) for line in (chosen.gsm8k / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
        rows = []
        for number, pair in enumerate(pairs):
            right, wrong = pair["chosen"][-1]["content"], pair["rejected"][-1]["content"]
            why = f"its result is right. {right.splitlines()[-1]}"
            strength = strength_of(right, wrong)
            rows.append(
                preference_row(pair["chosen"][:-1], right, wrong, number % 2 == 0, strength, why, domain="stem")
            )
        write_split(chosen.out / "preference" / f"{split}.jsonl.gz", rows)
        print(f"{chosen.out}/preference/{split}.jsonl.gz: {len(rows)} rows")


if __name__ == "__main__":
    main()
