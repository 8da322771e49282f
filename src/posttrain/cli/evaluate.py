"""`posttrain evaluate`: a model in an environment, predictions against references, predictions under reward models."""

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from posttrain.cli import stages

if TYPE_CHECKING:
    from posttrain.evaluation.judges import Judgement, Question
    from posttrain.evaluation.results import Results


from posttrain.cli.plugins import PluginGroup


def show_results(results: "Results", out: Path | None) -> None:
    """Print the table, keep the results in `out`, and end with an InputError that names what could not be had."""
    from rich.console import Console

    from posttrain.errors import InputError

    if results.metrics:
        table = results.table()
        Console(highlight=False).print(table.rich())
        for line in [table.note, *results.details()]:
            typer.echo(line)
        if out is not None:
            results.write(out)
            typer.echo(f"results: {out}")
    if results.failed:
        kept = "the other metrics are kept" if results.metrics else "nothing was measured"
        raise InputError("\n".join(f"{reason} ({kept})" for reason in results.failed.values()))


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
    from posttrain.errors import InputError
    from posttrain.evaluation.predictions import column_names, read_predictions
    from posttrain.evaluation.text_metrics import TextOptions, evaluate_text, select_metrics

    if layer is not None and encoder is None:
        raise InputError("--layer has no effect without --encoder; give it, or leave --layer out")
    names = select_metrics(metrics, encoder, model, verifier)
    rows = read_predictions(predictions, column_names(words or []))
    options = TextOptions(names, encoder, layer, model, verifier, tokens_per_batch)
    show_results(evaluate_text(rows, options, lambda name: typer.echo(f"computing {name}", err=True)), out)


def reward(
    predictions: Annotated[str, typer.Argument(metavar="PREDICTIONS", help=PREDICTIONS_HELP)],
    model: Annotated[
        list[str], typer.Option(help="A reward model, as `posttrain reward` exports it; several times for several.")
    ],
    words: Annotated[list[str] | None, typer.Argument(metavar=COLUMNS, help=COLUMNS_HELP)] = None,
    out: Annotated[Path | None, typer.Option(help="Write the results to this .json file.")] = None,
    tokens_per_batch: Annotated[int, typer.Option(help="Most tokens of one forward pass.", min=16)] = 4096,
) -> None:
    """Normalized reward of predictions under one or several reward models, with 95% intervals over prompts.

    A model that was trained against a reward model should also be scored by another one.

    Examples:

    posttrain evaluate reward predictions.jsonl --model runs/reward/model --model runs/other_reward/model
    """
    from posttrain.evaluation.model_metrics import evaluate_rewards
    from posttrain.evaluation.predictions import column_names, read_predictions
    from posttrain.training.reward_scorer import AnswerRewards

    rows = read_predictions(predictions, column_names(words or []))
    found = evaluate_rewards(
        rows,
        model,
        lambda path: AnswerRewards(path, tokens_per_batch),
        lambda path: typer.echo(f"scoring with {path}", err=True),
    )
    show_results(found, out)


def preview(questions: Sequence["Question"]) -> None:
    """The first prompt as it would be sent, and how many there are."""
    for message in questions[0].prompt if questions else []:
        typer.echo(f"--- {message['role']}\n{message['content']}")
    typer.echo(f"--- {len(questions):,} such requests, fewer where the cache knows the reply")


@contextmanager
def progress() -> Iterator[Callable[[int, int, int], None]]:
    """A bar in a terminal, ten lines elsewhere."""
    if not sys.stderr.isatty():
        yield _lines
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("judging", total=None)

        def update(done: int, total: int, failed: int) -> None:
            about = f"judging, {failed} without a verdict" if failed else "judging"
            bar.update(task, completed=done, total=total, description=about)

        yield update


def _lines(done: int, total: int, failed: int) -> None:
    if done * 10 // total > (done - 1) * 10 // total:
        typer.echo(f"judged {done:,} of {total:,}{f', {failed:,} without a verdict' if failed else ''}", err=True)


def keep(found: "Judgement", records: Path) -> None:
    """Write the records, and the numbers beside them."""
    from posttrain.runs.directory import storage_errors, write_atomically

    with storage_errors(records):
        records.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(records, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in found.records))
    if found.results.metrics:
        found.results.write(records.with_suffix(".json"))
    else:
        # Numbers of an earlier try would be taken for those of this one.
        records.with_suffix(".json").unlink(missing_ok=True)


def show_judged(found: "Judgement", records: Path, kept: Path) -> None:
    """Print what was found; RunError where the server failed or nothing could be scored."""
    from rich.console import Console

    from posttrain.errors import RunError

    if found.results.metrics:
        table = found.results.table()
        Console(highlight=False).print(table.rich())
        typer.echo(table.note)
    for line in [*found.results.details(), *found.warnings]:
        typer.echo(line)
    typer.echo(f"records: {records}" + (f", numbers: {records.with_suffix('.json')}" if found.results.metrics else ""))
    if found.unanswered:
        raise RunError(
            f"the judge did not answer for {found.unanswered:,} of {len(found.records):,} rows, which have no score; run "
            f"the same command again to ask for these alone (what it said is in {kept})"
        )
    if not found.results.metrics:
        raise RunError(
            "no row has a score; read the records, try a judge that follows instructions better, or --structured"
        )


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

    from posttrain.environments.judge import check_judge
    from posttrain.errors import InputError
    from posttrain.evaluation.judges import (
        Options,
        judge_pairs,
        judge_predictions,
        load_rubric,
        questions_of,
        questions_of_pairs,
    )
    from posttrain.evaluation.predictions import column_names, read_predictions
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
        timeout=seconds,
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
    check_judge(server)
    with progress() as told:
        found = judge_pairs(rows, others, options, told) if others else judge_predictions(rows, options, told)
    keep(found, records)
    show_judged(found, records, kept)


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


_DEFAULT = "model"
_ABOUT = """Evaluate a model in an environment, or files of predictions.

Without one of the words below, a model in an environment is evaluated.

Examples:

posttrain evaluate environment.type=sokoban name=before

posttrain evaluate text predictions.jsonl --out results.json
"""


class _ModelUnlessNamed(PluginGroup):
    """`posttrain evaluate recipe.yaml key=value` is `posttrain evaluate model recipe.yaml key=value`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or args[0] not in (*self.list_commands(ctx), "--help"):
            args = [_DEFAULT, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(cls=_ModelUnlessNamed, help=_ABOUT)


def model(
    words: stages.Words = None,
    dry_run: stages.DryRun = False,
    on: stages.On = None,
    resume: stages.Resume = None,
    overwrite: stages.Overwrite = False,
) -> None:
    """Evaluate a model in an environment on held-out seeds. The word `model` may be left out.

    Examples:

    posttrain evaluate environment.type=sokoban name=before

    posttrain evaluate environment.type=bandit model.path=runs/run/model evaluation.sampling.temperature=0.7
    """
    stages.run("evaluate", words or [], dry_run, on, resume, overwrite)


app.command(context_settings=stages.OPEN)(model)
app.command()(text)
app.command()(reward)
app.command()(judge)
