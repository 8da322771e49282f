"""The results of a study: the best trial, the table of trials, `best.yaml` and report.md."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from optuna.trial import FrozenTrial, TrialState

from posttrain.recipe.sources import Layer, dump_values, merge, nested
from posttrain.recipe.study import Study, shown
from posttrain.runs.directory import write_atomically
from posttrain.runs.report import Report
from posttrain.runs.tables import IMPROVED, Table
from posttrain.tune.study import from_storage

_STATES = {
    TrialState.COMPLETE: "finished",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
    TrialState.RUNNING: "running",
    TrialState.WAITING: "waiting",
}
_NARROW_NOTE = 40
"""Maximum length of a note in a terminal. The full reason was printed when the trial failed."""


def best_of(study: Study, trials: Sequence[FrozenTrial]) -> FrozenTrial | None:
    """The best trial, of equal ones the first; None if no finished trial satisfies all limits."""
    sign = -1 if study.recipe.objective.direction == "maximize" else 1
    finished = [trial for trial in trials if trial.state == TrialState.COMPLETE and _feasible(trial)]
    return min(finished, key=lambda trial: (sign * (trial.value or 0.0), trial.number), default=None)


def _feasible(trial: FrozenTrial) -> bool:
    return all(distance <= 0 for distance in trial.constraints.values())


def no_best_reason(study: Study, trials: Sequence[FrozenTrial]) -> str:
    """Why the study has no best trial, in one sentence."""
    failed = [trial for trial in trials if trial.state == TrialState.FAIL]
    finished = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    reason = f"no trial was finished, {len(failed)} failed and the others were pruned"
    if failed and len(failed) == len(trials):
        ((why, count),) = Counter(trial.user_attrs.get("reason", "unknown") for trial in failed).most_common(1)
        how = "because" if count == len(failed) else f"most often ({count} of them) because"
        reason = f"all {len(failed)} trials failed, {how}: {why}"
    elif finished:
        nearest = min(finished, key=lambda trial: sum(max(0.0, d) for d in trial.constraints.values()))
        limits, values = study.recipe.objective.within, nearest.user_attrs["limited"]
        over = [metric for metric, distance in nearest.constraints.items() if distance > 0]
        violated = ", ".join(f"{metric} {values[metric]:.4g} where {limits[metric]}" for metric in over)
        reason = (
            f"none of {len(finished)} finished trials satisfies the limits; the nearest is trial {nearest.number} "
            f"({violated} is required)"
        )
    return f"{study.directory}: {reason}; best.yaml is not written"


def trial_table(study: Study, trials: Sequence[FrozenTrial], narrow: bool = False) -> Table:
    """All trials by number: state, objective, step of the best evaluation (of a pruned trial: its last step), limited
    metrics, searched keys, and a note.

    `narrow`: shorten keys and notes for a terminal.
    """
    objective, best, named = study.recipe.objective, best_of(study, trials), list(study.recipe.spaces)
    groups = ["group"] if study.recipe.groups else []
    titles = short_names(named) if narrow else named
    headings = ("trial", *groups, "state", objective.metric, "step", *objective.within, *titles, "minutes", "note")
    rows = []
    for trial in trials:
        point, attrs = from_storage(study, trial.params), trial.user_attrs
        over = trial.state in (TrialState.COMPLETE, TrialState.PRUNED) and not _feasible(trial)
        verdict = attrs.get("verdict", IMPROVED)
        note = "; ".join(
            [
                *(["best"] if best is not None and trial.number == best.number else []),
                *([verdict] if verdict != IMPROVED else []),
                *filter(None, [attrs.get("reason", "exceeds its limits" * over or "start point" * ("start" in attrs))]),
            ]
        )
        if narrow and len(note) > _NARROW_NOTE:
            note = f"{note[: _NARROW_NOTE - 1]}…"
        limited = attrs.get("limited", {})
        pruned = trial.state == TrialState.PRUNED and trial.intermediate_values
        cells = [
            *(str(trial.number), *(attrs.get("group", "") for _ in groups), _STATES[trial.state]),
            "–" if trial.value is None else f"{trial.value:.4g}",
            str(max(trial.intermediate_values) if pruned else attrs.get("step", "–")),
            *(shown(limited[metric]) if metric in limited else "–" for metric in objective.within),
            *(shown(point[name], narrow) if name in point else "–" for name in named),
            f"{attrs['minutes']:.1f}" if "minutes" in attrs else "–",
            note,
        ]
        rows.append(tuple(cells))
    better = "smaller" if objective.direction == "minimize" else "larger"
    limits = "; ".join(f"{metric} {limit}" for metric, limit in objective.within.items())
    about = (
        f"{objective.metric} is the best evaluation after step 0 ({better} is better), `step` its step, `minutes` "
        f"the working time of the run{f'; limits: {limits}' if limits else ''}. A pruned trial shows its last value."
    )
    return Table(f"{study.recipe.name}: trials", headings, rows, about, ("group", "state", "note"))


def short_names(keys: Sequence[str]) -> list[str]:
    """The shortest unique suffix of each dotted key, or all of it, with two words for `type` and `coefficient`."""
    names = []
    for key in keys:
        parts = key.split(".")
        fewest = 2 if parts[-1] in ("type", "coefficient") else 1
        ends = [".".join(parts[-count:]) for count in range(min(fewest, len(parts)), len(parts) + 1)]
        # No suffix is unique for `optimizer.learning_rate` beside `critic.optimizer.learning_rate`.
        names.append(next((end for end in ends if sum(f".{other}".endswith(f".{end}") for other in keys) == 1), key))
    return names


def write_best(study: Study, trial: FrozenTrial, file: Path) -> None:
    """Write the searched keys of `trial` to `file`, for `posttrain STAGE RECIPE.yaml best.yaml`."""
    values = study.keys_of(from_storage(study, trial.params))
    files = " ".join(study.recipe.recipe) or "RECIPE.yaml"
    content = merge([Layer(nested(key, value)) for key, value in values.items()]).values
    write_atomically(
        file,
        f"# Trial {trial.number} of the study {study.recipe.name}: {study.recipe.objective.metric} {trial.value:.6g}.\n"
        f"# Apply it to the searched recipe: posttrain {study.trained} {files} {file}\n"
        "# Searched keys only; the trials also had the `keys` of the study, see "
        f"trials/{trial.number:04d}/recipe.yaml.\n{dump_values(content)}",
    )


def summary_sentences(study: Study, trials: Sequence[FrozenTrial]) -> list[str]:
    """Summary of the study: counts of trials, and the best trial."""
    counts = Counter(_STATES[trial.state] for trial in trials)
    states = ", ".join(f"{count} {state}" for state, count in counts.items())
    summary = [f"{len(trials)} {'trial' if len(trials) == 1 else 'trials'}: {states}."]
    if (best := best_of(study, trials)) is not None:
        finished = counts["finished"]
        noisy = f", which is optimistic as the best of {finished} noisy values" if finished > 1 else ""
        summary.append(f"Best is trial {best.number} with {study.recipe.objective.metric} {best.value:.4g}{noisy}.")
    return summary


def write_report(study: Study, table: Table, summary: Sequence[str]) -> Path:
    """Write report.md of the study."""
    table = replace(table, title=table.title.partition(": ")[2])
    path = study.directory / "report.md"
    report = Report(study.recipe.name, headline=" ".join(summary), tables=[table])
    write_atomically(path, report.markdown(titled=True))
    return path
