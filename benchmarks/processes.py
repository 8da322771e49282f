"""Supervised updates by 1, 2 and 4 processes of one machine: seconds, memory per process, and differences of the results.

Each run is a complete run from the command line. The table shows the median duration of an update, and the median and
largest resident memory after the first update. The processes share the cores of the machine, so the times measure overhead,
not speedup.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from growing.models import random_policy
from harness.table import show


def write_rows(file: Path, count: int, words: int) -> None:
    """Conversations whose answers have between `words` / 2 and 2 `words` words."""
    lines = []
    for number in range(count):
        answer = " ".join(f"{(number * 7 + place * 13) % 97} and" for place in range(words // 2 + number * 11 % words))
        messages = [{"role": "user", "content": f"Count from {number}."}, {"role": "assistant", "content": answer}]
        lines.append(json.dumps({"messages": messages}) + "\n")
    file.write_text("".join(lines))


def resident(pid: int) -> dict[int, int]:
    """Process id -> bytes of resident memory, for a process and its descendants."""
    found = {}
    listed = subprocess.run(["ps", "-e", "-o", "pid=,ppid=,rss="], capture_output=True, text=True, check=True).stdout
    rows = [tuple(map(int, line.split())) for line in listed.splitlines()]
    family = {pid}
    for _ in range(4):
        family |= {own for own, parent, _ in rows if parent in family}
    for own, _, kilobytes in rows:
        if own in family:
            found[own] = kilobytes * 1024
    return found


def run(processes: int, folder: Path, words: list[str]) -> dict[str, Any]:
    """One run: its metrics, memory and weights."""
    name = f"processes-{processes}"
    command = [sys.executable, "-m", "posttrain.cli.main", "sft", f"runs={folder}", f"name={name}", *words]
    log = open(folder / f"{name}.txt", "w")  # noqa: SIM115
    process = subprocess.Popen([*command, f"hardware.processes={processes}"], stdout=log, stderr=log)
    seen: dict[int, list[int]] = {}
    metrics = folder / name / "metrics.jsonl"
    while process.poll() is None:
        time.sleep(0.25)
        if metrics.exists() and '"kind": "train"' in metrics.read_text() and not (folder / name / "model").exists():
            for pid, count in resident(process.pid).items():
                seen.setdefault(pid, []).append(count)
    if process.returncode:
        raise SystemExit((folder / f"{name}.txt").read_text())
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    trained = [line for line in lines if line["kind"] == "train"]
    learners = sorted(seen.values(), key=max)[-processes:]
    return {
        "seconds": statistics.median(line["time/update"] for line in trained[1:]),
        "loss": [line["loss/nll"] for line in trained],
        "norm": [line["optimizer/gradient_norm"] for line in trained],
        "middle": max(statistics.median(own) for own in learners),
        "largest": max(max(own) for own in learners),
        "weights": folder / name / "model" / "model.safetensors",
    }


def apart(one: dict[str, Any], other: dict[str, Any]) -> tuple[float, float, float]:
    """Largest relative differences of losses and of norms, and the largest absolute one of weights."""
    from safetensors.torch import load_file

    relative = [max(abs(a - b) / abs(a) for a, b in zip(one[k], other[k], strict=True)) for k in ("loss", "norm")]
    mine, others = load_file(one["weights"]), load_file(other["weights"])
    return *relative, max(float((mine[name] - others[name]).abs().max()) for name in mine)  # type: ignore[return-value]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model.path; default: a random Qwen3 with --width and 8 layers")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--updates", type=int, default=4)
    parser.add_argument("words", nargs="*", help="recipe overrides, key=value")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = options.model or str(folder / "model")
        if options.model is None:
            random_policy(folder / "model", options.width, 8, 1)
        write_rows(folder / "rows.jsonl", 16 * options.updates, 60)
        words = [
            f"model.path={model}",
            f"data.train={folder / 'rows.jsonl'}",
            "rows_per_update=16",
            f"steps={options.updates}",
            "data.max_tokens=512",
            "learner.tokens_per_batch=512",
            "checkpoint.every=1000",
            *options.words,
        ]
        found = {count: run(count, folder, words) for count in options.processes}
        first = found[options.processes[0]]
        rows = []
        for count, result in found.items():
            loss, norm, weights = apart(first, result)
            rows.append(
                {
                    "processes": count,
                    "seconds per update": f"{result['seconds']:.2f}",
                    "memory per process, GiB": f"{result['middle'] / 2**30:.2f}",
                    "peak memory, GiB": f"{result['largest'] / 2**30:.2f}",
                    "loss difference": f"{loss:.1e}",
                    "gradient norm difference": f"{norm:.1e}",
                    "weight difference": f"{weights:.1e}",
                }
            )
    show("Supervised updates by several processes", rows)


if __name__ == "__main__":
    main()
