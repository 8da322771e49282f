"""Run a study from its first trial to its report, resume it, and choose the next trial."""

from collections import Counter
from functools import partial
from multiprocessing.connection import wait
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState
from rich.console import Console

from posttrain.distributed.world import Interrupts
from posttrain.errors import InputError, PosttrainError, RunError
from posttrain.planning.dry_run import batch_arithmetic
from posttrain.recipe.study import Group, Range, Study, choices_of, grid_of, shown
from posttrain.runs.tables import IMPROVED, Table, read_verdict, show_line
from posttrain.tune.report import (
    best_of,
    no_best_reason,
    short_names,
    summary_sentences,
    trial_table,
    write_best,
    write_report,
)
from posttrain.tune.study import check_space, distributions, from_storage, open_study, study_lock, to_storage
from posttrain.tune.trial import Attempt, MissingMetric, curve, outcome

_POLL_SECONDS = 0.25
"""Interval between polls of the runs' metrics."""


def run_study(study: Study, resume: bool, console: Console, group: str | None = None) -> None:
    """Run the remaining trials, and write tables, `best.yaml`, and `best_GROUP.yaml` of groups.

    `group`: run only the trials of this group, given by its number from 1 or by its name.

    Raises `InputError` for invalid input, and `RunError` if there is no best trial; report.md is then written without
    `best.yaml`. Raises KeyboardInterrupt when stopped: runs save a checkpoint, and `--resume` continues them.
    """
    chosen = chosen_group(study, group)
    for text in check_space(study):
        show_line(console, f"warning: {text}")
    with study_lock(study):
        optuna_study = open_study(study, resume)
        for other in study.recipe.groups if chosen is not None else ():
            unfinished = sum(not trial.state.is_finished() for trial in _of_group(optuna_study, other))
            if other is not chosen and unfinished:  # its trials would run together with those of the chosen group
                raise InputError(
                    f"{unfinished} trials of group {other.name} have not ended; run `posttrain tune STUDY --group "
                    f"{other.name} --resume` first"
                )
        search, chain_error = Search(study, optuna_study, console, chosen), ""
        try:
            search.run()
        except RunError as error:
            chain_error = str(error)
        except KeyboardInterrupt:
            console.print(f"continue the study {study.directory} with `--resume`", highlight=False, soft_wrap=True)
            raise
        trials = optuna_study.get_trials(deepcopy=False)
        summary, best = summary_sentences(study, trials), best_of(study, trials)
        missing = no_best_reason(study, trials) if best is None else ""
        report = write_report(study, trial_table(study, trials), [*summary, missing] if missing else summary)
        console.print(trial_table(study, trials, narrow=True))
        for text in [*summary, f"report: {report}"]:
            show_line(console, text)
        for one in study.recipe.groups:
            if (best_of_group := best_of(study, _of_group(optuna_study, one))) is not None:
                write_best(study, best_of_group, study.directory / f"best_{one.name}.yaml")
        file = study.directory / "best.yaml"
        if best is None or chain_error:
            file.unlink(missing_ok=True)
            raise RunError(chain_error or missing)
        write_best(study, best, file)
        show_line(console, f"best: {file} (trial {best.number})")


def chosen_group(study: Study, name: str | None) -> Group | None:
    """The group with this name or number, counted from 1; None for all. Raises `InputError` if there is no such
    group."""
    if name is None:
        return None
    groups = study.recipe.groups
    for number, group in enumerate(groups, start=1):
        if name in (group.name, str(number)):
            return group
    names = ", ".join(f"{number} ({group.name})" for number, group in enumerate(groups, start=1))
    raise InputError(
        f"--group {name}: the study {study.recipe.name} has no such group; "
        + (f"its groups are {names}" if groups else "remove --group, because it has none")
    )


def show_study(study: Study, console: Console, group: str | None = None) -> None:
    """Print the plan of the study, or of one group of it; raises `InputError` if no combination of values is valid."""
    say = partial(show_line, console)
    chosen = chosen_group(study, group)
    messages, recipe = check_space(study), study.recipe
    objective = recipe.objective
    count = recipe.number_of_trials if chosen is None else len(grid_of(chosen))
    say(f"study {recipe.name}: {count} trials of {study.trained} in {study.directory}")
    limits = [f"{metric} {limit}" for metric, limit in objective.within.items()]
    within = f", within {' and '.join(limits)}" if limits else ""
    say(f"{objective.direction} {objective.metric}, the best evaluation after step 0{within}")
    if recipe.groups:
        console.print(_grid_table(study, chosen))
        say("best: the best value of the group that searches the key, or that of the recipe if the group has not run")
    else:
        console.print(_search_table(study))
        for point in recipe.start:
            say(f"start point: {', '.join(f'{name}={shown(value)}' for name, value in point.items())}")
    plural = "trials at a time" if recipe.workers > 1 else "trial at a time"
    say(f"{recipe.workers} {plural}, pruner {recipe.pruner.type}")
    say("a trial without the searched values:")
    for line in batch_arithmetic(study.at({})):
        show_line(console, line, 2)
    for message in messages:
        say(f"warning: {message}")


def _search_table(study: Study) -> Table:
    rows: list[tuple[str, ...]] = []
    for name, values in study.recipe.search.items():
        if isinstance(values, Range):
            kind = "whole numbers" if values.int else "numbers"
            how = ", logarithmic" if values.log else f", steps of {shown(values.step)}" if values.step else ""
            rows.append((name, f"{kind} from {shown(values.low)} to {shown(values.high)}{how}"))
        else:
            rows += [(name if not at else "", shown(value)) for at, value in enumerate(choices_of(values) or [])]
    return Table("", ("key", "values"), rows, "", ("key", "values"))


def _grid_table(study: Study, chosen: Group | None) -> Table:
    keys = list(study.recipe.spaces)
    rows: list[tuple[str, ...]] = []
    earlier: dict[str, str] = {}
    for group in study.recipe.groups:
        for point in grid_of(group) if chosen in (None, group) else []:
            cells = [shown(point[key], narrow=True) if key in point else earlier.get(key, "") for key in keys]
            rows.append((str(len(rows)), group.name, *cells))
        earlier |= dict.fromkeys(group.grid, "best")
    return Table("", ("trial", "group", *short_names(keys)), rows, "", ("group",))


class Search:
    """Supplies the trials of a study, or of one of its groups, interrupted ones first."""

    def __init__(self, study: Study, optuna_study: optuna.Study, console: Console, group: Group | None = None) -> None:
        self.study, self.optuna_study, self.console, self.group = study, optuna_study, console, group
        self._distributions = distributions(study)
        # Trials that a killed process left running; this process holds the lock of the study.
        self._interrupted = optuna_study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        self._jobs: list[TrialJob] = []
        self.warned: set[str] = set()
        """Warnings that were printed."""

    def run(self) -> None:
        """Run the trials, `workers` at a time, until there is none left.

        On Ctrl-C and SIGTERM the runs are asked to save and stop; after they have stopped, KeyboardInterrupt is raised.
        Errors are handled in the same way and raised again.
        """
        workers, devices = self.study.recipe.workers, self.study.recipe.devices
        active: dict[int, TrialJob] = {}
        with Interrupts() as interrupts:
            try:
                while True:
                    with interrupts.critical():
                        while len(active) < workers and (job := self.take()) is not None:
                            worker = next(number for number in range(workers) if number not in active)
                            active[worker] = job
                            job.begin(devices[worker % len(devices)] if devices else None)
                    if not active:
                        return
                    sentinels = [job.attempt.sentinel for job in active.values() if job.attempt.running]
                    if len(sentinels) == len(active):
                        wait(sentinels, timeout=_POLL_SECONDS)
                    with interrupts.critical():
                        for worker, job in list(active.items()):
                            ended = not job.attempt.running
                            job.poll()
                            if ended:
                                job.end()
                                del active[worker]
            except BaseException:
                for job in active.values():
                    job.attempt.stop()
                for job in active.values():
                    while job.attempt.running:
                        wait([job.attempt.sentinel], timeout=_POLL_SECONDS)
                raise

    def take(self) -> "TrialJob | None":
        """The next trial with a valid recipe; None if there is none now. Trials without a valid recipe fail at once.

        Raises `RunError` if a trial ended without a metric of the objective and no earlier trial had this metric,
        because the remaining trials would lack it too.
        """
        unmeasured = next((job for job in self._jobs if job.unmeasured), None)
        measured = (TrialState.COMPLETE, TrialState.PRUNED)
        if unmeasured is not None and not self.optuna_study.get_trials(deepcopy=False, states=measured):
            raise RunError(
                f"{self.study.directory}: stopped after trial {unmeasured.trial.number}, because no trial can be scored: "
                f"{unmeasured.unmeasured}; correct `objective` and choose another `name`"
            )
        while (trial := self._next()) is not None:
            # With groups, the keys of its group and of the earlier groups that have run.
            names = trial.user_attrs.get("names", list(self.study.recipe.search))
            suggested = {name: trial._suggest(name, self._distributions[name]) for name in names}
            point = from_storage(self.study, suggested)
            words = ", ".join(f"{name}={shown(value)}" for name, value in point.items())
            try:
                recipe = self.study.at(point, self.study.directory / "trials", f"{trial.number:04d}")
            except InputError as error:
                reason = " ".join(str(error).split())
                record_failure(self.optuna_study, trial, reason)
                show_line(self.console, f"trial {trial.number}: {words}: failed, {reason}")
                continue
            attempt = Attempt(recipe)
            resumed = "resumed, " if attempt.run.path.exists() else ""
            show_line(self.console, f"trial {trial.number}: {resumed}{words}")
            self._jobs.append(TrialJob(self, trial, attempt))
            return self._jobs[-1]
        return None

    def _next(self) -> optuna.Trial | None:
        if self._interrupted:
            return optuna.Trial(self.optuna_study, self._interrupted.pop(0)._trial_id)
        if self.study.recipe.groups:
            return self.optuna_study.ask() if self._enqueue_grid() else None
        started = [trial for trial in self.optuna_study.get_trials(deepcopy=False) if trial.state != TrialState.WAITING]
        return self.optuna_study.ask() if len(started) < self.study.recipe.number_of_trials else None

    def _enqueue_grid(self) -> bool:
        """Whether a grid point is waiting. Enqueues the grid of a group once all trials of the previous group have
        ended."""
        chained: dict[str, Any] = {}
        for group in self.study.recipe.groups:
            trials = _of_group(self.optuna_study, group)
            if self.group not in (None, group):
                if best_of(self.study, trials) is not None:
                    chained |= self._chosen(group, trials)
                continue
            enqueued = {trial.user_attrs["point"] for trial in trials}
            for number, point in enumerate(grid_of(group)):
                if number not in enqueued:
                    self.optuna_study.enqueue_trial(
                        to_storage(chained | point),
                        user_attrs={"group": group.name, "point": number, "names": [*chained, *point]},
                    )
            trials = _of_group(self.optuna_study, group)
            states = {trial.state for trial in trials}
            if TrialState.WAITING in states or TrialState.RUNNING in states:
                return TrialState.WAITING in states
            chained |= self._chosen(group, trials)
        return False

    def _chosen(self, group: Group, trials: list[FrozenTrial]) -> dict[str, Any]:
        best = best_of(self.study, trials)
        if best is None:
            reasons = Counter(trial.user_attrs.get("reason", "its limits were not kept") for trial in trials)
            ((reason, count),) = reasons.most_common(1)
            raise RunError(
                f"group {group.name}: none of its {len(trials)} trials can be chained to the next group; most frequent "
                f"reason ({count} of them): {reason}"
            )
        return {key: value for key, value in from_storage(self.study, best.params).items() if key in group.grid}


class TrialJob:
    """Runs one Optuna trial, or resumes it after an interruption. Prints its result and its warnings, except those in
    `warned`."""

    def __init__(self, search: "Search", trial: optuna.Trial, attempt: Attempt) -> None:
        self.study, self.attempt, self.trial = search.study, attempt, trial
        self.optuna_study, self.console, self.warned = search.optuna_study, search.console, search.warned
        self._reported = set(self._frozen().intermediate_values)
        self._pruned = False
        self.damage = ""
        """Why the metrics of the run are unreadable; empty if they are not."""
        self.unmeasured = ""
        """Why the finished run lacks a metric of the objective; empty otherwise."""

    def _frozen(self) -> FrozenTrial:
        return self.optuna_study._storage.get_trial(self.trial._trial_id)

    def begin(self, device: str | None) -> None:
        """Start the run, unless it is finished or was about to be pruned when the study was interrupted."""
        if self._reported and self.trial.should_prune():
            self._pruned = True
        self.poll()
        if not self._pruned:
            self.attempt.start(device)

    def poll(self) -> None:
        """Report new evaluations in order, and stop the run if one of them prunes the trial."""
        try:
            points = curve(self.attempt.lines(), self.study.recipe.objective)
        except PosttrainError as error:
            self.damage = str(error)
            self.attempt.stop()
            return
        for step, value in points:
            if self._pruned:
                break
            if step not in self._reported:
                self.trial.report(value, step)
                self._reported.add(step)
                self._pruned = self.trial.should_prune()
        if self._pruned:
            self.attempt.stop()

    def end(self) -> None:
        """Report the result to Optuna: a value, pruned, or failed with a reason."""
        reason, value = self.damage or ("" if self._pruned else self.attempt.failure() or ""), None
        if not self.damage:
            self.trial.set_user_attr("minutes", round(self.attempt.minutes, 3))
        if not reason:
            try:
                value = self._measure()
            except PosttrainError as error:
                reason = str(error)
                if isinstance(error, MissingMetric):
                    self.unmeasured = reason
        if reason:
            record_failure(self.optuna_study, self.trial, reason)
        elif self._pruned:
            self.optuna_study.tell(self.trial, state=TrialState.PRUNED)
        else:
            self.optuna_study.tell(self.trial, value)
        for line in [] if self.damage else self.attempt.lines():
            message = " ".join(str(line.get("message", "")).split()) if line["kind"] == "warning" else ""
            if message and message not in self.warned:
                self.warned.add(message)
                show_line(self.console, f"trial {self.trial.number}: warning: {message}")
        trials = self.optuna_study.get_trials(deepcopy=False)
        best = best_of(self.study, trials)
        for other in trials if self.study.recipe.weights == "best" else ():
            if other.state.is_finished():
                run = Attempt(self.attempt.recipe.model_copy(update={"name": f"{other.number:04d}"}))
                run.delete_weights(but_model=other is best)
        ended = trials[self.trial.number]
        if ended.state == TrialState.FAIL:
            result = f"failed, {ended.user_attrs['reason']}"
        else:
            how = "pruned, " if ended.state == TrialState.PRUNED else ""
            metric = self.study.recipe.objective.metric
            result = f"{how}{metric} {ended.value:.4g} at step {ended.user_attrs['step']}"
        show_line(self.console, f"trial {ended.number}: {result}")

    def _measure(self) -> float:
        """The value of the trial. Its step, limited metrics and constraints are stored as well."""
        lines, reached = self.attempt.lines(), max(self._reported, default=0)
        # A pruned run may log more before it stops. Ignore that, because it depends on timing.
        known = [line for line in lines if line["step"] <= reached] if self._pruned else lines
        result = outcome(known, self.study.recipe.objective)
        self.trial.set_user_attr("step", result.step)
        if (verdict := read_verdict(self.attempt.run.path)) is not None:
            what = verdict.sentence.partition(":")[0]  # such as "The reward rose and the audit did not"
            improved = verdict.outcome == IMPROVED
            self.trial.set_user_attr("verdict", IMPROVED if improved else what[0].lower() + what[1:])
        self.trial.set_user_attr("limited", result.limited)
        have = self._frozen().constraints
        for metric, distance in result.violations.items():
            if metric not in have:
                self.trial.set_constraint(metric, distance)
        return result.value


def record_failure(optuna_study: optuna.Study, trial: optuna.Trial, reason: str) -> None:
    """Record the failure of a trial with its reason."""
    trial.set_user_attr("reason", reason)
    optuna_study.tell(trial, state=TrialState.FAIL)


def _of_group(optuna_study: optuna.Study, group: Group) -> list[FrozenTrial]:
    return [trial for trial in optuna_study.get_trials(deepcopy=False) if trial.user_attrs.get("group") == group.name]
