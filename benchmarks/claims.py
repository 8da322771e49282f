"""Claims of other authors, tested with several training seeds on small models.

    python benchmarks/claims.py --claims units --out runs/claims
    python benchmarks/claims.py --table docs/results/claims.jsonl

See docs/results/claims.md. A run's outcome is one line of OUT/claims.jsonl; runs that are there are not made again.
"""

import argparse
import json
import shutil
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from claimed.games import (
    COLLAPSE_VARIANTS,
    COMMON,
    RAGEN_VARIANTS,
    SEARCH_VARIANTS,
    SLIPPERY_VARIANTS,
    Keys,
    Line,
    Run,
    curves_table,
    ragen_table,
    run_lake,
    run_ragen,
    search_table,
)
from harness import procedure_models
from harness.crossed import crossed_mean
from harness.made_model import fine_tuned
from harness.options import add_places, names, numbers
from harness.paired import difference, overall, results, shown, verdict
from harness.ranked_pairs import (
    asked,
    copier,
    pairs,
    prompt_of,
    quality,
    random_answer,
    ranked,
    reward_model,
    rewards,
    write_in,
)
from harness.table import Stored, markdown, read_lines
from harness.verified_units import CURVE, FINAL, MARKS, TRAINED, policies, random_score, register, write_rows
from learning import merged

import posttrain
from posttrain.recipe.catalogue import recipe_file
from posttrain.runs.intervals import Estimate, success_rate
from posttrain.runs.machine import describe_machine

# -- runs --------------------------------------------------------------------------------------------------------------

VERIFIER = "posttrain_environments.rationales.verifier:scores"
UNITS: Keys = {
    "environment": {"type": "text_task", "reward": VERIFIER},
    "steps": 10,
    "rollout": {"groups_per_step": 12, "episodes_per_group": 8, "tokens_per_turn": 64, "tokens_per_episode": 160},
    "learner": {"updates_per_step": 2},
    "loss": {"type": "ppo"},
    "optimizer": {"learning_rate": 4e-4, "warmup_updates": 2},
    "seeds": {"start": 0, "count": TRAINED},
    "export": "last",
    "evaluation": {"every": 2, "metric": "return"},
}
UNIT_VARIANTS: dict[str, Keys] = {
    **{
        f"ppo {name}": {
            "credit": {
                "type": "verified_units",
                "estimator": name,
                "gae_lambda": 1.0 if name == "drca_published" else 0.95,
            },
            "critic": {"optimizer": {"learning_rate": 1e-3}, "updates_before_policy": 4},
        }
        for name in ("outcome", "prefix", "loo", "drca_published", "unit_rewards", "reached_unit_rewards")
    },
    "grpo outcome": {"credit": {"type": "grpo"}},
    "grpo prefix": {"credit": {"type": "verified_unit_groups"}},
}


def short_writer(out: Path) -> Path:
    """The model that all seeds start from: it writes procedures with `NOISE`, fine-tuned from random weights."""
    if not (out / "data" / "prompts.jsonl").exists():
        write_rows(out / "data")
    rows = [row["messages"] for row in read_lines(out / "data" / "sft.jsonl")]
    return fine_tuned(
        out / "models" / "writer",
        10,
        [message for messages in rows for message in messages],
        {
            "data": {"train": str(out / "data" / "sft.jsonl")},
            "epochs": 4,
            "rows_per_update": 48,
            "optimizer": {"learning_rate": 3e-3, "warmup_updates": 20, "schedule": "cosine"},
        },
        marks=MARKS,
        hidden=128,
    )


def run_units(run: Run) -> Line:
    """A learning curve of the verifier's score, by task, after fine-tuning and RL."""
    register()
    model, prompts = short_writer(run.out), str(run.out / "data" / "prompts.jsonl")
    start = TRAINED + (CURVE + FINAL) * run.tuning
    variant = UNIT_VARIANTS[run.variant]
    here: Keys = {"environment": {"prompts": prompts}}
    if variant["credit"]["type"] != "grpo":
        here["credit"] = {"prompts": prompts, "tokenizer": str(model)}
    here["evaluation"] = {
        "seeds": {"start": start, "count": CURVE},
        "final_seeds": {"start": start + CURVE, "count": 1 if run.tuning else FINAL},
    }
    keys = merged(COMMON, UNITS, variant, here, json.loads(run.keys or "{}"))
    result = posttrain.rl(
        **keys, model={"path": str(model), "threads": 1}, seed=run.seed, name=run.name, runs=str(run.out)
    )
    curve = [
        [round(e.total_reward, 4) for e in result.episodes(row["step"], "evaluation")] for row in result.evaluations
    ]
    last = result.episodes(split="final")[-FINAL:]
    final = [round(episode.total_reward, 4) for episode in last]
    scores = {name: float(np.mean([episode.scores[name] for episode in last])) for name in last[0].scores}
    scores["lines"] = float(np.mean([len(episode.turns[-1].answer.splitlines()) for episode in last]))
    tasks = policies(prompts)[start + CURVE : start + CURVE + len(final)]
    random = float(np.mean([random_score(policy, number) for number, policy in enumerate(tasks)]))
    steps = [row["step"] for row in result.evaluations]
    return {"steps": steps, "curve": curve, "final": final, "random": random, "scores": scores}


# -- a policy under its reward model -----------------------------------------------------------------------------------

REWARDED: Keys = {
    "environment": {"type": "text_task"},
    "steps": 20,
    "rollout": {"groups_per_step": 24, "episodes_per_group": 4, "tokens_per_turn": 24, "tokens_per_episode": 64},
    "credit": {"type": "rloo"},
    "loss": {"type": "ppo"},
    "reward": {"normalize": "running"},
    "kl": {"coefficient": 0.05, "estimator": "k1", "apply_to": "reward"},
    "optimizer": {"learning_rate": 4e-4, "warmup_updates": 2},
    "seeds": {"start": 0, "count": TRAINED},
    "export": "last",
    "evaluation": {"every": 0},
}
REWARDED_VARIANTS: dict[str, Keys] = {"rloo": {}}


def start_of(keys: Keys) -> Keys:
    """The keys of an evaluation of the policy that a run starts from, on its final tasks."""
    played = ("environment", "rollout", "model", "seed", "name", "runs", "overwrite")
    evaluation = {key: keys["evaluation"][key] for key in ("sampling", "final_seeds")}
    return {**{key: keys[key] for key in played}, "evaluation": evaluation}


def run_rewarded(run: Run) -> Line:
    """Answers before and after RLOO against a reward model, scored by it, by a second one, which has another seed and other
    pairs, and by the rule.
    """
    scorers = [reward_model(name, run.out) for name in ("first", "second")]
    texts = [prompt_of("policy", number) for number in range(TRAINED + 2 * FINAL)]
    prompts = write_in(run.out / "data" / "policy_prompts.jsonl", [{"prompt": asked(text)} for text in texts])
    start = TRAINED + FINAL * run.tuning
    keys = merged(
        COMMON,
        REWARDED,
        {"environment": {"prompts": prompts}, "model": {"path": str(copier(run.out)), "threads": 1}, "seed": run.seed},
        {"evaluation": {"final_seeds": {"start": start, "count": FINAL}}, "name": run.name, "runs": str(run.out)},
        {"reward": {"path": str(scorers[0])}},
        REWARDED_VARIANTS[run.variant],
        json.loads(run.keys or "{}"),
    )
    before, after = (
        [episode.turns[-1].answer for episode in stage(**given).episodes(split="final")]
        for stage, given in ((posttrain.evaluate, {**start_of(keys), "reward": quality}), (posttrain.rl, keys))
    )
    tasks = texts[start : start + FINAL]
    policies = {
        "random": [random_answer(task) for task in tasks],
        "before": before,
        "after": after,
        "optimal": tasks,
    }
    ways: dict[str, Callable[[Sequence[str]], list[float]]] = {
        "its reward model": partial(rewards, scorers[0], tasks),
        "second reward model": partial(rewards, scorers[1], tasks),
        "quality": lambda answers: [round(quality(*pair), 4) for pair in zip(tasks, answers, strict=True)],
    }
    scores = {way: {name: score(answers) for name, answers in policies.items()} for way, score in ways.items()}
    held_out = pairs("tuning" if run.tuning else "held_out", run.out)
    return {
        "curve": [scores["quality"]["before"], scores["quality"]["after"]],
        "final": scores["quality"]["after"],
        "scores": scores,
        "ranked": [ranked(scorer, held_out) for scorer in scorers],
        "equally long": [int(len(set(row["lengths"])) == 1) for row in held_out],
    }


# -- procedures under learned reward models ------------------------------------------------------------------------------

MODELLED: Keys = {
    "steps": 20,
    "environment": {"score_weight": 0},
    "reward": {"normalize": "stored"},
    "credit": {"type": "gae", "gae_lambda": 0.95},
    "critic": {"optimizer": {"learning_rate": 1e-3}, "updates_before_policy": 4},
    "kl": {"coefficient": 0.01, "estimator": "k1", "apply_to": "reward"},
    "evaluation": {"every": 0},
}
STEPS: Keys = {"unit_credit": {"type": "unit_rewards", "beta": 1.0, "placement": "even"}}
MODELLED_VARIANTS: dict[str, Keys] = {"answers": {}, "steps": STEPS, "even steps": STEPS}
"""By reward model."""


def run_procedures(run: Run) -> Line:
    """The verifier's scores before and after PPO against a learned reward model of answers or of steps."""
    model, prompts = short_writer(run.out), str(run.out / "data" / "prompts.jsonl")
    scorer = procedure_models.reward_model(run.variant, model, run.out)
    start = TRAINED + CURVE + (CURVE + FINAL) * run.tuning
    here: Keys = {
        "environment": {"prompts": prompts},
        "reward": {"path": str(scorer / "model")},
        "evaluation": {"final_seeds": {"start": start, "count": FINAL}},
        "model": {"path": str(model), "threads": 1},
        "seed": run.seed,
        "name": run.name,
        "runs": str(run.out),
    }
    if run.variant != "answers":
        here["unit_credit"] = {"normalizer": str(scorer)}
    keys = merged(COMMON, UNITS, MODELLED, MODELLED_VARIANTS[run.variant], here, json.loads(run.keys or "{}"))
    scored = {"environment": {"score_weight": 1.0}}
    before, after = (
        [round(e.scores["score"], 4) for e in stage(**given).episodes(split="final")]
        for stage, given in ((posttrain.evaluate, merged(start_of(keys), scored)), (posttrain.rl, keys))
    )
    return {"curve": [before, after], "final": after, "ranked": procedure_models.ranked(scorer, run.out)}


# -- the memory agent --------------------------------------------------------------------------------------------------

MEMORY: Keys = {
    "stages.warm-up.experts.seeds.count": 400,
    "stages.warm-up.evaluation.final_seeds.count": 400,
    "stages.rl.steps": 24,
    "stages.rl.evaluation.every": 24,
    "stages.rl.checkpoint.every": 8,
    "common.model.threads": 1,
}
KINDS = ("retrieval", "update", "clarification", "filter")
COSTS = ("turn", "turns_at_most", "asked", "guessed", "leaked", "damaged", "broken", "silent")
MEMORY_VARIANTS: dict[str, Keys] = {
    "as in the recipe": {},
    "success alone": {
        **{f"stages.rl.environment.weights.{name}": 0.0 for name in COSTS},
        "stages.rl.environment.rejected": 0.0,
        "stages.rl.rollout.filter": {"type": "dynamic", "max_rounds": 1},
    },
}


def run_memory(run: Run) -> Line:
    """Success and kind by task of the board's memory agent, imitated from fewer solutions, before and after RL."""
    stages = posttrain.pipeline(
        recipe_file("memory/board"),
        name=run.name,
        runs=str(run.out),
        **(MEMORY | MEMORY_VARIANTS[run.variant] | {"common.seed": run.seed} | json.loads(run.keys or "{}")),
    )
    played = [result.episodes(split="final") for result in stages.values()]
    before, after = ([int(bool(e.success)) for e in episodes[-len(played[0]) :]] for episodes in played)
    return {
        "curve": [before, after],
        "final": after,
        "kinds": [next(kind for kind in KINDS if kind in e.scores) for e in played[-1][-len(before) :]],
        "policies": {row["policy"]: row.get("success") for row in stages["rl"].evaluation},
    }


RUNNERS: dict[str, tuple[Callable[[Run], Line], dict[str, Keys]]] = {
    "units": (run_units, UNIT_VARIANTS),
    "ragen": (run_ragen, RAGEN_VARIANTS),
    "search": (run_lake, SEARCH_VARIANTS),
    "reward model": (run_rewarded, REWARDED_VARIANTS),
    "procedures": (run_procedures, MODELLED_VARIANTS),
    "memory": (run_memory, MEMORY_VARIANTS),
    "collapse": (run_lake, COLLAPSE_VARIANTS),
    "slippery lake": (run_lake, SLIPPERY_VARIANTS),
}


# -- tables ------------------------------------------------------------------------------------------------------------


def units_table(lines: Sequence[Line]) -> str:
    """A row per credit, compared with the same baseline and the outcome alone."""
    rows = []
    for variant in UNIT_VARIANTS:
        base = f"{variant.split()[0]} outcome" if variant != "grpo outcome" else "ppo outcome"
        area, seeds = difference(lines, variant, base, "curve")
        rows.append(
            {
                "credit": variant,
                "training seeds": len(results(lines, variant, "final")),
                "area under the curve": overall(lines, variant, "curve"),
                "after RL": overall(lines, variant, "final"),
                "compared with": base if variant != base else "–",
                "difference in area": area,
                "seeds that would decide": seeds,
                "difference after RL": difference(lines, variant, base, "final")[0],
            }
        )
    start = crossed_mean([line["curve"][0] for line in lines if line["variant"] == "ppo outcome"], rate=True)
    random = np.mean([line["random"] for line in lines])
    return f"Random steps {random:.1%}, before RL {shown(start)}, optimal 100.0%.\n\n{markdown(rows)}"


def rewarded_table(lines: Sequence[Line]) -> str:
    """How the reward models rank held-out pairs, and the policies under each scorer. Rewards are in standard deviations of
    those before RL, from their mean, by training seed.
    """
    lines = sorted(lines, key=lambda line: line["seed"])
    long = np.array(lines[0]["equally long"], dtype=bool)
    ranks = [
        {
            "reward model": name,
            "held-out pairs": kind,
            "number": int(kept.sum()),
            "ranked rightly": shown(success_rate(int(np.sum(right, where=kept)), int(kept.sum()))),
        }
        for name, right in zip(("its reward model", "second reward model"), lines[0]["ranked"], strict=True)
        for kind, kept in (("all", np.ones_like(long)), ("equally long answers", long))
    ]
    rows = []
    for way, text in (("its reward model", deviations), ("second reward model", deviations), ("quality", shown)):
        policies = ("random", "before", "after", "optimal")
        by = {name: np.array([line["scores"][way][name] for line in lines]) for name in policies}
        if way != "quality":
            mean, deviation = by["before"].mean(1, keepdims=True), by["before"].std(1, keepdims=True)
            by = {name: (values - mean) / deviation for name, values in by.items()}
        gain = crossed_mean(by["after"] - by["before"])
        cells = {name: text(crossed_mean(values)) for name, values in by.items()}
        rows.append({"scored by": way, "training seeds": len(lines), **cells, "after - before": text(gain)})
    return f"{markdown(ranks)}\n{markdown(rows)}"


def procedures_table(lines: Sequence[Line]) -> str:
    """How the reward models rank held-out pairs, and the verifier's scores of policies trained under them."""
    rows = []
    for variant in MODELLED_VARIANTS:
        runs = sorted((line for line in lines if line["variant"] == variant), key=lambda line: line["seed"])
        right = runs[0]["ranked"]
        before, after = (np.array([line["curve"][place] for line in runs]) for place in (0, 1))
        gain = crossed_mean(after - before)
        base = "answers" if variant == "steps" else "steps"
        rows.append(
            {
                "reward model of": variant,
                "pairs ranked rightly": f"{shown(success_rate(sum(right), len(right)))} of {len(right)}",
                "training seeds": len(runs),
                "before": shown(crossed_mean(before, rate=True)),
                "after": shown(crossed_mean(after, rate=True)),
                "after - before": shown(gain),
                "seeds that would decide": verdict(gain, (after - before).mean(1).tolist()),
                "compared with": base if variant != "answers" else "–",
                "difference after": difference(lines, variant, base, "final")[0] if variant != "answers" else "–",
            }
        )
    return markdown(rows)


def memory_table(lines: Sequence[Line]) -> str:
    """Success of the memory agent before and after RL, by kind of task, and of policies that are written by hand."""
    rows, base = [], "as in the recipe"
    for variant in dict.fromkeys(line["variant"] for line in lines):
        runs = sorted((line for line in lines if line["variant"] == variant), key=lambda line: line["seed"])
        before, after = (np.array([line["curve"][place] for line in runs]) for place in (0, 1))
        for kind in ("all", *KINDS):
            of = np.array([kind in ("all", one) for one in lines[0]["kinds"]])
            gain = crossed_mean((after - before)[:, of])
            one_kind = [
                line | {"final": [one for one, kept in zip(line["final"], of, strict=True) if kept]} for line in lines
            ]
            rows.append(
                {
                    "settings": variant,
                    "kind": kind,
                    "tasks": int(of.sum()),
                    "training seeds": len(runs),
                    "before RL": shown(crossed_mean(before[:, of], rate=True)),
                    "after RL": shown(crossed_mean(after[:, of], rate=True)),
                    "after - before": shown(gain),
                    "seeds that would decide": "–"
                    if np.isnan(gain.low)
                    else verdict(gain, (after - before)[:, of].mean(1).tolist()),
                    "difference after RL": difference(one_kind, variant, base, "final")[0],
                }
            )
    known = {name: value for name, value in lines[0]["policies"].items() if value is not None and name != "trained"}
    return f"{', '.join(f'{name} {value:.1%}' for name, value in known.items())}\n\n{markdown(rows)}"


def deviations(found: Estimate) -> str:
    """In standard deviations, with the limits if there are any."""
    return f"{found.value:.2f}" + ("" if np.isnan(found.low) else f" [{found.low:.2f}, {found.high:.2f}]")


def tables(lines: Sequence[Line]) -> str:
    """The tables of all claims that have lines."""
    by = {name: [line for line in lines if line["claim"] == name] for name in RUNNERS}
    made = {
        "units": units_table,
        "ragen": ragen_table,
        "search": search_table,
        "reward model": rewarded_table,
        "procedures": procedures_table,
        "memory": memory_table,
        "collapse": partial(curves_table, variants=list(COLLAPSE_VARIANTS)),
        "slippery lake": partial(curves_table, variants=list(SLIPPERY_VARIANTS)),
    }
    return "\n".join(f"## {name}\n\n{made[name](found)}" for name, found in by.items() if found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--claims", type=names(RUNNERS), default=",".join(RUNNERS), help="comma-separated")
    parser.add_argument("--variants", help="comma-separated; all if left out")
    parser.add_argument("--seeds", type=numbers(0), default="0,1,2,3,4", help="training seeds, comma-separated")
    parser.add_argument("--tune", metavar="JSON", help="play the tuning tasks, with these keys of the recipe")
    add_places(parser)
    chosen = parser.parse_args()
    if chosen.table:
        print(tables(read_lines(chosen.table)), end="")
        return
    file = chosen.out / ("tuning.jsonl" if chosen.tune else "claims.jsonl")
    keys, stored = chosen.tune or "", Stored(file, "claim", "variant", "seed", "keys")
    wanted = stored.missing(
        (claim, variant, seed, keys)
        for seed in chosen.seeds
        for claim in chosen.claims
        for variant in RUNNERS[claim][1]
        if not chosen.variants or variant in chosen.variants.split(",")
    )
    for claim, variant, seed, _ in wanted:
        run = Run(claim, variant, seed, chosen.out.resolve(), bool(chosen.tune), keys)
        begun = time.process_time()
        line = {"claim": claim, "variant": variant, "seed": seed, "keys": keys, **RUNNERS[claim][0](run)}
        line["cpu_seconds"] = round(time.process_time() - begun, 1)
        line["processor"] = describe_machine()["processor"]
        stored.add(line)
        shutil.rmtree(run.out / run.name, ignore_errors=True)
        curve, final = [round(float(np.mean(values)), 3) for values in line["curve"]], float(np.mean(line["final"]))
        print(claim, variant, seed, keys, curve, round(final, 3), line["cpu_seconds"], flush=True)


if __name__ == "__main__":
    main()
