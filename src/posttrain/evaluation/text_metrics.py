"""Metrics of a file of predictions: BLEU, chrF, exact match and verifiers. Metrics with a model are in
`model_metrics`.
"""

import json
import math
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, get_args

from posttrain.environments.rewards import BUILT_IN, SCORE, RewardFailure, load_reward
from posttrain.errors import InputError
from posttrain.evaluation.predictions import Prediction, Predictions, with_reference
from posttrain.evaluation.results import MetricResult, Results
from posttrain.evaluation.statistics import item_means, item_sums, sacrebleu_metric
from posttrain.evaluation.workers import ModelOptions, ModelWorkers
from posttrain.plugins import require_module


def corpus_metric(name: Literal["bleu", "chrf"], rows: Sequence[Prediction]) -> MetricResult:
    """SacreBLEU's corpus BLEU (Papineni et al. 2002; Post 2018) or chrF2 (Popović 2015), in [0, 100]."""
    metric = sacrebleu_metric(name)
    known, missing = with_reference(rows)
    counts = metric._extract_corpus_statistics([row.text for row in known], [[row.reference for row in known]])
    scores = item_sums(name, ((row.item, row_counts) for row, row_counts in zip(known, counts, strict=True)))
    return MetricResult(name, scores, "higher", len(known), missing, {"signature": str(metric.get_signature())})


def exact_match(rows: Sequence[Prediction]) -> MetricResult:
    """Fraction of predictions equal to the reference after `normalized`."""
    known, missing = with_reference(rows)
    hits = ((row.item, float(normalized(row.text) == normalized(row.reference or ""))) for row in known)
    about = {"normalized": "Unicode NFKC, case-folded, runs of white space as one space, stripped"}
    return MetricResult("exact", item_means("rate", hits), "higher", len(known), missing, about)


def normalized(text: str) -> str:
    """`text` in NFKC, case-folded, runs of white space as one space, stripped. Punctuation is kept."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def verified(rows: Sequence[Prediction], verifier: str) -> MetricResult:
    """Mean score by a reasoning-gym data set (`chain_sum`) or by a reward function (`exact`,
    `module:function`, `file.py:function`).

    Rows on which the verifier raises or returns no finite number are left out and counted. Raises `InputError` if no
    row remains.
    """
    score = _rewarded(verifier) if ":" in verifier or verifier in BUILT_IN else _gym_scorer(verifier)
    values: list[tuple[str, float]] = []
    left_out: dict[str, int] = {}
    first = ""
    for row in rows:
        try:
            value = score(row)
            if not math.isfinite(value):
                raise RewardFailure(f"it returned {value}")
            values.append((row.item, value))
        except Exception as error:
            first = first or f"{type(error).__name__}: {str(error)[:120]}, {row.origin}"
            cause = error.__cause__ if isinstance(error, RewardFailure) else error
            reason = f"the verifier raised {type(cause).__name__}" if cause else "the verifier returned no number"
            left_out[reason] = left_out.get(reason, 0) + 1
    if not values:
        raise InputError(
            f"--verifier {verifier}: no prediction could be scored ({first}); rows need the fields that the verifier reads, "
            "a reference and often `metadata`"
        )
    return MetricResult("verifier", item_means(None, values), "higher", len(values), left_out, {"verifier": verifier})


def _rewarded(where: str) -> Callable[[Prediction], float]:
    reward = load_reward(where, key="--verifier")

    def score(row: Prediction) -> float:
        filled = {} if row.reference is None else {"label": row.reference}
        value = reward(row.prompt or [], row.text, {**filled, **row.row}, row.origin)[SCORE]
        return math.nan if value is None else value

    return score


def _gym_scorer(name: str) -> Callable[[Prediction], float]:
    reasoning_gym = require_module("reasoning_gym", f"--verifier {name}")
    if name not in require_module("reasoning_gym.factory", f"--verifier {name}").DATASETS:
        raise InputError(
            f"--verifier: reasoning-gym has no data set {name!r}; use one of its names, or `module:function`"
        )
    scorer = reasoning_gym.get_score_answer_fn(name)

    def score(row: Prediction) -> float:
        if row.reference is None:
            raise ValueError("the row has no reference")
        metadata = row.row.get("metadata")
        metadata = json.loads(metadata) if isinstance(metadata, str) else metadata
        question = row.prompt[-1]["content"] if row.prompt else ""
        entry = {"question": question, "answer": row.reference, "metadata": metadata or {}}
        return float(scorer(row.text.strip(), entry))

    return score


Metric = Literal["bleu", "chrf", "exact", "verifier", "bertscore", "perplexity"]
METRICS: tuple[Metric, ...] = get_args(Metric)


@dataclass(frozen=True)
class TextOptions:
    """The metrics to compute and their settings."""

    metrics: tuple[Metric, ...]
    encoder: str | None = None
    """Encoder of BERTScore: a directory or hub id."""
    layer: int | None = None
    model: str | None = None
    """Causal language model of the perplexities."""
    verifier: str | None = None
    models: ModelOptions = field(default_factory=ModelOptions)
    """Settings for loading the encoder and the language model."""


def select_metrics(
    metrics: str | None, encoder: str | None, model: str | None, verifier: str | None
) -> tuple[Metric, ...]:
    """Parse a list such as `bleu,chrf`; None selects all metrics whose options are given.

    Raises `InputError` for an unknown metric, a metric without its option, and an option without its metric.
    """
    needs = {
        "bertscore": ("--encoder", encoder),
        "perplexity": ("--model", model),
        "verifier": ("--verifier", verifier),
    }
    if metrics is None:
        return tuple(name for name in METRICS if name not in needs or needs[name][1] is not None)
    listed = [name.strip() for name in metrics.split(",") if name.strip()]
    for name in listed:
        if name not in METRICS:
            raise InputError(f"--metrics: unknown metric {name!r}; use some of {', '.join(METRICS)}")
        if name in needs and needs[name][1] is None:
            raise InputError(f"--metrics {name} needs {needs[name][0]}; add it, or remove {name}")
    for name, (option, given) in needs.items():
        if given is not None and name not in listed:
            raise InputError(f"{option} has no effect without {name} in --metrics; add {name}, or remove {option}")
    if not listed:
        raise InputError(f"--metrics is empty; use some of {', '.join(METRICS)}")
    return tuple(name for name in METRICS if name in listed)


def evaluate_text(
    predictions: Predictions, options: TextOptions, progress: Callable[[str], None] = lambda _: None
) -> Results:
    """Compute every metric of `options`. Failed metrics are in `Results.failed`; the others are still computed."""
    results = predictions.results()
    for name in options.metrics:
        progress(name)
        try:
            results.metrics += _compute(name, predictions, options, results.failed)
        except InputError as error:
            results.failed[name] = str(error)
    return results


def _compute(
    name: Metric, predictions: Predictions, options: TextOptions, failed: dict[str, str]
) -> Sequence[MetricResult]:
    """The results of a metric. Perplexities that cannot be computed are added to `failed`: they need different columns."""
    rows = predictions.rows
    if name == "bleu" or name == "chrf":
        return [corpus_metric(name, rows)]
    if name == "exact":
        return [exact_match(rows)]
    if name == "verifier":
        return [verified(rows, str(options.verifier))]
    from posttrain.evaluation.model_metrics import Encoder, LanguageModel, attribute, bert_scores, conditional

    if name == "bertscore":
        load = partial(Encoder, str(options.encoder), options.layer, options.models)
        with ModelWorkers(load, options.models.processes) as encoder:
            return bert_scores(rows, encoder)
    results: list[MetricResult] = []
    texts: list[Literal["reference", "prediction"]] = ["prediction"]
    if any(row.reference is not None for row in rows):
        texts = ["reference", "prediction"]
    with ModelWorkers(partial(LanguageModel, str(options.model), options.models), options.models.processes) as model:
        model.map(attribute, ["about"])  # load the model first, so that a failure is reported once
        for of in texts:
            try:
                results.append(conditional(rows, model, of))
            except InputError as error:
                failed[f"perplexity_{of}"] = str(error)
    return results
