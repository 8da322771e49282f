"""The best trial of a study, and the retest of the best points with other seeds."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from optuna.trial import FrozenTrial, TrialState
from rich.console import Console

from posttrain.errors import PosttrainError
from posttrain.recipe.study_file import Study, shown
from posttrain.runs.intervals import Estimate, mean_difference, seed_mean
from posttrain.runs.panels import metric_of
from posttrain.runs.tables import show_line
from posttrain.tune.study import from_storage
from posttrain.tune.trial import Attempt, Job, Outcome, outcome, run_jobs


def ranked(study: Study, trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """The finished trials that satisfy all limits, best first; ties in order of trial number."""
    sign = -1 if study.recipe.objective.direction == "maximize" else 1
    finished = [trial for trial in trials if trial.state == TrialState.COMPLETE and feasible(trial)]
    return sorted(finished, key=lambda trial: (sign * (trial.value or 0.0), trial.number))


def best_of(study: Study, trials: Sequence[FrozenTrial]) -> FrozenTrial | None:
    """The best trial; None if no finished trial satisfies all limits."""
    return next(iter(ranked(study, trials)), None)


def feasible(trial: FrozenTrial) -> bool:
    """Whether the trial satisfies all limits."""
    return all(distance <= 0 for distance in trial.constraints.values())


def no_best_reason(study: Study, trials: Sequence[FrozenTrial]) -> str:
    """Why the study has no best trial, in one sentence."""
    failed = [trial for trial in trials if trial.state == TrialState.FAIL]
    finished = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    prefix = f"{study.directory}: "
    if failed and len(failed) == len(trials):
        ((reason, count),) = Counter(trial.user_attrs.get("reason", "unknown") for trial in failed).most_common(1)
        how = "because" if count == len(failed) else f"most often ({count} of them) because"
        return f"{prefix}all {len(failed)} trials failed, {how}: {reason}; best.yaml is not written"
    if finished:
        nearest = min(finished, key=lambda trial: sum(max(0.0, d) for d in trial.constraints.values()))
        limits = study.recipe.objective.within
        over = [metric for metric, distance in nearest.constraints.items() if distance > 0]
        violated = ", ".join(
            f"{metric} {nearest.user_attrs['limited'][metric]:.4g} where {limits[metric]}" for metric in over
        )
        return (
            f"{prefix}none of {len(finished)} finished trials satisfies the limits; the nearest is trial "
            f"{nearest.number} ({violated} is required); best.yaml is not written"
        )
    return f"{prefix}no trial was finished, {len(failed)} failed and the others were pruned; best.yaml is not written"


@dataclass
class RetestResult:
    """A point of the search space, and the outcomes of its runs with other seeds."""

    trial: FrozenTrial
    rate: bool
    """Whether the objective lies in [0, 1]."""
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    """Run seed -> best evaluation of the run."""
    failed: dict[int, str] = field(default_factory=dict)
    """Run seed -> why the run failed."""

    @property
    def estimate(self) -> Estimate | None:
        """Mean over the seeds with its interval; None if all runs failed."""
        return seed_mean([one.value for one in self.outcomes.values()], self.rate) if self.outcomes else None

    @property
    def feasible(self) -> bool:
        """Whether the means over the seeds satisfy all limits."""
        metrics = {metric for one in self.outcomes.values() for metric in one.violations}
        return all(sum(one.violations[metric] for one in self.outcomes.values()) <= 0 for metric in metrics)


def retest(study: Study, points: Sequence[FrozenTrial], console: Console) -> list[RetestResult]:
    """Run every point with every seed of `study.recipe.retest`, skipping finished runs; returns the results, best
    first.
    """
    assert study.recipe.retest is not None
    rate = metric_of(study.recipe.objective.metric).panel.percent
    results = [RetestResult(trial, rate) for trial in points]
    jobs: list[_RetestJob] = []
    for result in results:
        jobs += [_RetestJob(study, result, seed, console, jobs) for seed in study.recipe.retest.seeds]
    waiting = list(reversed(jobs))
    run_jobs(lambda: waiting.pop() if waiting else None, study.recipe.workers, study.recipe.devices)
    return sorted(results, key=partial(_order, study))


def _order(study: Study, result: RetestResult) -> tuple[bool, bool, float]:
    sign, estimate = -1 if study.recipe.objective.direction == "maximize" else 1, result.estimate
    return not result.feasible, estimate is None, sign * estimate.value if estimate is not None else 0.0


def verdict(study: Study, results: Sequence[RetestResult]) -> str:
    """Whether the best point differs significantly from the second, in one sentence."""
    metric, maximize = study.recipe.objective.metric, study.recipe.objective.direction == "maximize"
    usable = [result for result in results if result.outcomes and result.feasible]
    if not usable:
        return "No retested point satisfies the limits in a finished run, so the retest is inconclusive."
    first = usable[0]
    if len(usable) == 1:
        return f"Only trial {first.trial.number} could be retested, so there is nothing to compare it with."
    other = usable[1]
    seeds = [seed for seed in first.outcomes if seed in other.outcomes]
    names = f"trial {first.trial.number} and trial {other.trial.number}"
    if len(seeds) < 2:
        return f"{names.capitalize()} share {len(seeds)} finished seeds, too few for a comparison."
    sign = 1 if maximize else -1
    lead = mean_difference([sign * (first.outcomes[seed].value - other.outcomes[seed].value) for seed in seeds])
    how = f"leads trial {other.trial.number} by {lead.value:.4g} in {metric} over {lead.n} seeds"
    if math.isnan(lead.low):
        return f"Trial {first.trial.number} {how}, the same in each: without a spread there is no interval, and the retest is inconclusive."
    how += f", 95% interval of the paired difference [{lead.low:.4g}, {lead.high:.4g}]"
    if lead.low > 0:
        return f"Trial {first.trial.number} {how}: the difference is significant."
    return f"Trial {first.trial.number} {how}, which contains 0: {names} do not differ significantly."


class _RetestJob(Job):
    """The run of a retested point with one seed."""

    def __init__(
        self, study: Study, result: RetestResult, seed: int, console: Console, jobs: "list[_RetestJob]"
    ) -> None:
        point = from_storage(study, result.trial.params)
        name = f"{result.trial.number:04d}-seed{seed}"
        super().__init__(study, Attempt(study.at(point, study.directory / "retest", name, seed=seed)))
        self.result, self.seed, self.console, self.jobs = result, seed, console, jobs
        self.ended = False

    def end(self) -> None:
        text = self.attempt.failure()
        if text is None:
            try:
                result = outcome(self.attempt.lines(), self.study.recipe.objective)
                self.result.outcomes[self.seed] = result
                text = f"{self.study.recipe.objective.metric} {shown(result.value)}"
            except PosttrainError as error:
                self.result.failed[self.seed] = text = str(error)
        else:
            self.result.failed[self.seed] = text
        message = f"retest of trial {self.result.trial.number}, seed {self.seed}: {text}"
        show_line(self.console, message)
        self.ended = True
        if self.study.recipe.weights == "best":
            self._delete_superseded()

    def _delete_superseded(self) -> None:
        """Keep the model of the best run of each point that is being run, and of the best of the others."""
        running = {id(job.result) for job in self.jobs if not job.ended}
        others = [job.result for job in self.jobs if id(job.result) not in running]
        best = min(others, key=partial(_order, self.study), default=None)
        sign = -1 if self.study.recipe.objective.direction == "maximize" else 1
        for job in self.jobs:
            if job.ended:
                values = {seed: (sign * one.value, seed) for seed, one in job.result.outcomes.items()}
                first = job.seed in values and values[job.seed] == min(values.values())
                job.attempt.delete_weights(first and (job.result is best or id(job.result) in running))
