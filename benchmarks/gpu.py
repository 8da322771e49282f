"""Everything that matters on one GPU as one table: first what it has to pass, then what it reaches.

    python benchmarks/gpu.py --minutes 45 --json out.json   from a bare checkout: torch, transformers and numpy are enough
    python benchmarks/gpu.py --minutes 45 --json out.json   again: parts with rows in the file are not run again
    python benchmarks/gpu.py --device cpu --tiny            the same code in seconds
    python benchmarks/gpu.py --parts sft-4B,decode-4B
    python benchmarks/gpu.py --parts rl-0.5B,rl-1.7B,rl-4B,rl-4B-lora --runs 3   GRPO on one GPU, with its spread

Every part runs in a separate process with a time limit, so what fails, hangs or breaks the device is one line of
the table and the others go on; rows that a part had finished are kept, and all processes that it started end with it.
The column `check` has the verdicts of `accelerator/checks.py`. Parts for more GPUs or packages than the machine has
are not run, and say so. The exit status is 1 if a check FAILED or no part gave a number, and 2 if `--json` has rows of
another device.

- SFT: whole optimizer steps on rows of lognormal length; MFU = FLOPs / (seconds x peak). FLOPs are 6 per parameter of
  the layers (embedding left out) and token, 6 per parameter of the output projection and trained token, and
  12 x layers x heads x head size per pair of a token and one it sees; with LoRA, 4 in place of 6, for frozen
  weights have no gradient; recomputation does not count. The peak is the
  vendor's dense bfloat16 figure, or the measured product where the part is not listed.
- decoding: the limit is the time to read all weights and the cached keys and values of every sequence once at the
  copy bandwidth measured in the same run, or to do a step's arithmetic at the measured product, whichever is longer.
- log-probabilities: forward and backward, the peak beyond what is held before.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE)]

from accelerator.bare import use_stand_in  # noqa: E402
from accelerator.checks import FAILED, judged  # noqa: E402
from accelerator.processes import adopted_orphans, descendants, end  # noqa: E402
from accelerator.rows import Row, ratios, spread, table  # noqa: E402
from harness.options import names  # noqa: E402

MINUTES = 45.0
"""For all parts together."""
BUDGETS = {
    "device": 30,
    "limits": 35,
    "parity": 45,
    "attention": 30,
    "decode-4B": 60,
    "rl-0.5B": 50,
    "ragged-4B": 60,
    "rl-4B-lora": 60,
    "lora-4B": 40,
    "profile-4B": 50,
    "log-probabilities": 40,
    "optimizers": 40,
    "qlora-8B": 60,
    "lora-8B": 45,
    "profile-0.5B": 40,
    "decode-0.5B": 45,
    "run-killed": 200,
    "rl-1.7B": 60,
    "rl-4B": 70,
    "sft-0.5B": 45,
    "sft-4B": 75,
    "offload-8B": 180,
    "agree-0.5B": 110,
    "sft-4B-liger": 55,
    "run-vllm": 200,
    "server-killed-4B": 200,
    "offload-4B": 80,
    "gpus-2": 120,
    "ray-8": 200,
    "ray-gspo-8": 240,
    "sft-1.5B": 45,
    "trl-0.5B": 100,
    "trl-grpo-0.5B": 120,
}
"""Maximum seconds of each part, the start of its process included, in the order in which they run: parts
without a row in docs/results/gpu.json come first, so that `--minutes 15` measures these."""
RUNS = ("run-vllm", "run-killed", "server-killed-4B", "offload-8B")
"""Parts that run the command line on one GPU."""
MORE_GPUS = ("gpus-2", "ray-8", "ray-gspo-8")
"""Parts that are not run on one GPU. The others fit into `MINUTES`."""
NAN = float("nan")


def measure(name: str, device_name: str, tiny: bool, limits: dict[str, float] | None, budget: float) -> Iterator[Row]:
    """The rows of one part, in this process. The part `limits` hands its numbers on in the case of its rows."""
    begun = time.monotonic()
    until = begun + 0.6 * budget
    use_stand_in()
    import torch
    from accelerator import agreement, decoding, measuring, parity, probes, reinforcement, training, trl_side
    from accelerator.shapes import SHAPES, TINY

    from posttrain.models.load import resolve_device

    if device_name == "auto":
        device_name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device_name, 0) if device_name == "cuda" else torch.device(device_name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    shapes = TINY if tiny else SHAPES
    part, _, size = name.partition("-")
    known = measuring.Limits(limits["products"], limits["copying"]) if limits else measuring.Limits(NAN, NAN)
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
        yield Row("limits", "copying", found.reading / 1e12, "TB/s", note="bytes read and written")
    elif name == "parity":
        yield from parity.parity(shapes["0.5B"], device)
    elif part == "agree":
        yield from agreement.agreement(shapes[size], device)
    elif name == "log-probabilities":
        for shape in (shapes["0.5B"], shapes["4B"]):
            yield from training.log_probabilities(shape, device, 64 if tiny else 8192, until)
    elif name == "attention":
        yield from probes.attention(device, tiny, until)
    elif name == "optimizers":
        yield from probes.optimizers(shapes["1.7B"], device, until)
    elif part == "profile":
        yield from probes.profile(shapes[size], device, *((4, 6) if tiny else (32, 24)))
    elif part in ("lora", "qlora"):
        yield from training.supervised_that_fits(shapes[size], device, known, until, mode=part)
    elif part == "sft":
        size, _, fused = size.partition("-")
        if fused == "liger":
            require_liger(device.type)
        yield from training.supervised_that_fits(shapes[size], device, known, until, fused=fused or "own")
    elif part == "decode":
        prompt, tokens, flights = (8, 6, (1, 4)) if tiny else (128, 128, decoding.IN_FLIGHT)
        yield from decoding.decoding(shapes[size], device, known, until, prompt, tokens, flights)
    elif part in ("rl", "ragged"):
        size, _, mode = size.partition("-")
        sizes = (2, 2, 6, 6) if tiny else (8, 16, 256, 256)
        yield from reinforcement.learning(shapes[size], device, until, sizes, mode, part == "ragged")
    elif name in (*RUNS, *MORE_GPUS):
        # The run must end, and its files must be removed, before this process is stopped.
        yield from whole_run(name, device.type, tiny, begun + budget - min(20.0, 0.15 * budget))
    elif part == "offload":
        # Masters, gradients and moments are in CPU memory: 16 bytes per parameter there.
        setting = training.Setting(shapes[size].tokens_per_batch // 2, offload="optimizer")
        yield from training.supervised(shapes[size], device, known, until, setting)
    elif name.startswith("trl-grpo"):
        groups, members, prompt, tokens, steps = (2, 2, 6, 6, 3) if tiny else (8, 16, 256, 256, 3)
        yield from trl_side.trl_grpo(shapes["0.5B"], device, groups, members, prompt, tokens, steps)
    elif part == "trl":
        rows, batch = (12_000, 2) if tiny else (300_000, 16)
        yield from trl_side.trl_supervised(shapes[size], device, rows, batch, until)
    else:
        raise ValueError(f"there is no part {name!r}; there is {', '.join(BUDGETS)}")


def require_liger(device: str) -> None:
    """Raise the error that reports the part as not run if Liger's kernels are not available."""
    from accelerator.runs import Missing

    if device != "cuda":
        raise Missing("Liger's kernels need a GPU")
    if find_spec("liger_kernel") is None:
        raise ModuleNotFoundError(name="liger-kernel")


def whole_run(name: str, device: str, tiny: bool, ends: float) -> Iterator[Row]:
    """The rows of a part that runs the command line, on tiny models of the processor or random ones of published shapes.

    Its runs must end at `ends` of `time.monotonic`.
    """
    from accelerator import runs
    from accelerator.shapes import SHAPES, TINY
    from harness import made_model

    small = str(made_model.small()) if tiny else ""
    if name == "run-killed":
        yield from runs.run_killed(small if tiny else "packaged:smollm2-135m", [], device, ends)
    elif name == "gpus-2":
        if not tiny:
            runs.require_gpus(2)
        yield from runs.processes(small if tiny else "packaged:smollm2-135m", device, 2, ends)
    elif name == "ray-8":
        if not tiny:
            runs.require_gpus(8)
        yield from runs.ppo_on_ray((TINY if tiny else SHAPES)["4B"], tiny, device, ends)
    elif name == "run-vllm" and tiny:
        yield from runs.reinforcement_run(small, ["engine.type=local"], device, ends)
    elif tiny or device != "cuda":
        raise runs.Missing("it needs a GPU")
    elif name == "offload-8B":
        yield from runs.offloaded_run(SHAPES["8B"], 3, ends)
    else:
        runs.require_gpus(8 if name == "ray-gspo-8" else 1)
        import vllm  # noqa: F401 (a missing package is one line of the table)

        if name == "ray-gspo-8":
            yield from runs.gspo_on_ray(SHAPES["4B"], ends)
        elif name == "server-killed-4B":
            yield from runs.server_killed(SHAPES["4B"], ends)
        else:
            yield from runs.reinforcement_run(SHAPES["1.5B"], ["engine.type=vllm"], device, ends)


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
    """The rows of a part that runs in a separate process for at most `budget` seconds.

    On return, all processes that the part started have ended, and its temporary files are removed.
    """
    command = [sys.executable, str(Path(__file__).resolve()), "--part", name, "--device", chosen.device]
    command += ["--budget", str(budget), *(["--tiny"] if chosen.tiny else [])]
    command += ["--limits", json.dumps(limits)] if limits else []
    others = descendants(os.getpid())
    code = None
    # A short name: Ray and vLLM make sockets below it, whose paths have at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="gpu-", ignore_cleanup_errors=True) as folder, adopted_orphans():
        output = Path(folder, "rows")
        with output.open("wb") as file:
            environment = {**os.environ, "TMPDIR": folder}
            process = subprocess.Popen(command, stdout=file, env=environment, start_new_session=True)
        try:
            code = process.wait(budget)
        except subprocess.TimeoutExpired:
            pass
        finally:
            end(process, others)
        lines = output.read_text(encoding="utf-8").splitlines()
    rows = [Row(**json.loads(line)) for line in lines if line.startswith('{"part"') and line.endswith("}")]
    if code is None:
        rows.append(Row(name, "", NAN, "", note=f"stopped after {budget:.0f} s"))
    elif code:
        rows.append(Row(name, "", NAN, "", note=f"its process ended with code {code}"))
    return rows


def device_of(chosen: argparse.Namespace) -> str:
    """The device that the rows describe, and whether the models are tiny."""
    name = "a processor"
    if chosen.device != "cpu":
        code = "import torch; print(torch.cuda.get_device_name(0) if torch.cuda.is_available() else 'a processor')"
        done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=False)
        name = done.stdout.strip() or "an unknown device"
    return f"{name} with tiny models" if chosen.tiny else name


class Results:
    """The rows of all parts, stored in a file if there is one. Parts that failed in an earlier call are not read."""

    def __init__(self, file: Path | None, device: str) -> None:
        """ValueError if `file` has rows of another device."""
        self.file = file
        self.parts: dict[str, list[Row]] = {}
        self.document: dict[str, Any] = {"device": device, "calls": []}
        if file is not None and file.is_file():
            self.document = json.loads(file.read_text(encoding="utf-8"))
            found = self.document.get("device", "an unknown device")
            if found != device:
                raise ValueError(f"{file} has rows of {found}, and this is {device}; name another file with --json")
            read = {part: [Row(**row) for row in rows] for part, rows in self.document["parts"].items()}
            self.parts = {part: rows for part, rows in read.items() if all(row.value == row.value for row in rows)}
        now = datetime.now(UTC).isoformat(timespec="seconds")
        self.document["calls"].append({"date": now, "versions": versions()})

    def add(self, part: str, rows: list[Row]) -> None:
        self.parts[part] = rows
        if self.file is not None:
            kept = {name: [asdict(row) for row in found] for name, found in self.parts.items()}
            compared = [asdict(row) for row in ratios(self.parts)]
            document = {**self.document, "parts": kept, "ratios": compared}
            self.file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def limits_of(rows: list[Row]) -> dict[str, float] | None:
    """What the part `limits` measured, as the other parts take it."""
    found = {row.case: row.value * 1e12 for row in rows if row.part == "limits" and row.case}
    return found or None


def main(arguments: list[str] | None = None) -> int:
    """Run the parts and print the table; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--tiny", action="store_true", help="the same code on tiny models")
    parser.add_argument("--parts", type=names(BUDGETS), default=",".join(BUDGETS), help="some of: %(default)s")
    parser.add_argument("--runs", type=int, default=1, help="processes of each part; rows have their median and spread")
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
    parts = chosen.parts if "limits" in chosen.parts else ["limits", *chosen.parts]
    begun = time.monotonic()
    try:
        results = Results(chosen.json, device_of(chosen))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    done = results.parts
    for name in parts:
        if name in done:
            continue
        # With --tiny, most of the time is the start of processes, which takes longer on a few processors.
        budget = BUDGETS[name] * (2 if chosen.tiny else 1)
        runs: list[list[Row]] = []
        started = time.monotonic()
        while len(runs) < chosen.runs and (left := 60 * chosen.minutes - (time.monotonic() - begun)) >= 20:
            runs.append(in_a_process(name, chosen, limits_of(done.get("limits", [])), min(budget, left)))
        if not runs:
            print(f"{name}: not run, the time is over", file=sys.stderr, flush=True)
            continue
        results.add(name, judged(name, spread(runs), chosen.tiny))
        print(f"{name}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    rows = [
        row for name in parts for row in done.get(name, [Row(name, "", NAN, "", note="not run: the time was over")])
    ]
    print(table([*rows, *ratios(done)]))
    used = ", ".join(f"{package} {version}" for package, version in versions().items())
    print(f"\n{time.monotonic() - begun:.0f} s; {used}")
    return int(all(row.value != row.value for row in rows) or any(row.check.startswith(FAILED) for row in rows))


def versions() -> dict[str, str]:
    """Versions of the packages that the results depend on, without importing them."""
    from importlib import metadata

    found = {}
    for package in ("torch", "transformers", "triton", "vllm", "ray", "trl", "liger-kernel", "bitsandbytes"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def stop(number: int, frame: Any) -> None:
    """Handler of SIGTERM: an exception, so that `finally` blocks kill runs and remove files."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, stop)
    sys.exit(main())
