"""Sides measured in turn: warm-up, repetitions, medians, ratios, and the peak memory of each process."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

Outcome = TypeVar("Outcome")
BENCHMARKS = Path(__file__).parents[1]


class OverLimit(Exception):
    """A side took longer than its limit."""


def in_turn(
    sides: Mapping[str, Callable[[int], Outcome]],
    rounds: int,
    warmup: int = 0,
    say: Callable[[str], None] | None = None,
) -> dict[str, list[Outcome]]:
    """What each side returns in each of `rounds` rounds.

    In a round every side runs once, so that what changes on the machine meanwhile meets all of them; every other round
    goes through them backwards. A side gets the number of the round, which is below 0 in the `warmup` rounds before,
    whose outcomes are dropped. `say` gets a line of progress after each run (stderr by default). A side that raises
    `OverLimit` is left out from then on, with a line that says so; SystemExit with a sentence if none is left.
    """
    say = say or _say
    sides = dict(sides)
    found: dict[str, list[Outcome]] = {name: [] for name in sides}
    for number in range(-warmup, rounds):
        names = list(sides) if number % 2 == 0 else list(sides)[::-1]
        for name in names:
            begun = time.perf_counter()
            try:
                outcome = sides[name](number)
            except OverLimit as over:
                say(f"{name} is left out: {over}; raise --limit to run it")
                del sides[name], found[name]
                if not found:
                    raise SystemExit("every side is over the limit; raise --limit") from over
                continue
            if number >= 0:
                found[name].append(outcome)
            label = f"round {number + 1} of {rounds}" if number >= 0 else "warm-up"
            say(f"{label}: {name} took {time.perf_counter() - begun:.1f} s")
    return found


def seconds_of(function: Callable[[], Any], repeats: int = 5, warmup: int = 1) -> list[float]:
    """Wall-clock seconds of each of `repeats` calls, after `warmup` that are not counted."""
    found = []
    for number in range(warmup + repeats):
        begun = time.perf_counter()
        function()
        if number >= warmup:
            found.append(time.perf_counter() - begun)
    return found


def middle(values: Sequence[float]) -> float:
    """The median; NaN of nothing."""
    return median(values) if values else float("nan")


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Median of `ours` over median of `theirs`."""
    return middle(ours) / middle(theirs)


def peak_memory(pid: int | str = "self") -> int:
    """Bytes: the largest resident size that the process `pid` has had since it was started (VmHWM of Linux).

    Where there is no /proc, the same of the present process from getrusage.
    """
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def side_environment(threads: int) -> dict[str, Any]:
    """Environment variables of a side: it sees this folder, `threads` threads and no network of the hub."""
    offline = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TOKENIZERS_PARALLELISM": "false"}
    limits = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
    return {**os.environ, "PYTHONPATH": str(BENCHMARKS), **limits, **offline}


def run_side(
    module: str,
    job: Mapping[str, Any],
    threads: int,
    variables: Mapping[str, str | None] | None = None,
    limit: float | None = None,
) -> dict[str, Any]:
    """Run `python -m module JOB RESULT` in a separate process; what it wrote to RESULT, a JSON object.

    JOB is a file with `job` as JSON. The process sees this folder, `threads` threads and no network of the hub.
    `variables` are set last; None removes one. A side that dies raises RuntimeError with the end of what it printed, one
    that is not done after `limit` seconds is killed and raises `OverLimit`.
    """
    with tempfile.TemporaryDirectory(prefix="posttrain-benchmark-") as place:
        request, answer, log = (Path(place) / name for name in ("job.json", "result.json", "log"))
        request.write_text(json.dumps({**job, "place": place, "threads": threads}))
        paths = filter(None, [str(BENCHMARKS), os.environ.get("PYTHONPATH")])
        environment = side_environment(threads) | {"PYTHONPATH": os.pathsep.join(paths)} | dict(variables or {})
        environment = {name: value for name, value in environment.items() if value is not None}
        with log.open("w") as output:
            try:
                done = subprocess.run(
                    [sys.executable, "-m", module, str(request), str(answer)],
                    cwd=place,
                    env=environment,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    check=False,
                    timeout=limit,
                )
            except subprocess.TimeoutExpired:
                raise OverLimit(f"not done after {limit:g} s") from None
        if done.returncode or not answer.is_file():
            raise RuntimeError(f"{module} ended with {done.returncode}:\n{log.read_text(errors='replace')[-3000:]}")
        return json.loads(answer.read_text())


def available_threads() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
