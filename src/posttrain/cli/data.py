"""`posttrain data`: inspect, convert and generate rows."""

import json
import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import typer


def convert(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="helpsteer3, helpsteer3_prompts, gsm8k or ultrafeedback_binarized; for rows of your own conversations, pairs or "
            "prompts.",
            show_default=False,
        ),
    ],
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="[SOURCE]", help="A file, a directory, or a hub id. Default: the published data set on the hub."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The .jsonl or .parquet file to write. Default: NAME.jsonl.")] = None,
    language: Annotated[
        str | None, typer.Option(help="helpsteer3: the language to keep; `any` keeps all. Default: english.")
    ] = None,
    split: Annotated[str | None, typer.Option(help="Split of a hub data set. Default: its training split.")] = None,
    limit: Annotated[int | None, typer.Option(help="Maximum number of rows to write.", min=1)] = None,
    shuffle: Annotated[
        bool,
        typer.Option("--shuffle", help="Write the rows in a fixed random order. --limit then samples from all rows."),
    ] = False,
) -> None:
    """Convert a published data set to rows for the training stages, and count dropped rows by reason.

    HelpSteer3 becomes preference pairs. A negative preference chooses response 1, and neutral ones are skipped. A sample
    of rows is checked against the comments of its annotators.

    Examples:

    posttrain data convert helpsteer3 --out helpsteer3_train.jsonl

    posttrain data convert helpsteer3 --split validation --language any --out helpsteer3_val.parquet

    posttrain data convert helpsteer3_prompts --split validation --shuffle --limit 400 --out prompts_val.jsonl

    posttrain data convert gsm8k train.jsonl --out gsm8k_train.jsonl --limit 1000
    """
    from posttrain.data.convert import convert_rows

    target = out or Path(f"{name}.jsonl")
    done = convert_rows(name, target, source, language, split, limit, shuffle)
    for line in done.lines():
        typer.echo(line)
    typer.echo(f"wrote {target}")


def rationales(
    out: Annotated[
        Path, typer.Option(help="Directory for the parquet files in sft/, preferences/ and prompts/.")
    ] = Path("rationales"),
    seed: Annotated[int, typer.Option(help="Seed of the generated policies.", min=0)] = 0,
    train: Annotated[int, typer.Option(help="Training policies. Each gives two pairs.", min=1)] = 5000,
    val: Annotated[int, typer.Option(help="Validation policies.", min=1)] = 500,
    test: Annotated[int, typer.Option(help="Test policies.", min=1)] = 500,
) -> None:
    """Generate policies with their procedures: conversations for `sft`, pairs for `dpo` and `reward`, and prompts.

    Every procedure is then run on all cases of its policy, and the mean scores are printed. See docs/reference/rationales.md.

    Example:

    posttrain data rationales --out rationales --seed 0 --train 5000 --val 500 --test 500
    """
    from rich.console import Console
    from rich.table import Column, Table

    from posttrain.data.rationales.dataset import write_dataset

    written = write_dataset(out, seed, {"train": train, "val": val, "test": test})
    for path, count in written.files.items():
        typer.echo(f"{path}: {count} rows")
    groups = {"sound": written.scores.sound, **written.scores.corrupted}
    table = Table(Column("procedures", no_wrap=True), "n", "accuracy", "soundness", "efficiency", "reward", "max")
    for name, verdicts in groups.items():
        columns = [
            [verdict.factual_accuracy for verdict in verdicts],
            [verdict.logical_soundness for verdict in verdicts],
            [verdict.efficiency for verdict in verdicts],
            [verdict.reward for verdict in verdicts],
        ]
        cells = [f"{sum(column) / len(column):.3f}" if column else "-" for column in columns]
        table.add_row(name, str(len(verdicts)), *cells, f"{max(columns[3]):.3f}" if verdicts else "-")
    Console().print(table)


def documents(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder with a text file per document.")],
    template: Annotated[
        Path,
        typer.Option(help="Text file of the prompt: `{document}` is the text of a document, `{name}` its file name."),
    ],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[key=value ...]",
            help="Keys of `posttrain generate`, such as model.path=runs/sft/model or engine.type=openai, to sample answers; "
            "and with --rubric those of a judge, such as judge.url=URL judge.model=NAME.",
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Directory for the parquet files in sft/, preferences/ and prompts/.")
    ] = Path("data/rationales"),
    name: Annotated[str, typer.Option(help="First word of the file names.")] = "rationales",
    answers: Annotated[
        Path | None,
        typer.Option(help="Folder with answers that were written: files of the same names as the documents."),
    ] = None,
    reward: Annotated[str | None, typer.Option(help="Reward model that scores the sampled answers.")] = None,
    rubric: Annotated[
        str | None, typer.Option(help="Rubric of a judge that scores them: a packaged one or a .yaml file.")
    ] = None,
    val: Annotated[str, typer.Option(help="Validation documents: a number, or a share such as 0.1.")] = "0.1",
    test: Annotated[str, typer.Option(help="Test documents: a number, or a share.")] = "0.1",
    workers: Annotated[int, typer.Option(help="Maximum number of concurrent requests to the judge.", min=1)] = 8,
) -> None:
    """Turn documents into training rows: prompts, conversations with answers, and preference pairs.

    Answers are written (--answers), or sampled by a model or a server (`model.path`, `engine.*`, `samples`). With a scorer
    (--reward or --rubric), the best and the worst sampled answer of a document are a pair. A command that was interrupted
    continues where it stopped, without sampling or judging an answer twice.

    Examples:

    posttrain data documents policies --template prompt.txt --answers procedures

    posttrain data documents policies --template prompt.txt samples=8 sampling.temperature=1 model.path=runs/rlhf-sft/model
    --reward runs/rlhf-reward/model

    posttrain data documents policies --template prompt.txt samples=8 sampling.temperature=1 engine.type=openai
    engine.url=http://localhost:8000/v1 engine.model=NAME --rubric logical_soundness judge.url=URL judge.model=NAME
    """
    from posttrain.cli.evaluate import progress
    from posttrain.documents import Scorer, document_rows
    from posttrain.errors import InputError

    keys = [word for word in words or [] if not word.startswith("judge.")]
    judge = [word.removeprefix("judge.") for word in words or [] if word.startswith("judge.")]
    if reward is not None and rubric is not None:
        raise InputError("--reward and --rubric both score the answers; keep one")
    if judge and rubric is None:
        raise InputError(f"judge.{judge[0]} has no effect without --rubric; add --rubric, or remove it")
    scorer = Scorer(reward, rubric, judge, workers) if reward or rubric else None
    shares = (share("--val", val), share("--test", test))
    written = document_rows(folder, template, out, name, answers, *shares, keys, scorer, progress)
    for message in written.messages:
        typer.echo(message)
    for path, count in written.files.items():
        typer.echo(f"{path}: {count} rows")


def share(option: str, text: str) -> int | float:
    """A number of rows, or a share of them between 0 and 1; raises `InputError` for other words."""
    from posttrain.errors import InputError

    try:
        value = float(text) if "." in text else int(text)
    except ValueError:
        value = -1
    if value < 0 or (isinstance(value, float) and not 0 < value < 1):
        raise InputError(f"{option} {text} is neither a whole number nor a share such as 0.1; correct it")
    return value


app = typer.Typer(no_args_is_help=True, help="Inspect, convert and generate rows of data.")
app.command()(convert)
app.command()(rationales)
app.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})(documents)


class Kind(StrEnum):
    """Kind of rows."""

    CONVERSATION = "conversation"
    PAIR = "pair"
    UNPAIRED = "unpaired"


_KINDS: dict[Kind, Literal["conversation", "pair", "unpaired"]] = {
    Kind.CONVERSATION: "conversation",
    Kind.PAIR: "pair",
    Kind.UNPAIRED: "unpaired",
}


class LossOn(StrEnum):
    """Which tokens of a conversation are trained."""

    ASSISTANT = "assistant"
    LAST_ASSISTANT = "last_assistant"
    ALL = "all"


class History(StrEnum):
    """How an episode becomes rows."""

    EPISODE = "episode"
    TURN = "turn"


class Expert(StrEnum):
    """Policy that plays."""

    OPTIMAL = "optimal"
    RANDOM = "random"


@app.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def inspect(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A file, a directory, or a hub id.")],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[key=value ...]",
            help="Keys of `data`, such as columns.prompt=question or max_tokens=512, and of `model`: model.path=NAME is the model "
            "whose tokenizer and chat template render the rows.",
        ),
    ] = None,
    kind: Annotated[Kind | None, typer.Option(help="Kind of rows. Default: inferred from the columns.")] = None,
    loss_on: Annotated[LossOn, typer.Option(help="Which tokens are trained.")] = LossOn.ASSISTANT,
    rows: Annotated[int, typer.Option(help="Rows to show in full.", min=0)] = 3,
    limit: Annotated[int, typer.Option(help="Rows to read.", min=1)] = 1000,
) -> None:
    """Show rows as text with colored training tokens, their lengths, and which rows are unusable.

    Examples:

    posttrain data inspect pairs_train.jsonl

    posttrain data inspect train.jsonl columns.prompt=question columns.completion=answer model.path=runs/sft/model --rows 1
    """
    from rich.console import Console

    from posttrain.data.inspect import inspect_rows
    from posttrain.data.rendering import Renderer
    from posttrain.models.load import load_end_tokens, load_tokenizer
    from posttrain.recipe.compose import load_recipe
    from posttrain.recipe.supervised import SftRecipe

    # Load a whole recipe, so that keys are validated as everywhere else.
    plain = [word.removeprefix("--") for word in words or []]
    keys = [word if re.match(r"model\b", word) else f"data.{word}" for word in plain]
    recipe = load_recipe([], [f"data.train={json.dumps(path)}", *keys, "learner.tokens_per_batch=1000000000"], "sft")
    assert isinstance(recipe, SftRecipe)
    assert recipe.data is not None
    tokenizer = load_tokenizer(recipe.model)
    renderer = Renderer(tokenizer, load_end_tokens(recipe.model.path, tokenizer))
    inspect_rows(
        recipe.data, _KINDS[kind] if kind else None, renderer, loss_on.value, rows, limit, Console(highlight=False)
    )


@app.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def experts(
    environment: Annotated[str, typer.Argument(metavar="ENV", help="A built-in name, module:Class, or a .py file.")],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[key=value ...]", help="Keys of the environment, such as slippery=false or format.thinking=true."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="The .jsonl or .parquet file to write.")] = Path("experts.jsonl"),
    count: Annotated[int, typer.Option(help="Episodes to play.", min=1)] = 1000,
    start: Annotated[
        int, typer.Option(help="The first environment seed. For text_task with prompts: the first row, from 0.", min=0)
    ] = 200_000,
    expert: Annotated[Expert, typer.Option(help="The optimal policy, or uniformly random actions.")] = Expert.OPTIMAL,
    history: Annotated[
        History, typer.Option(help="One row per episode with all turns, or one row per turn with the earlier turns.")
    ] = History.EPISODE,
) -> None:
    """Write the answers of an environment's expert to the prompts that RL uses, as rows for `posttrain sft`.

    Examples:

    posttrain data experts frozen_lake --count 1000 --out lake.jsonl

    posttrain data experts sokoban format.thinking=true --history turn --out sokoban.jsonl
    """
    from posttrain.cli.env import environment_of
    from posttrain.data.files import require_format, write_rows
    from posttrain.errors import InputError
    from posttrain.recipe.components import environment_class
    from posttrain.training.experts import expert_rows

    require_format(out)
    if not words and not environment_class(environment).self_contained:
        raise InputError(
            f"{environment} has no default task; set its keys, for example `reasoning_gym.dataset=chain_sum` for text_task; "
            "rows that already contain answers need no expert: use `posttrain sft data.train=FILE`"
        )
    recipe = environment_of(environment, words or [])
    rows = expert_rows(recipe, range(start, start + count), expert.value, history.value, 0)
    write_rows(out, rows)
    typer.echo(f"{out}: {len(rows)} rows of {count} episodes, seeds {start} to {start + count - 1}")
