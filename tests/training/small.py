"""A small but complete RL run in a separate process, which can kill itself at a given point."""

import errno
import gc
import importlib
import io
import itertools
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

PRELOAD = ["torch", "torch.distributed.checkpoint", "transformers", "peft", "posttrain.cli.main"]
PRELOAD += [f"posttrain.training.{stage}" for stage in ("rl", "sft", "dpo", "reward", "distill", "generate")]
PRELOAD.append("posttrain.distributed.sharding")
"""What runs import, so that each run need not."""


def fork_server() -> Any:
    """The context whose processes are forked from a server that has imported `PRELOAD`.

    A process has one such server, and it imports what its first user names: each test takes it from here, or starts it before
    the package does.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def recipe_values(tiny: Path, runs: Path, **changes: Any) -> dict[str, Any]:
    """Four steps on a toy task with everything that has state: dynamic sampling, adaptive KL, entropy target, schedule, guards."""
    values: dict[str, Any] = {"stage": "rl", "name": "small", "runs": str(runs), "steps": 4}
    values["model"] = {"path": str(tiny), "threads": 1}
    values["environment"] = {"type": f"{Path(__file__).parent / 'letters.py'}", "max_turns": 3}
    values |= {"seeds": {"start": 0, "count": 5}, "engine": {"type": "local", "slots": 6}}
    values["rollout"] = {"groups_per_step": 2, "episodes_per_group": 3, "tokens_per_turn": 6, "tokens_per_episode": 700}
    values["rollout"]["filter"] = {"type": "dynamic", "max_rounds": 2}
    values["kl"] = {"coefficient": 0.1, "target": 0.01, "horizon": 50}
    values["entropy"] = {"coefficient": 0.01, "target": 8.0, "step": 0.01}
    values["entropy"]["covariance"] = {"type": "clip_cov", "share": 0.1, "low": 0.0}
    values["optimizer"] = {"learning_rate": 1e-3, "weight_decay": 0.1, "schedule": "cosine", "warmup_updates": 2}
    values["learner"] = {"tokens_per_batch": 1500, "updates_per_step": 2}
    held_out = {"seeds": {"start": 1000, "count": 3}, "final_seeds": {"start": 2000, "count": 4}}
    values["evaluation"] = {"every": 2, **held_out, "sampling": {"temperature": 1.0}, "metric": "return"}
    values["checkpoint"] = {"every": 1, "keep": 2, "keep_state": "always"}
    return values | changes


def two_steps(values: dict[str, Any]) -> dict[str, Any]:
    """Changes to `values` for a run of two steps with the least evaluation, where the updates alone matter."""
    evaluation = {"every": 0, "seeds": {"start": 1000, "count": 1}, "final_seeds": {"start": 2000, "count": 1}}
    return {
        "steps": 2,
        "evaluation": values["evaluation"] | evaluation,
        "checkpoint": {"every": 100, "keep_state": "always"},
    }


def run(
    values: dict[str, Any],
    resume: bool = False,
    die_at: tuple[str, int] | None = None,
    figures: bool = False,
    kill_after: float | None = None,
    number: int = signal.SIGKILL,
) -> int:
    """Run the recipe in a process; returns its exit code (-9 when it was killed).

    `die_at` = (what, k): send itself the signal `number` at the k-th call of `what`, for example ("os:fsync", 3), or at the
    k-th time that it opens, renames or deletes a file of the run ("files", k). ("clock", k) is no death: its clock jumps,
    with the seed k.
    `kill_after`: SIGKILL from outside after so many seconds. Without `figures` the run draws none, which saves most of its
    time.
    """
    process = fork_server().Process(target=_child, args=(values, resume, die_at, figures, number))
    process.start()
    process.join(kill_after)
    if process.is_alive():
        process.kill()
        process.join()
    assert process.exitcode is not None
    return process.exitcode


def _child(
    values: dict[str, Any],
    resume: bool,
    die_at: tuple[str, int] | None,
    figures: bool = False,
    number: int = signal.SIGKILL,
) -> None:
    from pydantic import TypeAdapter

    from posttrain.recipe.components import environment_class
    from posttrain.recipe.stages import Recipe
    from posttrain.stages import run_stage

    gc.freeze()  # what the server has imported is no garbage
    os.fsync = lambda descriptor: None  # as in the process of the tests
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "POSTTRAIN_PLOTS": str(int(figures))}
    log = open(Path(values["runs"]) / "log.txt", "a")  # noqa: SIM115
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    if "environment" in values:
        environment_class(values["environment"]["type"])  # so that its module can be armed
    if die_at is not None and die_at[0] == "files":
        _arm_files(values["runs"], die_at[1], number)
    elif die_at is not None and die_at[0] == "clock":
        jumping_clock(random.Random(die_at[1]))
    elif die_at is not None:
        _arm(*die_at, number)
    run_stage(TypeAdapter(Recipe).validate_python(values), resume=resume)


def _arm(what: str, count: int, number: int = signal.SIGKILL) -> None:
    """Send this process the signal `number` before the `count`-th call of `module:name` (or `module:Class.name`)."""
    calls = itertools.count(1)

    def act(*args: Any) -> None:
        if next(calls) == count:
            os.kill(os.getpid(), number)

    before_calls(what, act)


def fill_disk(what: str, count: int) -> None:
    """Raise the error of a full disk in the `count`-th call of `what`, which is named as in `_arm`."""
    calls = itertools.count(1)

    def act(*args: Any) -> None:
        if next(calls) == count:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before_calls(what, act)


def before_calls(what: str, act: Callable[..., None]) -> None:
    """Call `act` with the positional arguments of each call of `what`, which is named as in `_arm`, before the call."""
    module_name, _, path = what.partition(":")
    owner: Any = importlib.import_module(module_name)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    original = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        act(*args)
        return original(*args, **kwargs)

    setattr(owner, name, wrapped)


def _arm_files(folder: str, count: int, number: int) -> None:
    """Send this process the signal `number` at the `count`-th opening, renaming or deletion of a file below `folder`."""
    left = [count]

    def audit(event: str, words: tuple[Any, ...]) -> None:
        if event in ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link"):
            path = words[0]
            if isinstance(path, str | os.PathLike) and str(path).startswith(folder):
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), number)

    sys.addaudithook(audit)


def jumping_clock(draw: random.Random) -> None:
    """Make `time.time` jump back or ahead, by up to ten years, at about every fifth call."""
    real, offset = time.time, [0.0]

    def now() -> float:
        if draw.random() < 0.2:
            offset[0] = draw.choice([0, -3600, 3600, -315e6, 315e6, -1, 1]) * draw.random()
        return real() + offset[0]

    time.time = now


def finished(values: dict[str, Any], figures: bool = False) -> Path:
    """Run the recipe in a process to its end, from where an earlier process left it; returns the folder of the run."""
    folder = Path(values["runs"]) / values["name"]
    code = run(values, resume=folder.exists(), figures=figures)
    assert code == 0, (folder.parent / "log.txt").read_text()
    return folder


def killed(
    values: dict[str, Any], *deaths: tuple[str, int], number: int = signal.SIGKILL, figures: bool = False
) -> list[int]:
    """Die at each of `deaths` in turn, in processes that go on where the one before ended; returns their exit codes."""
    folder = Path(values["runs"]) / values["name"]
    return [run(values, folder.exists(), death, figures, number=number) for death in deaths]


def stopped(values: dict[str, Any], number: int, at: str) -> str:
    """Send the signal `number` to a run when its output has the text `at`; returns the whole output."""
    process = fork_server().Process(target=_child, args=(values, False, None))
    process.start()
    log, deadline = Path(values["runs"]) / "log.txt", time.monotonic() + 120
    while time.monotonic() < deadline and not (log.exists() and at in log.read_text()):
        time.sleep(0.005)
    os.kill(process.pid, number)
    process.join()
    return log.read_text()


def train(values: dict[str, Any], **options: Any) -> tuple[Any, str]:
    """Run the recipe in this process with the options of `run_stage`; returns the run and its output."""
    from pydantic import TypeAdapter
    from rich.console import Console

    from posttrain.recipe.stages import Recipe
    from posttrain.stages import run_stage

    printed = io.StringIO()
    recipe = TypeAdapter(Recipe).validate_python(values)
    return run_stage(recipe, console=Console(file=printed, width=200), **options), printed.getvalue()


def lines(run: Any, kind: str) -> list[dict[str, Any]]:
    """The lines of a kind, such as `train`, in the metrics of a run or of its folder."""
    from posttrain.runs.metrics import read_metrics

    return [line for line in read_metrics(getattr(run, "path", run) / "metrics.jsonl") if line["kind"] == kind]


def messages(run: Any) -> list[str]:
    """The warnings of a run."""
    return [line["message"] for line in lines(run, "warning")]


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`changes` whose sections have the other keys of the sections of `base`."""
    return {key: base[key] | value if isinstance(base.get(key), dict) else value for key, value in changes.items()}


def cases(table: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """Parameters of a test, of which those that are not in `quick` are marked slow."""
    import pytest

    return [pytest.param(case, marks=[] if case in quick else pytest.mark.slow) for case in table]


def weights(run: Path) -> dict[str, bytes]:
    """The exported model and the last checkpoint's state, as bytes."""
    from posttrain.distributed.tensors import read_all

    last = sorted((run / "checkpoints").glob("step_*"))[-1]
    files = [*sorted((run / "model").glob("*.safetensors")), last / "state.json"]
    tensors = {name: tensor.numpy().tobytes() for name, tensor in read_all(last / "tensors").items()}
    assert any(name.startswith("optimizer/") for name in tensors)
    return {str(file.relative_to(run)): file.read_bytes() for file in files} | tensors


def metrics(run: Path) -> list[dict[str, Any]]:
    """Metrics without what depends on the clock or on the process."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(("time/", "speed/", "memory/"))} for line in lines]


def episodes(run: Path) -> dict[str, list]:
    """All stored episodes with their token ids, log-probabilities, advantages and units."""
    from posttrain.rollout.store import read_episodes

    found = {}
    for file in sorted((run / "episodes").iterdir()):
        stored = read_episodes(file)
        streams = [s for episode in stored.episodes for s in episode.streams]
        found[file.name] = [
            [(s.ids.tolist(), s.rollout_logprobs.tobytes(), s.rewards.tobytes()) for s in streams],
            stored.advantages and [[a.tobytes() for a in streams] for streams in stored.advantages.values],
            [u and (u.spans.cuts.tolist(), u.credits.tobytes(), u.outcome, u.empty_value) for u in stored.units],
        ]
    return found


def assert_same(run: Path, reference: Path, stored: bool = True) -> None:
    """Two runs have the same weights and state, metrics and, if they are `stored`, episodes, to the bit."""
    assert weights(run) == weights(reference)
    assert metrics(run) == metrics(reference)
    assert not stored or episodes(run) == episodes(reference)


def kept_gradients(monkeypatch: Any) -> dict[str, Any]:
    """The gradients at each step of any optimizer, which changes no weights any more."""
    from posttrain.training.optimizer import Optimizer

    found: dict[str, Any] = {}

    def keep(self: Any) -> float:
        found.update({each.name: each.gradient.clone() for each in self.trained if each.gradient is not None})
        return 1.0

    monkeypatch.setattr(Optimizer, "step", keep)
    return found


def gradients(
    model: Any, forward: Any, samples: list[Any], objective: Any, monkeypatch: Any, budget: int = 4096
) -> tuple[dict[str, Any], dict[str, float]]:
    """The gradients of one update in micro-batches of at most `budget` tokens, which changes no weights, and its metrics."""
    from posttrain.recipe.model import LearnerRecipe, OptimizerRecipe
    from posttrain.training.optimizer import Optimizer
    from posttrain.training.updater import Updater, means

    for _, parameter in model.trainable():
        parameter.grad = None
    optimizer = Optimizer(model.trainable(), OptimizerRecipe(), 10)
    updater = Updater(model, optimizer, LearnerRecipe(tokens_per_batch=budget), forward)
    version = model.version
    with monkeypatch.context() as patch:
        found = kept_gradients(patch)
        totals = updater.update(samples, objective)
    model.version = version
    return found, means(totals)


def assert_no_split_changes_gradients(
    model: Any,
    forward: Any,
    make_samples: Callable[[], list[Any]],
    objective: Any,
    monkeypatch: Any,
    budgets: tuple[int, ...] = (70, 150),
    atol: float = 3e-6,
    rtol: float = 2e-4,
) -> dict[str, Any]:
    """The gradients of an update are the same in one micro-batch and in several; returns them."""
    import torch

    from posttrain.training.updater import pack

    whole, _ = gradients(model, forward, make_samples(), objective, monkeypatch)
    assert len(pack(make_samples(), 4096)) == 1
    for budget in budgets:
        assert len(pack(make_samples(), budget)) > 1
        parts, _ = gradients(model, forward, make_samples(), objective, monkeypatch, budget)
        torch.testing.assert_close(parts, whole, atol=atol, rtol=rtol)
    return whole
