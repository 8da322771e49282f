"""The metrics that a study may name: what evaluations hold, and what training measures, stage by stage.

Names that only a run can know (scores, domains of rows) pass here; a study stops after its first trial without them.
"""

import difflib
from collections.abc import Mapping
from typing import Any

from posttrain.errors import InputError
from posttrain.recipe.rollout import SCORES
from posttrain.recipe.sources import Layer
from posttrain.recipe.study import Objective

PLAYED = ("success", "return", "tokens_per_answer", "rejected_share", "turns")
"""Metrics of held-out episodes, besides `score/...`."""
_PREFERENCE = ("accuracy", "loss", "margin", "chosen", "rejected", "reward_mean", "reward_std")
VALIDATION = {"sft": ("loss", "perplexity"), "reward": _PREFERENCE, "dpo": _PREFERENCE}
"""Stage -> what follows `validation/` in its evaluations, limits of intervals and counts of rows left out."""
_BY_DOMAIN = ("loss", "accuracy", "margin")
"""Those of `VALIDATION` that are also measured by domain, as `validation/loss/DOMAIN`."""
_ALWAYS = (
    "loss/total",
    "optimizer/learning_rate",
    "optimizer/gradient_norm",
    "optimizer/skipped",
    "optimizer/no_signal",
    "tokens/trained",
    "speed/tokens_per_second",
)
_COMPARED = tuple(f"preference/{name}" for name in ("accuracy", "margin", "chosen", "rejected"))
_FREE = {"rl": ("rollout/score/", "units/", "critic/", "time/"), "reward": ("units/", "time/")}
"""Stage -> beginnings of training metrics whose names are not listed here."""
TRAINING: dict[str, tuple[str, ...]] = {
    "sft": (*_ALWAYS, "loss/nll", "policy/entropy"),
    "reward": (*_ALWAYS, *_COMPARED, "loss/preference", "loss/unevenness"),
    "dpo": (
        *_ALWAYS,
        *_COMPARED,
        "loss/preference",
        "loss/nll",
        "preference/kl",
        "policy/chosen_logprob",
        "policy/rejected_logprob",
    ),
    "rl": (
        *_ALWAYS,
        *(f"loss/{name}" for name in ("policy", "kl", "nll")),
        *(
            f"policy/{name}"
            for name in ("kl", "entropy", "mismatch", "repeated_share", "ratio", "staleness_mean", "staleness_max")
        ),
        *(f"policy/{name}" for name in ("clip_low", "clip_high", "clip_dual", "kl_behaviour_k1", "kl_behaviour_k3")),
        *(f"rollout/{name}" for name in ("return", "success", "turns", "tokens_per_answer", "rejected_share")),
        *(f"rollout/{name}" for name in ("episodes", "kept", "failed", "stale", "stale_alone", "restarted")),
        *(f"tokens/{name}" for name in ("sampled", "prefilled", "reused", "discarded")),
        "kl/coefficient",
        "reward/group_spread",
    ),
}
"""Stage -> metrics of its training steps; which of them a run has depends on its recipe."""


def check_metrics(objective: Objective, stage: str, base: Mapping[str, Any], given: Layer, source: str) -> None:
    """`InputError` unless evaluations of the recipe `base` hold the objective, and evaluations or steps each limit."""
    where = given.origin(("objective", "metric")) or source
    known = _held_out(stage, base)
    if not _measured(objective.metric, known):
        why, remedy = _why_not(objective.metric, stage, base, known)
        raise InputError(f"{where}: objective.metric: {objective.metric} {why}; {remedy}")
    for metric in objective.within:
        where = given.origin(("objective", "within", metric)) or given.origin(("objective", "within")) or source
        if _measured(metric, known) or metric in TRAINING[stage] or metric.startswith(_FREE.get(stage, ("time/",))):
            continue
        if metric.startswith("test/"):
            why = "is of the final table, which is for no choice"
        elif _counts_rows(metric):
            why = "counts rows, which are the same in every trial"
        else:
            why = f"is measured neither by evaluations nor by training steps of stage {stage} of this recipe"
        near = _nearest(metric, [*known, *TRAINING[stage]])
        remedy = f"the nearest is {near}" if near else f"it measures for example {', '.join(_examples(stage, known))}"
        raise InputError(f"{where}: objective.within: {metric} {why}; {remedy}")


def _held_out(stage: str, base: Mapping[str, Any]) -> list[str]:
    """What evaluations hold, but for scores and domains."""
    rows = _has_rows(base)
    played = stage == "rl" or (stage == "sft" and base.get("environment") is not None)
    found = [f"validation/{name}" for name in VALIDATION.get(stage, ())] if rows else []
    return found + (list(PLAYED) if played else [])


def _has_rows(base: Mapping[str, Any]) -> bool:
    data = base.get("data")
    return isinstance(data, dict) and bool(data.get("validation") or data.get("held_out"))


def _measured(metric: str, known: list[str]) -> bool:
    if metric.startswith(SCORES):
        return "return" in known and not metric.endswith(("_low", "_high"))
    whole, _, domain = metric.removeprefix("validation/").partition("/")
    return metric in known or (bool(domain) and whole in _BY_DOMAIN and f"validation/{whole}" in known)


def _why_not(metric: str, stage: str, base: Mapping[str, Any], known: list[str]) -> tuple[str, str]:
    """Why `metric` cannot be the objective, and the remedy."""
    common = ("validation/loss", "validation/accuracy", "success", "return")
    remedy = f"use {' or '.join(name for name in common if name in known)}"
    if not known:
        remedy = "name `data.validation` or `data.held_out` rows to measure on"
    near = _nearest(metric, known)
    if metric.startswith("test/"):
        return "is of the final table, which is for no choice", remedy
    if _counts_rows(metric):
        return "counts rows, which are the same in every trial", remedy
    if metric.startswith("validation/") and stage != "rl" and not _has_rows(base):
        return "needs validation rows, and the recipe names none", remedy
    if metric in PLAYED or metric.startswith((SCORES, "validation/")):
        why = f"is not measured by stage {stage} of this recipe"
        return why, f"the nearest is {near}" if near else remedy
    if near and "/" not in metric:
        return f"is not measured by stage {stage} of this recipe", f"the nearest is {near}"
    return "is no held-out metric; what training measures of itself chooses nothing", remedy


def _counts_rows(metric: str) -> bool:
    return metric == "validation/rows" or metric.startswith("validation/rows/")


def _nearest(metric: str, known: list[str]) -> str | None:
    """The known metric that `metric` resembles, told by what follows its section."""
    tails = {name.rpartition("/")[2]: name for name in known if name.rpartition("/")[0] == metric.rpartition("/")[0]}
    found = difflib.get_close_matches(metric.rpartition("/")[2], tails, 1, 0.7)
    if found:
        return tails[found[0]]
    return next(iter(difflib.get_close_matches(metric, known, 1, 0.85)), None)


def _examples(stage: str, known: list[str]) -> list[str]:
    return [*known[:2], *[name for name in TRAINING[stage] if name not in _ALWAYS][:3]]
