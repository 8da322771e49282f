"""What kills cost at each phase of a step: of a learner, with posttrain in one and in two processes and TRL's GRPO; and, on a
Ray cluster of eight machines that are processes here, of an engine, of environments, and of Ray's daemon on a machine.

    python benchmarks/kills.py --out runs/kills
    python benchmarks/kills.py --out runs/kills --sides "engine,environments,Ray beside an engine,Ray beside a learner"
    python benchmarks/kills.py --table docs/results/kills.jsonl

Runs of four steps with a checkpoint after each, on a random model of 31 thousand weights. A process kills itself (SIGKILL) in a given
call of a function of the phase, of two processes the second one; then the run is resumed. It is compared with a run that was not
killed. Lost are finished steps that have to be repeated. A kill is a line of OUT/results.jsonl, and is not run again.

On a cluster, one run of 16 steps is killed in every phase, in another step each, with two learners, two engines and two processes of
environments. Its bits are compared with those of an undisturbed run on the same cluster. Seconds are those to the end of the second
step from the kill, less those of the undisturbed run. Of the first machine, there is one kill in 80 steps, with the seconds to the end.
"""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from harness.cluster import Machines, marks, progress  # noqa: E402
from harness.options import names  # noqa: E402
from harness.table import Stored, markdown  # noqa: E402
from tests.conftest import save_tiny_model  # noqa: E402
from tests.distributed import together  # noqa: E402
from tests.training import small  # noqa: E402

OURS = {
    "rollout": ("posttrain.training.rollouts:_play_groups", 3),
    "scoring": ("posttrain.training.updater:Updater.without_gradient", 3),
    "update": ("posttrain.training.updater:Optimizer.step", 5),
    "checkpoint": ("posttrain.training.checkpoint:Checkpoints._seal", 4),
    "policy written, state not": ("posttrain.training.checkpoint:write_tensors", 4),
    "weights to the engine": ("posttrain.engines.local.engine:LocalEngine.load_weights", 3),
    "evaluation": ("posttrain.training.evaluators:EpisodeEvaluator.curve", 2),
}
"""Phase -> the function and the call of it in which a process dies."""
TRLS = {
    "rollout": ("trl:GRPOTrainer._generate", 3),
    "scoring": ("trl:GRPOTrainer._calculate_rewards", 3),
    "update": ("trl:GRPOTrainer.compute_loss", 3),
    "checkpoint": ("transformers:Trainer._save_rng_state", 3),
    "policy written, state not": ("transformers:Trainer._save_optimizer_and_scheduler", 3),
    "evaluation": ("transformers:Trainer.evaluate", 1),
}


def one(model: Path, folder: Path, die: tuple[str, int] | None, resume: bool) -> int:
    return small.run(small.recipe_values(model, folder), resume, die)


def two(model: Path, folder: Path, die: tuple[str, int] | None, resume: bool) -> int:
    # Only the first process seals a checkpoint.
    rank = int(die is not None and "_seal" not in die[0])
    job = {"values": small.recipe_values(model, folder), "resume": resume, "die": die and (rank, *die)}
    ((first, *others),) = together.run(2, [job], folder)
    return first or max(others, key=abs)


def trl(model: Path, folder: Path, die: tuple[str, int] | None, resume: bool) -> int:
    process = small.fork_server().Process(target=_trl, args=(model, folder, die, resume))
    process.start()
    process.join()
    return process.exitcode or 0


def _trl(model: Path, folder: Path, die: tuple[str, int] | None, resume: bool) -> None:
    log = open(folder / "log.txt", "a")  # noqa: SIM115
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Finished(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            with open(folder / "finished.txt", "a") as file:
                file.write(f"{state.global_step}\n")

    if die is not None:
        small._arm(*die)
    rows = Dataset.from_list([{"prompt": f"Say {number}."} for number in range(16)])
    settings = {"output_dir": str(folder / "run"), "use_cpu": True, "bf16": False, "max_steps": 4, "save_steps": 1}
    settings |= {"per_device_train_batch_size": 6, "num_generations": 3, "max_completion_length": 8, "eval_steps": 2}
    settings |= {"eval_strategy": "steps", "report_to": "none", "learning_rate": 1e-3, "per_device_eval_batch_size": 6}
    trainer = GRPOTrainer(
        model=str(model),
        args=GRPOConfig(**settings),
        train_dataset=rows,
        eval_dataset=rows.select(range(2)),
        reward_funcs=lambda completion_ids, **others: [float(sum(ids) % 7) for ids in completion_ids],
        callbacks=[Finished()],
    )
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(str(folder / "model"))


CLUSTER = {phase: function for phase, (function, _) in OURS.items()} | {
    "rollout": "posttrain.rollout.driver:RolloutWorker.answer",
    "weights to the engine": "posttrain.distributed.ray.engine:RayEngine.load_weights",
}
FIRST = "Ray on the first machine"
WORKERS = {
    "engine": "engine 0",
    "environments": "environments 0",
    "Ray beside an engine": "raylet of engine 0",
    "Ray beside a learner": "raylet of learner 1",
    FIRST: "raylet of head",
}
"""Side -> what the first learner kills on a cluster."""

SIDES: dict[str, tuple[dict[str, tuple[str, int]], Callable[..., int]]]
SIDES = {"posttrain": (OURS, one), "two processes": (OURS, two), "TRL": (TRLS, trl)}


def finished(folder: Path) -> tuple[int, int]:
    """The last finished step, and the last one with a checkpoint."""
    if (folder / "finished.txt").exists():
        last = int((folder / "finished.txt").read_text().split()[-1])
        saved = [int(path.name.split("-")[1]) for path in (folder / "run").glob("checkpoint-*")]
        return last, max(saved, default=0)
    return progress(folder / "small")


def result(folder: Path) -> Any:
    return (
        small.weights(folder / "small")
        if (folder / "small").exists()
        else (folder / "model/model.safetensors").read_bytes()
    )


def kill(side: str, phase: str, model: Path, out: Path) -> dict[str, Any]:
    places, run = SIDES[side]
    whole, folder = out / f"{side}, whole", out / f"{side}, {phase}"
    if not whole.exists():
        whole.mkdir()
        assert run(model, whole, None, False) == 0, f"the log is in {whole}"
    folder.mkdir()
    died = run(model, folder, places[phase], False) != 0
    last, saved = finished(folder)
    code = run(model, folder, None, True)
    line = {"side": side, "phase": phase, "died": died, "lost": last - saved, "resumes": code == 0}
    return line | ({"same": result(folder) == result(whole)} if code == 0 else {"error": last_line(folder)})


def on_cluster(side: str, model: Path, out: Path) -> list[dict[str, Any]]:
    """One run on a cluster of eight machines that is killed in each phase once, and resumed when it ends too early."""
    first = side == FIRST
    # The first machine is not replaced, and the run notices its death only after many steps.
    killed, last = dict(list(CLUSTER.items())[: 1 if first else None]), 80 if first else 2 * len(CLUSTER) + 2
    whole, folder = out / f"cluster, whole, {last}", out / f"cluster, {side}"
    machines = Machines()
    try:
        for one, kill, phases in ((whole, None, CLUSTER), (folder, WORKERS[side], killed)):
            if one.exists():
                continue
            one.mkdir()
            values = small.recipe_values(model, one, steps=last)
            code, launches = machines.run(values, one, phases, kill, False), 1
            while code and launches <= len(phases):
                machines.close()
                machines = Machines()
                code, launches = machines.run(values, one, phases, kill, True), launches + 1
            assert not code, f"it ends with {code}; the log is in {one}"
    finally:
        machines.close()
    same = result(folder) == result(whole)
    steps = last - 2 if first else 2
    return [{"side": side, "phase": phase, "same": same} | cost(folder, whole, phase, steps) for phase in killed]


def cost(folder: Path, whole: Path, phase: str, steps: int) -> dict[str, Any]:
    """What a kill in a phase cost: the steps that were repeated, and the seconds until so many steps from then ended."""
    events, undisturbed = (_since(one, phase, steps) for one in (folder, whole))
    again = next((number for number, event in enumerate(events) if event["what"] == "start"), len(events))
    before, after = events[:again], events[again:]
    cost = {"outcome": "went on", "lost": 0, "seconds": events[-1]["time"] - events[0]["time"]}
    if after:
        repeated = max(event.get("number", events[0]["step"]) for event in before) + 1 - after[1]["number"]
        resumed = any(event["what"] == "launch" for event in before)
        cost |= {"outcome": "resumed" if resumed else "continued", "lost": repeated}
    return cost | {"seconds": cost["seconds"] - (undisturbed[-1]["time"] - undisturbed[0]["time"])}


def _since(folder: Path, phase: str, steps: int) -> list[dict[str, Any]]:
    """What happened from a phase until so many steps from then ended: the steps that ended, and the starts."""
    lines = marks(folder)
    lines = lines[next(number for number, line in enumerate(lines) if line["what"] == phase) :]
    last = lines[0]["step"] + steps
    end = next(number for number, line in enumerate(lines) if line.get("number") == last)
    return [lines[0], *(line for line in lines[1 : end + 1] if line["what"] in ("launch", "start", "step"))]


def last_line(folder: Path) -> str:
    """The last line of its log, without the words of Ray."""
    log = next(iter(sorted(folder.glob("log*.txt")))).read_text(errors="replace").strip().splitlines()
    return log[-1][:300]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/kills"))
    parser.add_argument("--table", type=Path, help="show the table of these lines and run nothing")
    parser.add_argument("--sides", type=names([*SIDES, *WORKERS]), default=",".join(SIDES), help="comma-separated")
    options = parser.parse_args()
    stored = Stored(options.table or options.out / "results.jsonl", "side", "phase")
    if options.table is None:
        out = options.out.resolve()
        model = out / "tiny" if (out / "tiny").exists() else save_tiny_model(out / "tiny")
        for side in options.sides:
            for _, phase in stored.missing((side, phase) for phase in SIDES.get(side, ({},))[0]):
                stored.add(kill(side, phase, model, out))
            if side in WORKERS and not any(side == line["side"] for line in stored.lines):
                for line in on_cluster(side, model, out):
                    stored.add(line)
    lines = {(line["side"], line["phase"]): line for line in stored.lines}
    for sides in (SIDES, WORKERS):
        print(markdown([{"killed in": phase} | {s: _cell(lines.get((s, phase))) for s in sides} for phase in OURS]))


def _cell(line: dict[str, Any] | None) -> str:
    if line is None:
        return "-"
    if not line.get("resumes", True):
        return "does not resume"
    if "outcome" in line:
        same = "same bits" if line["same"] else "other weights"
        return f"{line['outcome']}, {same}, {line['lost']} lost, {line['seconds']:.0f} s"
    return f"{'same bits' if line['same'] else 'other weights'}, {line['lost']} lost"


if __name__ == "__main__":
    main()
