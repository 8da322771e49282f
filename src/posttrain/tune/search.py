"""Which trial comes next: of a search, what the sampler draws; of groups, the next point of their grids."""

from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState
from rich.console import Console

from posttrain.errors import InputError, RunError
from posttrain.recipe.study import Group, grid_of
from posttrain.recipe.study_file import Study, shown
from posttrain.tune.best import best_of, most_frequent
from posttrain.tune.report import messages_of
from posttrain.tune.space import distributions, restored, stored
from posttrain.tune.study import owner, torn_trials
from posttrain.tune.trial import Attempt, TrialJob, tell_failure


class Search:
    """Gives the jobs of a study, those first that a kill has interrupted."""

    def __init__(self, study: Study, kept: optuna.Study, console: Console) -> None:
        self.study = study
        self.kept = kept
        self.console = console
        self._distributions = distributions(study)
        self._torn = torn_trials(study, kept)
        self._told: list[_Told] = []
        self._warned: set[str] = set()

    def take(self) -> TrialJob | None:
        """The next trial that makes a recipe; None where there is none now. One that makes none fails at once.

        Raises `RunError` where a trial has ended without a metric that the study is judged by, before any had one: no
        other trial would have it either.
        """
        self._stop_unmeasured()
        while (trial := self._next()) is not None:
            trial.set_user_attr("owner", owner(self.study))
            point = restored(self.study, {name: self._suggest(trial, name) for name in self._names(trial)})
            words = ", ".join(f"{name}={shown(value)}" for name, value in point.items())
            try:
                recipe = self.study.at(point, self._runs, f"{trial.number:04d}")
            except InputError as error:
                reason = " ".join(str(error).split())
                tell_failure(self.kept, trial, reason)
                self._say(f"trial {trial.number}: {words}: failed, {reason}")
                continue
            attempt = Attempt(recipe)
            goes_on = "goes on, " if attempt.run.path.exists() else ""
            self._say(f"trial {trial.number}: {goes_on}{words}")
            self._told.append(_Told(self.study, self.kept, trial, attempt, self.console, self._warned))
            return self._told[-1]
        return None

    def _stop_unmeasured(self) -> None:
        lacking = next((job for job in self._told if job.unmeasured), None)
        measured = (TrialState.COMPLETE, TrialState.PRUNED)
        if lacking is not None and not self.kept.get_trials(deepcopy=False, states=measured):
            raise RunError(
                f"{self.study.directory}: stopped after trial {lacking.trial.number}, since no trial can be judged: "
                f"{lacking.unmeasured}; correct `objective` and choose another `name`"
            )

    @property
    def _runs(self) -> Path:
        return self.study.directory / "trials"

    def _next(self) -> optuna.Trial | None:
        if self._torn:
            return optuna.Trial(self.kept, self._torn.pop(0)._trial_id)
        if self.study.recipe.groups:
            return self.kept.ask() if self._grid_is_there() else None
        begun = [trial for trial in self.kept.get_trials(deepcopy=False) if trial.state != TrialState.WAITING]
        return self.kept.ask() if len(begun) < self.study.recipe.number_of_trials else None

    def _suggest(self, trial: optuna.Trial, name: str) -> Any:
        return trial._suggest(name, self._distributions[name])

    def _names(self, trial: optuna.Trial) -> list[str]:
        """What is searched in this trial: of groups, its own keys and those of earlier groups."""
        group = trial.user_attrs.get("group")
        names: list[str] = []
        for one in self.study.recipe.groups:
            names += one.grid
            if one.name == group:
                return names
        return list(self.study.recipe.search)

    def _grid_is_there(self) -> bool:
        """Whether a point of a grid waits. The next group's is laid out once all of the group before have ended."""
        chained: dict[str, Any] = {}
        for group in self.study.recipe.groups:
            trials = _of_group(self.kept, group)
            have = {trial.user_attrs["point"] for trial in trials}
            for place, point in enumerate(grid_of(group)):
                if place not in have:
                    self.kept.enqueue_trial(stored(chained | point), user_attrs={"group": group.name, "point": place})
            trials = _of_group(self.kept, group)
            if any(trial.state == TrialState.WAITING for trial in trials):
                return True
            if any(trial.state == TrialState.RUNNING for trial in trials):
                return False
            chained |= self._chosen(group, trials)
        return False

    def _chosen(self, group: Group, trials: list[FrozenTrial]) -> dict[str, Any]:
        best = best_of(self.study, trials)
        if best is None:
            reasons = [trial.user_attrs.get("reason", "its limits were not kept") for trial in trials]
            reason, count = most_frequent(reasons)
            raise RunError(
                f"group {group.name}: none of its {len(trials)} trials can be chained to the next group, most often "
                f"({count} of them) because: {reason}"
            )
        return {key: value for key, value in restored(self.study, best.params).items() if key in group.grid}

    def _say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)


class _Told(TrialJob):
    """A trial whose end is printed, and those of its warnings that are not in `warned`, where they are then put."""

    def __init__(
        self,
        study: Study,
        kept: optuna.Study,
        trial: optuna.Trial,
        attempt: Attempt,
        console: Console,
        warned: set[str],
    ) -> None:
        super().__init__(study, kept, trial, attempt)
        self.console = console
        self.warned = warned

    def end(self) -> None:
        super().end()
        for message in [] if self.damaged else messages_of(self.attempt.lines()):
            if message not in self.warned:
                self.warned.add(message)
                self._say(f"trial {self.trial.number}: warning: {message}")
        if self.study.recipe.weights == "best":
            self._forget()
        ended = self.kept.get_trials(deepcopy=False)[self.trial.number]
        metric = self.study.recipe.objective.metric
        if ended.state == TrialState.FAIL:
            said = f"failed, {ended.user_attrs['reason']}"
        else:
            how = "pruned, " if ended.state == TrialState.PRUNED else ""
            said = f"{how}{metric} {ended.value:.4g} at step {ended.user_attrs['step']}"
        self._say(f"trial {ended.number}: {said}")

    def _say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _forget(self) -> None:
        """Keep the weights of the best trial alone."""
        trials = self.kept.get_trials(deepcopy=False)
        best = best_of(self.study, trials)
        for trial in trials:
            if trial.state.is_finished() and trial is not best:
                Attempt(self.attempt.recipe.model_copy(update={"name": f"{trial.number:04d}"})).forget_weights()


def _of_group(kept: optuna.Study, group: Group) -> list[FrozenTrial]:
    return [trial for trial in kept.get_trials(deepcopy=False) if trial.user_attrs.get("group") == group.name]
