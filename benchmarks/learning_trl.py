"""The same one-shot tasks learned by posttrain and by TRL: success against samples and against wall time, over training seeds.

    python benchmarks/learning_trl.py --seeds 5 --out runs/learning_trl
    python benchmarks/learning_trl.py --table docs/results/learning_trl.jsonl

Both sides start from the small model (`harness/made_model.py`) of the training seed and get the same tasks, reward function, algorithm, samples and
updates per step, and three learning rates; the best one of each side is shown. A run has one thread, and sides take turns.
Steps are timed from the end of set-up. The success of a step's samples is that of the policy before the step's update. The final
models of both sides are evaluated by the same code on 400 new seeds; the bandit has two different prompts and `word_sort` sixteen,
so these are the prompts of training with other random numbers.
A run's outcome is one line of OUT/results.jsonl; runs that are there are not run again.
"""

import argparse
import math
import shutil
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from harness.options import add_places, names
from harness.panels import curve, panel
from harness.table import Stored, read_lines, show

from posttrain.runs.intervals import Estimate, mean_difference, seed_mean

Line = dict[str, Any]

GROUPS, GROUP, UPDATES, WARMUP = 16, 8, 2, 10
"""Tasks of a step, answers to each, optimizer updates a step, and updates in which the learning rate rises."""
TOKENS = 10
"""Of an answer at most."""
LEARNING_RATES = (2.5e-4, 5e-4, 1e-3)
SIDES = ("posttrain", "trl")
SHARE = 0.8
"""Of the optimal policy's success: the level whose samples and seconds are counted."""
SMOOTH = 3
"""Steps that a point of the curve is the mean of."""


@dataclass(frozen=True)
class Task:
    """A one-shot game and the algorithm that both sides use for it."""

    credit: str
    """`rloo` or `grpo`."""
    steps: int
    kl: float = 0.0
    """Coefficient of the KL penalty in the loss, estimated with k3, against the starting model."""


TASKS = {"bandit": Task("rloo", 20), "word_sort": Task("grpo", 60, kl=0.1)}


def run(side: str, name: str, learning_rate: float, seed: int, out: Path) -> Line:
    """Train once and evaluate the final model. Returns the line of results."""
    from harness.made_model import small

    import posttrain

    folder = (out / "work").resolve()
    shutil.rmtree(folder, ignore_errors=True)
    train = {"posttrain": _train_posttrain, "trl": _train_trl}[side]
    successes, seconds = train(name, learning_rate, seed, str(small(seed)), folder)
    evaluated = posttrain.evaluate(
        name="evaluation",
        runs=str(folder),
        model={"path": str(folder / "model"), "threads": 1},
        environment={"type": name},
        rollout={"tokens_per_turn": TOKENS},
        evaluation={"sampling": {"temperature": 1.0}, "final_seeds": {"start": 2_000_000, "count": 400}},
    )
    rates = {row["policy"]: row for row in evaluated.evaluation}
    levels = {level: rates[level]["success"] for level in ("random", "optimal")}
    (model,) = [row for policy, row in rates.items() if policy not in levels]
    shutil.rmtree(folder)
    return {
        "side": side,
        "task": name,
        "learning_rate": learning_rate,
        "seed": seed,
        "successes": successes,
        "seconds": [round(second, 3) for second in seconds],
        "final": model["success"],
        **levels,
    }


def _train_posttrain(
    name: str, learning_rate: float, seed: int, model: str, folder: Path
) -> tuple[list[float], list[float]]:
    """Success of each step's samples, and seconds at the end of each step. The final model is in `folder`/model."""
    import posttrain

    task = TASKS[name]
    result = posttrain.rl(
        name="run",
        runs=str(folder),
        seed=seed,
        model={"path": model, "threads": 1},
        environment={"type": name},
        steps=task.steps,
        rollout={"groups_per_step": GROUPS, "episodes_per_group": GROUP, "tokens_per_turn": TOKENS},
        credit={"type": task.credit},
        loss={"type": "ppo"},
        kl={"coefficient": task.kl},  # k3 in the loss, as in TRL
        learner={"updates_per_step": UPDATES},
        optimizer={"learning_rate": learning_rate, "warmup_updates": WARMUP},
        evaluation={
            "every": 0,
            "start": False,
            "sampling": {"temperature": 1.0},
            "seeds": {"start": 1_000_000, "count": 1},
            "final_seeds": {"start": 2_000_000, "count": 1},
        },
        checkpoint={"every": 1000},
        export="last",
    )
    assert result.model is not None
    shutil.copytree(result.model, folder / "model")
    seconds = np.cumsum([row["time/step"] for row in result.metrics])
    return [row["rollout/success"] for row in result.metrics], seconds.tolist()


def _train_trl(name: str, learning_rate: float, seed: int, model: str, folder: Path) -> tuple[list[float], list[float]]:
    """The same with TRL's GRPO or RLOO trainer; settings that are not named are its defaults, but for what is slow on a CPU."""
    import torch
    import trl
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback

    import posttrain

    torch.set_num_threads(1)
    task = TASKS[name]
    environment = posttrain.make_env(name)()
    tokenizer = AutoTokenizer.from_pretrained(model)
    successes: list[float] = []

    def reward(completion_ids: list[list[int]], task_seed: list[int], **others: Any) -> list[float]:
        # From the ids, because the tags of an answer are special tokens, which TRL leaves out of the text.
        steps = []
        for ids, number in zip(completion_ids, task_seed, strict=True):
            environment.reset(number)
            steps.append(environment.step(tokenizer.decode(ids).removesuffix(tokenizer.eos_token)))
        successes.append(float(np.mean([step.info["success"] for step in steps])))
        return [step.reward for step in steps]

    class Stopwatch(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            self.begun, self.updates = time.perf_counter(), list[float]()

        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            self.updates.append(time.perf_counter() - self.begun)

    stopwatch = Stopwatch()
    settings: dict[str, Any] = {
        "output_dir": str(folder / "trl"),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "seed": seed,
        "learning_rate": learning_rate,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": WARMUP,
        "max_steps": task.steps * UPDATES,
        "per_device_train_batch_size": GROUPS * GROUP // UPDATES,
        "gradient_accumulation_steps": 1,
        "steps_per_generation": UPDATES,
        "num_generations": GROUP,
        "max_completion_length": TOKENS,
        "temperature": 1.0,
        "beta": task.kl,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    kind = {"rloo": "RLOO", "grpo": "GRPO"}[task.credit]
    rows = [
        {"prompt": list(environment.reset(number).messages), "task_seed": number}
        for number in range(task.steps * GROUPS)
    ]
    trainer = getattr(trl, f"{kind}Trainer")(
        model=model,
        args=getattr(trl, f"{kind}Config")(**settings),
        train_dataset=Dataset.from_list(rows),
        reward_funcs=reward,
        processing_class=tokenizer,
        callbacks=[stopwatch],
    )
    trainer.train()
    trainer.save_model(str(folder / "model"))
    tokenizer.save_pretrained(str(folder / "model"))
    return successes, stopwatch.updates[UPDATES - 1 :: UPDATES]


# -- the tables and the panels --------------------------------------------------------------------------------------------


def best_runs(lines: list[Line], task: str, side: str) -> list[Line]:
    """The runs of the learning rate with the best final success, and among equals the best success of all samples."""
    of_side = [line for line in lines if (line["task"], line["side"]) == (task, side)]
    return max(
        (
            [line for line in of_side if line["learning_rate"] == rate]
            for rate in {line["learning_rate"] for line in of_side}
        ),
        key=lambda runs: (
            float(np.mean([line["final"] for line in runs])),
            float(np.mean([line["successes"] for line in runs])),
        ),
    )


def reached(line: Line) -> tuple[int, float] | None:
    """Samples and seconds until the smoothed success reaches `SHARE` of the optimal policy's; None where it does not."""
    for step, value in enumerate(_smooth(line["successes"])):
        if value >= SHARE * line["optimal"]:
            return (step + 1) * GROUPS * GROUP, line["seconds"][step]
    return None


def _smooth(values: list[float]) -> list[float]:
    return [float(np.mean(values[max(0, at + 1 - SMOOTH) : at + 1])) for at in range(len(values))]


def table(lines: list[Line]) -> list[Line]:
    """A row per task and side."""
    rows = []
    for task in dict.fromkeys(line["task"] for line in lines):
        for side in SIDES:
            runs = best_runs(lines, task, side)
            final = seed_mean([line["final"] for line in runs], rate=True)
            points = [point for line in runs if (point := reached(line))]
            rows.append(
                {
                    "task": task,
                    "side": side,
                    "learning rate": f"{runs[0]['learning_rate']:g}",
                    "seeds": len(runs),
                    "final success": f"{final.value:.1%}{_limits(final, 100)}",
                    "success of all samples": float(np.mean([line["successes"] for line in runs])),
                    f"reached {SHARE:.0%}": f"{len(points)} of {len(runs)}",
                    "samples until then": float(np.median([samples for samples, _ in points])) if points else None,
                    "seconds until then": float(np.median([seconds for _, seconds in points])) if points else None,
                    "samples/s": float(
                        np.median([len(line["successes"]) * GROUPS * GROUP / line["seconds"][-1] for line in runs])
                    ),
                }
            )
    return rows


def differences(lines: list[Line]) -> list[Line]:
    """How much more often posttrain succeeds than TRL, over all learning rates, paired by training seed. A row per task."""

    def seed_means(task: str, side: str, key: str) -> np.ndarray:
        runs = [line for line in lines if (line["task"], line["side"]) == (task, side)]
        seeds = sorted({line["seed"] for line in runs})
        return np.array([np.mean([np.mean(line[key]) for line in runs if line["seed"] == seed]) for seed in seeds])

    rows = []
    for task in dict.fromkeys(line["task"] for line in lines):
        row: Line = {"task": task}
        for name, key in (("success of all samples", "successes"), ("final success", "final")):
            points = mean_difference(100 * (seed_means(task, "posttrain", key) - seed_means(task, "trl", key)))
            row[name] = f"{points.value:+.1f}{_limits(points)}"
            row["seeds"] = points.n
        rows.append(row)
    return rows


def _limits(estimate: Estimate, scale: float = 1) -> str:
    known = not math.isnan(estimate.low)
    return f" [{scale * estimate.low:.1f}, {scale * estimate.high:.1f}]" if known else ""


def show_tables(lines: list[Line], json_file: Path | None = None) -> None:
    """Print both tables, and store the first."""
    show("Learning beside TRL", table(lines), json_file=json_file)
    show("posttrain minus TRL, in points, all learning rates, paired by seed", differences(lines))


def panels(axes: Any, lines: list[Line], colors: dict[str, str], faint: str, ink: str) -> None:
    """Success against samples and against seconds in the area of `axes`, a row per task: mean and 95% interval over seeds.

    `colors`: of the curves, by side. Dotted lines, in the color `faint`: random and optimal. `ink`: color of words.
    """
    axes.axis("off")
    tasks = list(dict.fromkeys(line["task"] for line in lines))
    for row, task in enumerate(tasks):
        for column, label in enumerate(("samples", "seconds, one thread")):
            place = (0.5 * column + 0.06, 1 - (row + 0.72) / len(tasks), 0.42, 0.6 / len(tasks))
            drawn = panel(axes, place, 8, ink, faint)
            for side in SIDES:
                runs = best_runs(lines, task, side)
                successes = [_smooth(line["successes"]) for line in runs]
                samples = [(step + 1) * GROUPS * GROUP for step in range(len(successes[0]))]
                places = np.mean([line["seconds"] for line in runs], axis=0) if column else samples
                curve(drawn, places, successes, colors[side], label=side.replace("trl", "TRL"))
            for level in ("random", "optimal"):
                drawn.axhline(runs[0][level], color=faint, linestyle=":", linewidth=1)
            if column:
                drawn.set_xscale("log")
                drawn.xaxis.set_major_formatter("{x:g}")
            drawn.set_xlabel(label, fontsize=8, color=ink)
            drawn.set_title(f"{task}: success of the samples", fontsize=9, color=ink, loc="left")
            if not (row or column):
                legend = drawn.legend(fontsize=8, frameon=False, loc="lower right")
                for text in legend.get_texts():
                    text.set_color(ink)


def main() -> None:
    """Run what is missing and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=names(TASKS), default=",".join(TASKS), help="comma-separated")
    parser.add_argument(
        "--learning-rates", default=",".join(f"{rate:g}" for rate in LEARNING_RATES), help="comma-separated"
    )
    parser.add_argument("--seeds", type=int, default=5)
    add_places(parser)
    chosen = parser.parse_args()
    if chosen.table is not None:
        show_tables(read_lines(chosen.table))
        return
    stored = Stored(chosen.out / "results.jsonl", "side", "task", "learning_rate", "seed")
    wanted = stored.missing(
        (side, task, rate, seed)
        for seed in range(chosen.seeds)
        for task in chosen.tasks
        for rate in map(float, chosen.learning_rates.split(","))
        for side in SIDES
    )
    # A fresh process per run: neither side inherits the other's threads or caches.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        for one in wanted:
            line = pool.submit(run, *one, chosen.out).result()
            stored.add(line)
            print(*one, f"final {line['final']:.1%} after {line['seconds'][-1]:.0f} s", flush=True)
    show_tables(stored.lines, json_file=chosen.out / "table.json")


if __name__ == "__main__":
    main()
