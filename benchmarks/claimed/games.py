"""Runs of a claim. RAGEN's experiments with thinking, imitation, reinforcement learning and a search of settings, and the
settings of a run that collapsed, on small models that start by playing one game at random.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from board import by_task as board_results
from harness.made_model import fine_tuned, random_episode, slower
from harness.paired import difference, overall, results, shown, verdict
from harness.table import markdown, read_lines, write_lines
from harness.verified_units import FINAL, MARKS
from learning import COMMON as LEARNING
from learning import ENVIRONMENTS, merged
from scipy.stats import spearmanr

import posttrain
from posttrain.result import Result
from posttrain.runs.intervals import mean_difference
from posttrain.seeds import random_stream

Keys = dict[str, Any]
Line = dict[str, Any]
"""What is stored of a run."""

COMMON: Keys = {"checkpoint": {"every": 100_000}, "evaluation": {"sampling": {"temperature": 1.0}}, "overwrite": True}


@dataclass(frozen=True)
class Run:
    """One training run of a claim."""

    claim: str
    variant: str
    seed: int
    out: Path
    tuning: bool = False
    """On the tasks on which settings are chosen."""
    keys: str = ""
    """Further keys as JSON."""

    @property
    def name(self) -> str:
        """Name of its directory."""
        return re.sub(r"\W+", "_", f"{self.claim}-{self.variant}-{self.seed}-{self.keys}")[:200]


GAMES: dict[str, Keys] = {"bandit": {"steps": 10, "imitated": 16}, "firm lake": {"steps": 15, "imitated": 64}}
"""RL steps, and the optimal traces of fine-tuning."""
FORMATS = ("no thinking", "thinking")
WAYS = ("SFT", "RL", "SFT then RL")
SIZES: dict[str, dict[str, int]] = {"5M": {"hidden": 352, "layers": 3}, "20M": {"hidden": 512, "layers": 6}}
"""Larger models, of 5.3 and 21 million weights; the others have 1.2."""
RAGEN_VARIANTS: dict[str, dict[str, int]] = {
    **{f"{game} | {thoughts} | {way}": {} for game in GAMES for thoughts in FORMATS for way in WAYS},
    **{f"{game} | no thinking | {way} | {size}": SIZES[size] for size in SIZES for game in GAMES for way in WAYS},
}
SEARCH: dict[str, dict[str, Keys]] = {
    "groups x episodes": {
        f"{groups} x {episodes}": {"rollout": {"groups_per_step": groups, "episodes_per_group": episodes}}
        for groups in (4, 8, 16)
        for episodes in (4, 8, 16)
    },
    # 200 times the published ones: the model is small.
    "learning rate": {f"{rate:g}": {"optimizer": {"learning_rate": rate}} for rate in (1e-4, 2e-4, 1e-3, 2e-3)},
    "KL coefficient": {f"{beta:g}": {"kl": {"coefficient": beta}} for beta in (0.001, 0.005, 0.01, 0.04, 0.1, 0.5)},
    "turns x temperature": {
        f"{turns} x {heat:g}": {
            "environment": {"max_turns": turns},
            "rollout": {"sampling": {"temperature": heat}},
        }
        for turns in (2, 5, 8)
        for heat in (0.1, 0.5, 1.0)
    },
}
"""RAGEN's four groups of settings."""
SEARCH_VARIANTS = {f"{group} | {name}": keys for group, names in SEARCH.items() for name, keys in names.items()}
GSPO: Keys = {"credit": {"type": "grpo"}, "steps": 40, "evaluation": {"every": 5}}
PUBLISHED: Keys = {
    "rollout": {"groups_per_step": 32, "episodes_per_group": 4},
    "loss": {"type": "gspo", "clip_low": 0.1, "clip_high": 0.1},
    "kl": {"coefficient": 0.1, "estimator": "k3", "target": 0.02, "horizon": 256},
    "learner": {"updates_per_step": 4, "epochs_per_step": 10},
}
NARROW = {"type": "gspo", "clip_low": 3e-4, "clip_high": 4e-4}
COLLAPSE_VARIANTS: dict[str, Keys] = {
    "published": PUBLISHED,
    "published with a narrow clip": PUBLISHED | {"loss": NARROW},
    "published with one pass": PUBLISHED | {"learner": {"updates_per_step": 4}},
    "published with a fixed KL coefficient": PUBLISHED | {"kl": {"coefficient": 0.1, "estimator": "k3"}},
    "corrected": {
        "loss": NARROW,
        "kl": {"coefficient": 0.001, "estimator": "k3"},
        "learner": {"updates_per_step": 2, "epochs_per_step": 2},
    },
}
"""The settings of `memory/gspo_published`, with one supposed cause of its collapse removed, and those of `memory/gspo`; steps
have 128 episodes."""
SLIPPERY_VARIANTS: dict[str, Keys] = {name: {"credit": {"type": name}} for name in ("turn_returns", "gae")}
LAKES: dict[str, tuple[str, Keys, dict[str, Keys]]] = {
    "search": ("firm lake", {"steps": GAMES["firm lake"]["steps"], "evaluation": {"every": 5}}, SEARCH_VARIANTS),
    "collapse": ("firm lake", GSPO, COLLAPSE_VARIANTS),
    "slippery lake": ("slippery lake", {"steps": 200, "evaluation": {"every": 25}}, SLIPPERY_VARIANTS),
}
"""The lake, the keys and the variants of each claim."""


def random_player(game: str, thinking: bool, seed: int, out: Path, size: dict[str, int]) -> Path:
    """A model that plays one game at random in its format, trained from random weights; made once for each seed."""
    name = "-".join([game, "thinking" if thinking else "answers", *map(str, size.values())]).replace(" ", "_")
    settings = {**ENVIRONMENTS[game]["environment"], "format": {"thinking": thinking}}
    environment = posttrain.make_env(settings.pop("type"), **settings)()
    traces = [random_episode(environment, n, random_stream("claims", "moves", n)) for n in range(300_000, 300_400)]
    file = write_lines(out / "data" / f"{name}.jsonl", ({"messages": messages} for messages in traces))
    keys = {
        "data": {"train": str(file)},
        "loss_on": "all",
        "steps": 60 if game == "bandit" else 150,
        "rows_per_update": 12,
        "optimizer": {"learning_rate": 3e-3 * slower(**size), "warmup_updates": 10, "schedule": "cosine"},
    }
    messages = [message for trace in traces for message in trace]
    return fine_tuned(out / "models" / f"{name}-{seed}", seed, messages, keys, marks=MARKS, **size)


def trained(run: Run, model: Path, own: Keys, further: Keys) -> Result:
    """The result of RL on a game, or of an evaluation if there are no steps, with the settings `own` and `further`."""
    evaluation = {"sampling": {"temperature": 1.0}, "seeds": {"start": 1_000_000, "count": 128}}
    evaluation["final_seeds"] = {"start": 1_500_000 if run.tuning else 2_000_000, "count": FINAL}
    keys = merged({"environment": own["environment"], "rollout": {"tokens_per_turn": 48, "tokens_per_episode": 700}})
    keys |= {"model": {"path": str(model), "threads": 1}, "evaluation": evaluation}
    keys |= {"seed": run.seed, "runs": str(run.out), "name": run.name, "overwrite": True}
    if not further:
        return posttrain.evaluate(**keys)
    return posttrain.rl(
        **merged(LEARNING, own, keys, {"checkpoint": COMMON["checkpoint"]}, further, json.loads(run.keys or "{}"))
    )


def outcome(result: Result) -> Line:
    """Success by task along the curve and at the end, beside the other policies'."""
    rates = {row["policy"]: row["success"] for row in result.evaluation}
    final = [int(bool(episode.success)) for episode in result.episodes(split="final")][-FINAL:]
    steps = [row["step"] for row in result.evaluations]
    curve = [[int(bool(e.success)) for e in result.episodes(step, "evaluation")] for step in steps] or [final]
    return {"steps": steps or [0], "curve": curve, "final": final} | {k: rates.get(k) for k in ("random", "optimal")}


def run_ragen(run: Run) -> Line:
    """Success by task after imitation, reinforcement learning or both, from a model that plays at random."""
    game, thoughts, way, *_ = run.variant.split(" | ")
    size = RAGEN_VARIANTS[run.variant]
    model = random_player(game, thoughts == "thinking", run.seed, run.out, size)
    own = merged(ENVIRONMENTS[game], {"environment": {"format": {"thinking": thoughts == "thinking"}}})
    if way != "RL":
        sft = {
            "environment": own["environment"],
            "experts": {"seeds": {"start": 200_000, "count": GAMES[game]["imitated"]}},
            "rows_per_update": 8,
            "optimizer": {"learning_rate": 1e-3 * slower(**size)},
        }
        model = fine_tuned(model.parent.with_name(f"{model.parent.name}-imitated"), run.seed, [], sft, start=model)
    rate = slower(**size) * merged(LEARNING, own)["optimizer"]["learning_rate"]
    rl = {"steps": GAMES[game]["steps"], "evaluation": {"every": 5}, "optimizer": {"learning_rate": rate}}
    return outcome(trained(run, model, own, {} if way == "SFT" else rl))


def run_lake(run: Run) -> Line:
    """Success by task of RL on a lake, from a model that plays at random, with the settings of a variant."""
    game, keys, variants = LAKES[run.claim]
    model = random_player(game, False, run.seed, run.out, {})
    result = trained(run, model, ENVIRONMENTS[game], merged(keys, variants[run.variant]))
    last = result.metrics[-1]
    return outcome(result) | {key: round(last[key], 4) for key in ("kl/coefficient", "policy/kl") if key in last}


def success_rows(lines: Sequence[Line], game: str, thoughts: str, size: str) -> list[Keys]:
    """A row of success by way, if there are runs."""
    names = {way: f"{game} | {thoughts} | {way}" + (f" | {size}" if size in SIZES else "") for way in WAYS}
    known = [line for line in lines if line["variant"] == names["RL"]]
    if not known:
        return []
    return [
        {
            "game": game,
            "weights": size,
            "format": thoughts,
            "training seeds": min(len(results(lines, name, "final")) for name in names.values()),
            "random": f"{known[0]['random']:.1%}",
            **{way: overall(lines, name, "final") for way, name in names.items()},
            "optimal": f"{known[0]['optimal']:.1%}",
        }
    ]


def ragen_table(lines: Sequence[Line]) -> str:
    """Success by game, format and way, and the paired differences that the claims are about."""
    rows, compared = [], []
    for game in GAMES:
        for thoughts, size in (*((thoughts, "1.2M") for thoughts in FORMATS), *((FORMATS[0], size) for size in SIZES)):
            rows += success_rows(lines, game, thoughts, size)
            end = f" | {size}" if size in SIZES else ""
            for way, base in (("RL", "SFT"), ("SFT then RL", "SFT"), ("SFT then RL", "RL")):
                names = (f"{game} | {thoughts} | {one}{end}" for one in (way, base))
                what = f"{way} - {base}, {thoughts}{', ' + size if end else ''}"
                compared.append((game, what, "after training", *difference(lines, *names, "final")))
        for way in WAYS:
            for key in ("final", "curve") if way != "SFT" else ("final",):
                values = difference(lines, f"{game} | thinking | {way}", f"{game} | no thinking | {way}", key)
                what = "after training" if key == "final" else "area under the curve"
                compared.append((game, f"thinking - no thinking, {way}", what, *values))
    stored = read_lines(Path(__file__).parents[2] / "docs" / "results" / "board.jsonl")
    for entry in ("bandit", "firm_lake", "slippery_lake", "sokoban"):
        gains = [float(np.mean(board_results(line))) - line["before"] for line in stored if line["entry"] == entry]
        gain = mean_difference(gains)
        values = (shown(gain), verdict(gain, gains))
        compared.append((f"{entry}, SmolLM2-135M", "SFT then RL - SFT, no thinking", "after training", *values))
    heads = ("game", "difference", "of", "points", "seeds that would decide")
    return f"{markdown(rows)}\n{markdown([dict(zip(heads, row, strict=True)) for row in compared])}"


def search_table(lines: Sequence[Line]) -> str:
    """Every setting's success by training seed, and whether another seed ranks the settings of a group in the same order."""
    rows = []
    for group, names in SEARCH.items():
        found = {name: results(lines, f"{group} | {name}", "final") for name in names}
        seeds = sorted(set.intersection(*(set(by_seed) for by_seed in found.values())))
        table = np.array([[np.mean(by_seed[seed]) for seed in seeds] for by_seed in found.values()])
        best = [list(names)[int(place)] for place in table.argmax(0)]
        order = spearmanr(table[:, 0], table[:, 1]).statistic
        rows.append(
            {
                "group": group,
                "settings": len(names),
                "least and most success": f"{table.mean(1).min():.1%}, {table.mean(1).max():.1%}",
                "best by seed": ", then ".join(best),
                "rank of one seed's best with the other": ", ".join(
                    str(int((table[:, 1 - k] > table[table[:, k].argmax(), 1 - k]).sum()) + 1) for k in (0, 1)
                ),
                "rank correlation of two seeds": f"{order:.2f}",
            }
        )
    return markdown(rows)


def curves_table(lines: Sequence[Line], variants: Sequence[str]) -> str:
    """Success by step, over training seeds and tasks, and the difference after training from the first of `variants`."""
    rows = []
    for name in variants:
        runs = sorted((line for line in lines if line["variant"] == name), key=lambda line: line["seed"])
        places = range(0, len(runs[0]["steps"]), 2)
        means = np.array([[np.mean(tasks) for tasks in line["curve"]] for line in runs])
        at = {f"step {runs[0]['steps'][k]}": f"{means[:, k].mean():.1%}" for k in places}
        fall = mean_difference((means[:, -1] - means.max(1)).tolist())
        compared = difference(lines, name, variants[0], "final")
        rows.append(
            {
                "settings": name,
                "training seeds": len(runs),
                **at,
                "last - best": shown(fall),
                "after": overall(lines, name, "final"),
                f"difference from {variants[0]}": compared[0],
                "seeds that would decide": compared[1],
            }
        )
    return f"Random policy {lines[0]['random']:.1%}, optimal {lines[0]['optimal']:.1%}.\n\n{markdown(rows)}"
