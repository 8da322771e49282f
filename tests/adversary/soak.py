"""Attack every surface with new seeds until the time is up: `make soak MINUTES=30`.

`python -m tests.adversary.soak --surface rows --seed 17` repeats one case. Exit code 1 if an attack got through.
"""

import argparse
import os
import random
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path

from tests.adversary.surfaces import SURFACES, attempt


def soak(seconds: float, first: int, surfaces: list[str], folder: Path) -> dict[str, list[tuple[int, str]]]:
    """Surface -> (seed, failure) of each failed case. Prints failures as they come, and a line per surface at the end."""
    cases: Counter[str] = Counter()
    spent: dict[str, float] = defaultdict(float)
    failures: dict[str, list[tuple[int, str]]] = {name: [] for name in surfaces}
    end, seed = time.monotonic() + seconds, first
    while time.monotonic() < end:
        # The surface that has used the least time is next, so that slow ones do not take all of it.
        name = min(surfaces, key=lambda one: spent[one])
        started = time.monotonic()
        failure = attempt(name, seed, folder / name)
        spent[name] += time.monotonic() - started
        cases[name] += 1
        if failure is not None:
            failures[name].append((seed, failure))
            print(
                f"FAILED {name}: {failure}\n  python -m tests.adversary.soak --surface {name} --seed {seed}", flush=True
            )
        seed += 1
    for name in surfaces:
        seeds = ", ".join(str(seed) for seed, _ in failures[name][:8])
        print(f"{name:14} {cases[name]:7} cases, {len(failures[name]):4} failures{f': seeds {seeds}' if seeds else ''}")
    print(f"{sum(cases.values())} cases, {sum(map(len, failures.values()))} failures; first seed {first}")
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--surface", choices=SURFACES, action="append", help="only this surface; can be repeated")
    parser.add_argument("--seed", type=int, help="repeat the case of this seed; needs --surface")
    arguments = parser.parse_args()
    os.environ["POSTTRAIN_PLOTS"] = "0"
    surfaces = arguments.surface or list(SURFACES)
    with tempfile.TemporaryDirectory() as folder:
        if arguments.seed is not None:
            failures = [attempt(name, arguments.seed, Path(folder) / name) for name in surfaces]
            print("\n".join(f"{name}: {failure or 'held'}" for name, failure in zip(surfaces, failures, strict=True)))
            return int(any(failures))
        first = random.SystemRandom().randrange(10**9)
        return int(any(soak(60 * arguments.minutes, first, surfaces, Path(folder)).values()))


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # threads of servers that serve to the end would be waited for
