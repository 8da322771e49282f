"""What the stages' verbs share: their options, words into files and overrides, resuming, and the plan."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from posttrain.recipe.cost_devices import Device
    from posttrain.recipe.stages import Recipe

WORDS = "[RECIPE.yaml ...] [key=value ...]"
WORDS_HELP = (
    "Recipe files, merged left to right, then overrides of any of their keys: `key=value`, `--key value` or "
    "`--key=value`, with the key dotted as in `rollout.groups_per_step=4`. `posttrain recipe` lists the keys."
)
Words = Annotated[list[str] | None, typer.Argument(metavar=WORDS, help=WORDS_HELP)]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would run, and the memory and time it takes.")]
On = Annotated[
    str | None,
    typer.Option(
        metavar="DEVICE",
        help="With --dry-run: whose time is estimated, by name (such as h200) or a YAML file of its measured limits.",
    ),
]
Resume = Annotated[Path | None, typer.Option(metavar="RUN", help="Go on with the run in this directory.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Delete a run of the same name first.")]
OPEN = {"ignore_unknown_options": True, "allow_extra_args": True}
"""Context settings of verbs that take `--key value` for every key of a recipe."""


def run(stage: str, words: list[str], dry_run: bool, on: str | None, resume: Path | None, overwrite: bool) -> None:
    """Run one stage of the recipe in `words`, show its plan, or go on with the run `resume`."""
    from posttrain.errors import InputError
    from posttrain.recipe.compose import load_recipe

    if resume is not None and overwrite:
        raise InputError("--resume goes on with a run and --overwrite deletes it; give one of them")
    device = planned_device(dry_run, on)
    sources, overrides = split_words(words)
    recipe = load_recipe(sources, overrides, stage) if resume is None else resumed(resume, sources, overrides, stage)
    if dry_run:
        from rich.console import Console

        from posttrain.models.sizes import model_sizes
        from posttrain.recipe.plan import show_plan

        sizes = None if recipe.remote is not None else model_sizes(recipe.model.path)
        show_plan(recipe, sizes, Console(), device)
        return
    from posttrain.training.stage import run_stage

    run_stage(recipe, resume=resume is not None, overwrite=overwrite)


def planned_device(dry_run: bool, on: str | None) -> "Device | None":
    """The device that `--on` names; InputError for one without `--dry-run`."""
    from posttrain.errors import InputError
    from posttrain.recipe.cost_devices import device_of

    if on is not None and not dry_run:
        raise InputError("--on says whose time is estimated, which only --dry-run does; add that, or leave out --on")
    return None if on is None else device_of(on)


def require_same(words: list[str], run: Path, stage: str) -> None:
    """InputError unless the recipe in `words` is that of `run`, wherever that run is kept."""
    from posttrain.errors import InputError
    from posttrain.recipe.compose import load_recipe
    from posttrain.runs.directory import RunDirectory

    sources, overrides = split_words(words)
    given = load_recipe(sources, overrides, stage).model_dump(mode="json")
    begun = load_recipe([str(RunDirectory.open(run).recipe_file)], [], stage).model_dump(mode="json")
    changed = [key for key, value in given.items() if key not in ("runs", "name") and value != begun[key]]
    if changed:
        raise InputError(
            f"--resume {run} goes on with the recipe of that run, which has another value of {', '.join(changed)}; leave out "
            "what has changed, or start a run with another name"
        )


def split_words(words: list[str]) -> tuple[list[str], list[str]]:
    """Recipe files and overrides, each in their order; a word is a file unless it begins with `--` or holds `=`."""
    sources, overrides = [], []
    remaining = iter(words)
    for word in remaining:
        if word.startswith("--") and "=" not in word:
            overrides += [word, *[value for value in [next(remaining, None)] if value is not None]]
        elif word.startswith("--") or ("=" in word and not Path(word).is_file()):
            overrides.append(word)
        else:
            sources.append(word)
    return sources, overrides


def resumed(run: Path, sources: list[str], overrides: list[str], stage: str) -> "Recipe":
    """The recipe of the run in the directory `run`, with more `steps`, or on other `hardware`, if overrides ask for them.

    A run goes on as it began, so every other override is an `InputError`.
    """
    from posttrain.errors import InputError
    from posttrain.recipe.compose import load_recipe
    from posttrain.recipe.sources import read_overrides
    from posttrain.runs.directory import RunDirectory

    directory = RunDirectory.open(run)
    if sources:
        raise InputError(f"--resume {run} goes on with the recipe of that run; leave out {', '.join(sources)}")
    for layer in read_overrides(overrides):
        (key,) = layer.values
        if key not in ("steps", "hardware"):
            where = next(iter(layer.origins.values()))
            raise InputError(
                f"{where}: a resumed run keeps its recipe, except for steps and hardware; start a run with another name"
            )
    # The run may have been moved or renamed since, and where it is now is where it goes on.
    place = directory.path.resolve()
    recipe = load_recipe([str(directory.recipe_file)], overrides, stage)
    done, steps = directory.saved_step(), getattr(recipe, "steps", None)
    if steps is not None and steps < done:
        raise InputError(
            f"--resume {run}: {done} steps are done and saved, more than steps = {steps}; ask for more than {done}, or start "
            "a run with another name"
        )
    if (Path(recipe.runs) / recipe.name).resolve() == place:
        return recipe
    return recipe.model_copy(update={"runs": str(place.parent), "name": place.name})
