"""`posttrain evaluate judge`."""

import os
from pathlib import Path
from typing import Annotated

import typer

from posttrain.cli.evaluate_text import COLUMNS, COLUMNS_HELP, PREDICTIONS_HELP


def judge(
    predictions: Annotated[str, typer.Argument(metavar="PREDICTIONS", help=PREDICTIONS_HELP)],
    rubric: Annotated[
        str, typer.Option(help="factual_accuracy, logical_soundness, efficiency, or a .yaml file of your own.")
    ],
    url: Annotated[str, typer.Option(help="Base URL of an OpenAI-compatible server: http://localhost:8000/v1.")],
    model: Annotated[str, typer.Option(help="The judge, as the server knows it.")],
    words: Annotated[list[str] | None, typer.Argument(metavar=COLUMNS, help=COLUMNS_HELP)] = None,
    against: Annotated[
        str | None, typer.Option(help="Predictions for the same prompts: which is better, asked in both orders.")
    ] = None,
    key: Annotated[
        str | None, typer.Option(metavar="VAR", help="Environment variable that holds the server's key.")
    ] = None,
    workers: Annotated[int, typer.Option(help="Requests under way at a time.", min=1)] = 8,
    requests_per_minute: Annotated[float | None, typer.Option(help="Most requests, retries included.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="A record of each row; beside the predictions without it. The numbers go to the same .json."),
    ] = None,
    cache: Annotated[
        Path | None, typer.Option(help="Keeps the replies; judge-cache.jsonl beside the predictions without it.")
    ] = None,
    structured: Annotated[
        bool, typer.Option("--structured", help="Send the JSON schema of the reply, which some servers refuse.")
    ] = False,
    seconds: Annotated[float, typer.Option(help="Time-out of a request.", min=0.001)] = 60,
    retries: Annotated[int, typer.Option(help="Further requests after a time-out or a status 429 or 5xx.", min=0)] = 4,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens of a reply, thinking included.", min=1)] = None,
    longest: Annotated[int, typer.Option(help="Characters of each text that the judge is shown.", min=1)] = 50_000,
    max_samples: Annotated[int | None, typer.Option(help="Judge the first rows only.", min=1)] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the first prompt, and ask nothing.")] = False,
) -> None:
    """What a language model thinks of predictions by a rubric, with a 95% interval over prompts.

    Examples:

    posttrain evaluate judge predictions.jsonl --rubric factual_accuracy --url http://localhost:8000/v1 --model NAME

    posttrain evaluate judge after.jsonl --against before.jsonl --rubric efficiency --url URL --model NAME --key MY_KEY
    """
    from dataclasses import replace

    from posttrain.cli.judge_output import keep, preview, progress, show
    from posttrain.environments.judge import prepare_judge
    from posttrain.errors import InputError
    from posttrain.evaluation.judged import Options, judge_predictions, questions_of
    from posttrain.evaluation.judged_pairs import judge_pairs, questions_of_pairs
    from posttrain.evaluation.predictions import column_names, read_predictions
    from posttrain.evaluation.rubrics import load_rubric
    from posttrain.recipe.judge import JudgeServerRecipe

    if not url.startswith(("http://", "https://")) or len(url.split()) != 1:
        raise InputError(f"--url {url}: it is no address of a server; write http://HOST:PORT/v1")
    if not model:
        raise InputError("--model is empty; name the judge as the server knows it")
    if requests_per_minute is not None and not 0 < requests_per_minute < float("inf"):
        raise InputError(f"--requests-per-minute {requests_per_minute:g} lets no request through; give more than 0")
    if key is not None and not os.environ.get(key):
        raise InputError(f"--key names the environment variable {key}, which is not set; export it")
    chosen = load_rubric(rubric)
    names = column_names(words or [])
    rows = read_predictions(predictions, names)
    rows = replace(rows, rows=rows.rows[:max_samples])
    others = read_predictions(against, names) if against else None
    place = Path(predictions)
    stem = place.with_name(f"{place.stem}.{chosen.name}{f'.against.{Path(against).stem}' if against else ''}.jsonl")
    records, kept = out or stem, cache or place.with_name("judge-cache.jsonl")
    _refuse_to_overwrite(records, kept, [path for path in (predictions, against) if path is not None])
    server = JudgeServerRecipe(
        url=url,
        model=model,
        api_key_variable=key,
        seconds=seconds,
        retries=retries,
        requests_per_minute=requests_per_minute,
        max_tokens=max_tokens,
        structured=structured,
        cache=str(kept),
    )
    options = Options(chosen, server, workers, longest)
    if dry_run:
        preview(questions_of_pairs(rows, others, options) if others else questions_of(rows, options))
        return
    prepare_judge(server)
    with progress() as told:
        found = judge_pairs(rows, others, options, told) if others else judge_predictions(rows, options, told)
    keep(found, records)
    show(found, records, kept)


def _refuse_to_overwrite(records: Path, kept: Path, inputs: list[str]) -> None:
    from posttrain.errors import InputError

    if records.suffix != ".jsonl":
        raise InputError(f"--out {records}: it has to end in .jsonl; the numbers go to a .json of the same name")
    written = {path.absolute() for path in (records, records.with_suffix(".json"))}
    if kept.absolute() in written:
        raise InputError(f"--cache {kept} is where the results go; name another file")
    for path in inputs:
        if Path(path).absolute() in {*written, kept.absolute()}:
            raise InputError(
                f"{path} holds predictions and would be written over; name another file in --out or --cache"
            )
