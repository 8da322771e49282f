"""Figures of a study: history, importance of the searched keys, and parallel coordinates."""

import io
import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib
import numpy as np
import optuna
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances
from optuna.trial import FrozenTrial, TrialState
from optuna.visualization import matplotlib as optuna_plots

from posttrain.recipe.study_file import Study
from posttrain.runs.directory import storage_errors, write_atomically
from posttrain.tune.report import short_names

_MIN_TRIALS = 4
"""Minimum number of finished trials for importances."""


def draw_study(study: Study, optuna_study: optuna.Study) -> list[Path]:
    """Draw history.png, importance.png and parallel.png into the `plots` of the study; figures without data are
    skipped.
    """
    trials = optuna_study.get_trials(deepcopy=False)
    drawn = []
    folder = study.directory / "plots"
    with storage_errors(folder):
        folder.mkdir(exist_ok=True)
    # Optuna marks some of its figures as experimental, and sets a style for the whole process.
    with warnings.catch_warnings(), matplotlib.rc_context({"figure.dpi": 150, "font.size": 9}):
        warnings.simplefilter("ignore")
        for draw in (draw_history, draw_importance, draw_parallel):
            path = folder / f"{draw.__name__.removeprefix('draw_')}.png"
            if draw(study, optuna_study, trials) is None:
                path.unlink(missing_ok=True)
                continue
            content = io.BytesIO()
            plt.savefig(content, format="png", bbox_inches="tight")
            plt.close()
            write_atomically(path, content.getvalue())
            drawn.append(path)
    return drawn


def draw_history(study: Study, optuna_study: optuna.Study, trials: Sequence[FrozenTrial]) -> Axes | None:
    """The value of every trial and the best so far; grey: exceeds its limits; triangles: pruned; crosses: failed."""
    pruned = [trial for trial in trials if trial.state == TrialState.PRUNED and trial.value is not None]
    if not pruned and not _finished(trials):
        return None
    axes = optuna_plots.plot_optimization_history(optuna_study, target_name=study.recipe.objective.metric)
    axes.plot(
        [t.number for t in pruned], [t.value or 0.0 for t in pruned], "v", color="grey", label="pruned, last value"
    )
    failed = [trial.number for trial in trials if trial.state == TrialState.FAIL]
    bottom: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "clip_on": False}
    axes.plot(failed, [0.0] * len(failed), "x", color="red", label="failed", **bottom)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return axes


def draw_importance(study: Study, optuna_study: optuna.Study, trials: Sequence[FrozenTrial]) -> Axes | None:
    """Importance of each key: PED-ANOVA (Watanabe et al. 2023) for a search, the range of the means over a key's values
    for groups.
    """
    if study.recipe.groups:
        ranges: dict[str, float] = {}  # key -> range of the means over its values, among the trials of its group
        for group in study.recipe.groups:
            members = [trial for trial in _finished(trials) if trial.user_attrs.get("group") == group.name]
            for key in group.grid:
                by_value: dict[Any, list[float]] = {}
                for trial in members:
                    by_value.setdefault(trial.params[key], []).append(trial.value or 0.0)
                if len(by_value) > 1:
                    ranges[f"{key} ({group.name})"] = float(np.ptp([fmean(values) for values in by_value.values()]))
        if not ranges:
            return None
        _, axes = plt.subplots()
        axes.bar_label(axes.barh(list(ranges), list(ranges.values())), fmt="%.2g", padding=3)
        axes.set_xlabel(f"{study.recipe.objective.metric}: best minus worst mean over a key's values, in its group")
        return axes
    finished, evaluator = _finished(trials), PedAnovaImportanceEvaluator()
    if len(finished) < _MIN_TRIALS or len({trial.value for trial in finished}) < 2:
        return None
    if not all(map(math.isfinite, get_param_importances(optuna_study, evaluator=evaluator).values())):
        return None
    return optuna_plots.plot_param_importances(optuna_study, evaluator=evaluator)


def draw_parallel(study: Study, optuna_study: optuna.Study, trials: Sequence[FrozenTrial]) -> Axes | None:
    """Parallel coordinates: a line per finished trial, colored by its value; dotted: exceeds its limits."""
    finished = _finished(trials)
    names = sorted({name for trial in finished for name in trial.params})
    if len(finished) < 2 or not names:
        return None
    axes = optuna_plots.plot_parallel_coordinate(optuna_study, names, target_name=study.recipe.objective.metric)
    axes.set_xticks(range(len(names) + 1), [study.recipe.objective.metric, *short_names(names)])
    plt.gcf().set_size_inches(2.0 * (len(names) + 2), 4.8)
    return axes


def _finished(trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    return [trial for trial in trials if trial.state == TrialState.COMPLETE]
