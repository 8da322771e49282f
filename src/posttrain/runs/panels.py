"""What is plotted: the metrics on each panel of each figure, and their values in order of step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Line = dict[str, Any]

KINDS = ("train", "evaluation")
"""Kinds of lines whose numbers are curves; no metric is in lines of both, but for `time/run`."""

# Okabe and Ito's palette can be told apart with any kind of colour vision; yellow is left out, it is faint on white.
BLUE, ORANGE, GREEN, RED, SKY, PURPLE = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7"
GREY = "#6E6E6E"
HELD_OUT, TRAINING, BETTER, WORSE = BLUE, ORANGE, GREEN, RED
DOMAINS = (BLUE, ORANGE, GREEN, PURPLE, RED, SKY)
"""One colour for each domain that is shown."""


@dataclass(frozen=True)
class Series:
    """Values of one metric: steps, values, and the steps at which it was NaN or infinite."""

    steps: list[int]
    values: list[float]
    nonfinite: list[int]


@dataclass(frozen=True)
class Curve:
    """One metric on a panel."""

    key: str
    label: str
    color: str = BLUE


@dataclass(frozen=True)
class Panel:
    """One pair of axes. The unit is that of the y axis."""

    title: str
    unit: str
    curves: Sequence[Curve]
    percent: bool = False
    logarithmic: bool = False
    """Whether the axis may be logarithmic, which it is if the values span a factor of 20."""
    from_zero: bool = True
    """Whether the axis begins at zero if no value is below it."""
    whole: bool = False
    """Whether the axis spans all rates, 0 to 1."""
    smoothed: bool = False
    """Whether long training curves are faint behind their moving mean."""
    reference: tuple[float, str] | None = None
    """A value to compare with, drawn as a dashed line, and its label."""
    compared: bool = False
    """Whether curves show their 95% interval as bars at the last evaluation only: bands of many curves hide each other."""


RATE: dict[str, Any] = {"percent": True, "whole": True}
"""How rates are shown."""
GUESSING = (0.5, "guessing, 50%")
_ACCURACY: dict[str, Any] = {**RATE, "reference": GUESSING}

PANELS = {
    "rows": [
        Panel(
            "Accuracy",
            "share ranked right",
            [
                Curve("preference/accuracy", "training rows", TRAINING),
                Curve("validation/accuracy", "validation rows", HELD_OUT),
            ],
            smoothed=True,
            **_ACCURACY,
        ),
    ],
    "preference": [
        Panel(
            "Rewards of the two answers",
            "reward",
            [
                Curve("preference/chosen", "better answer, training", "#7FCEB9"),
                Curve("preference/rejected", "worse answer, training", "#EDB28A"),
                Curve("validation/chosen", "better answer, validation", BETTER),
                Curve("validation/rejected", "worse answer, validation", WORSE),
            ],
            smoothed=True,
        ),
        Panel(
            "Margin: reward of the better answer minus that of the worse",
            "reward",
            [
                Curve("preference/margin", "training rows", TRAINING),
                Curve("validation/margin", "validation rows", HELD_OUT),
            ],
            smoothed=True,
        ),
        Panel(
            "Log-probability of the two answers, training rows",
            "nats per token",
            [
                Curve("policy/chosen_logprob", "better answer", BETTER),
                Curve("policy/rejected_logprob", "worse answer", WORSE),
            ],
            smoothed=True,
        ),
        Panel(
            "KTO's reference point",
            "nats per answer",
            [Curve("preference/kl", "estimated KL divergence from the reference")],
        ),
    ],
    "reward": [
        Panel(
            "Return",
            "reward per episode",
            [Curve("rollout/return", "training episodes", TRAINING), Curve("return", "held-out episodes", HELD_OUT)],
            smoothed=True,
        ),
        Panel(
            "Spread inside groups",
            "standard deviation",
            [Curve("reward/group_spread", "mean spread of a group's returns", TRAINING)],
        ),
    ],
    "kl": [
        Panel(
            "Distance from the reference model", "nats per token", [Curve("policy/kl", "Kullback-Leibler divergence")]
        ),
        Panel("Penalty", "coefficient", [Curve("kl/coefficient", "KL coefficient")]),
    ],
    "entropy": [
        Panel("Entropy", "nats per token", [Curve("policy/entropy", "entropy of the policy")]),
        Panel(
            "Repetition",
            "share of sampled tokens",
            [Curve("policy/repeated_share", "same token twice in a row")],
            percent=True,
        ),
    ],
    "lengths": [
        Panel(
            "Answers",
            "tokens per answer",
            [Curve("rollout/tokens_per_answer", "training", TRAINING), Curve("tokens_per_answer", "held-out")],
        ),
        Panel(
            "Episodes", "turns per episode", [Curve("rollout/turns", "training", TRAINING), Curve("turns", "held-out")]
        ),
        Panel(
            "Not understood",
            "share of answers",
            [Curve("rollout/rejected_share", "training", TRAINING), Curve("rejected_share", "held-out")],
            percent=True,
        ),
    ],
    "critic": [
        Panel(
            "Values against the returns that came",
            "explained variance",
            [Curve("critic/explained_variance", "explained variance, training episodes", TRAINING)],
            from_zero=False,
            smoothed=True,
        ),
        Panel(
            "Mean over sampled tokens",
            "reward",
            [Curve("critic/value", "value", TRAINING), Curve("critic/return", "return from the token on", HELD_OUT)],
            from_zero=False,
            smoothed=True,
        ),
        Panel("Value loss", "reward squared", [Curve("critic/loss", "value loss")], logarithmic=True),
    ],
    "units": [
        Panel(
            "Units of an answer",
            "units",
            [
                Curve("units/per_answer", "all units", TRAINING),
                Curve("units/effective", "effective units: exp of the entropy of their rewards", HELD_OUT),
            ],
        ),
        Panel(
            "What the units of an answer get",
            "reward",
            [
                Curve("units/spread", "standard deviation within an answer", TRAINING),
                Curve("units/residual", "|residual|: what they leave of the outcome", HELD_OUT),
            ],
        ),
        Panel(
            "Units that lowered the reward",
            "share of units",
            [Curve("units/negative", "credit below 0", TRAINING)],
            percent=True,
            whole=True,
        ),
    ],
    "optimization": [
        Panel(
            "What is minimised",
            "loss",
            [
                Curve("loss/total", "total"),
                Curve("loss/policy", "policy", ORANGE),
                Curve("loss/kl", "KL", GREEN),
                Curve("ptx/loss", "supervised rows", PURPLE),
            ],
            from_zero=False,
        ),
        Panel(
            "Gradient", "norm before clipping", [Curve("optimizer/gradient_norm", "gradient norm")], logarithmic=True
        ),
        Panel(
            "Engine against learner",
            "mean |difference|, nats",
            [Curve("policy/mismatch", "log-probability mismatch")],
            logarithmic=True,
        ),
        Panel("Step size", "learning rate", [Curve("optimizer/learning_rate", "learning rate")]),
    ],
}
TITLES = {
    "learning_curve": "Learning curve",
    "scores": "Scores of the evaluations",
    "rows": "Training and validation rows",
    "preference": "Preferences",
    "domains": "Domains",
    "reward": "Reward",
    "kl": "Kullback-Leibler divergence",
    "entropy": "Entropy and repetition",
    "lengths": "Lengths",
    "critic": "Critic",
    "units": "Units",
    "optimization": "Optimization",
    "time": "Time per phase",
}


def panels_of(name: str, lines: list[Line]) -> list[Panel]:
    """The panels of the figure `name`; some depend on what the run measures."""
    if name == "domains":
        return _domain_panels(lines)
    return [*_loss_panels(lines), *PANELS[name]] if name == "rows" else PANELS[name]


def series_of(lines: list[Line], key: str) -> Series | None:
    """The metric `key` in order of step; None where no line has it."""
    rows = sorted((line for line in lines if line["kind"] in KINDS and key in line), key=lambda line: line["step"])
    numbers = [(row["step"], float(row[key])) for row in rows if isinstance(row[key], (int, float))]
    nonfinite = [row["step"] for row in rows if key in row.get("nonfinite", ())]
    if not numbers and not nonfinite:
        return None
    return Series([step for step, _ in numbers], [value for _, value in numbers], nonfinite)


def limits_of(lines: list[Line], key: str) -> list[tuple[int, float, float, float]]:
    """(step, low, value, high) of the evaluations at which `key` has an interval, in order of step.

    The limits of `success` are `success_low` and `success_high`; those of `validation/loss/medicine` are
    `validation/loss_low/medicine` and so on.
    """
    split, metric, *domain = key.split("/", 2) if "/" in key else ("", key)
    low, high = ("/".join([*([split] if split else []), f"{metric}_{side}", *domain]) for side in ("low", "high"))
    return sorted(
        (line["step"], line[low], line[key], line[high])
        for line in lines
        if line["kind"] == "evaluation" and None not in (line.get(low), line.get(high), line.get(key))
    )


def keys_of(lines: list[Line]) -> list[str]:
    """Every metric of which there is a curve, in the order in which the lines first name them."""
    found = {key for line in lines if line["kind"] in KINDS for key in line if _is_metric(line, key)}
    return [key for key in dict.fromkeys(key for line in lines for key in line) if key in found]


def is_trained(lines: list[Line], key: str) -> bool:
    """Whether the metric `key` is of training steps and not of evaluations."""
    return not any(line["kind"] == "evaluation" and key in line for line in lines)


def _is_metric(line: Line, key: str) -> bool:
    limit = key.split("/")[0 if key.count("/") == 0 else 1].endswith(("_low", "_high"))
    number = isinstance(line[key], (int, float)) or key in line.get("nonfinite", ())
    return number and key != "step" and not (limit and line["kind"] == "evaluation")


def _compares(lines: list[Line]) -> bool:
    """Whether the run learns from comparisons, whose loss is per row and not per token."""
    return any("loss/preference" in line or "validation/accuracy" in line for line in lines)


def _loss_panels(lines: list[Line]) -> list[Panel]:
    look: dict[str, Any] = {"from_zero": False, "smoothed": True}
    held_out = Curve("validation/loss", "validation rows", HELD_OUT)
    nll = Curve("loss/nll", "training rows", TRAINING)
    if not _compares(lines):
        return [Panel("Loss", "nats per token", [nll, held_out], **look)]
    preference = Curve("loss/preference", "training rows", TRAINING)
    return [
        Panel("Preference loss", "loss per row", [preference, held_out], **look),
        Panel("Supervised loss of the better answer", "nats per token", [nll], **look),
    ]


def _domain_panels(lines: list[Line]) -> list[Panel]:
    """Curves of single domains, for the first few of them by name."""
    compares = _compares(lines)
    found = []
    for metric, title, unit, look in (
        ("loss", "Preference loss" if compares else "Loss", "loss per row" if compares else "nats per token", {}),
        ("accuracy", "Accuracy", "share ranked right", _ACCURACY),
    ):
        start = f"validation/{metric}/"
        domains = sorted({key.removeprefix(start) for line in lines for key in line if key.startswith(start)})
        shown = domains[: len(DOMAINS)]
        more = f", the first {len(shown)} of {len(domains)} domains" if len(domains) > len(shown) else ""
        curves = [Curve(f"{start}{domain}", domain, color) for domain, color in zip(shown, DOMAINS, strict=False)]
        if curves:
            found.append(
                Panel(f"{title} of the validation rows{more}", unit, curves, from_zero=False, compared=True, **look)
            )
    return found
