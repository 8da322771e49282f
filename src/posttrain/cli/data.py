"""`posttrain data`: look at rows, convert them, and make them."""

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import typer


def convert(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="helpsteer3, helpsteer3_prompts, gsm8k or ultrafeedback_binarized.", show_default=False
        ),
    ],
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="[SOURCE]", help="A file, a directory, or a hub id; without it, the published data set on the hub."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The .jsonl or .parquet file to write; NAME.jsonl if not given.")
    ] = None,
    language: Annotated[
        str | None, typer.Option(help="helpsteer3: the language to keep, english if not given; `any` keeps all.")
    ] = None,
    split: Annotated[str | None, typer.Option(help="Split of a hub data set; its training split if not given.")] = None,
    limit: Annotated[int | None, typer.Option(help="Rows to write.", min=1)] = None,
    shuffle: Annotated[
        bool,
        typer.Option("--shuffle", help="Write the rows in a random order, always the same; --limit draws from all."),
    ] = False,
) -> None:
    """Convert a published data set to rows that the stages read; what is left out is counted by reason.

    HelpSteer3 becomes preference pairs: a negative preference chooses response 1, a neutral one is skipped, and a
    sample of rows is compared with what their annotators wrote.

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
    seed: Annotated[int, typer.Option(help="Another seed, other policies.", min=0)] = 0,
    train: Annotated[int, typer.Option(help="Policies to train on; each gives two pairs.", min=1)] = 5000,
    val: Annotated[int, typer.Option(help="Policies for validation.", min=1)] = 500,
    test: Annotated[int, typer.Option(help="Policies for the test.", min=1)] = 500,
) -> None:
    """Write made-up policies with their procedures: conversations for `sft`, pairs for `dpo` and `reward`, and prompts.

    Every procedure is then done on all cases of its policy, and the means are shown. See docs/rationales.md.

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


app = typer.Typer(no_args_is_help=True, help="Look at rows of data, convert them, and make them.")
app.command()(convert)
app.command()(rationales)


class Kind(StrEnum):
    """What the rows are."""

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
    """How a game becomes rows."""

    EPISODE = "episode"
    TURN = "turn"


class Expert(StrEnum):
    """Who plays."""

    OPTIMAL = "optimal"
    RANDOM = "random"


@app.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def inspect(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A file, a directory, or a hub id.")],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[key=value ...]", help="Keys of `data`, such as columns.prompt=question or max_tokens=512."
        ),
    ] = None,
    kind: Annotated[Kind | None, typer.Option(help="What the rows are; without it, told from the columns.")] = None,
    model: Annotated[
        str, typer.Option(help="Whose tokenizer and chat template render them.")
    ] = "packaged:smollm2-135m",
    loss_on: Annotated[LossOn, typer.Option(help="Which tokens are trained.")] = LossOn.ASSISTANT,
    rows: Annotated[int, typer.Option(help="Rows to show whole.", min=0)] = 3,
    limit: Annotated[int, typer.Option(help="Rows to read.", min=1)] = 1000,
) -> None:
    """Show rows as text with the trained tokens coloured, how long they are, and which cannot be used.

    Examples:

    posttrain data inspect pairs_train.jsonl

    posttrain data inspect train.jsonl columns.prompt=question columns.completion=answer --rows 1
    """
    from rich.console import Console

    from posttrain.data.inspect import inspect_rows
    from posttrain.data.rendering import Renderer
    from posttrain.models.load import load_end_tokens, load_tokenizer
    from posttrain.recipe.compose import load_recipe
    from posttrain.recipe.supervised import SftRecipe

    # As part of a whole recipe, so that keys are read and complained about as everywhere else.
    keys = [f"data.{word.removeprefix('--')}" for word in words or []]
    recipe = load_recipe(
        [],
        [
            f"data.train={json.dumps(path)}",
            *keys,
            f"model.path={json.dumps(model)}",
            "learner.tokens_per_batch=1000000000",
        ],
        "sft",
    )
    assert isinstance(recipe, SftRecipe)
    assert recipe.data is not None
    tokenizer = load_tokenizer(recipe.model)
    renderer = Renderer(tokenizer, load_end_tokens(model, tokenizer))
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
    count: Annotated[int, typer.Option(help="Games to play.", min=1)] = 1000,
    start: Annotated[
        int, typer.Option(help="The first environment seed; of text_task with prompts, the first row, from 0.", min=0)
    ] = 200_000,
    expert: Annotated[Expert, typer.Option(help="The optimal player, or uniformly random actions.")] = Expert.OPTIMAL,
    history: Annotated[
        History, typer.Option(help="A row per game with all its turns, or a row per turn with the turns before it.")
    ] = History.EPISODE,
) -> None:
    """Write what an environment's expert answers, in the prompts that RL uses, as rows for `posttrain sft`.

    Examples:

    posttrain data experts frozen_lake --count 1000 --out lake.jsonl

    posttrain data experts sokoban format.thinking=true --history turn --out sokoban.jsonl
    """
    from posttrain.cli.env import environment_of
    from posttrain.data.files import require_format, write_rows
    from posttrain.errors import InputError
    from posttrain.recipe.components import environment_class
    from posttrain.recipe.rollout import SeedRange
    from posttrain.training.experts import expert_rows

    require_format(out)
    if not words and not environment_class(environment).self_contained:
        raise InputError(
            f"{environment} has no tasks until its keys name some, for example `reasoning_gym.dataset=chain_sum` for "
            "text_task; rows that hold their answers need no expert, for `posttrain sft data.train=FILE` reads them"
        )
    recipe = environment_of(environment, words or [])
    rows = expert_rows(recipe, SeedRange(start=start, count=count), expert.value, history.value, 0)
    write_rows(out, rows)
    typer.echo(f"{out}: {len(rows)} rows of {count} games, seeds {start} to {start + count - 1}")
