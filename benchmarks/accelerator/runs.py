"""Whole runs of the command line, in processes of their own, read from their metrics."""

import gc
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
from functools import partial
from pathlib import Path
from typing import Any

import torch

from accelerator.processes import descendants, kill
from accelerator.rows import WEIGHTS, Row
from accelerator.shapes import Shape, random_model, random_scorer

STEPS = 5
QUIET = ["evaluation.every=0", "evaluation.seeds.count=4", "evaluation.final_seeds.count=4", "plots=false"]
BANDIT = ["environment.type=bandit", "rollout.groups_per_step=4", "rollout.episodes_per_group=4", f"steps={STEPS}"]
SHORT = [*BANDIT, *QUIET]
Line = dict[str, Any]


class Missing(Exception):
    """What a part needs and this machine does not have."""


def require_gpus(count: int) -> None:
    """Raises `Missing` where fewer GPUs are."""
    if torch.cuda.device_count() < count:
        raise Missing(f"it needs {count} GPUs, and {torch.cuda.device_count()} are here")


def written_model(shape: Shape, folder: Path) -> str:
    """A directory with random weights of a published shape and the tokenizer of the packaged model."""
    return _written(shape, folder, partial(random_model, packed=False))


def written_scorer(shape: Shape, folder: Path) -> str:
    """`written_model` with a reward model's head of random weights."""
    return _written(shape, folder, random_scorer)


def _written(shape: Shape, folder: Path, make: Callable[..., Any]) -> str:
    from posttrain.models.load import load_tokenizer
    from posttrain.recipe.model import ModelRecipe

    tokenizer = load_tokenizer(ModelRecipe())
    # A processor takes minutes to draw billions of weights.
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = make(replace(shape, vocabulary=len(tokenizer)), device)
    model.config.pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    del model
    gc.collect()
    torch.cuda.empty_cache()
    return str(folder)


class Run:
    """A run of a stage in `folder`, which must end at `ends` of `time.monotonic`. Leaving its block kills the run."""

    def __init__(self, words: list[str], folder: Path, ends: float) -> None:
        self.folder, self.run, self.ends = folder, folder / "short", ends
        self._words = [sys.executable, "-m", "posttrain.cli.main", *words]
        self._process: Any = None

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    def start(self, *words: str) -> None:
        """Start it with further words, or resume it without."""
        more = [*words, f"runs={self.folder}", "name=short"] if words else ["--resume", str(self.run)]
        command = [*self._words, *more]
        with (self.folder / "log.txt").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)

    def wait(self) -> list[Line]:
        """The steps of the run, once it has ended. RuntimeError with its last line if it failed or took too long."""
        try:
            code = self._process.wait(max(1.0, self.ends - time.monotonic()))
        except subprocess.TimeoutExpired:
            steps = len(self.lines("train"))
            raise RuntimeError(f"the time was over after {steps} steps; last line: {self._last_line()}") from None
        finally:
            self.kill()
        if code:
            raise RuntimeError(self._last_line())
        return self.lines("train")

    def _last_line(self) -> str:
        lines = (self.folder / "log.txt").read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "none"

    def kill(self) -> None:
        """Send SIGKILL to the run and all its descendants, including servers in other sessions."""
        if self._process is None:
            return
        started = descendants(self._process.pid)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        kill(started)
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


def _halfway(ends: float) -> float:
    """The end of the first of two runs that have until `ends`."""
    return (time.monotonic() + ends) / 2


def _reinforcement(steps: list[Line], note: str) -> Iterator[Row]:
    """Rows of a run of rl: mismatch, times, and growth of the GPU's memory from the second step to the last."""
    mismatch = [step["policy/mismatch"] for step in steps if "policy/mismatch" in step]
    yield Row("run", f"{len(steps)} steps of rl, largest mismatch", max(mismatch), "nats", note=note)
    yield Row("run", "median step", statistics.median(step["time/step"] for step in steps), "s")
    yield _weights(steps)
    gpu = [step["memory/gpu"] for step in steps if "memory/gpu" in step]
    if len(gpu) > 1:
        yield Row("run", "peak memory, last step over the second", gpu[-1] / gpu[1], "times", memory=gpu[-1])


def _weights(steps: list[Line]) -> Row:
    """Seconds of sending the weights. The first step is left out: the engine may already have its weights."""
    sent = [step["time/weights"] for step in steps if "time/weights" in step]
    return Row("run", WEIGHTS, statistics.median(sent[1:] or sent), "s")


@with_folder
def reinforcement_run(folder: Path, model: str | Shape, words: list[str], device: str, ends: float) -> Iterator[Row]:
    """A short run of `rl` with LoRA.

    A mismatch is the mean distance of the engine's log-probabilities from the learner's, in nats per token.
    """
    path = model if isinstance(model, str) else written_model(model, folder / "model")
    with Run(["rl"], folder, ends) as run:
        run.start(f"model.path={path}", f"model.device={device}", "model.lora.rank=16", *words, *SHORT)
        yield from _reinforcement(run.wait(), " ".join(words))


@with_folder
def server_killed(folder: Path, shape: Shape, ends: float) -> Iterator[Row]:
    """A run with adapters alone on a vLLM server that is killed after the second step."""
    path = written_model(shape, folder / "model")
    words = [f"model.path={path}", "model.lora.rank=16", "engine.type=vllm", "engine.adapters=adapter_only"]
    with Run(["rl"], folder, ends) as run:
        run.start(*words, *SHORT)
        run.until(2)
        servers = run.servers()
        for server in servers:
            os.killpg(server, signal.SIGKILL)
        yield from _reinforcement(run.wait(), "adapters alone")
        restarts = sum("was restarted" in line["message"] for line in run.lines("warning"))
    yield Row("run", "restarts of killed servers", float(restarts), "", note=f"{len(servers)} killed")


@with_folder
def run_killed(folder: Path, model: str, words: list[str], device: str, ends: float) -> Iterator[Row]:
    """A run of `sft` that is killed after the second update and resumed, against one that is not: losses of its updates.

    First with all kernels, then with deterministic ones.
    """
    shape = [f"model.path={model}", f"model.device={device}", *words, *QUIET]
    shape += ["environment.type=bandit", "steps=5", "rows_per_update=8", "checkpoint.every=1"]
    for kernels in ("false", "true"):
        losses = []
        for name in ("whole", "killed"):
            place = folder / f"{name}-{kernels}"
            place.mkdir()
            with Run(["sft"], place, ends) as run:
                run.start(*shape, f"hardware.deterministic={kernels}")
                if name == "killed":
                    run.until(2)
                    run.kill()
                    if len(run.lines("train")) == 5:
                        raise RuntimeError("the run ended before it was killed")
                    run.start()
                losses.append([step["loss/nll"] for step in run.wait()])
        apart = max(abs(one / other - 1) for one, other in zip(*losses, strict=True))
        note = " ".join([*words, f"hardware.deterministic={kernels}"])
        yield Row("run", "losses of a killed and resumed run", apart, "relative", note=note)


@with_folder
def processes(folder: Path, model: str, device: str, count: int, ends: float) -> Iterator[Row]:
    """The same updates of `sft` in one process and in `count` of them (FSDP2): distance of their losses."""
    losses = []
    for size in (1, count):
        (folder / str(size)).mkdir()
        words = ["environment.type=bandit", "steps=3", "rows_per_update=8", f"hardware.processes={size}", *QUIET]
        with Run(["sft"], folder / str(size), _halfway(ends) if size == 1 else ends) as run:
            run.start(f"model.path={model}", f"model.device={device}", *words)
            losses.append([step["loss/nll"] for step in run.wait()])
    apart = max(abs(one / other - 1) for one, other in zip(*losses, strict=True))
    yield Row("run", f"losses of {count} processes against one", apart, "relative")


@with_folder
def offloaded_run(folder: Path, shape: Shape, updates: int, ends: float) -> Iterator[Row]:
    """Updates of all weights with `hardware.offload: all`: one layer at a time is on the GPU."""
    path = written_model(shape, folder / "model")
    words = ["environment.type=bandit", f"steps={updates + 1}", "rows_per_update=8", "hardware.offload=all", *QUIET]
    with Run(["sft"], folder, ends) as run:
        run.start(f"model.path={path}", *words)
        run.until(updates)
        # The run's last step also evaluates and exports, which is not measured.
        steps = run.lines("train")[:updates]
        if len(steps) < updates:
            steps = run.wait()
    took = statistics.median(step["time/step"] for step in steps)
    peak = max((step["memory/gpu"] for step in steps if "memory/gpu" in step), default=None)
    weights = sum(file.stat().st_size for file in Path(path).glob("*.safetensors")) / 2
    note = f"{len(steps)} updates, hardware.offload=all, {weights / 1e9:.1f} billion weights with a smaller vocabulary"
    yield Row("run", f"{shape.name}, median update", took, "s", memory=peak, note=note)


@with_folder
def ppo_on_ray(folder: Path, shape: Shape, tiny: bool, device: str, ends: float) -> Iterator[Row]:
    """Three steps of the shipped `ppo_8gpu.yaml` on a Ray cluster, with smaller batches and made-up prompts."""
    policy, scorer = written_model(shape, folder / "policy"), written_scorer(shape, folder / "scorer")
    prompts = folder / "prompts.jsonl"
    questions = [[{"role": "user", "content": f"What is {i} times {i + 1}?"}] for i in range(64)]
    prompts.write_text("".join(json.dumps({"context_messages": asked}) + "\n" for asked in questions))
    words = [f"model.path={policy}", f"reward.path={scorer}", f"critic.path={scorer}", "reward.normalize=none"]
    words += [f"environment.prompts=[{prompts}]", f"model.device={device}", "sinks=[]"]
    words += ["optimizer.warmup_updates=0", "critic.optimizer.warmup_updates=0", "rollout.tokens_per_episode=1024"]
    words += [f"rollout.groups_per_step={4 if tiny else 16}", f"rollout.tokens_per_turn={8 if tiny else 256}"]
    yield from _on_ray(folder, "rlhf/ppo", "rlhf/ppo_8gpu", [*words, *(_on_processors() if tiny else [])], ends)


@with_folder
def gspo_on_ray(folder: Path, shape: Shape, ends: float) -> Iterator[Row]:
    """Three steps of the shipped `gspo_8gpu_published.yaml` on a Ray cluster, with smaller batches and fewer epochs."""
    words = [f"model.path={written_model(shape, folder / 'policy')}", "rollout.groups_per_step=8"]
    words += ["learner.epochs_per_step=1", "optimizer.warmup_updates=0", "checkpoint={every: 1000}"]
    yield from _on_ray(folder, "memory/gspo_published", "memory/gspo_8gpu_published", words, ends)


def _on_processors() -> list[str]:
    """Overrides with which a placement for 8 GPUs runs on a few processors."""
    sections = ("model", "reward", "critic")
    return [
        *("engine.type=local", "hardware.processes=1", "hardware.engines.count=1"),
        *(f"{section}.dtype=float32" for section in sections),
    ]


def _on_ray(folder: Path, stage: str, placement: str, words: list[str], ends: float) -> Iterator[Row]:
    with Run(["rl", stage, placement], folder, ends) as run:
        run.start(*words, "steps=3", *QUIET)
        steps = run.wait()
    note = f"{placement}.yaml; which GPUs each engine sees is not recorded, so it is not checked"
    yield Row("ray", "median step", statistics.median(step["time/step"] for step in steps), "s", note=note)
    yield replace(_weights(steps), part="ray")
    yield Row("ray", "steps", float(len(steps)), "")
