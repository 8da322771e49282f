"""Metrics of the texts in a file of predictions, one after the other; one that cannot be had leaves the others be."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from posttrain.errors import InputError
from posttrain.evaluation.predictions import Predictions
from posttrain.evaluation.results import Results
from posttrain.evaluation.text_metrics import Measured, corpus_metric, exact_match, verified

Metric = Literal["bleu", "chrf", "exact", "verifier", "bertscore", "perplexity"]
METRICS: tuple[Metric, ...] = get_args(Metric)


@dataclass(frozen=True)
class TextOptions:
    """What to measure, and with what."""

    metrics: tuple[Metric, ...]
    encoder: str | None = None
    """Encoder of BERTScore."""
    layer: int | None = None
    model: str | None = None
    """Causal language model of the perplexities."""
    verifier: str | None = None
    tokens_per_batch: int = 4096
    """Most tokens of one forward pass."""


def chosen(metrics: str | None, encoder: str | None, model: str | None, verifier: str | None) -> tuple[Metric, ...]:
    """Metrics out of `bleu,chrf`; without a list, all that the other options allow. InputError for what lacks one."""
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
            raise InputError(f"--metrics: there is no metric {name!r}; use some of {', '.join(METRICS)}")
        if name in needs and needs[name][1] is None:
            raise InputError(f"--metrics {name} needs {needs[name][0]}; give it, or leave {name} out")
    for name, (option, given) in needs.items():
        if given is not None and name not in listed:
            raise InputError(f"{option} has no effect without {name} in --metrics; add {name}, or leave {option} out")
    if not listed:
        raise InputError(f"--metrics names none; use some of {', '.join(METRICS)}")
    return tuple(name for name in METRICS if name in listed)


def evaluate_text(
    predictions: Predictions, options: TextOptions, progress: Callable[[str], None] = lambda _: None
) -> Results:
    """Every metric of `options`; those that fail are in `Results.failed` with their reason."""
    found = Results(
        predictions.path,
        len(predictions.rows),
        predictions.items,
        predictions.notes(),
        digests=predictions.digests(),
    )
    for name in options.metrics:
        progress(name)
        try:
            if name == "perplexity":
                _perplexities(found, predictions, options)
            else:
                found.measured += _measure(name, predictions, options)
        except InputError as error:
            found.failed[name] = str(error)
    return found


def _measure(
    name: Literal["bleu", "chrf", "exact", "verifier", "bertscore"], predictions: Predictions, options: TextOptions
) -> Sequence[Measured]:
    rows = predictions.rows
    if name == "bleu" or name == "chrf":
        return [corpus_metric(name, rows)]
    if name == "exact":
        return [exact_match(rows)]
    if name == "verifier":
        assert options.verifier is not None
        return [verified(rows, options.verifier)]
    from posttrain.evaluation.bertscore import Encoder, bert_scores

    assert options.encoder is not None
    return bert_scores(rows, Encoder(options.encoder, options.layer), options.tokens_per_batch)


def _perplexities(found: Results, predictions: Predictions, options: TextOptions) -> None:
    """Add each of the perplexities to `found`, or why it could not be had: they need different columns."""
    from posttrain.evaluation.perplexity import LanguageModel, conditional, unconditional

    assert options.model is not None
    model, rows = LanguageModel(options.model, options.tokens_per_batch), predictions.rows
    measures: dict[str, Callable[[], Measured]] = {
        "perplexity_prediction": lambda: conditional(rows, model, "prediction")
    }
    if any(row.reference is not None for row in rows):
        measures = {
            "perplexity_reference": lambda: conditional(rows, model, "reference"),
            **measures,
            "perplexity_unconditional": lambda: unconditional(rows, model),
        }
    for name, measure in measures.items():
        try:
            found.measured.append(measure())
        except InputError as error:
            found.failed[name] = str(error)
