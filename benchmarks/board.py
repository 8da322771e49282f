"""The laptop board: recipes that train a real model on frozen tasks, with five training seeds each.

    python benchmarks/board.py --entries firm_lake --seeds 5 --jobs 2 --threads 1 --out runs/board
    python benchmarks/board.py --table docs/results/board.jsonl
    python benchmarks/board.py --spreads docs/results/board.jsonl > src/posttrain/evaluation/spreads.json

An entry is a pipeline of `posttrain recipe list`, run in a separate process for each training seed. Its final episodes, on the same
400 held-out tasks for every seed, become one line of OUT/board.jsonl; lines that are there are not made again. After Ctrl-C
or SIGTERM, the same command resumes the runs. A row's number is the mean over training seeds and tasks with an interval over
both, and its lower end is what counts. See docs/results/board.md.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness.crossed import crossed_mean
from harness.limits import product_speed
from harness.options import names
from harness.table import Stored, markdown, read_lines

from posttrain.environments.game import play
from posttrain.environments.protocol import EnvironmentFactory
from posttrain.evaluation.power import Spread, keys_of_environment
from posttrain.recipe.catalogue import recipe_file
from posttrain.recipe.pipeline import PipelineRecipe, load_pipeline
from posttrain.recipe.stages import RlRecipe, SftRecipe
from posttrain.result import Result
from posttrain.runs.machine import describe_machine
from posttrain.runs.tables import START, TRAINED

Line = dict[str, Any]

MODEL = "packaged:smollm2-135m"
TASKS = 400
"""Final tasks of an entry."""
SEEDS = 5
"""Training seeds of a row."""
MINUTES = 120
"""Processor minutes of a training seed at most."""


@dataclass(frozen=True)
class Entry:
    """A recipe of the board."""

    task: str
    target: float
    """The lower end of the interval must lie above this."""
    of_optimal: bool = False
    """`target` is the least difference from the success of the optimal policy, which plays the same tasks with the same
    luck.
    """
    score: str | None = None
    """The environment's score that counts, where an answer is more than right or wrong. `target` is then the least gain
    over the model before RL, on the same tasks.
    """
    first_task: int = 2_000_000
    """Environment seed of the first final task; the others follow."""
    minutes: float | None = None
    """The wall minutes of a seed that are aimed at, in the median; more are reported and allowed."""
    data: tuple[str, ...] = ()
    """Words of the `posttrain data` command whose files the recipe reads."""

    @property
    def tasks(self) -> range:
        """Environment seeds of the final tasks."""
        return range(self.first_task, self.first_task + TASKS)


ENTRIES = {
    "bandit": Entry("two-armed bandit; the dragon is the high-risk arm", 0.95),
    "bandit_swapped": Entry("two-armed bandit with the names swapped", 0.95),
    "firm_lake": Entry("frozen lake, firm ice, six turns", 0.90, minutes=5),
    "slippery_lake": Entry("frozen lake, slippery ice, ten turns", -0.05, of_optimal=True),
    "sokoban": Entry("Sokoban, 6 x 6 rooms with one box, six turns", 0.80),
    "arithmetic": Entry("sums and differences of two numbers with two digits, unseen questions", 0.50),
    "json_answer": Entry("JSON with given keys and types (the form alone), unseen schemas", 0.95),
    "tools": Entry("shop questions with a lookup tool and a calculator", 0.95),
    # The rule agent succeeds in 73.2% of the final tasks; the target was set when it had reached 74.8% of others.
    "memory": Entry("memory agent, vaults of four notes, eight kinds of questions", 0.748),
    "rationales": Entry(
        "yes/no procedures for a policy in words, scored by their verifier",
        0.0,
        score="score",
        first_task=1000,
        data=("rationales", "--out", "data/rationales", "--train", "1000", "--val", "48", "--test", "400"),
    ),
}


def broken_rules(pipeline: PipelineRecipe, entry: Entry) -> list[str]:
    """What an entry's pipeline does that the board does not allow; empty if nothing."""
    last = pipeline.stages[-1].recipe
    broken = [
        f"stage {stage.name} starts from {stage.recipe.model.path}, not from {MODEL} or another stage"
        for stage in pipeline.stages
        if not stage.upstream and stage.recipe.model.path != MODEL
    ]
    if not isinstance(last, RlRecipe):
        return [*broken, f"the last stage is {last.stage}, not rl"]
    evaluation = last.evaluation
    final = evaluation.final_seeds
    tasks = entry.tasks
    if (final.start, final.count, evaluation.episodes_per_seed) != (tasks.start, TASKS, 1):
        broken.append(f"the final tasks are not one episode on each of the seeds {tasks.start} to {tasks.stop - 1}")
    if evaluation.sampling.temperature != 1:
        broken.append(f"final episodes are sampled at temperature {evaluation.sampling.temperature}, not 1")
    return broken


def warm_up(pipeline: PipelineRecipe) -> str:
    """What is imitated before reinforcement learning."""
    recipe = pipeline.stages[0].recipe
    if not isinstance(recipe, SftRecipe):
        return "none"
    if recipe.data is not None:
        return f"{recipe.data.max_rows or 'all'} rows of training data"
    experts = recipe.experts
    share = f", {experts.random_share:.0%} of moves random" if experts.random_share else ""
    return f"{(experts.seeds.count or 0) * experts.per_seed} traces, {experts.expert}{share}"


RUNNING: set[int] = set()
"""Process ids of the pipelines that run now."""


def recipe_of(name: str) -> str:
    """The file of an entry's recipe."""
    return str(recipe_file("memory/board" if name == "memory" else f"board/{name}"))


def run(name: str, seed: int, threads: int, out: Path) -> Line:
    """Train one seed of an entry in a separate process, or resume a stopped one. Returns its line of results.

    Raises:
        RuntimeError: the pipeline failed or was stopped.
    """
    directory = out / f"{name}-{seed}"
    words = [recipe_of(name), f"name={directory.name}", f"runs={out}"]
    words += [f"common.seed={seed}", f"common.model.threads={threads}"]
    # Minutes of attempts that did not finish. Where they are unknown, the run starts from the beginning.
    before = out / f"{directory.name}.spent.json"
    resume = before.exists()
    spent = json.loads(before.read_text()) if resume else {"wall_minutes": 0.0, "cpu_minutes": 0.0}
    before.unlink(missing_ok=True)
    begun = time.monotonic()
    with (out / f"{directory.name}.log").open("a" if resume else "w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "posttrain.cli.main", "pipeline", *words, *([] if resume else ["--overwrite"])],
            stdout=log,
            stderr=log,
            env={**os.environ, "OMP_NUM_THREADS": str(threads), "POSTTRAIN_PLOTS": "0"},
        )
        RUNNING.add(process.pid)
        # The processor time of this child alone; another one may run beside it.
        _, status, usage = os.wait4(process.pid, 0)
        RUNNING.discard(process.pid)
    process.returncode = os.waitstatus_to_exitcode(status)
    spent["wall_minutes"] += (time.monotonic() - begun) / 60
    spent["cpu_minutes"] += (usage.ru_utime + usage.ru_stime) / 60
    if process.returncode:
        before.write_text(json.dumps(spent))
        raise RuntimeError(
            f"{name}, training seed {seed}: the pipeline stopped with exit code {process.returncode}; its output is in "
            f"{log.name}, and the same command resumes it"
        )
    stages = load_pipeline(words[0], words[1:3]).stages
    entry = ENTRIES[name]
    line = {
        "entry": name,
        "seed": seed,
        "threads": threads,
        **{key: round(value, 2) for key, value in spent.items()},
        **outcome(entry, [directory / stage.name for stage in stages]),
    }
    if entry.of_optimal:
        line["success_optimal"] = optimal_success(stages[-1].recipe, entry.tasks)
    for weights in ("checkpoints", "model"):  # gigabytes for each seed; report, metrics and episodes stay
        for folder in directory.glob(f"*/{weights}"):
            shutil.rmtree(folder)
    return line


def make_data(entry: Entry) -> None:
    """Write the files that the recipe reads, once for all of its seeds, which may run at the same time."""
    if entry.data:
        subprocess.run([sys.executable, "-m", "posttrain.cli.main", "data", *entry.data], check=True)


def outcome(entry: Entry, stages: Sequence[Path]) -> Line:
    """The final tables of a pipeline's runs: results by task, and the success of the other policies.

    Results are a text of 0 and 1 under `success`, or lists of scores under `results` and `results_before`.
    """
    result = Result.open(stages[-1])
    played = result.episodes(split="final")
    # Where the stage before has not played these tasks, this stage has played its initial model on them first.
    before, episodes = played[:-TASKS], played[-TASKS:]
    if [episode.seed for episode in episodes] != list(entry.tasks):
        raise RuntimeError(f"{stages[-1]}: the final episodes are not those of the board's tasks, in their order")
    # A score of one kind of task is in the episodes of that kind alone.
    reported = [episode.scores for episode in episodes]
    scores = {
        name: float(np.mean([found[name] for found in reported if name in found]))
        for name in dict.fromkeys(name for found in reported for name in found)
    }
    if entry.score:
        before = before or Result.open(stages[-2]).episodes(split="final")[-TASKS:]
        after, earlier = ([round(episode.scores[entry.score], 4) for episode in some] for some in (episodes, before))
        best = {"before": float(np.mean(earlier)), "random": None, "optimal": 1.0, "scores": scores}
        return {"results": after, "results_before": earlier, **best}
    rates = {row["policy"]: row["success"] for row in result.evaluation if "success" in row}
    if START not in rates and len(stages) > 1:  # the stage before has played its model on the same tasks
        rates[START] = next(row["success"] for row in Result.open(stages[-2]).evaluation if row["policy"] == TRAINED)
    return {
        "success": "".join(str(int(bool(episode.success))) for episode in episodes),
        **{key: rates.get(policy) for key, policy in (("before", START), ("random", "random"), ("optimal", "optimal"))},
        "scores": scores,
    }


def optimal_success(recipe: Any, tasks: Sequence[int]) -> str:
    """0 or 1 for each task: the success of the optimal policy with the task's luck, such as its slips."""
    environment = EnvironmentFactory(recipe.evaluation.environment or recipe.environment)()
    return "".join(str(int(play(environment, task)[-1].info["success"])) for task in tasks)


def by_task(line: Line, of: str = "") -> list[float]:
    """The result of each final task after training; `of`: that of another policy, `_before` or `_optimal`."""
    return line[f"results{of}"] if f"results{of}" in line else [int(one) for one in line[f"success{of}"]]


def tables(lines: Sequence[Line]) -> str:
    """What was reached, and what it took: two tables with a row per entry, in the order of `ENTRIES`."""
    reached, spent = [], []
    for name, entry in ENTRIES.items():
        runs = sorted((line for line in lines if line["entry"] == name), key=lambda line: line["seed"])
        if not runs:
            continue
        found = crossed_mean([by_task(line) for line in runs], rate=True)
        target = entry.target
        reach, counted = f"> {100 * target:.3g}%", found
        if entry.score or entry.of_optimal:
            other = "_before" if entry.score else "_optimal"
            counted = crossed_mean(np.array([by_task(line) for line in runs]) - [by_task(line, other) for line in runs])
            measure = "gain" if entry.score else "difference from optimal"
            reach = f"{measure} > {100 * target:.3g}%, is {counted.value:.1%} [{100 * counted.low:.1f}, {100 * counted.high:.1f}]"
        met = "met" if counted.low > target else f"missed by {100 * (target - counted.low):.1f} points"
        took = _middle([line["wall_minutes"] for line in runs])
        if entry.minutes is not None and float(took) > entry.minutes:
            met += f"; at most {entry.minutes:g} minutes: missed, {took}"
        longest = max(line["cpu_minutes"] for line in runs)
        if longest > MINUTES:
            met = f"not counted, a seed took {longest:.0f} processor minutes"
        if [line["seed"] for line in runs] != list(range(SEEDS)):
            met = f"open, has training seeds {', '.join(str(line['seed']) for line in runs)}"
        reached.append(
            {
                "task": entry.task,
                "random": _share(runs[0]["random"]),
                "before RL": _shares([line["before"] for line in runs]),
                "after RL": f"**{found.value:.1%}** [{100 * found.low:.1f}, {100 * found.high:.1f}]",
                "optimal": _share(runs[0]["optimal"]),
                "target": f"{reach}: {met}",
            }
        )
        spent.append(
            {
                "recipe": f"`{name}`",
                "imitated first": warm_up(load_pipeline(recipe_of(name), [])),
                "after RL by seed": ", ".join(f"{100 * np.mean(by_task(line)):.1f}" for line in runs),
                "processor minutes": _middle([line["cpu_minutes"] for line in runs]),
                "wall minutes": took,
                "threads": runs[0]["threads"],
                "GFLOP/s": _middle([line["gflops"] for line in runs]),
                "scores": ", ".join(
                    f"{score} {np.mean([line['scores'][score] for line in runs]):.1%}" for score in runs[0]["scores"]
                ),
            }
        )
    return f"{markdown(reached)}\n{markdown(spent)}"


def seen(lines: Sequence[Line]) -> str:
    """How many final tasks begin with the same prompt as a trace of the warm-up, and the success on these and the others."""
    rows = []
    for name, entry in ENTRIES.items():
        runs = [line for line in lines if line["entry"] == name and "success" in line]
        stages = load_pipeline(recipe_of(name), []).stages
        first, last = stages[0].recipe, stages[-1].recipe
        if not (runs and isinstance(first, SftRecipe) and isinstance(last, RlRecipe) and first.environment):
            continue
        traces = first.experts.seeds.of_generated("experts.seeds")
        known_prompts = set(first_prompts(first.environment, traces))
        prompts = first_prompts(last.evaluation.environment or last.environment, entry.tasks)
        known = np.array([prompt in known_prompts for prompt in prompts])
        success = np.array([by_task(line) for line in runs])
        shares = {
            f"success where it {where}": _range(success[:, of].mean(axis=1)) if of.any() else "–"
            for where, of in (("was imitated", known), ("was not", ~known))
        }
        rows.append({"entry": name, "first prompts": len(set(prompts)), "imitated": int(known.sum()), **shares})
    return markdown(rows)


def spreads(lines: Sequence[Line]) -> list[Spread]:
    """The spread of each entry over its training seeds and tasks, for `posttrain plan`."""
    found = []
    for name in ENTRIES:
        runs = [line for line in lines if line["entry"] == name]
        if len(runs) > 1 and not ENTRIES[name].data:  # whose tasks are files
            found.append(
                Spread.of(
                    [np.array(by_task(line))[:, None] for line in runs],
                    source=f"{len(runs)} runs of board/{name} on {TASKS} tasks",
                    environment=keys_of_environment(load_pipeline(recipe_of(name), []).stages[-1].recipe),
                    kind="mean" if ENTRIES[name].score else "rate",
                    minutes=float(np.median([line["wall_minutes"] for line in runs])),
                    minutes_per_episode=None,  # the minutes are those of whole runs
                    machine=", ".join(sorted({line["processor"] for line in runs})),
                )
            )
    return found


def first_prompts(environment: Any, tasks: Sequence[int]) -> list[str]:
    """The first prompt of each task."""
    play = EnvironmentFactory(environment)()
    return [str(play.reset(task).messages) for task in tasks]


def _range(values: Sequence[float]) -> str:
    return f"{100 * min(values):.1f}% to {100 * max(values):.1f}%"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _shares(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{np.mean(known):.1%}" if known else "–"


def _middle(values: Sequence[float]) -> str:
    return f"{np.median(values):.0f}" if np.median(values) >= 10 else f"{np.median(values):.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=names(ENTRIES), default=",".join(ENTRIES), help="comma-separated")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="training seeds, from 0 on")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--threads", type=int, default=2, help="threads of a run")
    parser.add_argument("--out", type=Path, help="folder of the runs and of board.jsonl")
    parser.add_argument("--table", type=Path, help="only print the table of this file")
    parser.add_argument(
        "--seen", type=Path, help="only print how many final tasks of this file begin like imitated ones"
    )
    parser.add_argument("--spreads", type=Path, help="only print the spreads of this file for `posttrain plan`")
    chosen = parser.parse_args()
    if chosen.spreads is not None:
        rounded = (
            {
                key: float(f"{value:.4g}") if isinstance(value, float) else value
                for key, value in asdict(one).items()
                if key not in ("here", "differing")  # of a plan
            }
            for one in spreads(read_lines(chosen.spreads))
        )
        print("[\n" + ",\n".join(map(json.dumps, rounded)) + "\n]")
        return
    if chosen.seen is not None:
        print(seen(read_lines(chosen.seen)), end="")
        return
    if chosen.table is not None:
        print(tables(read_lines(chosen.table)), end="")
        return
    if chosen.out is None:
        parser.error("--out is missing")
    for name in chosen.entries:
        if broken := broken_rules(load_pipeline(recipe_of(name), []), ENTRIES[name]):
            parser.error(f"{name} breaks a rule of the board: {'; '.join(broken)}")
    stored = Stored(chosen.out / "board.jsonl", "entry", "seed")
    machine = {"processor": describe_machine()["processor"], "gflops": round(speed() / 1e9)}
    wanted = stored.missing((name, seed) for name in chosen.entries for seed in range(chosen.seeds))
    for name in dict.fromkeys(name for name, _ in wanted):
        make_data(ENTRIES[name])
    failed = False
    with ThreadPoolExecutor(chosen.jobs) as pool:
        futures = [pool.submit(run, *one, chosen.threads, chosen.out) for one in wanted]

        def stop(number: int, _: Any) -> None:
            for future in futures:
                future.cancel()
            if number == signal.SIGTERM:  # Ctrl-C in a terminal has reached the pipelines already
                for child in tuple(RUNNING):
                    os.kill(child, number)

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, stop)
        for future in as_completed(futures):
            try:
                line = {**future.result(), **machine}
            except CancelledError:
                continue
            except RuntimeError as error:
                failed = True
                print(error, file=sys.stderr, flush=True)
                continue
            stored.add(line)
            success = f"{np.mean(by_task(line)):.1%}"
            print(line["entry"], line["seed"], success, f"{line['cpu_minutes']} processor minutes", flush=True)
    if stored.lines:
        print(tables(stored.lines), end="")
    if failed:
        sys.exit(1)


def speed() -> float:
    """FLOP/s of a product of matrices in bfloat16, by one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return product_speed(1024, 1024, 1024, torch.bfloat16)
    finally:
        torch.set_num_threads(threads)


if __name__ == "__main__":
    main()
