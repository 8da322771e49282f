"""Logs of inspect-ai (`.eval`) as scores per sample."""

import math
from pathlib import Path

from posttrain.errors import InputError
from posttrain.evaluation.predictions import digest_of
from posttrain.evaluation.results import MetricResult
from posttrain.evaluation.statistics import item_means
from posttrain.plugins import require_module


def read_inspect_log(path: Path) -> tuple[dict[str, MetricResult], dict[str, str]]:
    """The scores of a log by name, a mean over the epochs of each sample, and the digests of its samples.

    InputError for a file that is not a log, and for the log of an evaluation that has not ended.
    """
    read = require_module("inspect_ai.log", str(path)).read_eval_log
    as_number = require_module("inspect_ai.scorer", str(path)).value_to_float()
    try:
        log = read(str(path))
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise InputError(f"{path} is not a log of inspect-ai ({reason}); correct the path") from error
    if log.status != "success":
        raise InputError(f"{path}: the evaluation has status {log.status}; continue it with `inspect eval-retry`")
    values: dict[str, list[tuple[str, float]]] = {}
    digests = {}
    for sample in log.samples or []:
        item = str(sample.id)
        given = sample.input if isinstance(sample.input, str) else [one.text for one in sample.input]
        digests[item] = digest_of([given, sample.target])
        for name, score in (sample.scores or {}).items():
            parts = {name: score.value}
            if isinstance(score.value, dict):
                parts = {f"{name}/{key}": value for key, value in score.value.items()}
            for key, value in parts.items():
                number = math.nan if value is None or isinstance(value, list) else as_number(value)
                if math.isfinite(number):
                    values.setdefault(key, []).append((item, number))
    metrics = {}
    for name, scored in values.items():
        kind = "rate" if {value for _, value in scored} <= {0.0, 1.0} else "mean"
        metrics[name] = MetricResult(name, item_means(kind, scored), texts=len(scored))  # type: ignore[arg-type]
    return metrics, digests
