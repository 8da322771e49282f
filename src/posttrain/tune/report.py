"""The report of a study: table of trials, `best.yaml` and report.md."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from posttrain.recipe.sources import Layer, dump_values, merge
from posttrain.recipe.study_file import Study, nested, shown
from posttrain.runs.directory import write_atomically
from posttrain.runs.report import Report
from posttrain.runs.tables import IMPROVED, Table
from posttrain.tune.best import best_of, feasible
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


def trial_table(study: Study, trials: Sequence[FrozenTrial], narrow: bool = False) -> Table:
    """All trials by number: state, objective, step of the best evaluation (of a pruned trial: its last step), limited
    metrics, searched keys, and a note.

    `narrow`: shorten keys and notes for a terminal.
    """
    objective, best = study.recipe.objective, best_of(study, trials)
    named = list(study.recipe.spaces)
    groups = ("group",) if study.recipe.groups else ()
    titles = short_names(named) if narrow else named
    headings = ("trial", *groups, "state", objective.metric, "step", *objective.within, *titles, "minutes", "note")
    rows = []
    for trial in trials:
        point, attrs = from_storage(study, trial.params), trial.user_attrs
        over = trial.state in (TrialState.COMPLETE, TrialState.PRUNED) and not feasible(trial)
        note = attrs.get("reason", "exceeds its limits" if over else "start point" if "start" in attrs else "")
        if attrs.get("verdict", IMPROVED) != IMPROVED:
            note = "; ".join([attrs["verdict"], *([note] if note else [])])
        if best is not None and trial.number == best.number:
            note = f"best; {note}" if note else "best"
        if narrow and len(note) > _NARROW_NOTE:
            note = f"{note[: _NARROW_NOTE - 1]}…"
        limited = attrs.get("limited", {})
        cells = [str(trial.number), *([attrs.get("group", "")] if groups else []), _STATES[trial.state]]
        pruned = trial.state == TrialState.PRUNED and trial.intermediate_values
        step = max(trial.intermediate_values) if pruned else attrs.get("step", "–")
        cells += ["–" if trial.value is None else f"{trial.value:.4g}", str(step)]
        cells += [shown(limited[metric]) if metric in limited else "–" for metric in objective.within]
        cells += [shown(point[name], narrow) if name in point else "–" for name in named]
        cells += [f"{attrs['minutes']:.1f}" if "minutes" in attrs else "–", note]
        rows.append(tuple(cells))
    return Table(f"{study.recipe.name}: trials", headings, rows, _note(study), ("group", "state", "note"))


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
    objective = study.recipe.objective
    result = f"{objective.metric} {trial.value:.6g}"
    files = " ".join(study.recipe.recipe) or "RECIPE.yaml"
    lines = [
        f"# Trial {trial.number} of the study {study.recipe.name}: {result}.",
        f"# Apply it to the searched recipe: posttrain {study.trained} {files} {file}",
        f"# Searched keys only; the trials also had the `keys` of the study, see trials/{trial.number:04d}/recipe.yaml.",
    ]
    content = merge([Layer(nested(key, value)) for key, value in values.items()]).values
    write_atomically(file, "\n".join(lines) + "\n" + dump_values(content))


def summary_sentences(study: Study, trials: Sequence[FrozenTrial]) -> list[str]:
    """Summary of the study: counts of trials, and the best trial."""
    counts = Counter(_STATES[trial.state] for trial in trials)
    summary = [
        f"{len(trials)} {'trial' if len(trials) == 1 else 'trials'}: {', '.join(f'{count} {state}' for state, count in counts.items())}."
    ]
    best = best_of(study, trials)
    if best is not None:
        finished = counts["finished"]
        noisy = f", which is optimistic as the best of {finished} noisy values" if finished > 1 else ""
        summary.append(f"Best is trial {best.number} with {study.recipe.objective.metric} {best.value:.4g}{noisy}.")
    return summary


def write_report(study: Study, tables: Sequence[Table], summary: Sequence[str], plots: Sequence[Path]) -> Path:
    """Write report.md of the study."""
    tables = [replace(table, title=table.title.partition(": ")[2]) for table in tables]
    report = Report(study.recipe.name, headline=" ".join(summary), tables=tables)
    path = study.directory / "report.md"
    images = [(plot.stem, str(plot.relative_to(study.directory))) for plot in plots]
    write_atomically(path, report.markdown(images, titled=True))
    return path


def _note(study: Study) -> str:
    objective: Any = study.recipe.objective
    better = "smaller" if objective.direction == "minimize" else "larger"
    limits = "; ".join(f"{metric} {limit}" for metric, limit in objective.within.items())
    return (
        f"{objective.metric} is the best evaluation after step 0 ({better} is better), `step` its step, `minutes` "
        f"the working time of the run{f'; limits: {limits}' if limits else ''}. A pruned trial shows its last value."
    )


def warning_messages(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """The distinct warnings in the metrics lines of a run, in order, one line each."""
    messages = [line.get("message") for line in lines if line["kind"] == "warning"]
    return list(dict.fromkeys(" ".join(message.split()) for message in messages if isinstance(message, str)))
