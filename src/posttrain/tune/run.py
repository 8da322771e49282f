"""Running a study from its first trial to its report, and on from wherever it was stopped."""

import optuna
from optuna.trial import TrialState
from rich.console import Console

from posttrain.errors import RunError
from posttrain.planning.dry_run import batch_arithmetic
from posttrain.recipe.study import Range, choices_of, grid_of
from posttrain.recipe.study_file import Study, shown
from posttrain.runs.tables import Table
from posttrain.tune.best import best_of, ranked, why_none
from posttrain.tune.report import (
    retest_table,
    sentences,
    short_names,
    trial_table,
    warnings_of,
    write_best,
    write_report,
)
from posttrain.tune.retest import Retested, retest
from posttrain.tune.search import Search
from posttrain.tune.space import check_space
from posttrain.tune.study import only_here, open_study
from posttrain.tune.trial import work


def run_study(study: Study, resume: bool, console: Console) -> None:
    """Run what is left of the study, retest its best points, and write tables, plots and `best.yaml`.

    Raises `InputError` for wrong input and `RunError` where no trial is the best; then report.md is there all the same,
    and no `best.yaml`. KeyboardInterrupt where it is stopped: runs save a checkpoint, and `--resume` goes on with them.
    """
    for text in check_space(study):
        console.print(f"note: {text}", highlight=False, markup=False, soft_wrap=True)
    with only_here(study):
        kept = open_study(study, resume)
        try:
            search = Search(study, kept, console)
            unchained = ""
            try:
                work(search.take, study.recipe.workers, study.recipe.devices)
            except RunError as error:
                unchained = str(error)
            trials = kept.get_trials(deepcopy=False)
            results: list[Retested] = []
            points = ranked(study, trials)
            elsewhere = sum(trial.state == TrialState.RUNNING for trial in trials)
            if elsewhere:
                said = (
                    f"{elsewhere} trials run elsewhere; what follows is without them. Once they have ended, `--resume`"
                )
                console.print(said, highlight=False, soft_wrap=True)
            if study.recipe.retest is not None and points and not unchained and not elsewhere:
                results = retest(study, points[: study.recipe.retest.best], console)
        except KeyboardInterrupt:
            console.print(f"the study {study.directory} goes on with `--resume`", highlight=False, soft_wrap=True)
            raise
        _conclude(study, kept, results, unchained, console)


def _conclude(study: Study, kept: optuna.Study, results: list[Retested], unchained: str, console: Console) -> None:
    from posttrain.tune.plots import draw_study

    trials = kept.get_trials(deepcopy=False)
    again = [retest_table(study, results)] if results else []
    said = sentences(study, trials, results)
    best = best_of(study, trials)
    if best is None:
        said.append(why_none(study, trials))
    plots = draw_study(study, kept)
    warned = warnings_of(study)
    report = write_report(study, [trial_table(study, trials), *again], said, plots, warned)
    for table in [trial_table(study, trials, narrow=True), *again]:
        console.print(table.rich())
    for text in said if best is not None else said[:-1]:
        console.print(text, highlight=False, markup=False, soft_wrap=True)
    if warned:
        plural = "warnings" if len(warned) > 1 else "warning"
        console.print(f"{len(warned)} {plural} of the runs: see {report}", highlight=False, soft_wrap=True)
    file = study.directory / "best.yaml"
    if best is None or unchained:
        file.unlink(missing_ok=True)
        console.print(f"report: {report}", highlight=False, markup=False, soft_wrap=True)
        raise RunError(unchained or why_none(study, trials))
    winner = next((result for result in results if result.found and result.feasible), None)
    chosen = winner.trial if winner is not None else best
    write_best(study, chosen, winner)
    console.print(
        f"report: {report}\nbest: {file} (trial {chosen.number})", highlight=False, markup=False, soft_wrap=True
    )


def show_study(study: Study, console: Console) -> None:
    """Print the plan; `InputError` where no value makes a recipe."""

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    notes, recipe = check_space(study), study.recipe
    objective = recipe.objective
    say(f"study {recipe.name}: {recipe.number_of_trials} trials of {study.trained} in {study.directory}")
    limits = [
        f"{metric} {'at most' if limit.max is not None else 'at least'} "
        f"{shown(limit.max if limit.max is not None else limit.min)}"
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
