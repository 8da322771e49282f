"""A small but complete RL run in a separate process, which can kill itself at a given point."""

import gc
import importlib
import itertools
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PRELOAD = [
    "torch",
    "torch.distributed.checkpoint",
    "transformers",
    "peft",
    "posttrain.cli.main",
    "posttrain.distributed.sharding",
    *(f"posttrain.training.{stage}" for stage in ("rl", "sft", "dpo", "reward", "distill", "generate")),
]
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
    values = {
        "stage": "rl",
        "name": "small",
        "runs": str(runs),
        "model": {"path": str(tiny), "threads": 1},
        "environment": {"type": f"{Path(__file__).parent / 'letters.py'}", "max_turns": 3},
        "steps": 4,
        "seeds": {"start": 0, "count": 5},
        "engine": {"type": "local", "slots": 6},
        "rollout": {
            "groups_per_step": 2,
            "episodes_per_group": 3,
            "tokens_per_turn": 6,
            "tokens_per_episode": 700,
            "filter": {"type": "dynamic", "max_rounds": 2},
        },
        "kl": {"coefficient": 0.1, "target": 0.01, "horizon": 50},
        "entropy": {
            "coefficient": 0.01,
            "target": 8.0,
            "step": 0.01,
            "covariance": {"type": "clip_cov", "share": 0.1, "low": 0.0},
        },
        "optimizer": {"learning_rate": 1e-3, "weight_decay": 0.1, "schedule": "cosine", "warmup_updates": 2},
        "learner": {"tokens_per_batch": 1500, "updates_per_step": 2},
        "evaluation": {
            "every": 2,
            "seeds": {"start": 1000, "count": 3},
            "final_seeds": {"start": 2000, "count": 4},
            "sampling": {"temperature": 1.0},
            "metric": "return",
        },
        "checkpoint": {"every": 1, "keep": 2, "keep_state": "always"},
    }
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
        found[file.name] = [
            [
                (s.ids.tolist(), s.rollout_logprobs.tobytes(), s.rewards.tobytes())
                for e in stored.episodes
                for s in e.streams
            ],
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
        found.update({n: m.grad.clone() for n, m in zip(self.names, self.masters, strict=True) if m.grad is not None})
        return 1.0

    monkeypatch.setattr(Optimizer, "step", keep)
    return found
