"""What a metric is called and how it is shown where it has a figure of its own."""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, replace

from posttrain.errors import InputError
from posttrain.recipe.rollout import SCORES
from posttrain.runs.panels import PANELS, RATE, Panel

_PLAYED = {
    "success": Panel("Success", "success", (), **RATE),
    "return": Panel("Return", "reward per episode", (), from_zero=False),
}
_SCORE = Panel("", "score", ())
_PLAIN = Panel("", "value", (), from_zero=False)
_LOSS = Panel("Loss of the validation rows", "loss", (), from_zero=False)


@dataclass(frozen=True)
class Metric:
    """One metric; `panel` says unit and axis, its curves are not used."""

    key: str
    what: str
    """In words; the key where there are none."""
    panel: Panel

    @property
    def differs_by_stage(self) -> bool:
        """Whether each stage measures something else under this name, such as its own loss."""
        return self.key.startswith("loss/") or "/loss" in self.key

    @property
    def file(self) -> str:
        """A name of a file."""
        return "".join(c if c.isalnum() or c in "-_." else "_" for c in self.key).strip(".") or "metric"


def metric_of(key: str) -> Metric:
    """How the metric `key` is shown; one that nobody knows has its key for a name."""
    base = key.removeprefix("rollout/")
    where = "training episodes" if base != key else "held-out seeds"
    if base in _PLAYED:
        return Metric(key, where, _PLAYED[base])
    if base.startswith(SCORES):
        return Metric(key, where, replace(_SCORE, title=f"Score: {base.removeprefix(SCORES)}"))
    if key.startswith("validation/loss"):
        return Metric(key, key.removeprefix("validation/loss/").removeprefix("validation/loss") or "all", _LOSS)
    for panels in PANELS.values():
        for panel in panels:
            for curve in panel.curves:
                if curve.key == key:
                    return Metric(key, curve.label, panel)
    return Metric(key, "", replace(_PLAIN, title=key))


def known_metrics(present: Iterable[str]) -> list[str]:
    """Those of `present` that are drawn without being asked for, in the order of a report."""
    found = set(present)
    scores = sorted(key for key in found if key.startswith((SCORES, f"rollout/{SCORES}")))
    panels = [curve.key for panels in PANELS.values() for panel in panels for curve in panel.curves]
    ordered = [
        "success",
        "return",
        *scores,
        "validation/loss",
        "rollout/success",
        "rollout/return",
        *panels,
        "loss/nll",
        "loss/preference",
    ]
    return [key for key in dict.fromkeys(ordered) if key in found]


def check_metric(key: str, present: Iterable[str], at_the_end: Iterable[str] = ()) -> None:
    """`InputError` with the nearest right names if `key` is not `present`; `at_the_end` are those without a curve."""
    keys = sorted(present)
    if key in keys:
        return
    if key in at_the_end:
        raise InputError(f"--metric {key} is measured at the end alone; leave --metric out to see it in results.md")
    near = difflib.get_close_matches(key, keys, n=3) or [one for one in keys if key in one][:3] or keys[:3]
    if not near:
        raise InputError(f"--metric {key}: nothing has been measured yet; wait for the first step")
    raise InputError(f"--metric {key}: nothing here has it; there is for example {', '.join(near)}")
