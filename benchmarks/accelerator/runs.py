"""Whole runs of the command line, in processes of their own, read from their metrics."""

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from accelerator.rows import Row
from accelerator.shapes import Shape, random_model

STEPS = 5
SHORT = [
    *("environment.type=bandit", "rollout.groups_per_step=4", "rollout.episodes_per_group=4", f"steps={STEPS}"),
    *("evaluation.every=0", "evaluation.seeds.count=4", "evaluation.final_seeds.count=4", "plots=false"),
]
Line = dict[str, Any]


class Missing(Exception):
    """What a part needs and this machine does not have."""


def require_gpus(count: int) -> None:
    """Raises `Missing` where fewer GPUs are."""
    if torch.cuda.device_count() < count:
        raise Missing(f"it needs {count} GPUs, and {torch.cuda.device_count()} are here")


def written_model(shape: Shape, folder: Path) -> str:
    """A directory with random weights of a published shape and the tokenizer of the packaged model."""
    from posttrain.models.load import load_tokenizer
    from posttrain.recipe.model import ModelRecipe

    tokenizer = load_tokenizer(ModelRecipe())
    model = random_model(replace(shape, vocabulary=len(tokenizer)), torch.device("cpu"), packed=False)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


class Run:
    """A run of a stage in `folder`, which is to end within `budget` seconds."""

    def __init__(self, words: list[str], folder: Path, budget: float) -> None:
        self.folder, self.run = folder, folder / "short"
        self.ends = time.monotonic() + budget
        self._words = [sys.executable, "-m", "posttrain.cli.main", *words]
        self._process: Any = None

    def start(self, *words: str) -> None:
        """Start it with further words, or resume it without."""
        more = [*words, f"runs={self.folder}", "name=short"] if words else ["--resume", str(self.run)]
        self._log = (self.folder / "log.txt").open("ab")
        command = [*self._words, *more]
        self._process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True)

    def wait(self) -> list[Line]:
        """The steps of the run, once it has ended. RuntimeError with its last line if it failed."""
        try:
            code = self._process.wait(max(1.0, self.ends - time.monotonic()))
        finally:
            self.kill()
        if code:
            raise RuntimeError((self.folder / "log.txt").read_text(errors="replace").strip().splitlines()[-1])
        return self.lines("train")

    def kill(self) -> None:
        """SIGKILL to all its processes."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def until(self, steps: int) -> None:
        """Wait until so many steps are in the metrics, or the run has ended."""
        while len(self.lines("train")) < steps and self._process.poll() is None and time.monotonic() < self.ends:
            time.sleep(0.2)

    def lines(self, kind: str) -> list[Line]:
        """The lines of a kind in the metrics so far."""
        file = self.run / "metrics.jsonl"
        whole = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.is_file() else []
        return [
            line for line in map(json.loads, (text for text in whole if text.endswith("\n"))) if line["kind"] == kind
        ]

    def servers(self) -> list[int]:
        """Process ids of the vLLM servers on this machine that run under this interpreter's user."""
        found = []
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = entry.read_bytes().split(b"\0")
                parent = int((entry.parent / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, ValueError):
                continue
            if b"posttrain.engines.vllm.server" in words and parent == self._process.pid:
                found.append(int(entry.parent.name))
        return found


def with_folder(part: Callable[..., Iterator[Row]]) -> Callable[..., Iterator[Row]]:
    """The part, with a temporary folder as its first argument."""

    def run(*arguments: Any) -> Iterator[Row]:
        with tempfile.TemporaryDirectory() as folder:
            yield from part(Path(folder), *arguments)

    return run


def _reinforcement(steps: list[Line], note: str) -> Iterator[Row]:
    """Rows of a run of rl: mismatch, time, and growth of the GPU's memory from the second step to the last."""
    mismatch = [step["policy/mismatch"] for step in steps if "policy/mismatch" in step]
    yield Row("run", f"{len(steps)} steps of rl, largest mismatch", max(mismatch), "nats", note=note)
    yield Row("run", "median step", statistics.median(step["time/step"] for step in steps), "s")
    gpu = [step["memory/gpu"] for step in steps if "memory/gpu" in step]
    if len(gpu) > 1:
        yield Row("run", "peak memory, last step over the second", gpu[-1] / gpu[1], "times", memory=gpu[-1])


@with_folder
def reinforcement_run(folder: Path, model: str | Shape, words: list[str], device: str, budget: float) -> Iterator[Row]:
    """A short run of `rl` with LoRA.

    A mismatch is the mean distance of the engine's log-probabilities from the learner's, in nats per token.
    """
    path = model if isinstance(model, str) else written_model(model, folder / "model")
    run = Run(["rl"], folder, budget)
    run.start(f"model.path={path}", f"model.device={device}", "model.lora.rank=16", *words, *SHORT)
    yield from _reinforcement(run.wait(), " ".join(words))


@with_folder
def server_killed(folder: Path, shape: Shape, budget: float) -> Iterator[Row]:
    """A run with adapters alone on a vLLM server that is killed after the second step."""
    path = written_model(shape, folder / "model")
    run = Run(["rl"], folder, budget)
    words = [f"model.path={path}", "model.lora.rank=16", "engine.type=vllm", "engine.adapters=adapter_only"]
    run.start(*words, *SHORT)
    run.until(2)
    servers = run.servers()
    for server in servers:
        os.killpg(server, signal.SIGKILL)
    yield from _reinforcement(run.wait(), "adapters alone")
    restarts = sum("was restarted" in line["message"] for line in run.lines("warning"))
    yield Row("run", "restarts of killed servers", float(restarts), "", note=f"{len(servers)} killed")


@with_folder
def run_killed(folder: Path, model: str, words: list[str], device: str, budget: float) -> Iterator[Row]:
    """A run of `sft` that is killed after the second update and resumed, against one that is not: losses of its updates."""
    losses = []
    for name in ("whole", "killed"):
        (folder / name).mkdir()
        run = Run(["sft"], folder / name, budget / 2)
        shape = ["environment.type=bandit", "steps=5", "rows_per_update=8", "checkpoint.every=1", "evaluation.every=0"]
        shape += ["evaluation.seeds.count=4", "evaluation.final_seeds.count=4", "plots=false"]
        run.start(f"model.path={model}", f"model.device={device}", *words, *shape)
        if name == "killed":
            run.until(2)
            run.kill()
            run.start()
        losses.append([step["loss/nll"] for step in run.wait()])
    apart = max(abs(one / other - 1) for one, other in zip(*losses, strict=True))
    yield Row("run", "losses of a killed and resumed run", apart, "relative", note=" ".join(words))


@with_folder
def processes(folder: Path, model: str, device: str, count: int, budget: float) -> Iterator[Row]:
    """The same updates of `sft` in one process and in `count` of them (FSDP2): distance of their losses."""
    losses = []
    for size in (1, count):
        (folder / str(size)).mkdir()
        run = Run(["sft"], folder / str(size), budget / 2)
        words = ["environment.type=bandit", "steps=3", "rows_per_update=8", "evaluation.every=0", "plots=false"]
        words += ["evaluation.seeds.count=4", "evaluation.final_seeds.count=4", f"hardware.processes={size}"]
        run.start(f"model.path={model}", f"model.device={device}", *words)
        losses.append([step["loss/nll"] for step in run.wait()])
    apart = max(abs(one / other - 1) for one, other in zip(*losses, strict=True))
    yield Row("run", f"losses of {count} processes against one", apart, "relative")


@with_folder
def on_ray(folder: Path, model: str | Shape, words: list[str], device: str, budget: float) -> Iterator[Row]:
    """Three steps on a Ray cluster: seconds of a step and of sending the weights."""
    path = model if isinstance(model, str) else written_model(model, folder / "model")
    run = Run(["rl"], folder, budget)
    run.start(f"model.path={path}", f"model.device={device}", "hardware.ray=auto", *words, *SHORT, "steps=3")
    steps = run.wait()
    yield Row("ray", "median step", statistics.median(step["time/step"] for step in steps), "s", note=" ".join(words))
    yield Row("ray", "weights to the engines", statistics.median(step["time/weights"] for step in steps), "s")
