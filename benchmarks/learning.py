"""What reinforcement learning learns, over training seeds: one factor varied at a time from a base recipe per environment.

    python benchmarks/learning.py --environments word_sort,bandit --seeds 5 --jobs 2 --out runs/learning

Every run starts from a small model that plays like the random policy, another one for each training seed, and is evaluated
on other seeds of the task during training and at its end. A run's outcome is one line of OUT/results.jsonl; runs that are there are
not run again. OUT/learning.md has a row per variant.
"""

import argparse
import hashlib
import math
import shutil
import sys
import time
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np
from harness.options import add_places, names
from harness.paired import shown as shown_in_percent
from harness.panels import curve as panel_curve
from harness.panels import panel
from harness.table import Stored, markdown, read_lines, write_lines

from posttrain.errors import InputError, PosttrainError
from posttrain.evaluation.statistics import probability_above
from posttrain.runs.intervals import mean_difference, seed_mean
from posttrain.runs.machine import describe_machine

Keys = dict[str, Any]

COMMON: Keys = {
    "model": {"threads": 1},
    "steps": 40,
    "rollout": {"groups_per_step": 16, "episodes_per_group": 8, "tokens_per_turn": 10},
    "credit": {"type": "rloo"},
    "loss": {"type": "ppo"},
    "learner": {"updates_per_step": 2},
    "optimizer": {"learning_rate": 5e-4, "warmup_updates": 10},
    "evaluation": {
        "every": 5,
        "sampling": {"temperature": 1.0},
        "seeds": {"start": 1_000_000, "count": 128},
        "final_seeds": {"start": 2_000_000, "count": 400},
    },
    "checkpoint": {"every": 1000},
    "export": "last",
}
ENVIRONMENTS: dict[str, Keys] = {
    "bandit": {"environment": {"type": "bandit"}, "steps": 20},
    "word_sort": {
        "steps": 60,
        "environment": {"type": "word_sort"},
        "credit": {"type": "grpo"},
        "kl": {"coefficient": 0.1, "estimator": "k2"},
    },
    # The words of word_sort, rewarded by a reward model that has seen pairs of answers; success is the rule's. The model also ranks
    # the wrong boxes: with a KL coefficient of 0.1, the policy ends at the box that is second best for many words.
    "reward model": {
        "steps": 80,
        "environment": {"type": "text_task"},
        "credit": {"type": "rloo"},
        "optimizer": {"learning_rate": 1e-3},
        "kl": {"coefficient": 0.5, "estimator": "k2"},
        "evaluation": {"environment": {"type": "word_sort"}, "metric": "success"},
    },
    # Two by two cells: the smallest lake on which an answer has to depend on the turn before.
    "firm lake": {
        "environment": {"type": "frozen_lake", "size": 2, "slippery": False, "max_turns": 2, "observation": "local"},
        "rollout": {"tokens_per_episode": 700},
        "credit": {"type": "turn_returns"},
        "optimizer": {"learning_rate": 1e-3},
        "kl": {"coefficient": 0.02, "estimator": "k2"},
    },
    "slippery lake": {
        "environment": {"type": "frozen_lake", "size": 2, "slippery": True, "max_turns": 4, "observation": "local"},
        "rollout": {"tokens_per_episode": 700},
        "credit": {"type": "turn_returns"},
        "optimizer": {"learning_rate": 1e-3},
        "kl": {"coefficient": 0.02, "estimator": "k2"},
    },
    # Rooms of three by three cells; their shortest solutions have one move or four. Only solving is paid.
    "sokoban": {
        "environment": {
            "type": "sokoban",
            "dim_x": 5,
            "dim_y": 5,
            "max_turns": 4,
            "observation": "local",
            "step_reward": 0.0,
            "box_reward": 0.0,
            "solved_reward": 1.0,
        },
        "rollout": {"tokens_per_episode": 1000},
        "credit": {"type": "turn_returns"},
        "optimizer": {"learning_rate": 1e-3},
        "kl": {"coefficient": 0.02, "estimator": "k2"},
    },
}
CREDITS = ["rloo", "grpo", "dr_grpo", "opo", "remax", "reinforce_pp_baseline", "brpo", "arpo", "reinforce_pp"]
CREDITS += ["reinforce", "turn_returns", "gigpo", "gae", "bilevel_gae", "optimal_token_baseline"]
LOSSES = ["gspo", "gspo_token", "cispo", "dppo", "sapo", "gmpo"]
VARIANTS: dict[str, Keys] = {
    "base": {},
    **{f"credit {name}": {"credit": {"type": name}} for name in CREDITS},
    # It divides by the mean return of a group, which the penalty for a wrong form can make negative.
    "credit maxrl": {"credit": {"type": "maxrl"}, "environment": {"format": {"penalty": 0.0}}},
    "credit pass_at_k": {"credit": {"type": "pass_at_k", "k": 4}},
    # In games, failed episodes are longer than others: their tokens outnumber the others' in a mean over tokens.
    **{
        f"credit {name} sequence_mean": {
            "credit": {"type": name},
            "loss": {"type": "ppo", "aggregation": "sequence_mean"},
        }
        for name in ("rloo", "grpo")
    },
    **{f"loss {name}": {"loss": {"type": name}} for name in LOSSES},
    # Without importance weights, a step has one update.
    **{f"loss {name}": {"loss": {"type": name}, "learner": {"updates_per_step": 1}} for name in ("reinforce", "gpg")},
    "no warm-up": {"optimizer": {"warmup_updates": 0}},
    "learning rate 1e-3": {"optimizer": {"learning_rate": 1e-3}},
    "1 update a step": {"learner": {"updates_per_step": 1}},
    "8 x 16 episodes": {"rollout": {"groups_per_step": 8, "episodes_per_group": 16}},
    "32 x 4 episodes": {"rollout": {"groups_per_step": 32, "episodes_per_group": 4}},
    "entropy 0.003": {"entropy": {"coefficient": 0.003}},
    "entropy 0.02 for KL": {"entropy": {"coefficient": 0.02}, "kl": {"coefficient": 0.0}},
    "entropy target 0.1": {"entropy": {"target": 0.1, "tokens": "answer"}},
    "filter dynamic": {"rollout": {"filter": {"type": "dynamic"}}},
    "filter uncertainty": {"rollout": {"filter": {"type": "uncertainty", "keep": 0.5}}},
    "no KL": {"kl": {"coefficient": 0.0}},
    "KL 0.02": {"kl": {"coefficient": 0.02, "estimator": "k2"}},
}
SHARE = 0.8
"""Of the optimal policy's success: the level whose time is measured."""
PIECES = ["<answer>", "</answer>", "red", "green", "blue", "white"]
"""What answers without the right form are put together from, for the reward model's pairs."""


def merged(*parts: Keys) -> Keys:
    """Nested dictionaries, the later ones winning key by key. A `credit` or `loss` of another type replaces the whole."""
    whole: Keys = {}
    for part in parts:
        for key, value in part.items():
            mergeable = isinstance(value, dict) and isinstance(whole.get(key), dict) and "type" not in value
            whole[key] = merged(whole[key], value) if mergeable else value
    return whole


def reward_model(out: Path) -> Keys:
    """Keys of the environment `reward model`: prompts, and a model trained on pairs of a right and a wrong answer to them.

    Half of the answers are pieces in random order: a model that has only seen answers of the right form scores others above
    them. Both are made once in `out`.
    """
    from harness.made_model import small

    import posttrain

    prompts, pairs, name = out / "prompts.jsonl", out / "pairs.jsonl", "reward_model"
    if not (out / name / "model" / "config.json").exists():
        make, draws = posttrain.make_env("word_sort"), np.random.default_rng(0)
        rows = []
        for seed in range(200_000, 201_024):
            found: dict[bool, Keys] = {}
            while len(found) < 2:
                environment = make()
                messages = list(environment.reset(seed).messages)
                answer = environment.random_answer(draws.random())
                if draws.random() < 0.5:
                    answer = "".join(draws.choice(PIECES, draws.integers(1, 5)))
                success = environment.step(answer).info["success"]
                found[success] = {"messages": messages, "answer": [{"role": "assistant", "content": answer}]}
            asked = found[True]["messages"]
            rows.append({"chosen": asked + found[True]["answer"], "rejected": asked + found[False]["answer"]})
        write_lines(pairs, rows)
        write_lines(prompts, ({"prompt": row["chosen"][:-1]} for row in rows))
        posttrain.reward(
            name=name,
            runs=str(out),
            overwrite=True,
            model={"path": str(small()), "threads": 1},
            # Nothing is held out: rows are divided by their prompts, and a word that was never seen cannot be sorted.
            data={"train": str(pairs), "max_tokens": 128},
            epochs=6,
            rows_per_update=16,
            optimizer={"learning_rate": 5e-4, "warmup_updates": 10, "schedule": "cosine"},
        )
    return {
        "environment": {"prompts": str(prompts)},
        "reward": {"path": str(out / name / "model"), "normalize": "running"},
    }


def run(environment: str, variant: str, seed: int, out: Path) -> Keys:
    """Train once. Returns its line of results: curve (step, seconds of training, success), final success, baselines."""
    from harness.made_model import small

    import posttrain

    folder = out / "runs" / f"{environment}-{variant}-{seed}".replace(" ", "_")
    # How fast a run learns depends on the model it starts from, so seeds do not share it.
    model = small(seed)
    begun = time.process_time()
    prepared = reward_model(out) if environment == "reward model" else {}
    keys = merged(COMMON, {"model": {"path": str(model)}}, ENVIRONMENTS[environment], prepared, VARIANTS[variant])
    result = posttrain.rl(**keys, name=folder.name, runs=str(folder.parent), seed=seed, overwrite=True)
    clock = np.cumsum([row["time/step"] for row in result.metrics])
    rates = {row["policy"]: row["success"] for row in result.evaluation}
    line = {
        "environment": environment,
        "variant": variant,
        "seed": seed,
        "curve": [
            (int(row["step"]), float(clock[int(row["step"]) - 1]) if row["step"] else 0.0, row["success"])
            for row in result.evaluations
        ],
        "final": rates["trained"],
        "start": rates["start of this run"],
        "random": rates["random"],
        "optimal": rates["optimal"],
        "cpu_seconds": time.process_time() - begun,
        # Processors round differently, so the same seed makes another model elsewhere.
        "processor": describe_machine()["processor"],
        "model": hashlib.blake2b((model / "model.safetensors").read_bytes(), digest_size=6).hexdigest(),
    }
    shutil.rmtree(folder)
    return line


def sections(lines: list[Keys]) -> list[str]:
    """Markdown per environment: a heading, the success of the baseline policies and a table with a row per variant."""
    return [
        f"### {name}\n\nRandom policy {runs[0]['random']:.1%}, optimal policy {runs[0]['optimal']:.1%}.\n\n{markdown(table(runs))}"
        for name, runs in by_environment(lines).items()
    ]


def by_environment(lines: list[Keys]) -> dict[str, list[Keys]]:
    """The lines of each environment."""
    by: dict[str, list[Keys]] = defaultdict(list)
    for line in lines:
        by[line["environment"]].append(line)
    return by


def table(lines: list[Keys]) -> list[Keys]:
    """A row per variant of one environment. `area - base` is paired by training seed: both start from the same model."""
    variants: dict[str, list[Keys]] = defaultdict(list)
    for line in sorted(lines, key=lambda line: line["seed"]):
        variants[line["variant"]].append(line)
    base = [line["final"] for line in variants["base"]]
    base_areas = {line["seed"]: _area(line) for line in variants["base"]}
    rows = []
    for variant in [name for name in VARIANTS if variants[name]]:
        runs = variants[variant]
        final = [line["final"] for line in runs]
        pairs = [_area(line) - base_areas[line["seed"]] for line in runs if line["seed"] in base_areas]
        better = probability_above([final], [base]) if base and variant != "base" else None
        rows.append(
            {
                "variant": variant,
                "seeds": len(runs),
                "final success": shown_in_percent(seed_mean(final, rate=True)),
                "worst": f"{min(final):.1%}",
                "area": f"{np.mean([_area(line) for line in runs]):.1%}",
                "area - base": shown_in_percent(mean_difference(pairs)) if pairs and variant != "base" else "–",
                "better than base": shown_in_percent(better) if better else "–",
                f"s to {SHARE:.0%} of optimal": _times([_time_to(line) for line in runs]),
            }
        )
    return rows


def _area(line: Keys) -> float:
    """Mean success over the learning curve."""
    return float(np.mean([success for _, _, success in line["curve"]]))


def _time_to(line: Keys) -> float:
    goal = SHARE * line["optimal"]
    return next((seconds for _, seconds, success in line["curve"] if success >= goal), math.inf)


def _times(times: list[float]) -> str:
    """Median over all runs, in which a run that never gets there takes longest."""
    reached = sum(map(math.isfinite, times))
    median = sorted(times)[len(times) // 2]
    shown = f"{median:.0f}" if math.isfinite(median) else "–"
    return shown if reached == len(times) else f"{shown} ({reached} of {len(times)})"


COLUMNS = 5
"""Panels beside each other in the figures."""


def height_of(lines: list[Keys]) -> float:
    """Height in inches of the small multiples of one environment."""
    return 0.4 + 1.3 * math.ceil(len({line["variant"] for line in lines}) / COLUMNS)


def small_multiples(axes: Any, lines: list[Keys], curve: str, base: str, text: str) -> None:
    """A panel per variant of one environment in the area of `axes`: held-out success by step, mean and 95% interval over
    seeds in the color `curve`, and the base's mean in the color `base`. Dotted: random and optimal. `text`: color of words.
    """
    axes.axis("off")
    by = {name: [line for line in lines if line["variant"] == name] for name in VARIANTS}
    shown = [name for name, runs in by.items() if runs]
    rows = math.ceil(len(shown) / COLUMNS)
    for place, name in enumerate(shown):
        row, column = divmod(place, COLUMNS)
        where = (column / COLUMNS, 1 - (row + 0.78) / rows, 0.86 / COLUMNS, 0.66 / rows)
        drawn = panel(axes, where, 7, text, base)
        curves = {key: [[success for _, _, success in line["curve"]] for line in by[key]] for key in (name, "base")}
        steps = [step for step, _, _ in by[name][0]["curve"]]
        for key in ("random", "optimal"):
            drawn.axhline(lines[0][key], color=base, linestyle=":", linewidth=0.8)
        if curves["base"]:
            drawn.plot(steps, np.mean(curves["base"], axis=0), color=base, linewidth=1.0)
        panel_curve(drawn, steps, curves[name], curve, linewidth=1.6)
        drawn.set_title(name.removeprefix("credit "), fontsize=8, color=text, pad=3)
        if column:
            drawn.set_yticklabels(("", "", ""))
        drawn.set_xticks((0, steps[-1]))
        drawn.tick_params(length=2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--environments", type=names(ENVIRONMENTS), default=",".join(ENVIRONMENTS), help="comma-separated"
    )
    parser.add_argument("--variants", type=names(VARIANTS), default=",".join(VARIANTS), help="comma-separated")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, of one thread each")
    add_places(parser)
    chosen = parser.parse_args()
    if chosen.table:
        print("\n".join(sections(read_lines(chosen.table))), end="")
        return
    stored = Stored(chosen.out / "results.jsonl", "environment", "variant", "seed")
    wanted = stored.missing(
        (environment, variant, seed)
        for seed in range(chosen.seeds)
        for variant in chosen.variants
        for environment in chosen.environments
    )
    if any(environment == "reward model" for environment, _, _ in wanted):
        reward_model(chosen.out)  # once, before several processes need it
    failed = False
    with ProcessPoolExecutor(chosen.jobs) as pool:
        futures = {pool.submit(run, *one, chosen.out): one for one in wanted}
        for future in as_completed(futures):
            try:
                line = future.result()
            except PosttrainError as error:
                # A refused recipe, such as one with a key that the environment does not have, is no result; a run that fails is.
                refused = isinstance(error, InputError)
                failed |= not refused
                print(*futures[future], f"{'left out' if refused else 'failed'}: {error}", flush=True)
                continue
            stored.add(line)
            print(*futures[future], f"{line['start']:.2f} -> {line['final']:.2f}", flush=True)
    if not stored.lines:
        sys.exit("no run has finished, so there is no table")
    text = "\n".join(sections(stored.lines))
    (chosen.out / "learning.md").write_text(text)
    print(text)
    if failed:
        sys.exit("a run failed, so a row has fewer seeds; the same command runs it again")


if __name__ == "__main__":
    main()
