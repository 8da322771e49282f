"""`posttrain data`: inspect, convert and generate rows."""

import json
import re
from pathlib import Path
from typing import Annotated, Literal

import typer
from typer import Argument, Option

_NAME = "helpsteer3, helpsteer3_prompts, gsm8k or ultrafeedback_binarized; for rows of your own conversations, pairs or prompts."
_SOURCE = "A file, a directory, or a hub id. Default: the published data set on the hub."
_SHUFFLE = "Write the rows in a fixed random order. --limit then samples from all rows."
_LANGUAGE = "helpsteer3: the language to keep; `any` keeps all. Default: english."


def convert(
    name: Annotated[str, Argument(metavar="NAME", help=_NAME, show_default=False)],
    source: Annotated[str | None, Argument(metavar="[SOURCE]", help=_SOURCE)] = None,
    out: Annotated[Path | None, Option(help="The .jsonl or .parquet file to write. Default: NAME.jsonl.")] = None,
    language: Annotated[str | None, Option(help=_LANGUAGE)] = None,
    split: Annotated[str | None, Option(help="Split of a hub data set. Default: its training split.")] = None,
    limit: Annotated[int | None, Option(help="Maximum number of rows to write.", min=1)] = None,
    shuffle: Annotated[bool, Option("--shuffle", help=_SHUFFLE)] = False,
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


app = typer.Typer(no_args_is_help=True, help="Inspect, convert and generate rows of data.")
app.command()(convert)


_OPEN = {"ignore_unknown_options": True, "allow_extra_args": True}
_ROWS_KEYS = (
    "Keys of `data`, such as columns.prompt=question or max_tokens=512, and of `model`: model.path=NAME is the model whose "
    "tokenizer and chat template render the rows."
)
_Kind = Literal["conversation", "pair", "unpaired"]
_Trained = Literal["assistant", "last_assistant", "all"]


@app.command(context_settings=_OPEN)
def inspect(
    path: Annotated[str, Argument(metavar="PATH", help="A file, a directory, or a hub id.")],
    words: Annotated[list[str] | None, Argument(metavar="[key=value ...]", help=_ROWS_KEYS)] = None,
    kind: Annotated[_Kind | None, Option(help="Kind of rows. Default: inferred from the columns.")] = None,
    loss_on: Annotated[_Trained, Option(help="Which tokens are trained.")] = "assistant",
    rows: Annotated[int, Option(help="Rows to show in full.", min=0)] = 3,
    limit: Annotated[int, Option(help="Rows to read.", min=1)] = 1000,
) -> None:
    """Show rows as text with colored training tokens, their lengths, and which rows are unusable.

    Examples:
    posttrain data inspect pairs_train.jsonl
    posttrain data inspect train.jsonl columns.prompt=question columns.completion=answer model.path=runs/sft/model --rows 1
    """
    from posttrain.data.files import require_source
    from posttrain.models.files import require_model
    from posttrain.recipe.compose import load_recipe
    from posttrain.recipe.supervised import SftRecipe
    from posttrain.terminal import new_console

    # Load a whole recipe, so that keys are validated as everywhere else.
    plain = [word.removeprefix("--") for word in words or []]
    keys = [word if re.match(r"(model|data)\b", word) else f"data.{word}" for word in plain]
    recipe = load_recipe([], [f"data.train={json.dumps(path)}", *keys, "learner.tokens_per_batch=1000000000"], "sft")
    assert isinstance(recipe, SftRecipe)
    assert recipe.data is not None
    for source in recipe.data.train:
        require_source(source)
    require_model(recipe.model.path)
    from posttrain.data.inspect import inspect_rows
    from posttrain.data.rendering import Renderer

    def renderer() -> Renderer:
        from posttrain.models.load import load_end_tokens, load_tokenizer  # imports torch

        tokenizer = load_tokenizer(recipe.model)
        return Renderer(tokenizer, load_end_tokens(recipe.model.path, tokenizer))

    inspect_rows(recipe.data, kind, renderer, loss_on, rows, limit, new_console(highlight=False))


_TASK_KEYS = "Keys of the environment, such as slippery=false or format.thinking=true."
_START = "The first environment seed. For text_task with prompts: the first row, from 0."
_Expert = Literal["optimal", "random"]
_HISTORY = "One row per episode with all turns, or one row per turn with the earlier turns."


@app.command(context_settings=_OPEN)
def experts(
    environment: Annotated[str, Argument(metavar="ENV", help="A built-in name, module:Class, or a .py file.")],
    words: Annotated[list[str] | None, Argument(metavar="[key=value ...]", help=_TASK_KEYS)] = None,
    out: Annotated[Path, Option(help="The .jsonl or .parquet file to write.")] = Path("experts.jsonl"),
    count: Annotated[int, Option(help="Episodes to play.", min=1)] = 1000,
    start: Annotated[int, Option(help=_START, min=0)] = 200_000,
    expert: Annotated[_Expert, Option(help="The optimal policy, or uniformly random actions.")] = "optimal",
    history: Annotated[Literal["episode", "turn"], Option(help=_HISTORY)] = "episode",
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
    rows = expert_rows(recipe, range(start, start + count), expert, history, 0)
    write_rows(out, rows)
    typer.echo(f"{out}: {len(rows)} rows of {count} episodes, seeds {start} to {start + count - 1}")
