"""Running a study from its first trial to its report, and on from wherever it was stopped."""

import optuna
from optuna.trial import TrialState
from rich.console import Console

from posttrain.errors import RunError
from posttrain.recipe.study_file import Study
from posttrain.tune.best import best_of, ranked, why_none
from posttrain.tune.keep import only_here, open_study
from posttrain.tune.report import retest_table, sentences, trial_table, write_best, write_report
from posttrain.tune.retest import Retested, retest
from posttrain.tune.search import Search
from posttrain.tune.space import check_space
from posttrain.tune.warned import warnings_of
from posttrain.tune.work import work


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
