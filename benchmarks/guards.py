"""How reliable the guards are: detection of planted collapses, its delay, and false alarms on healthy runs.

    python benchmarks/guards.py --planted 42 --healthy 100 --out runs/guards
    python benchmarks/guards.py --table docs/results/guards.jsonl

See docs/results/guards.md. Every run is a short run of reinforcement learning of a small model on one thread, whose metrics are
one line of OUT/guards.jsonl; runs that are there are not made again. Thresholds are chosen on one half of the runs and
measured on the other.
"""

import argparse
import random
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from harness.made_model import small
from harness.options import add_places, number
from harness.paired import shown
from harness.table import Stored, markdown, read_lines, write_lines
from learning import ENVIRONMENTS, merged

import posttrain
from posttrain.environments.game import FormatRecipe, Rejected
from posttrain.errors import RunError
from posttrain.recipe.compose import load_recipe
from posttrain.recipe.guards import GUARDS, GuardRecipe
from posttrain.runs.intervals import success_rate
from posttrain.runs.machine import describe_machine
from posttrain.training import rl
from posttrain.training.controllers import Guards

Keys = dict[str, Any]
Line = dict[str, Any]

COMMON: Keys = {
    "steps": 12,
    "rollout": {
        "groups_per_step": 4,
        "episodes_per_group": 6,
        "tokens_per_turn": 10,
        "tokens_per_episode": 300,
        "environment_timeout": None,
    },
    "optimizer": {"learning_rate": 5e-4},
    "evaluation": {"every": 0, "start": False, "final_seeds": {"count": 1}},
    "checkpoint": {"every": 100_000},
    "export": "last",
    "plots": False,
    "guards": {"thresholds": {guard.key: None for guard in GUARDS}},
}
"""The guards are off in the runs: they are applied to the stored metrics."""
TASKS: dict[str, Keys] = {
    "bandit": {"environment": {"type": "bandit"}},
    "word_sort": {"environment": {"type": "word_sort"}, "kl": {"coefficient": 0.1, "estimator": "k2"}},
    **{name: merged(ENVIRONMENTS[name], {"steps": 12}) for name in ("firm lake", "slippery lake", "sokoban")},
}
"""The first two are those of the runs numbered below `FIRST_GAME`, the others those of later ones."""
FIRST_GAME = 100
HEALTHY: dict[str, Sequence[Keys]] = {
    "credit": [{"type": name} for name in ("rloo", "grpo", "dr_grpo", "reinforce_pp_baseline", "reinforce_pp")],
    "loss": [{"type": name} for name in ("ppo", "ppo", "gspo", "cispo")],
    "optimizer": [{"learning_rate": rate} for rate in (2e-4, 5e-4, 1e-3)],
    "learner": [{"updates_per_step": count} for count in (1, 2)],
    "entropy": [{"coefficient": coefficient} for coefficient in (0.0, 0.0, 0.003)],
}
"""Section -> the values that healthy runs draw from."""


# -- planted collapses -------------------------------------------------------------------------------------------------


def marker(prompt: str, answer: str, **row: Any) -> float:
    """A reward that can be hacked: it pays for a word, whatever the task is."""
    return min(answer.count("red"), 4) / 4


def length(prompt: str, answer: str, **row: Any) -> float:
    """A reward that can be hacked: it pays for length."""
    return min(len(answer), 60) / 60


def constant(prompt: str, answer: str, **row: Any) -> float:
    """A reward without information."""
    return 0.5


@contextmanager
def negated() -> Iterator[None]:
    """The sign of every advantage is wrong."""
    usual = rl.set_advantages

    def plant(samples: Any, credit: Any) -> None:
        usual(samples, credit)
        for sample in samples:
            sample.advantages = -sample.advantages

    with patch.object(rl, "set_advantages", plant):
        yield


@contextmanager
def shifted() -> Iterator[None]:
    """The learner is given the token before in place of each token."""
    usual = rl.samples_of_episodes

    def plant(episodes: Any, step: int) -> Any:
        samples = usual(episodes, step)
        for sample in samples:
            sample.stream = copy(sample.stream)
            sample.stream.ids = np.roll(sample.stream.ids, 1)
        return samples

    with patch.object(rl, "samples_of_episodes", plant):
        yield


@contextmanager
def broken_parser() -> Iterator[None]:
    """No answer can be parsed."""
    with patch.object(FormatRecipe, "parse", lambda self, text, names: Rejected("no answer")):
        yield


def prompts(out: Path) -> str:
    """A file of prompts of word_sort, for rewards that are functions."""
    file, make = out / "prompts.jsonl", posttrain.make_env("word_sort")
    if not file.exists():
        write_lines(file, ({"prompt": list(make().reset(seed).messages)} for seed in range(400)))
    return str(file)


NO_CLIP: Keys = {
    "loss": {"type": "ppo", "clip_low": 0.999, "clip_high": 1e6},
    "learner": {"updates_per_step": 2, "epochs_per_step": 8},
    "optimizer": {"learning_rate": 2e-3},
    "kl": {"coefficient": 0.0},
}
HACKED: Keys = {"kl": {"coefficient": 0.0}, "optimizer": {"learning_rate": 1e-3}, "learner": {"updates_per_step": 2}}
LONG: Keys = {"rollout": {"tokens_per_turn": 24}}
PLANTED: dict[str, tuple[Keys, Callable[..., float] | None, Callable[[], Any] | None]] = {
    "learning rate x30": ({"optimizer": {"learning_rate": 1.5e-2}}, None, None),
    "wrong sign": ({"optimizer": {"learning_rate": 2e-3}}, None, negated),
    "tokens shifted by one": ({}, None, shifted),
    "clip removed": (NO_CLIP, None, None),
    "KL removed, reward for a word": (HACKED, marker, None),
    "KL removed, reward for length": (merged(HACKED, LONG), length, None),
    "constant reward": ({}, constant, None),
    "broken parser": ({}, None, broken_parser),
}
"""Collapse -> keys, a reward function in place of the task's, and what is broken in the program."""


def planned(healthy: int, planted: int) -> list[tuple[str, int]]:
    """(kind, number) of each run; the kinds are in turns, so that a part of the list has all of them."""
    kinds = [("healthy", index) for index in range(healthy)]
    kinds += [(kind, index // len(PLANTED)) for index, kind in zip(range(planted), [*PLANTED] * planted, strict=False)]
    random.Random(0).shuffle(kinds)
    return kinds


def run(kind: str, index: int, out: Path) -> Line:
    """Make one run; its line has the metrics of each step, and the error of a run that stopped itself."""
    draws = random.Random(f"{kind}-{index}")
    task = [*TASKS][index % 2 if index < FIRST_GAME else 2 + index % 3]
    drawn = {section: draws.choice(values) for section, values in HEALTHY.items()}
    keys, reward, broken = ({}, None, None) if kind == "healthy" else PLANTED[kind]
    base: Keys = TASKS[task] if reward is None else {"environment": {"prompts": prompts(out)}}
    seed, name = 1000 + index, f"{kind.replace(' ', '_').replace(',', '')}-{index}"
    parts = [COMMON, base, drawn if kind == "healthy" else {}, keys]
    common: Keys = {"model": {"path": str(small()), "threads": 1}, "seed": seed, "name": name, "runs": str(out)}
    error = ""
    started = time.monotonic()
    with ExitStack() as held:
        if broken is not None:
            held.enter_context(broken())
        try:
            posttrain.rl(merged(*parts), common, reward=reward, overwrite=True)
        except RunError as stopped:
            error = str(stopped)
    lines = [line for line in read_lines(out / name / "metrics.jsonl") if line["kind"] == "train"]
    known = {guard.metric for guard in GUARDS} | {guard.per for guard in GUARDS if guard.per}
    known |= {"rollout/success", "rollout/return", "policy/mismatch"}
    shutil.rmtree(out / name)
    return {
        "kind": kind,
        "index": index,
        "task": task if reward is None else "text_task",
        "keys": drawn if kind == "healthy" else {},
        "error": error,
        "seconds": round(time.monotonic() - started, 1),
        "steps": [{key: float(f"{line[key]:.5g}") for key in sorted(known & line.keys())} for line in lines],
    }


# -- thresholds and rates ----------------------------------------------------------------------------------------------


RUN = load_recipe([], ["environment.type=bandit"], "rl")
"""A recipe for the words of an alarm."""


def first_alarm(line: Line, recipe: GuardRecipe) -> tuple[int, str] | None:
    """The step at which the first guard fires and its key; None if none does. An error of the run counts as `mismatch`."""
    guards = Guards(RUN.model_copy(update={"guards": recipe}))
    for step, metrics in enumerate(line["steps"], 1):
        before = dict(guards.in_a_row)
        if guards.check(dict(metrics), step):
            fired = [key for key in before if guards.in_a_row[key] == recipe.patience]
            return step, fired[0]
    return (len(line["steps"]) or 1, "mismatch") if line["error"] else None


FELL = "collapsed without a plant"


def kind_of(line: Line) -> str:
    """The kind of a run. Some runs without a plant collapse: their success ends below half of what it was."""
    success = [step.get("rollout/success", 0.0) for step in line["steps"]]
    fell = line["kind"] == "healthy" and sum(success[-3:]) < 0.5 * sum(success[:3])
    return FELL if fell else str(line["kind"])


CANDIDATES = {
    "max_zero_groups": (0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.99),
    "min_reward_spread": (0.1, 0.05, 0.02, 0.01, 1e-3, 1e-6),
    "min_entropy": (0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 0.001),
    "max_gradient_norm": (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0),
    "max_repeated_share": (0.1, 0.2, 0.3, 0.5, 0.8),
    "max_same_answers": (0.6, 0.7, 0.8, 0.9, 0.95, 0.99),
    "max_truncated": (0.1, 0.2, 0.3, 0.5, 0.8),
    "max_rejected": (0.1, 0.2, 0.3, 0.5, 0.8),
    "max_ratio_kl": (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0),
    "max_failed": (0.05, 0.1, 0.2, 0.3),
}
"""Thresholds to choose from, the most sensitive first."""


def chosen_thresholds(lines: Sequence[Line], patience: int) -> dict[str, float]:
    """For each guard, the candidate after the most sensitive one at which no healthy run of `lines` has an alarm."""
    healthy = [line for line in lines if kind_of(line) == "healthy"]
    off: dict[str, float | None] = dict.fromkeys((guard.key for guard in GUARDS), None)
    chosen = {}
    for key, candidates in CANDIDATES.items():
        quiet = [
            not any(
                first_alarm(line, GuardRecipe(patience=patience, thresholds={**off, key: value})) for line in healthy
            )
            for value in candidates
        ]
        first = quiet.index(True) if True in quiet else len(candidates) - 1
        chosen[key] = candidates[min(first + 1, len(candidates) - 1)]
    return chosen


def rates(lines: Sequence[Line], recipe: GuardRecipe) -> list[Keys]:
    """A row per kind: runs, detected or alarmed with the interval, and the median step of the first alarm."""
    rows = []
    for kind in ("healthy", FELL, "all planted", *PLANTED):
        planted = PLANTED if kind == "all planted" else [kind]
        these = [line for line in lines if kind_of(line) in planted]
        if not these:
            continue
        alarms = [first_alarm(line, recipe) for line in these]
        found = [alarm for alarm in alarms if alarm]
        keys = sorted({key for _, key in found}, key=lambda key: (-sum(key == other for _, other in found), key))
        rows.append(
            {
                "runs": kind,
                "n": len(these),
                "alarms": len(found),
                "rate": shown(success_rate(len(found), len(these))),
                "median step": f"{statistics.median(step for step, _ in found):g}" if found else "–",
                "first guards": ", ".join(f"{key} {sum(key == other for _, other in found)}" for key in keys) or "–",
            }
        )
    return rows


def tables(lines: Sequence[Line], patience: int) -> str:
    """The thresholds that one half chooses and the defaults, with the rates of both on the other half, and those of the
    defaults on all runs."""
    # By pairs of numbers, because a number's parity decides on its task.
    halves = [[line for line in lines if line["index"] // 2 % 2 == part] for part in (0, 1)]
    chosen = chosen_thresholds(halves[0], patience)
    default = GuardRecipe().thresholds
    parts = [markdown([{"guard": key, "chosen": f"{chosen[key]:g}", "default": f"{default[key]:g}"} for key in chosen])]
    for title, recipe, measured in (
        ("chosen; the other half of the runs", GuardRecipe(patience=patience, thresholds=chosen), halves[1]),
        ("default; the other half of the runs", GuardRecipe(), halves[1]),
        ("default; all runs", GuardRecipe(), lines),
    ):
        parts.append(f"\nThresholds: {title}\n\n{markdown(rates(measured, recipe))}")
    return "\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--planted", type=number(0), default=48, help="runs with a planted collapse")
    parser.add_argument("--healthy", type=number(0), default=100, help="healthy runs")
    parser.add_argument("--patience", type=number(1), default=GuardRecipe().patience, help="steps before an alarm")
    add_places(parser)
    given = parser.parse_args()
    if given.table:
        print(tables(read_lines(given.table), given.patience), end="")
        return
    stored = Stored(given.out / "guards.jsonl", "kind", "index")
    for kind, index in stored.missing(planned(given.healthy, given.planted)):
        line = run(kind, index, given.out.resolve())
        stored.add(line)
        print(f"{kind} {index}: {line['seconds']:.0f} s {line['error'][:80]}", flush=True)
    print(tables(stored.lines, given.patience))
    print(f"- {describe_machine()}")


if __name__ == "__main__":
    main()
