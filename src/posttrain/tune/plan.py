"""`--dry-run` of a study: what is searched, what every trial is, and, of groups, all of them. Runs nothing."""

from rich.console import Console

from posttrain.recipe.plan import batch_arithmetic
from posttrain.recipe.study import Range, choices_of, grid_of
from posttrain.recipe.study_file import Study, shown
from posttrain.runs.tables import Table
from posttrain.tune.report import short_names
from posttrain.tune.space import check_space


def show_study(study: Study, console: Console) -> None:
    """Print the plan; `InputError` where no value makes a recipe."""

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    notes, recipe = check_space(study), study.recipe
    objective = recipe.objective
    say(f"study {recipe.name}: {recipe.number_of_trials} trials of {study.trained} in {study.directory}")
    limits = [
        f"{metric} {'at most' if limit.most is not None else 'at least'} "
        f"{shown(limit.most if limit.most is not None else limit.least)}"
        for metric, limit in objective.within.items()
    ]
    within = f", within {' and '.join(limits)}" if limits else ""
    say(f"{objective.direction} {objective.metric}, the best evaluation after the start{within}")
    if recipe.groups:
        console.print(_trials(study).rich())
        say("best: of the values that its group tried")
    else:
        console.print(_searched(study).rich())
        for point in recipe.start:
            say(f"first: {', '.join(f'{name}={shown(value)}' for name, value in point.items())}")
    if recipe.retest is not None:
        runs = recipe.retest.best * len(recipe.retest.seeds)
        seeds = ", ".join(map(str, recipe.retest.seeds))
        say(f"then the best {recipe.retest.best} again with seeds {seeds}: {runs} more runs")
    plural = "trials at a time" if recipe.workers > 1 else "trial at a time"
    say(
        f"{recipe.workers} {plural}, pruner {recipe.pruner.type}, storage {recipe.storage or 'study.db in its directory'}"
    )
    say("a trial, before anything searched is set:")
    for line in batch_arithmetic(study.at({})):
        say(f"  {line}")
    measured = getattr(study.at({}), "evaluation", None)
    if recipe.pruner.type != "none" and measured is not None and measured.every == 0:
        notes.append("evaluation.every = 0 measures before and after a run only, so nothing can be pruned")
    for note in notes:
        say(f"note: {note}")


def _searched(study: Study) -> Table:
    rows: list[tuple[str, ...]] = []
    for name, values in study.recipe.search.items():
        if isinstance(values, Range):
            kind = "whole numbers" if values.int else "numbers"
            how = ", logarithmic" if values.log else f", steps of {values.step:g}" if values.step else ""
            rows.append((name, f"{kind} from {values.low:g} to {values.high:g}{how}"))
        else:
            rows += [(name if not at else "", shown(value)) for at, value in enumerate(choices_of(values) or [])]
    return Table("", ("key", "values"), rows, "", ("key", "values"))


def _trials(study: Study) -> Table:
    keys = list(study.recipe.spaces)
    rows: list[tuple[str, ...]] = []
    earlier: dict[str, str] = {}
    for group in study.recipe.groups:
        for point in grid_of(group):
            cells = [shown(point[key], narrow=True) if key in point else earlier.get(key, "") for key in keys]
            rows.append((str(len(rows)), group.name, *cells))
        earlier |= dict.fromkeys(group.grid, "best")
    return Table("", ("trial", "group", *short_names(keys)), rows, "", ("group",))
