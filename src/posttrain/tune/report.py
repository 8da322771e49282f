"""What came of a study, on paper: the table of all trials, the retest, `best.yaml` and report.md."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from posttrain.errors import PosttrainError
from posttrain.recipe.sources import Layer, dump_values, merge
from posttrain.recipe.study_file import Study, nested, shown
from posttrain.runs.directory import RunDirectory
from posttrain.runs.files import write_atomically
from posttrain.runs.metrics import read_metrics
from posttrain.runs.tables import Table
from posttrain.tune.best import best_of, feasible
from posttrain.tune.retest import Retested, verdict
from posttrain.tune.space import restored

_STATES = {
    TrialState.COMPLETE: "finished",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
    TrialState.RUNNING: "running",
    TrialState.WAITING: "waiting",
}


_NARROW_NOTE = 40
"""Characters of a note in a terminal, where the whole reason was printed when the trial failed."""


def trial_table(study: Study, trials: Sequence[FrozenTrial], narrow: bool = False) -> Table:
    """All trials by number: state, objective and the step that counts, what is limited, what was tried, why it failed.

    `narrow` is for a terminal: keys by their last word, and short notes.
    """
    objective, best = study.recipe.objective, best_of(study, trials)
    named = list(study.recipe.spaces)
    groups = ("group",) if study.recipe.groups else ()
    titles = short_names(named) if narrow else named
    headings = ("trial", *groups, "state", objective.metric, "step", *objective.within, *titles, "minutes", "note")
    rows = []
    for trial in trials:
        point, attrs = restored(study, trial.params), trial.user_attrs
        over = trial.state in (TrialState.COMPLETE, TrialState.PRUNED) and not feasible(trial)
        note = attrs.get("reason", "beyond its limits" if over else "start point" if "start" in attrs else "")
        if best is not None and trial.number == best.number:
            note = f"best; {note}" if note else "best"
        if narrow and len(note) > _NARROW_NOTE:
            note = f"{note[: _NARROW_NOTE - 1]}…"
        limited = attrs.get("limited", {})
        cells = [str(trial.number), *([attrs.get("group", "")] if groups else []), _STATES[trial.state]]
        cells += ["–" if trial.value is None else f"{trial.value:.4g}", _step(trial)]
        cells += [shown(limited[metric]) if metric in limited else "–" for metric in objective.within]
        cells += [shown(point[name], narrow) if name in point else "–" for name in named]
        cells += [f"{attrs['minutes']:.2g}" if "minutes" in attrs else "–", note]
        rows.append(tuple(cells))
    return Table(f"{study.recipe.name}: trials", headings, rows, _note(study), ("group", "state", "note"))


def short_names(keys: Sequence[str]) -> list[str]:
    """The last word of each key, with as many before it as tell it from the others and what it is about."""
    found = []
    for key in keys:
        parts = key.split(".")
        fewest = 2 if parts[-1] in ("type", "coefficient") else 1
        ends = [".".join(parts[-count:]) for count in range(min(fewest, len(parts)), len(parts) + 1)]
        found.append(next(end for end in ends if sum(f".{other}".endswith(f".{end}") for other in keys) == 1))
    return found


def _step(trial: FrozenTrial) -> str:
    """The step that counts: of a pruned trial its last."""
    if trial.state == TrialState.PRUNED and trial.intermediate_values:
        return str(max(trial.intermediate_values))
    return str(trial.user_attrs.get("step", "–"))


def retest_table(study: Study, results: Sequence[Retested]) -> Table:
    """The retested points, best first, with the mean over their seeds."""
    assert study.recipe.retest is not None
    seeds, objective = study.recipe.retest.seeds, study.recipe.objective
    headings = ("trial", "mean", "95% interval", "n", *(f"seed {seed}" for seed in seeds), *objective.within, "note")
    rows = []
    for result in results:
        estimate = result.estimate
        known = estimate is not None and estimate.n > 1
        cells = [str(result.trial.number), "–" if estimate is None else f"{estimate.value:.4g}"]
        cells += [f"[{estimate.low:.4g}, {estimate.high:.4g}]" if known and estimate is not None else "–"]
        cells += [str(len(result.found))]
        cells += [f"{result.found[seed].value:.4g}" if seed in result.found else "–" for seed in seeds]
        for metric in objective.within:
            values = [one.limited[metric] for one in result.found.values()]
            cells.append(f"{sum(values) / len(values):.4g}" if values else "–")
        failed = "; ".join(f"seed {seed}: {reason}" for seed, reason in result.failed.items())
        rows.append((*cells, failed or ("" if result.feasible else "beyond its limits")))
    note = f"{objective.metric} of runs with other seeds; `n` runs; intervals are 95%, Student's t over runs."
    return Table(f"{study.recipe.name}: retest", headings, rows, note, ("note",))


def write_best(study: Study, trial: FrozenTrial, retested: Retested | None) -> Path:
    """Write `best.yaml`: the searched keys of `trial`, for `posttrain STAGE RECIPE.yaml best.yaml`."""
    values = study.keys_of(restored(study, trial.params))
    objective = study.recipe.objective
    said = f"{objective.metric} {trial.value:.6g}"
    estimate = retested.estimate if retested is not None else None
    if estimate is not None and estimate.n > 1:
        said += f"; with other seeds {estimate.value:.4g} [{estimate.low:.4g}, {estimate.high:.4g}], n = {estimate.n}"
    files = " ".join(study.recipe.recipe) or "RECIPE.yaml"
    lines = [
        f"# Trial {trial.number} of the study {study.recipe.name}: {said}.",
        f"# Use it over the recipe that was searched: posttrain {study.trained} {files} best.yaml",
        f"# The searched keys alone; the trials also had the study's `keys`, see trials/{trial.number:04d}/recipe.yaml.",
    ]
    content = merge([Layer(nested(key, value)) for key, value in values.items()]).values
    path = study.directory / "best.yaml"
    write_atomically(path, "\n".join(lines) + "\n" + dump_values(content))
    return path


def sentences(study: Study, trials: Sequence[FrozenTrial], results: Sequence[Retested]) -> list[str]:
    """What is to be said of the study besides its tables."""
    counts: dict[str, int] = {}
    for trial in trials:
        counts[_STATES[trial.state]] = counts.get(_STATES[trial.state], 0) + 1
    said = [f"{len(trials)} trials: {', '.join(f'{count} {state}' for state, count in counts.items())}."]
    best = best_of(study, trials)
    if best is not None:
        finished = counts["finished"]
        noisy = f", the best of {finished} noisy values and so a flattering one" if finished > 1 else ""
        said.append(f"Best is trial {best.number} with {study.recipe.objective.metric} {best.value:.4g}{noisy}.")
    if results:
        said.append(verdict(study, results))
    return said


def write_report(
    study: Study, tables: Sequence[Table], said: Sequence[str], plots: Sequence[Path], warned: Sequence[str]
) -> Path:
    """report.md of the study; `warned` is what its runs warned of."""
    parts = [f"# {study.recipe.name}", " ".join(said)]
    parts += [f"## {table.title.partition(': ')[2]}\n\n{table.markdown()}\n\n{table.note}" for table in tables]
    parts += [f"![{plot.stem}]({plot.relative_to(study.directory)})" for plot in plots]
    parts += ["## Warnings of the runs\n\n" + "\n".join(f"- {text}" for text in warned)] if warned else []
    path = study.directory / "report.md"
    write_atomically(path, "\n\n".join(parts) + "\n")
    return path


def _note(study: Study) -> str:
    objective: Any = study.recipe.objective
    better = "smaller" if objective.direction == "minimize" else "larger"
    limits = "; ".join(
        f"{metric} {'at most' if limit.max is not None else 'at least'} "
        f"{(limit.max if limit.max is not None else limit.min):g}"
        for metric, limit in objective.within.items()
    )
    return (
        f"{objective.metric} is the best evaluation after the start ({better} is better), `step` where it was, `minutes` "
        f"the time the run worked{f'; limits: {limits}' if limits else ''}. A pruned trial shows its last value."
    )


_MOST = 12
"""Warnings in a report, those of the most runs first."""
_NAMED = 6
"""Runs that are named beside a warning."""


def messages_of(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """The warnings among the lines of a run, each once, in order, on one line each."""
    told = [line.get("message") for line in lines if line["kind"] == "warning"]
    return list(dict.fromkeys(" ".join(message.split()) for message in told if isinstance(message, str)))


def warnings_of(study: Study) -> list[str]:
    """A sentence for each warning of the trials and retests in the study's directory; empty where there is none.

    Runs whose metrics are damaged are left out: they are failed trials that say so.
    """
    said: dict[str, list[str]] = {}
    counts = {"trials": 0, "retest": 0}
    for folder in counts:
        for path in sorted((study.directory / folder).glob("*")):
            metrics = RunDirectory(path).metrics
            if not metrics.is_file():
                continue
            counts[folder] += 1
            try:
                messages = messages_of(read_metrics(metrics))
            except PosttrainError:
                continue
            for message in messages:
                said.setdefault(message, []).append(f"{folder}/{path.name}")
    runs = sum(counts.values())
    ordered = sorted(said.items(), key=lambda item: -len(item[1]))
    sentences = [f"{message} ({_whose(names, runs)})" for message, names in ordered[:_MOST]]
    if len(ordered) > _MOST:
        sentences.append(f"{len(ordered) - _MOST} more warnings stand in the report.md of the runs")
    return sentences


def _whose(names: Sequence[str], runs: int) -> str:
    if len(names) == runs > 1:
        return f"all {runs} runs"
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
