"""The figure of a study: the value of every trial."""

import io
import warnings
from pathlib import Path
from typing import Any

import matplotlib
import optuna
from matplotlib import pyplot as plt
from optuna.trial import TrialState
from optuna.visualization import matplotlib as optuna_plots

from posttrain.recipe.study_file import Study
from posttrain.runs.directory import storage_errors, write_atomically


def draw_study(study: Study, optuna_study: optuna.Study) -> list[Path]:
    """Draw `plots/history.png` of the study: the value of every trial and the best so far; grey: exceeds its limits;
    triangles: pruned; crosses: failed. Returns the file, or nothing if no trial has a value.
    """
    trials = optuna_study.get_trials(deepcopy=False)
    pruned = [trial for trial in trials if trial.state == TrialState.PRUNED and trial.value is not None]
    failed = [trial.number for trial in trials if trial.state == TrialState.FAIL]
    path = study.directory / "plots" / "history.png"
    if not pruned and all(trial.state != TrialState.COMPLETE for trial in trials):
        return []
    content = io.BytesIO()
    # Optuna marks some of its figures as experimental, and sets a style for the whole process.
    with warnings.catch_warnings(), matplotlib.rc_context({"figure.dpi": 150, "font.size": 9}):
        warnings.simplefilter("ignore")
        axes = optuna_plots.plot_optimization_history(optuna_study, target_name=study.recipe.objective.metric)
        axes.plot(
            [t.number for t in pruned], [t.value or 0.0 for t in pruned], "v", color="grey", label="pruned, last value"
        )
        bottom: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "clip_on": False}
        axes.plot(failed, [0.0] * len(failed), "x", color="red", label="failed", **bottom)
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
        plt.savefig(content, format="png", bbox_inches="tight")
        plt.close()
    with storage_errors(path.parent):
        path.parent.mkdir(exist_ok=True)
    write_atomically(path, content.getvalue())
    return [path]
