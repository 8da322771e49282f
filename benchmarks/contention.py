"""Training and sampling beside busy processes, against a fair share of the processors.

Each part runs beside k processes that compute without pause, with OpenMP's default waiting (`before`), with threads that
sleep soon (`soon`) and with posttrain's (`after`). A fair share with t processors is 1 / (1 + k / t) of the quiet speed.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from harness.data import chat_rows, prompt_rows
from harness.models import MODELS, model_directory
from harness.options import names, number, numbers, seconds
from harness.table import show, write_lines
from harness.timing import available_threads, in_turn, middle, run_side

WAITING: dict[str, dict[str, str | None]] = {
    "before": {"GOMP_SPINCOUNT": "300000", "OMP_NUM_THREADS": str(available_threads())},
    "soon": {"GOMP_SPINCOUNT": "1000", "OMP_WAIT_POLICY": None, "OMP_NUM_THREADS": None, "MKL_NUM_THREADS": None},
    "after": {"GOMP_SPINCOUNT": None, "OMP_WAIT_POLICY": None, "OMP_NUM_THREADS": None, "MKL_NUM_THREADS": None},
}
"""Environment variables of a side; None removes one. The first is libgomp's default."""
PARTS = ("sft", "rl")
ROWS = 400


@contextmanager
def busy(count: int) -> Iterator[None]:
    """`count` processes that compute inside the block."""
    # Busy processes would outlive a parent that is ended without stopping them.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main() -> None:
    """Run the sides in turn and print the table."""
    chosen = options()
    from transformers import AutoTokenizer

    model = model_directory(chosen.model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    with tempfile.TemporaryDirectory(prefix="posttrain-benchmark-") as place:
        files = {
            "sft": write_lines(Path(place) / "sft.jsonl", chat_rows(tokenizer, ROWS)),
            "rl": write_lines(Path(place) / "rl.jsonl", prompt_rows(tokenizer, ROWS)),
        }

        def run(part: str, waiting: str, count: int, number: int) -> dict[str, Any]:
            job = {"part": part, "model": str(model), "rows": str(files[part]), "seconds": chosen.seconds}
            with busy(count):
                return run_side("sides.contention_worker", job, available_threads(), WAITING[waiting], chosen.limit)

        sides = {
            (part, waiting, count): partial(run, part, waiting, count)
            for part in chosen.parts
            for count in chosen.busy
            for waiting in WAITING
        }
        load = os.getloadavg()[0]
        found = in_turn({_name(side): call for side, call in sides.items()}, chosen.rounds)
    slow = [name for name in map(_name, sides) if name not in found]
    show("Beside busy processes", table(list(sides), found), notes(chosen, load, slow), chosen.json)


def _name(side: tuple[str, str, int]) -> str:
    return " ".join(map(str, side))


def table(sides: list[tuple[str, str, int]], found: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """A row per part, waiting and number of busy processes, without sides that were left out. The quiet speed is that of
    the same side without busy processes.
    """
    rows = []
    for side in sides:
        part, waiting, count = side
        if _name(side) not in found:
            continue
        outcomes = found[_name(side)]
        for name in ("tokens/s", *(["sampled/s"] if part == "rl" else [])):
            speed = middle([outcome[name] for outcome in outcomes])
            quiet = middle([outcome[name] for outcome in found.get(_name((part, waiting, 0)), [])])
            share = 1 / (1 + count / available_threads())
            rows.append(
                {
                    "part": "engine" if name == "sampled/s" else part,
                    "busy": count,
                    "waiting": waiting,
                    "tokens/s": speed,
                    "of the quiet speed": speed / quiet,
                    "fair share": share,
                    "of the fair share": speed / quiet / share,
                    "trained per processor s": middle([outcome["per processor second"] for outcome in outcomes]),
                    "threads": middle([outcome["threads"] for outcome in outcomes]),
                }
            )
    return rows


def notes(chosen: argparse.Namespace, load: float, slow: list[str]) -> list[str]:
    return [
        *(
            [f"left out, because a round took more than {chosen.limit:g} s (--limit): {', '.join(slow)}"]
            if slow
            else []
        ),
        f"{chosen.model}, float32, medians of {chosen.rounds} rounds in turn of {chosen.seconds:.0f} s each after the first step",
        f"load average before the rounds: {load:.1f}; figures are exact only where it is near 0",
        "before: libgomp's default waiting on all processors; soon: GOMP_SPINCOUNT=1000; after: posttrain's defaults; engine: sampled tokens over the time of rollouts",
    ]


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="qwen3", help="SmolLM2-135M or a small random Qwen3")
    parser.add_argument(
        "--busy",
        type=numbers(0),
        default="0,1,3",
        help="numbers of busy processes, separated by commas; 0 is always measured",
    )
    parser.add_argument("--parts", type=names(PARTS), default=",".join(PARTS), help="sft, rl (with the engine)")
    parser.add_argument("--seconds", type=seconds, default=10.0, help="seconds that a side is measured")
    parser.add_argument("--rounds", type=number(1), default=3, help="times that every side runs")
    parser.add_argument(
        "--limit",
        type=seconds,
        default=120.0,
        help="seconds of a round, its start included, after which a side is left out",
    )
    parser.add_argument("--json", metavar="FILE", help="also write the table there")
    chosen = parser.parse_args()
    # Shares are of the quiet speed.
    chosen.busy = list(dict.fromkeys([0, *chosen.busy]))
    return chosen


if __name__ == "__main__":
    main()
