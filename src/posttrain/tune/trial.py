"""A trial: a run whose held-out metrics go to Optuna's study while it runs, and whose end does."""

from typing import Any

import optuna
from optuna.trial import TrialState

from posttrain.errors import PosttrainError
from posttrain.recipe.study_file import Study
from posttrain.tune.attempt import Attempt
from posttrain.tune.outcome import NotMeasured, curve, outcome


class TrialJob:
    """Trial `trial` of the study `kept`, begun anew or gone on with after a kill."""

    def __init__(self, study: Study, kept: optuna.Study, trial: optuna.Trial, attempt: Attempt) -> None:
        self.study = study
        self.kept = kept
        self.trial = trial
        self.attempt = attempt
        self._reported = set(_frozen(kept, trial).intermediate_values)
        self._pruned = False
        self._damage = ""
        self.unmeasured = ""
        """Why, where the run came to its end without a metric that the study is judged by."""

    @property
    def damaged(self) -> bool:
        """Whether the metrics of the run cannot be read."""
        return bool(self._damage)

    def begin(self, device: str | None) -> None:
        """Start the run, unless it had ended. One that a killed study was about to prune is pruned."""
        if self._reported and self.trial.should_prune():
            self._pruned = True
        self.follow()
        if not self._pruned:
            self.attempt.start(device)

    def follow(self) -> None:
        """Report the evaluations that are new, in order, until one of them prunes the trial."""
        try:
            points = curve(self.attempt.lines(), self.study.recipe.objective)
        except PosttrainError as error:
            self._damage = str(error)
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
        """Tell Optuna what came of it: a value, pruned, or failed with the reason."""
        reason = self._damage or ("" if self._pruned else self.attempt.failure() or "")
        if not self._damage:
            self.trial.set_user_attr("minutes", round(self.attempt.minutes, 3))
        value = None
        if not reason:
            try:
                value = self._measure()
            except PosttrainError as error:
                reason = str(error)
                if isinstance(error, NotMeasured):
                    self.unmeasured = reason
        if reason:
            tell_failure(self.kept, self.trial, reason)
        elif self._pruned:
            self.kept.tell(self.trial, state=TrialState.PRUNED)
        else:
            self.kept.tell(self.trial, value)

    def _measure(self) -> float:
        """The value of the trial; its step and its limits are stored beside it."""
        lines, reached = self.attempt.lines(), max(self._reported, default=0)
        # A pruned run may have gone on a little before it stopped, as long as it took; that must not matter.
        known = [line for line in lines if line["step"] <= reached] if self._pruned else lines
        found = outcome(known, self.study.recipe.objective)
        self.trial.set_user_attr("step", found.step)
        self.trial.set_user_attr("limited", found.limited)
        have = _frozen(self.kept, self.trial).constraints
        for metric, distance in found.beyond.items():
            if metric not in have:
                self.trial.set_constraint(metric, distance)
        return found.value


def tell_failure(kept: optuna.Study, trial: optuna.Trial, reason: str) -> None:
    """Record that the trial failed, and why."""
    trial.set_user_attr("reason", reason)
    kept.tell(trial, state=TrialState.FAIL)


def _frozen(kept: optuna.Study, trial: optuna.Trial) -> Any:
    return kept._storage.get_trial(trial._trial_id)
