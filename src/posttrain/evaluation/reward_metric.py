"""Mean normalized reward of predictions under reward models."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from posttrain.data.messages import Message
from posttrain.errors import InputError
from posttrain.evaluation.predictions import Predictions
from posttrain.evaluation.results import Results
from posttrain.evaluation.scores import item_means
from posttrain.evaluation.text_metrics import Measured


class Rewards(Protocol):
    """A reward model."""

    statistics: tuple[float, float] | None

    def scores(self, conversations: Sequence[list[Message]], cut_off: Sequence[bool]) -> list[float]: ...


def evaluate_rewards(
    predictions: Predictions,
    models: Sequence[str],
    load: Callable[[str], Rewards],
    progress: Callable[[str], None] = lambda _: None,
) -> Results:
    """(reward - mean) / standard deviation of every prediction under each model that `load` makes of `models`.

    Mean and deviation are those that are kept with the reward model; one without them gives raw rewards, and says so. A
    model that cannot be had is in `Results.failed`, and the others are measured.
    """
    found = Results(
        predictions.path,
        len(predictions.rows),
        predictions.items,
        predictions.notes(),
        digests=predictions.digests(),
    )
    for name, path in zip(_names(models), models, strict=True):
        progress(path)
        try:
            found.measured.append(_measure(name, path, predictions, load(path)))
        except InputError as error:
            found.failed[path] = str(error)
    return found


def _measure(name: str, path: str, predictions: Predictions, model: Rewards) -> Measured:
    left_out: dict[str, int] = {}
    usable = []
    for row in predictions.rows:
        reason = "no prompt" if row.prompt is None else None if row.text.strip() else "empty prediction"
        if reason is None:
            usable.append(row)
        else:
            left_out[reason] = left_out.get(reason, 0) + 1
    conversations = [[*(row.prompt or []), {"role": "assistant", "content": row.text}] for row in usable]
    raw = model.scores(conversations, [row.cut_off for row in usable]) if usable else []
    mean, std = model.statistics or (0.0, 1.0)
    values = [(row.item, (own - mean) / std) for row, own in zip(usable, raw, strict=True) if math.isfinite(own)]
    if len(values) < len(raw):
        left_out["reward is not a finite number"] = len(raw) - len(values)
    if not values:
        reasons = ", ".join(f"{count} {reason}" for reason, count in left_out.items())
        raise InputError(f"{path}: no prediction could be scored ({reasons}); give rows with what is missing")
    plain = [own for own in raw if math.isfinite(own)]
    about = {"model": path, "mean of raw rewards": math.fsum(plain) / len(plain)}
    if model.statistics is None:
        title, about["normalized"] = f"raw_{name}", "no, for the model keeps no statistics of its rewards"
    else:
        title, about["normalized"] = name, f"(r - {mean:.4g}) / {std:.4g}, kept with the model"
    return Measured(title, item_means("mean", values), "higher", len(values), left_out, about)


def _names(models: Sequence[str]) -> list[str]:
    """`reward` for one model; for several, with what tells their paths apart."""
    if len(set(models)) < len(models):
        raise InputError(f"--model names {max(models, key=list(models).count)} twice; give every reward model once")
    if len(models) == 1:
        return ["reward"]
    parts = [list(Path(model).parts) for model in models]
    # A run's model is in its directory `model`, so what paths begin and end with says nothing.
    for end in (-1, 0):
        while min(map(len, parts)) > 1 and len({own[end] for own in parts}) == 1:
            for own in parts:
                del own[end]
    return [f"reward/{'/'.join(own)}" for own in parts]
