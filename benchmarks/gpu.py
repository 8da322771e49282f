"""Everything that matters on one GPU as one table: first what it has to pass, then what it reaches.

    python benchmarks/gpu.py --minutes 25 --json out.json   from a bare checkout: torch, transformers and numpy are enough
    python benchmarks/gpu.py --minutes 25 --json out.json   again: parts with rows in the file are not run again
    python benchmarks/gpu.py --device cpu --tiny            the same code in seconds
    python benchmarks/gpu.py --parts sft-4B,decode-4B

Every part runs in a separate process with a time limit, so what fails, hangs or breaks the device is one line of
the table and the others go on; rows that a part had finished are kept. The column `check` has the verdicts of
`accelerator/checks.py`. Parts for more GPUs than the machine has are not run, and say so.

- SFT: whole optimizer steps on rows of lognormal length; MFU = FLOPs / (seconds x peak). FLOPs are 6 per parameter of
  the layers (embedding left out) and token, 6 per parameter of the output projection and trained token, and
  12 x layers x heads x head size per pair of a token and one it sees; recomputation does not count. The peak is the
  vendor's dense bfloat16 figure, or the measured product where the part is not listed.
- decoding: the limit is the time to read all weights and the cached keys and values of every sequence once at the
  copy bandwidth measured in the same run, or to do a step's arithmetic at the measured product, whichever is longer.
- log-probabilities: forward and backward, the peak beyond what is held before.
"""

import argparse
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE)]

from accelerator.bare import use_stand_in  # noqa: E402
from accelerator.checks import judged  # noqa: E402
from accelerator.rows import Row, table  # noqa: E402

MINUTES = 25.0
"""For all parts together."""
BUDGETS = {
    "device": 30,
    "limits": 45,
    "parity": 60,
    "agree-0.5B": 100,
    "sft-0.5B": 45,
    "sft-4B": 75,
    "sft-4B-compiled": 85,
    "sft-4B-liger": 75,
    "decode-4B": 70,
    "run-vllm": 200,
    "server-killed-4B": 200,
    "offload-4B": 80,
    "gpus-2": 120,
    "ray-8": 200,
    "ray-gspo-8": 240,
    "run-killed": 80,
    "log-probabilities": 40,
    "decode-0.5B": 55,
    "rl-0.5B": 65,
    "sft-1.5B": 45,
    "trl-0.5B": 60,
    "trl-grpo-0.5B": 90,
}
"""Maximum seconds of each part, the start of its process included, in the order in which they run."""
MORE_GPUS = ("gpus-2", "ray-8", "ray-gspo-8")
"""Parts that are not run on one GPU. The others fit into `MINUTES`."""
NAN = float("nan")


def measure(name: str, device_name: str, tiny: bool, limits: dict[str, float] | None, budget: float) -> Iterator[Row]:
    """The rows of one part, in this process. The part `limits` hands its numbers on in the case of its rows."""
    until = time.monotonic() + 0.6 * budget
    use_stand_in()
    import torch
    from accelerator import agreement, decoding, measuring, parity, reinforcement, training, trl_grpo, trl_side
    from accelerator.shapes import SHAPES, TINY

    from posttrain.models.load import resolve_device

    if device_name == "auto":
        device_name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device_name, 0) if device_name == "cuda" else torch.device(device_name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    shapes = TINY if tiny else SHAPES
    part, _, size = name.partition("-")
    known = measuring.Limits(**limits) if limits else measuring.Limits(NAN, NAN)
    if name == "device":
        yield Row(
            "device", "torch is built for CUDA", float(torch.version.cuda is not None), "", note=torch.__version__
        )
        yield Row("device", "auto selects it", float(resolve_device("auto").type == "cuda"), "")
    elif name == "limits":
        found = measuring.measure_limits(device, tiny, until)
        what = torch.cuda.get_device_name(device) if device.type == "cuda" else "processor"
        share = found.products / measuring.data_sheet(device)
        yield Row("limits", "products", found.products / 1e12, "TFLOP/s", share, note=what)
        yield Row("limits", "copying", found.copying / 1e12, "TB/s", note="bytes read and written")
    elif name == "parity":
        yield from parity.parity(shapes["0.5B"], device)
    elif part == "agree":
        yield from agreement.agreement(shapes[size], device)
    elif name == "log-probabilities":
        yield from training.log_probabilities(shapes["1.5B"], device, 64 if tiny else 8192, until)
    elif part == "sft":
        size, _, fused = size.partition("-")
        yield from training.supervised_that_fits(shapes[size], device, known, until, fused=fused or "own")
    elif part == "decode":
        prompt, tokens, flights = (8, 6, (1, 4)) if tiny else (128, 128, decoding.IN_FLIGHT)
        yield from decoding.decoding(shapes[size], device, known, until, prompt, tokens, flights)
    elif part == "rl":
        groups, members, prompt, tokens = (2, 2, 6, 6) if tiny else (8, 16, 256, 256)
        yield from reinforcement.learning(shapes[size], device, until, groups, members, prompt, tokens)
    elif name in ("run-vllm", "run-killed", "server-killed-4B", *MORE_GPUS):
        yield from whole_run(name, device.type, tiny, budget)
    elif part == "offload":
        yield from training.offloaded(shapes[size], device, known, until)
    elif name.startswith("trl-grpo"):
        groups, members, prompt, tokens, steps = (2, 2, 6, 6, 3) if tiny else (8, 16, 256, 256, 3)
        yield from trl_grpo.trl_grpo(shapes["0.5B"], device, groups, members, prompt, tokens, steps)
    elif part == "trl":
        rows, batch = (2_000, 2) if tiny else (150_000, 16)
        yield from trl_side.trl_supervised(shapes[size], device, rows, batch)
    else:
        raise ValueError(f"there is no part {name!r}; there is {', '.join(BUDGETS)}")


def whole_run(name: str, device: str, tiny: bool, budget: float) -> Iterator[Row]:
    """The rows of a part that runs the command line, on tiny models of the processor or random ones of published shapes."""
    from accelerator import runs
    from accelerator.shapes import SHAPES

    small = "made:small"
    if name == "run-killed":
        yield from runs.run_killed(small if tiny else "packaged:smollm2-135m", [], device, budget)
    elif name == "gpus-2":
        if not tiny:
            runs.require_gpus(2)
        yield from runs.processes(small if tiny else "packaged:smollm2-135m", device, 2, budget)
    elif name == "ray-8":
        if not tiny:
            runs.require_gpus(8)
        # As published for PPO, but for the reward model: 2 learners, 2 engines, 2 GPUs of the critic, 1 of the reference.
        words = ["credit.type=gae", "kl.coefficient=0.01", "hardware.dedicated.reference=1"]
        words += ["hardware.dedicated.critic=1"] if tiny else ["engine.type=vllm", "hardware.dedicated.critic=2"]
        words += (
            [] if tiny else ["hardware.processes=2", "hardware.engines.count=2", "hardware.engines.colocated=false"]
        )
        yield from runs.on_ray(small if tiny else SHAPES["4B"], words, device, budget)
    elif tiny and name != "run-vllm":
        raise runs.Missing("it needs vLLM on a GPU")
    elif name == "ray-gspo-8":
        runs.require_gpus(8)
        words = ["engine.type=vllm", "loss.type=gspo", "hardware.processes=8"]
        words += ["hardware.engines.count=2", "hardware.engines.devices=4"]
        yield from runs.on_ray(SHAPES["4B"], words, device, budget)
    else:
        if not tiny:
            import vllm  # noqa: F401 (a missing package is one line of the table)
        if name == "server-killed-4B":
            yield from runs.server_killed(SHAPES["4B"], budget)
        else:
            words = ["engine.type=local"] if tiny else ["engine.type=vllm"]
            yield from runs.reinforcement_run(small if tiny else SHAPES["1.5B"], words, device, budget)


def attempt(name: str, rows: Callable[[], Iterator[Row]]) -> Iterator[Row]:
    """The rows, and a last one that says why there are no more where it fails."""
    try:
        yield from rows()
    except ModuleNotFoundError as error:
        yield Row(name, "", NAN, "", note=f"not run: {error.name} is not installed")
    except Exception as error:
        if type(error).__name__ == "Missing":
            yield Row(name, "", NAN, "", note=f"not run: {error}")
            return
        traceback.print_exc()
        line = (str(error).splitlines() or [""])[0][:160]
        yield Row(name, "", NAN, "", note=f"{type(error).__name__}: {line}")


def in_a_process(name: str, chosen: argparse.Namespace, limits: dict[str, float] | None, budget: float) -> list[Row]:
    """The rows of a part that runs in a separate process for at most `budget` seconds."""
    command = [sys.executable, str(Path(__file__).resolve()), "--part", name, "--device", chosen.device]
    command += ["--budget", str(budget), *(["--tiny"] if chosen.tiny else [])]
    command += ["--limits", json.dumps(limits)] if limits else []
    stopped = False
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, timeout=budget, check=False)
        output, code = done.stdout, done.returncode
    except subprocess.TimeoutExpired as expired:
        output, code, stopped = expired.stdout or b"", 0, True
    rows = [Row(**json.loads(line)) for line in output.decode().splitlines() if line.startswith('{"part"')]
    if stopped:
        rows.append(Row(name, "", NAN, "", note=f"stopped after {budget:.0f} s"))
    elif code:
        rows.append(Row(name, "", NAN, "", note=f"its process ended with code {code}"))
    return rows


def earlier(file: Path | None) -> dict[str, list[Row]]:
    """The rows of parts that an earlier call wrote to `file`, without parts that failed."""
    if file is None or not file.is_file():
        return {}
    parts = json.loads(file.read_text(encoding="utf-8"))
    read = {part: [Row(**row) for row in rows] for part, rows in parts.items()}
    return {part: rows for part, rows in read.items() if all(row.value == row.value for row in rows)}


def limits_of(rows: list[Row]) -> dict[str, float] | None:
    """What the part `limits` measured, as the other parts take it."""
    found = {row.case: row.value * 1e12 for row in rows if row.part == "limits" and row.case}
    return found or None


def main(arguments: list[str] | None = None) -> int:
    """Run the parts and print the table; 1 where none of them gave a number."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--tiny", action="store_true", help="the same code on tiny models")
    parser.add_argument("--parts", default=",".join(BUDGETS), help="some of: %(default)s")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="for all parts together; %(default)s")
    parser.add_argument(
        "--json", type=Path, help="a file for the same rows; parts that have rows in it are not run again"
    )
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--budget", type=float, default=60 * MINUTES, help=argparse.SUPPRESS)
    parser.add_argument("--limits", type=json.loads, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.part:
        for row in attempt(
            chosen.part, lambda: measure(chosen.part, chosen.device, chosen.tiny, chosen.limits, chosen.budget)
        ):
            print(json.dumps(asdict(row)), flush=True)
        return 0
    names = chosen.parts.split(",")
    unknown = [name for name in names if name not in BUDGETS]
    if unknown:
        parser.error(f"there is no part {unknown[0]}; there is {', '.join(BUDGETS)}")
    if "limits" not in names:
        names.insert(0, "limits")
    begun = time.monotonic()
    done = earlier(chosen.json)
    for name in names:
        if name in done:
            continue
        left = 60 * chosen.minutes - (time.monotonic() - begun)
        if left < 20:
            print(f"{name}: not run, the time is over", file=sys.stderr, flush=True)
            continue
        started = time.monotonic()
        done[name] = judged(
            name, in_a_process(name, chosen, limits_of(done.get("limits", [])), min(BUDGETS[name], left))
        )
        print(f"{name}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
        if chosen.json:
            kept = {part: [asdict(row) for row in found] for part, found in done.items()}
            chosen.json.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    rows = [
        row for name in names for row in done.get(name, [Row(name, "", NAN, "", note="not run: the time was over")])
    ]
    print(table(rows))
    print(f"\n{time.monotonic() - begun:.0f} s; {versions()}")
    return int(all(row.value != row.value for row in rows))


def versions() -> str:
    """Of what was measured with, without importing it."""
    from importlib import metadata

    found: dict[str, Any] = {}
    for package in ("torch", "transformers", "triton", "trl"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return ", ".join(f"{package} {version}" for package, version in found.items())


if __name__ == "__main__":
    sys.exit(main())
