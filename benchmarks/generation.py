"""Sampled tokens a second: the local engine against transformers' generate, its continuous batching, vLLM and llama.cpp.

Chat prompts of 60 to 200 tokens in groups, answers of lognormal length (median 48, mean 65, at most 256), sampled at
temperature 1 from the whole vocabulary. Each side gets the same prompts and lengths, in turn, in a process of
its own that sleeps while others are measured; no prompt comes twice, so caches help within a job only.
"""

import argparse
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness.limits import Limits, job_bound, measure_limits
from harness.models import MODELS, emulates_bfloat16, model_directory
from harness.options import named_sides, number, numbers, seconds
from harness.table import show
from harness.timing import available_threads, in_turn, middle, ratio
from sides import llama_side, vllm_side
from sides.process import Worker
from sides.workload import PROMPTS, Job, first_token_job, make_job

from posttrain.planning.model_sizes import model_sizes

OURS, GENERATE, CONTINUOUS, VLLM, LLAMA = "posttrain", "generate", "continuous batching", "vLLM", "llama.cpp"
SIDES = (
    f"{OURS} float32",
    f"{OURS} bfloat16",
    f"{GENERATE} float32",
    f"{GENERATE} bfloat16",
    f"{CONTINUOUS} bfloat16",
    f"{VLLM} float32",
    f"{VLLM} bfloat16",
    *(f"{LLAMA} {format}" for format in llama_side.FORMATS),
)
CONTEXT = PROMPTS[1] + 256 + 64
"""Tokens of the longest request, its template and answer included."""
WARMUP = -1
"""Number of the job that comes before the first round."""


@dataclass(frozen=True)
class Point:
    """One question: so many requests in flight, groups of so many."""

    in_flight: int
    group: int
    requests: int


@dataclass(frozen=True)
class Peers:
    """Where other engines are; None for one that is not installed."""

    vllm: str | None
    """The interpreter that has vLLM."""
    llama: str | None
    """The executable of llama.cpp's server."""

    def missing(self) -> dict[str, str]:
        """Name of each engine that is not installed -> how to get it."""
        found = {VLLM: (self.vllm, vllm_side.ABSENT), LLAMA: (self.llama, llama_side.ABSENT)}
        return {name: absent for name, (place, absent) in found.items() if place is None}


def start(side: str, chosen: argparse.Namespace, model: str, peers: Peers) -> Worker:
    """The worker of `side`."""
    name, _, dtype = side.rpartition(" ")
    settings: dict[str, Any] = {"model": model, "dtype": dtype, "threads": chosen.threads}
    if name == VLLM:
        assert peers.vllm is not None
        return vllm_side.start(
            peers.vllm, model, dtype, chosen.threads, max(chosen.in_flight), CONTEXT, eager=not chosen.vllm_compiled
        )
    if name == LLAMA:
        file = llama_side.gguf_file(Path(model), llama_side.FORMATS[dtype])
        settings |= {"server": peers.llama, "file": str(file), "context": CONTEXT}
        return Worker("sides.llama_worker", settings, chosen.threads)
    if name == OURS:
        return Worker("sides.posttrain_worker", settings, chosen.threads)
    way = "generate" if name == GENERATE else "continuous"
    return Worker("sides.transformers_worker", settings | {"way": way}, chosen.threads)


def measure(
    workers: dict[str, Worker], point: Point, rounds: int, tokenizer: Any, limit: float
) -> tuple[dict[str, list[dict[str, Any]]], list[Job]]:
    """What each side answers in each round: a job, and the burst whose first tokens are timed."""
    jobs = {
        number: make_job(tokenizer, point.in_flight, point.requests, point.group, number)
        for number in range(WARMUP, rounds)
    }
    bursts = {
        number: first_token_job(tokenizer, point.in_flight, point.group, number) for number in range(WARMUP, rounds)
    }

    def run(worker: Worker, number: int) -> dict[str, Any]:
        before = worker.processor_seconds()
        answer = worker.ask(jobs[number].as_json(), limit)
        spent = worker.processor_seconds() - before
        if answer["tokens"] != sum(jobs[number].lengths):
            raise RuntimeError(f"{worker.module} sampled {answer['tokens']} tokens, not {sum(jobs[number].lengths)}")
        first = worker.ask(bursts[number].as_json(), limit)["first"]
        speeds = {"speed": answer["tokens"] / answer["seconds"], "per processor": answer["tokens"] / spent}
        return answer | speeds | {"first token": first}

    sides: dict[str, Callable[[int], dict[str, Any]]] = {name: partial(run, worker) for name, worker in workers.items()}
    found = in_turn(sides, rounds, warmup=1)
    return found, [jobs[number] for number in range(rounds)]


def table(
    found: dict[str, list[dict[str, Any]]], jobs: list[Job], point: Point, sizes: Any, limits: dict[str, Limits]
) -> list[dict[str, Any]]:
    """A row per side; `x NAME` is the speed of the side over that of NAME."""

    def speeds(side: str) -> list[float]:
        return [outcome["speed"] for outcome in found.get(side, [])]

    def fastest(name: str, *dtypes: str) -> list[float]:
        return max((speeds(f"{name} {dtype}") for dtype in dtypes), key=lambda found: middle(found or [0.0]))

    prompts = sum(map(len, jobs[0].prompts))
    rows = []
    for side, outcomes in found.items():
        dtype = side.rpartition(" ")[2]
        width = 4 if dtype == "float32" else 2
        least = [
            job_bound(sizes, width, job.prompts, job.lengths, point.in_flight, limits[dtype])
            if dtype in limits
            else 0.0
            for job in jobs
        ]
        reused = [outcome["reused"] for outcome in outcomes if outcome["reused"] is not None]
        rows.append(
            {
                "side": side,
                "in flight": point.in_flight,
                "group": point.group,
                "tokens/s": middle(speeds(side)),
                "per processor s": middle([outcome["per processor"] for outcome in outcomes]),
                "x generate": ratio(speeds(side), fastest(GENERATE, "float32", "bfloat16")),
                "x vLLM": ratio(speeds(side), fastest(VLLM, "float32", "bfloat16")),
                "x llama.cpp": ratio(speeds(side), fastest(LLAMA, "bfloat16", "float16")),
                "of the bound": middle([b / o["seconds"] for b, o in zip(least, outcomes, strict=True)])
                if dtype in limits
                else None,
                "first token s": middle([outcome["first token"] for outcome in outcomes]),
                "prompts reused": middle(reused) / prompts if reused else None,
                "peak GB": outcomes[-1]["peak"] / 1e9,
            }
        )
    return rows


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="smollm2", help="SmolLM2-135M or a small random Qwen3")
    parser.add_argument(
        "--in-flight", type=numbers(1), default="1,8,32,128", help="requests in flight, separated by commas"
    )
    parser.add_argument(
        "--groups", type=numbers(1), default="1,8", help="requests that share a prompt, separated by commas"
    )
    parser.add_argument(
        "--requests", type=number(1), help="requests of a job (default: 2 for each in flight, at least 4)"
    )
    parser.add_argument("--rounds", type=number(1), default=3, help="times that every side runs, besides a warm-up")
    parser.add_argument("--threads", type=number(1), default=available_threads(), help="processor threads of a side")
    parser.add_argument("--limit", type=seconds, default=120.0, help="seconds of a job after which a side is left out")
    parser.add_argument("--sides", help="run those whose name holds one of these words, separated by commas")
    parser.add_argument("--vllm-python", metavar="FILE", help="the interpreter that has vLLM")
    parser.add_argument("--llama-server", metavar="FILE", help="llama.cpp's server")
    parser.add_argument("--vllm-compiled", action="store_true", help="let vLLM compile the model first")
    parser.add_argument("--json", metavar="FILE", help="also write the table there")
    chosen = parser.parse_args()
    if not points(chosen):
        parser.error(
            f"--groups: a group of {min(chosen.groups)} or more is larger than the {max(chosen.in_flight)} requests in flight; "
            "lower --groups or raise --in-flight"
        )
    return chosen


def points(chosen: argparse.Namespace) -> list[Point]:
    """What is measured; groups larger than what is in flight are left out."""
    return [
        Point(in_flight, group, chosen.requests or max(4, 2 * in_flight))
        for in_flight in chosen.in_flight
        for group in chosen.groups
        if group <= in_flight
    ]


def sides_to_run(given: str | None, peers: Peers) -> tuple[list[str], list[str]]:
    """The sides of --sides that can run here, and why others are left out. SystemExit with a sentence if none is left."""
    names, notes = named_sides(given, SIDES), []
    if given is None and (emulated := emulates_bfloat16()):
        names = [name for name in names if "bfloat16" not in name or name.startswith(OURS)]
        notes.append(f"except on the side of {OURS}, {emulated}")
    for peer, absent in peers.missing().items():
        if any(peer in name for name in names):
            names = [name for name in names if peer not in name]
            notes.append(absent)
    if not names:
        raise SystemExit(f"--sides: none of these sides can run here: {'; '.join(notes)}")
    return names, notes


def notes_of_limits(limits: dict[str, Limits]) -> list[str]:
    """What the bounds of the table's sides are computed with."""
    if not limits:
        return []
    (reading,) = {limit.reading for limit in limits.values()}
    speeds = {dtype: f"{limit.products / 1e9:,.0f} GFLOP/s" for dtype, limit in limits.items()}
    if "bfloat16" in limits and emulates_bfloat16():
        speeds["bfloat16"] += " (products in float32, because this processor has no instructions for bfloat16)"
    return [
        f"limits: reading {reading / 1e9:.1f} GB/s; products of {', of '.join(map(' '.join, speeds.items()))}",
        "of the bound: least seconds of the job by these limits (every distinct prompt once, then full decoding steps) over "
        "seconds taken; a kernel that multiplies faster than torch's products of square matrices can exceed 1",
    ]


def main() -> None:
    """Run the sides in turn and print the table."""
    from transformers import AutoTokenizer

    chosen = options()
    peers = Peers(vllm_side.find_python(chosen.vllm_python), llama_side.find_server(chosen.llama_server))
    names, notes = sides_to_run(chosen.sides, peers)
    for note in notes:
        print(note, file=sys.stderr)
    model = model_directory(chosen.model)
    tokenizer, sizes = AutoTokenizer.from_pretrained(model), model_sizes(str(model))
    torch.set_num_threads(chosen.threads)
    dtypes = {name.rpartition(" ")[2] for name in names}
    limits = measure_limits([dtype for dtype in ("float32", "bfloat16") if dtype in dtypes])
    rows, workers = [], {}
    # Sleeping workers outlive a parent that is ended without closing them.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        for name in names:
            workers[name] = start(name, chosen, str(model), peers)
        for point in points(chosen):
            found, jobs = measure(workers, point, chosen.rounds, tokenizer, chosen.limit)
            for name in set(workers) - set(found):
                workers.pop(name)
                notes.append(
                    f"{name} is left out from {point.in_flight} in flight on: over {chosen.limit:g} s (--limit)"
                )
            for name, outcomes in found.items():
                outcomes[-1]["peak"] = workers[name].peak_memory()
            rows += table(found, jobs, point, sizes, limits)
    finally:
        for worker in workers.values():
            worker.close()
    notes += [
        f"{chosen.model}, {chosen.threads} threads, medians of {chosen.rounds} rounds in turn; a job has "
        f"{chosen.requests or 'twice as many requests as are in flight, at least 4'}; tokens/s count sampled tokens over the whole job, prompts included",
        "per processor s: sampled tokens per second of processor time, which other processes on the machine change least",
        "x generate, x vLLM, x llama.cpp: against the fastest of their formats, of llama.cpp of those with 16 bits; first token: median of a burst of as many as are in flight",
        *notes_of_limits(limits),
        "peak GB adds up a side's processes"
        + ("; vLLM's holds a key/value cache of 2 GiB" if any(VLLM in name for name in workers) else ""),
        "versions: " + ", ".join(f"{name} {worker.version}" for name, worker in workers.items()),
    ]
    show("Generation", rows, notes, chosen.json)


if __name__ == "__main__":
    main()
