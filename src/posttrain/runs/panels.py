"""What is plotted: the metrics on each panel of each figure, and their values in order of step."""

from dataclasses import dataclass
from typing import Any

Line = dict[str, Any]


@dataclass(frozen=True)
class Series:
    """Values of one metric: steps, values, and the steps at which it was NaN or infinite."""

    steps: list[int]
    values: list[float]
    nonfinite: list[int]


@dataclass(frozen=True)
class Panel:
    """One pair of axes: a title, the unit of its y axis, and the metrics on it as key -> label."""

    title: str
    unit: str
    metrics: dict[str, str]
    percent: bool = False
    logarithmic: bool = False


MOST_DOMAINS = 6

PANELS = {
    "rows": [
        Panel(
            "Loss, 95% interval shaded",
            "nats per token, or loss per row",
            {"loss/nll": "training", "loss/preference": "training rows", "validation/loss": "validation rows"},
        ),
        Panel(
            "Accuracy, 95% interval shaded",
            "share of rows ranked right",
            {"preference/accuracy": "training rows", "validation/accuracy": "validation rows"},
            percent=True,
        ),
    ],
    "preference": [
        Panel("Rewards", "reward", {"preference/chosen": "better answer", "preference/rejected": "worse answer"}),
        Panel("Margin", "reward", {"preference/margin": "training rows", "validation/margin": "validation rows"}),
        Panel(
            "Likelihood of the answers",
            "nats per token",
            {"policy/chosen_logprob": "better answer", "policy/rejected_logprob": "worse answer"},
        ),
        Panel("KTO's reference point", "nats", {"preference/kl": "Kullback-Leibler divergence"}),
    ],
    "reward": [
        Panel(
            "Return",
            "reward per episode",
            {"rollout/return": "training episodes", "return": "held-out episodes, 95% interval"},
        ),
        Panel(
            "Spread inside groups", "standard deviation", {"reward/group_spread": "mean spread of a group's returns"}
        ),
    ],
    "kl": [
        Panel("Distance from the reference model", "nats per token", {"policy/kl": "Kullback-Leibler divergence"}),
        Panel("Penalty", "coefficient", {"kl/coefficient": "KL coefficient"}),
    ],
    "entropy": [
        Panel("Entropy", "nats per sampled token", {"policy/entropy": "entropy of the policy"}),
        Panel(
            "Repetition",
            "share of sampled tokens",
            {"policy/repeated_share": "same token twice in a row"},
            percent=True,
        ),
    ],
    "lengths": [
        Panel(
            "Answers", "tokens per answer", {"rollout/tokens_per_answer": "training", "tokens_per_answer": "held-out"}
        ),
        Panel("Episodes", "turns per episode", {"rollout/turns": "training", "turns": "held-out"}),
        Panel(
            "Not understood",
            "share of answers",
            {"rollout/rejected_share": "training", "rejected_share": "held-out"},
            percent=True,
        ),
    ],
    "optimization": [
        Panel(
            "Loss",
            "loss",
            {"loss/total": "total", "loss/policy": "policy", "loss/kl": "KL"},
        ),
        Panel("Gradient", "norm before clipping", {"optimizer/gradient_norm": "gradient norm"}, logarithmic=True),
        Panel(
            "Engine against learner",
            "mean |difference|, nats",
            {"policy/mismatch": "log-probability mismatch"},
            logarithmic=True,
        ),
        Panel("Step size", "learning rate", {"optimizer/learning_rate": "learning rate"}),
    ],
}
TITLES = {
    "learning_curve": "Success",
    "rows": "Rows",
    "preference": "Preferences",
    "domains": "Domains",
    "reward": "Reward",
    "kl": "Kullback-Leibler divergence",
    "entropy": "Entropy and repetition",
    "lengths": "Lengths",
    "optimization": "Optimization",
    "time": "Time per phase",
}


def series_of(lines: list[Line], key: str, kind: str | None = None) -> Series | None:
    """The metric `key` in order of step; None where no line has it. Held-out metrics have no slash, or begin with `validation/`."""
    kind = kind or ("train" if "/" in key and not key.startswith("validation/") else "evaluation")
    rows = sorted((line for line in lines if line["kind"] == kind and key in line), key=lambda line: line["step"])
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
    name, slash, domain = key.rpartition("/") if key.count("/") == 2 else (key, "", "")
    low, high = (f"{name}_{limit}{slash}{domain}" for limit in ("low", "high"))
    return sorted(
        (line["step"], line[low], line[key], line[high])
        for line in lines
        if line["kind"] == "evaluation" and None not in (line.get(low), line.get(high), line.get(key))
    )


def domain_panels(lines: list[Line]) -> list[Panel]:
    """The curves of single domains, for the first few of them by name."""
    found = []
    for name, unit, percent in (("loss", "nats or loss per row", False), ("accuracy", "share of rows", True)):
        start = f"validation/{name}/"
        domains = sorted({key.removeprefix(start) for line in lines for key in line if key.startswith(start)})
        shown = {f"{start}{domain}": domain for domain in domains[:MOST_DOMAINS]}
        more = f", the first {MOST_DOMAINS} of {len(domains)}" if len(domains) > MOST_DOMAINS else ""
        if shown:
            found.append(Panel(f"Held-out {name} by domain{more}", unit, shown, percent))
    return found
