"""`posttrain evaluate`: evaluate a model in an environment, or a file of predictions."""

import json
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Argument, Option

from posttrain.cli import stages
from posttrain.cli.plugins import PluginGroup

if TYPE_CHECKING:
    from posttrain.evaluation.judges import Judgement
    from posttrain.evaluation.results import Results


def show_results(results: "Results", out: Path | None) -> None:
    """Print the table and write the results to `out`. Raises InputError if a metric could not be computed."""
    from posttrain.errors import InputError
    from posttrain.terminal import new_console

    if results.metrics:
        table = results.table()
        new_console(highlight=False).print(table)
        for line in [table.note, *results.details()]:
            typer.echo(line)
        if out is not None:
            results.write(out)
            typer.echo(f"results: {out}")
    if results.failed:
        others = "the other metrics are unaffected" if results.metrics else "nothing was measured"
        raise InputError("\n".join(f"{reason} ({others})" for reason in results.failed.values()))


_PREDICTIONS = "A .jsonl, .parquet, .json or .csv file with `prompt`, `prediction` and `reference`."
Predictions = Annotated[str, Argument(metavar="PREDICTIONS", help=_PREDICTIONS)]
_COLUMNS = "Column names for `id`, `prompt`, `prediction` and `reference`."
Columns = Annotated[list[str] | None, Argument(metavar="[columns.NAME=COLUMN ...]", help=_COLUMNS)]
Out = Annotated[Path | None, Option(help="Write the results to this .json file.")]
_DTYPE = "Precision of the models. `auto`: bfloat16 where the device has it."
ModelDtype = Annotated[Literal["float32", "bfloat16", "auto"], Option(help=_DTYPE)]
ModelDevice = Annotated[Literal["auto", "cpu", "cuda"], Option(help="Device of the models. `auto`: cuda if available.")]
Processes = Annotated[int, Option(help="Copies of each model, each with a share of the rows; a GPU each.", min=1)]
TokensPerBatch = Annotated[int, Option(help="Maximum number of tokens per forward pass.", min=16)]
_METRICS = "Comma-separated: bleu, chrf, exact, verifier, bertscore, perplexity. Default: all whose options are given."
_VERIFIER = "Verifier: a data set of reasoning-gym, `module:function` or `file.py:function`."


def text(
    predictions: Predictions,
    words: Columns = None,
    metrics: Annotated[str | None, Option(help=_METRICS)] = None,
    encoder: Annotated[str | None, Option(help="BERTScore: directory or hub id of an encoder.")] = None,
    layer: Annotated[int | None, Option(help="BERTScore: layer of the encoder, counted from 1.", min=1)] = None,
    model: Annotated[str | None, Option(help="Perplexity: a causal language model, as `model.path`.")] = None,
    verifier: Annotated[str | None, Option(help=_VERIFIER)] = None,
    out: Out = None,
    dtype: ModelDtype = "float32",
    device: ModelDevice = "auto",
    processes: Processes = 1,
    tokens_per_batch: TokensPerBatch = 4096,
) -> None:
    """Compute metrics of predictions against references, each with a 95% interval over prompts.

    Examples:
    posttrain evaluate text predictions.jsonl --out results.json
    posttrain evaluate text predictions.jsonl --encoder FacebookAI/roberta-large --model packaged:smollm2-135m
    """
    from posttrain.errors import InputError
    from posttrain.evaluation.predictions import column_names, read_predictions
    from posttrain.evaluation.text_metrics import TextOptions, evaluate_text, select_metrics
    from posttrain.evaluation.workers import ModelOptions

    if layer is not None and encoder is None:
        raise InputError("--layer has no effect without --encoder; pass --encoder, or remove --layer")
    names = select_metrics(metrics, encoder, model, verifier)
    rows = read_predictions(predictions, column_names(words or []))
    models = ModelOptions(dtype, device, processes, tokens_per_batch)
    options = TextOptions(names, encoder, layer, model, verifier, models)
    show_results(evaluate_text(rows, options, lambda name: typer.echo(f"computing {name}", err=True)), out)


_REWARD_MODEL = "A reward model exported by `posttrain reward`. May be given several times."


def reward(
    predictions: Predictions,
    model: Annotated[list[str], Option(help=_REWARD_MODEL)],
    words: Columns = None,
    out: Out = None,
    dtype: ModelDtype = "float32",
    device: ModelDevice = "auto",
    processes: Processes = 1,
    tokens_per_batch: TokensPerBatch = 4096,
) -> None:
    """Score predictions with one or several reward models. Reports normalized rewards with 95% intervals over prompts.

    If a policy was trained against a reward model, also score it with another one.

    Examples:
    posttrain evaluate reward predictions.jsonl --model runs/reward/model --model runs/other_reward/model
    """
    from posttrain.evaluation.model_metrics import evaluate_rewards
    from posttrain.evaluation.predictions import column_names, read_predictions
    from posttrain.training.reward_scorer import AnswerRewards

    rows = read_predictions(predictions, column_names(words or []))
    results = evaluate_rewards(
        rows,
        model,
        partial(AnswerRewards, tokens_per_batch=tokens_per_batch, dtype=dtype, device=device),
        lambda path: typer.echo(f"scoring with {path}", err=True),
        processes,
    )
    show_results(results, out)


def show_progress(done: int, total: int, failed: int) -> None:
    """Print ten lines while a judge scores `total` rows."""
    if done * 10 // total > (done - 1) * 10 // total:
        typer.echo(f"judged {done:,} of {total:,}{f', {failed:,} failed' if failed else ''}", err=True)


def show_judged(judgement: "Judgement", records: Path, kept: Path) -> None:
    """Write the records, and the metrics to a .json file of the same name, and print the results. Raises RunError if the
    server failed or no row has a score."""
    from posttrain.errors import RunError
    from posttrain.runs.directory import storage_errors, write_atomically
    from posttrain.terminal import new_console

    results, numbers = judgement.results, records.with_suffix(".json")
    with storage_errors(records):
        records.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(records, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in judgement.records))
    if results.metrics:
        results.write(numbers)
        table = results.table()
        new_console(highlight=False).print(table)
        typer.echo(table.note)
    else:
        # Metrics of an earlier attempt do not belong to these records.
        numbers.unlink(missing_ok=True)
    for line in [*results.details(), *judgement.warnings]:
        typer.echo(line)
    typer.echo(f"records: {records}" + (f", numbers: {numbers}" if results.metrics else ""))
    if judgement.unanswered:
        raise RunError(
            f"the judge did not answer for {judgement.unanswered:,} of {len(judgement.records):,} rows, which have no score; run the "
            f"same command again to retry only these rows (replies are in {kept})"
        )
    if not results.metrics:
        raise RunError("no row has a score; see the records, then use another judge or judge.structured=true")


_RUBRIC = "factual_accuracy, logical_soundness, efficiency, or a .yaml file."
_JUDGE_KEYS = (
    "Keys of a judge, which `posttrain recipe environment.judge` lists: judge.url and judge.model are needed. "
    + _COLUMNS
)
_AGAINST = "Predictions for the same prompts. The judge compares each pair in both orders."
_RECORDS = "File for one record per row. Default: beside the predictions. Metrics go to a .json file of the same name."


def judge(
    predictions: Predictions,
    rubric: Annotated[str, Option(help=_RUBRIC)],
    words: Annotated[
        list[str] | None, Argument(metavar="judge.KEY=VALUE... [columns.NAME=COLUMN ...]", help=_JUDGE_KEYS)
    ] = None,
    against: Annotated[str | None, Option(help=_AGAINST)] = None,
    workers: Annotated[int, Option(help="Maximum number of concurrent requests.", min=1)] = 8,
    out: Annotated[Path | None, Option(help=_RECORDS)] = None,
    max_samples: Annotated[int | None, Option(help="Judge only the first rows.", min=1)] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Show the first prompt and send no request.")] = False,
) -> None:
    """Score predictions with a language model as judge, by a rubric. Reports a 95% interval over prompts.

    Replies are cached in judge-cache.jsonl beside the predictions, or in `judge.cache`.

    Examples:
    posttrain evaluate judge predictions.jsonl --rubric factual_accuracy judge.url=http://localhost:8000/v1 judge.model=NAME
    posttrain evaluate judge after.jsonl --against before.jsonl --rubric efficiency judge.url=URL judge.model=NAME
    posttrain evaluate judge predictions.jsonl --rubric efficiency judge.url=https://api.openai.com/v1 judge.model=o3
    judge.api_key_variable=OPENAI_API_KEY judge.sampling.temperature=null judge.sampling.reasoning_effort=high
    """
    from dataclasses import replace

    from posttrain.environments.judge import check_judge
    from posttrain.errors import InputError
    from posttrain.evaluation.judges import Options, judge_pairs, judge_predictions, load_rubric, questions_of
    from posttrain.evaluation.predictions import column_names, read_predictions
    from posttrain.images import readable
    from posttrain.recipe.compose import section
    from posttrain.recipe.judge import JudgeServerRecipe
    from posttrain.recipe.sources import merge, read_overrides

    chosen = load_rubric(rubric)
    given = [word.removeprefix("--") for word in words or []]
    names = column_names([word for word in given if not word.startswith("judge.")])
    rows = read_predictions(predictions, names)
    rows = replace(rows, rows=rows.rows[:max_samples])
    others = read_predictions(against, names) if against else None
    place = Path(predictions)
    stem = place.with_name(f"{place.stem}.{chosen.name}{f'.against.{Path(against).stem}' if against else ''}.jsonl")
    values = merge(read_overrides([word for word in given if word.startswith("judge.")])).values.get("judge", {})
    values = {"cache": str(place.with_name("judge-cache.jsonl")), **values}
    server = section(JudgeServerRecipe, **values)
    if server.cache is None:
        raise InputError("judge.cache is null, but a command that is repeated needs the replies; remove it")
    if server.api_key_variable is not None and not os.environ.get(server.api_key_variable):
        raise InputError(
            f"judge.api_key_variable: the environment variable {server.api_key_variable} is not set; export it"
        )
    records, kept = out or stem, Path(server.cache)
    if records.suffix != ".jsonl":
        raise InputError(f"--out {records} must end in .jsonl; metrics go to a .json file of the same name")
    written = {path.absolute() for path in (records, records.with_suffix(".json"))}
    if kept.absolute() in written:
        raise InputError(f"judge.cache {kept} is also the file of the results; name another file")
    for path in (predictions, against):
        if path is not None and Path(path).absolute() in {*written, kept.absolute()}:
            raise InputError(
                f"{path} contains the predictions and would be overwritten; name another file in --out or judge.cache"
            )
    options = Options(chosen, server, workers)
    if dry_run:
        questions = questions_of(rows, options, others)
        for message in questions[0].prompt if questions else []:
            typer.echo(f"--- {message['role']}\n{readable(message['content'])}")
        typer.echo(f"--- {len(questions):,} requests, fewer if replies are cached")
        return
    check_judge(server)
    if others is not None:
        judgement = judge_pairs(rows, others, options, show_progress)
    else:
        judgement = judge_predictions(rows, options, show_progress)
    show_judged(judgement, records, kept)


_ABOUT = """Evaluate a model in an environment, or files of predictions.

Without one of the subcommands below, evaluates a model in an environment.

Examples:
posttrain evaluate environment.type=sokoban name=before
posttrain evaluate text predictions.jsonl --out results.json
"""


class _ModelUnlessNamed(PluginGroup):
    """`posttrain evaluate recipe.yaml key=value` is `posttrain evaluate model recipe.yaml key=value`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or args[0] not in (*self.list_commands(ctx), "--help"):
            args = ["model", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(cls=_ModelUnlessNamed, help=_ABOUT)


_EVERY = "Evaluate every checkpoint of the run at `model.path`, or those that match it as a pattern."


def model(
    words: stages.Words = None,
    dry_run: stages.DryRun = False,
    full: stages.Full = False,
    on: stages.On = None,
    resume: stages.Resume = None,
    overwrite: stages.Overwrite = False,
    every: Annotated[bool, Option("--all", help=_EVERY)] = False,
) -> None:
    """Evaluate a model in an environment on held-out seeds. The word `model` is optional.

    With --all, the report in `<runs>/<name>` has the scores by checkpoint, and figures of them.

    Examples:
    posttrain evaluate environment.type=sokoban name=before
    posttrain evaluate environment.type=bandit model.path=runs/run/model evaluation.sampling.temperature=0.7
    posttrain evaluate environment.type=bandit model.path=runs/run name=scores --all
    """
    if not every:
        stages.run("evaluate", words or [], dry_run, full, on, resume, overwrite)
        return
    from posttrain.errors import InputError
    from posttrain.recipe.sources import read_overrides
    from posttrain.terminal import new_console
    from posttrain.verbs import evaluate_checkpoints, read_recipe

    device = stages.planned_device(dry_run, on)
    if resume is not None:
        raise InputError("--resume continues one run; run the command with --all again to continue its evaluations")
    sources, overrides = stages.split_words(words or [])
    if not dry_run:
        evaluate_checkpoints(*sources, *read_overrides(overrides), overwrite=overwrite)
        return
    from posttrain import pipelines
    from posttrain.planning.model_sizes import model_sizes
    from posttrain.recipe.stages import EvaluateRecipe
    from posttrain.runs.tables import show_line

    recipe, console = read_recipe("evaluate", *sources, *read_overrides(overrides)), new_console()
    assert isinstance(recipe, EvaluateRecipe)
    pipeline = pipelines.evaluate_checkpoints(recipe)
    for line in pipelines.planned(pipeline, None, None, overwrite):
        show_line(console, line)
    first = pipeline.stages[0]
    assert isinstance(first.recipe, EvaluateRecipe)
    console.rule(f"stage {first.name}")
    stages.show_stage(first.recipe, model_sizes(first.recipe.model.path), console, device, full=True, chosen=True)
    stages.show_checks(first.recipe, console)


app.command(context_settings=stages.OPEN)(model)
app.command()(text)
app.command()(reward)
app.command()(judge)
