"""`posttrain evaluate reward`."""

from pathlib import Path
from typing import Annotated

import typer

from posttrain.cli.evaluate_text import COLUMNS, COLUMNS_HELP, PREDICTIONS_HELP


def reward(
    predictions: Annotated[str, typer.Argument(metavar="PREDICTIONS", help=PREDICTIONS_HELP)],
    model: Annotated[
        list[str], typer.Option(help="A reward model, as `posttrain reward` exports it; several times for several.")
    ],
    words: Annotated[list[str] | None, typer.Argument(metavar=COLUMNS, help=COLUMNS_HELP)] = None,
    out: Annotated[Path | None, typer.Option(help="Write the results to this .json file.")] = None,
    tokens_per_batch: Annotated[int, typer.Option(help="Most tokens of one forward pass.", min=16)] = 4096,
) -> None:
    """Normalised reward of predictions under one or several reward models, with 95% intervals over prompts.

    A model that was trained against a reward model should also be scored by another one.

    Examples:

    posttrain evaluate reward predictions.jsonl --model runs/reward/model --model runs/other_reward/model
    """
    from posttrain.cli.evaluation_output import show
    from posttrain.evaluation.predictions import column_names, read_predictions
    from posttrain.evaluation.reward_metric import evaluate_rewards
    from posttrain.training.answer_rewards import AnswerRewards

    rows = read_predictions(predictions, column_names(words or []))
    found = evaluate_rewards(
        rows,
        model,
        lambda path: AnswerRewards(path, tokens_per_batch),
        lambda path: typer.echo(f"scoring with {path}", err=True),
    )
    show(found, out)
