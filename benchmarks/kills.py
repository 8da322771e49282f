"""What killing a learner costs at each phase of a step: posttrain in one and in two processes, and TRL's GRPO.

    python benchmarks/kills.py --out runs/kills
    python benchmarks/kills.py --table docs/results/kills.jsonl

Runs of four steps with a checkpoint after each, on a random model of 31 thousand weights. A process kills itself (SIGKILL) in a given
call of a function of the phase, of two processes the second one; then the run is resumed. It is compared with a run that was not
killed. Lost are finished steps that have to be repeated. A kill is a line of OUT/results.jsonl, and is not run again.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from harness.options import names  # noqa: E402
from harness.table import markdown, read_lines  # noqa: E402
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


SIDES: dict[str, tuple[dict[str, tuple[str, int]], Callable[..., int]]]
SIDES = {"posttrain": (OURS, one), "two processes": (OURS, two), "TRL": (TRLS, trl)}


def finished(folder: Path) -> tuple[int, int]:
    """The last finished step, and the last one with a checkpoint."""
    if (folder / "finished.txt").exists():
        last = int((folder / "finished.txt").read_text().split()[-1])
        saved = [int(path.name.split("-")[1]) for path in (folder / "run").glob("checkpoint-*")]
        return last, max(saved, default=0)
    run = folder / "small"
    steps = [line["step"] for line in small.metrics(run) if line["kind"] == "train"]
    return max(steps, default=0), max((int(p.name[5:]) for p in run.glob("checkpoints/step_*")), default=0)


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
    log = next(iter(sorted(folder.glob("log*.txt")))).read_text(errors="replace").strip().splitlines()
    line = {"side": side, "phase": phase, "died": died, "lost": last - saved, "resumes": code == 0}
    return line | ({"same": result(folder) == result(whole)} if code == 0 else {"error": log[-1][:300]})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/kills"))
    parser.add_argument("--table", type=Path, help="show the table of these lines and run nothing")
    parser.add_argument("--sides", type=names(SIDES), default=",".join(SIDES), help="comma-separated")
    options = parser.parse_args()
    file = options.table or options.out / "results.jsonl"
    if options.table is None:
        options.out.mkdir(parents=True, exist_ok=True)
        model = options.out.resolve() / "tiny"
        model = model if model.exists() else save_tiny_model(model)
        known = {(line["side"], line["phase"]) for line in (read_lines(file) if file.exists() else ())}
        for side in options.sides:
            for phase in SIDES[side][0]:
                if (side, phase) not in known:
                    line = kill(side, phase, model, options.out.resolve())
                    with open(file, "a") as results:
                        results.write(json.dumps(line) + "\n")
    lines = {(line["side"], line["phase"]): line for line in read_lines(file)}
    rows = [{"killed in": phase} | {side: _cell(lines.get((side, phase))) for side in SIDES} for phase in OURS]
    print(markdown(rows))


def _cell(line: dict[str, Any] | None) -> str:
    if line is None:
        return "-"
    if not line["resumes"]:
        return "does not resume"
    return f"{'same bits' if line['same'] else 'other weights'}, {line['lost']} lost"


if __name__ == "__main__":
    main()
