"""The reference of recipe keys, as Markdown (docs/reference/recipes.md) and in the terminal (`posttrain recipe`)."""

import difflib
import re

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from posttrain.errors import InputError
from posttrain.recipe.base import BaseConfig
from posttrain.recipe.catalogue import recipe_names, summary
from posttrain.recipe.pipeline import ConvertRecipe
from posttrain.recipe.reference import Key, keys_of, load_plugins
from posttrain.recipe.sources import read_file
from posttrain.recipe.stages import STAGES

_INTRODUCTION = """# Recipes: every key

This page is generated from the schema by `posttrain recipe --markdown`; `posttrain recipe KEY` shows the same in the
terminal.

A recipe is a YAML document. Files are merged left to right, then the overrides of the command line are applied:
`rollout.groups_per_step=4`, `--rollout.groups_per_step 4` and `--rollout.groups_per_step=4` mean the same, and
`model.lora=null` sets a key to nothing. Every key has a default, so a recipe contains only what differs. Text is literal:
nothing is interpolated. A key with the value `???` must be given, and text after it says what to set. A section with several types (`environment`, `credit`, `loss`) has the keys of its `type` and
no others. `posttrain rl ... --dry-run` prints the batch sizes and an estimate of the memory, and with `--full` the
whole recipe with its defaults. Where a key needs trust, the value of a run that is not yours is refused without `--trust`
(`SECURITY.md`).

A pipeline is a file with `stage: pipeline`, a `name`, and `stages`: a list whose items have a `name`, the keys of a recipe,
and optionally `recipe` (a file to begin with, or a list of files, relative to the pipeline) and `from` (an earlier stage, whose exported
model becomes `model.path`). The keys of `common` are defaults of every stage. The run of a stage is
`<runs>/<pipeline>/<stage>`. Any key may name the model of an earlier stage as `stage:NAME`. A stage with `stage: convert` makes
files from a data set, which later stages read as `stage:NAME/FILE`; `data` of the pipeline is its source. Overrides are
`data=FOLDER`, `common.KEY=value` for all stages and `stages.NAME.KEY=value` for one; they win over all files.
"""


def markdown_reference() -> str:
    """The text of docs/reference/recipes.md: all keys of `rl`, then the additional keys of the other stages."""
    load_plugins()
    schemas: dict[str, type[BaseConfig]] = {**STAGES, "convert": ConvertRecipe}
    keys = {stage: list(keys_of(schema)) for stage, schema in schemas.items()}
    parts = [_INTRODUCTION]
    for stage, schema in schemas.items():
        known = set(keys["rl"]) if stage != "rl" else set()
        additional = [key for key in keys[stage] if key not in known]
        parts.append(f"\n## `{stage}`\n\n{(schema.__doc__ or '').strip()}\n")
        if shared := sorted({key.path.split(".")[0] for key in keys[stage] if key in known}):
            parts.append(f"\nAs in `rl`: {', '.join(f'`{section}`' for section in shared)}. In addition:\n")
        # One table for each top-level section, after a table of the top-level keys.
        nested = {key.path.split(".")[0] for key in additional if "." in key.path}
        top = [key for key in additional if key.path not in nested and "." not in key.path]
        parts += [_markdown_table(top)] if top else []
        for section in dict.fromkeys(key.path.split(".")[0] for key in additional if key not in top):
            inside = [key for key in additional if key.path.split(".")[0] == section]
            parts.append(f"\n### `{section}`\n{_markdown_table(inside)}")
    return "".join(parts)


def show_keys(about: str, stage: str, console: Console) -> None:
    """Print the keys of `stage` at or under the dotted key `about` (empty: all), or whose last part is `about`: its default,
    its types and allowed values, and its description.

    Raises `InputError` if there are none.
    """
    if stage not in STAGES:
        raise InputError(f"--stage {stage}: there is no such stage; use {', '.join(STAGES)}")
    load_plugins()
    keys = list(keys_of(STAGES[stage]))
    shown = [key for key in keys if not about or key.path == about or key.path.startswith(f"{about}.")]
    shown = shown or [key for key in keys if key.path.split(".")[-1] == about]
    if not shown:
        names = {key.path for key in keys} | {key.path.rpartition(".")[0] for key in keys} - {""}
        close = difflib.get_close_matches(about, sorted(names), 1)
        hint = f"the nearest is {close[0]}" if close else f"`posttrain recipe --stage {stage}` shows all"
        raise InputError(f"stage {stage} has no key {about}; {hint}")
    for key in shown:
        console.print(Text.assemble((key.path, "bold"), f" = {key.default}"), soft_wrap=True)
        about = f"For {key.variant}. " if key.variant else ""
        about += f"Must be {key.allowed}. {' '.join(key.description.split())}"
        console.print(Padding(Text(about), (0, 0, 0, 4)))


def list_recipes(console: Console) -> None:
    """Print the name, the stage and the first sentence of every recipe that can be named."""
    for name, file in recipe_names().items():
        stage = read_file(str(file)).values.get("stage", "rl")
        console.print(Text.assemble((name, "bold"), f"  {stage}"), soft_wrap=True)
        console.print(Padding(Text(summary(file)), (0, 0, 0, 4)))


def _markdown_table(keys: list[Key]) -> str:
    rows = ["", "| key | for type | must be | default | what it does |", "|---|---|---|---|---|"]
    for key in keys:
        allowed = re.sub(r"\^\S+\$", r"`\g<0>`", key.allowed)  # a pattern has brackets, which Markdown reads as links
        cells = (f"`{key.path}`", key.variant, allowed, f"`{key.default}`", key.description)
        rows.append("| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows) + "\n"
