"""`posttrain evaluate text`."""

from pathlib import Path
from typing import Annotated

import typer

PREDICTIONS_HELP = "A .jsonl, .parquet, .json or .csv file with `prompt`, `prediction` and `reference`."
COLUMNS = "[columns.NAME=COLUMN ...]"
COLUMNS_HELP = "What the columns `id`, `prompt`, `prediction` and `reference` are called."


def text(
    predictions: Annotated[str, typer.Argument(metavar="PREDICTIONS", help=PREDICTIONS_HELP)],
    words: Annotated[list[str] | None, typer.Argument(metavar=COLUMNS, help=COLUMNS_HELP)] = None,
    metrics: Annotated[
        str | None,
        typer.Option(
            help="Some of bleu, chrf, exact, verifier, bertscore, perplexity, with commas; all that can be had without it."
        ),
    ] = None,
    encoder: Annotated[str | None, typer.Option(help="BERTScore: directory or hub id of an encoder.")] = None,
    layer: Annotated[int | None, typer.Option(help="BERTScore: layer of the encoder, from 1.", min=1)] = None,
    model: Annotated[str | None, typer.Option(help="Perplexity: a causal language model, as `model.path`.")] = None,
    verifier: Annotated[
        str | None, typer.Option(help="A data set of reasoning-gym, `module:function` or `file.py:function`.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the results to this .json file.")] = None,
    tokens_per_batch: Annotated[int, typer.Option(help="Most tokens of one forward pass.", min=16)] = 4096,
) -> None:
    """Metrics of predictions against references, each with a 95% interval over prompts.

    Examples:

    posttrain evaluate text predictions.jsonl --out results.json

    posttrain evaluate text predictions.jsonl --encoder FacebookAI/roberta-large --model packaged:smollm2-135m
    """
    from posttrain.cli.evaluation_output import show
    from posttrain.errors import InputError
    from posttrain.evaluation.predictions import column_names, read_predictions
    from posttrain.evaluation.text import TextOptions, chosen, evaluate_text

    if layer is not None and encoder is None:
        raise InputError("--layer has no effect without --encoder; give it, or leave --layer out")
    names = chosen(metrics, encoder, model, verifier)
    rows = read_predictions(predictions, column_names(words or []))
    options = TextOptions(names, encoder, layer, model, verifier, tokens_per_batch)
    show(evaluate_text(rows, options, lambda name: typer.echo(f"computing {name}", err=True)), out)
