"""The best points again with other seeds: means with 95% intervals, and whether the winner can be told apart."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from optuna.trial import FrozenTrial
from rich.console import Console

from posttrain.errors import PosttrainError
from posttrain.evaluation.statistics import Estimate, mean
from posttrain.recipe.study_file import Study, shown
from posttrain.tune.outcome import Outcome, outcome
from posttrain.tune.space import restored
from posttrain.tune.trial import Attempt, work


@dataclass
class Retested:
    """A point and what its runs with other seeds gave."""

    trial: FrozenTrial
    found: dict[int, Outcome] = field(default_factory=dict)
    """Run seed -> the evaluation of that run that counts."""
    failed: dict[int, str] = field(default_factory=dict)
    """Run seed -> why that run failed."""

    @property
    def estimate(self) -> Estimate | None:
        """Mean over the seeds with Student's t interval; None where every run failed."""
        return mean([one.value for one in self.found.values()]) if self.found else None

    @property
    def feasible(self) -> bool:
        """Whether the means keep every limit."""
        metrics = {metric for one in self.found.values() for metric in one.beyond}
        return all(sum(one.beyond[metric] for one in self.found.values()) <= 0 for metric in metrics)


def retest(study: Study, points: Sequence[FrozenTrial], console: Console) -> list[Retested]:
    """Run every point with every seed of `study.recipe.retest`; what is finished is not run again. Best first."""
    assert study.recipe.retest is not None
    results = [Retested(trial) for trial in points]
    jobs = [_Again(study, result, seed, console) for result in results for seed in study.recipe.retest.seeds]
    waiting = list(reversed(jobs))
    work(lambda: waiting.pop() if waiting else None, study.recipe.workers, study.recipe.devices)
    sign = -1 if study.recipe.objective.direction == "maximize" else 1

    def order(result: Retested) -> tuple[bool, bool, float]:
        estimate = result.estimate
        return not result.feasible, estimate is None, sign * estimate.value if estimate is not None else 0.0

    results.sort(key=order)
    if study.recipe.weights == "best":
        for job in jobs:
            if job.result is not results[0]:
                job.attempt.forget_weights()
    return results


def verdict(study: Study, results: Sequence[Retested]) -> str:
    """One sentence: whether the winner can be told from the next."""
    metric, maximize = study.recipe.objective.metric, study.recipe.objective.direction == "maximize"
    usable = [result for result in results if result.found and result.feasible]
    if not usable:
        return "No retested point keeps its limits in a finished run, so the retest decides nothing."
    first = usable[0]
    if len(usable) == 1:
        return f"Only trial {first.trial.number} could be retested, so there is nothing to tell it from."
    other = usable[1]
    seeds = [seed for seed in first.found if seed in other.found]
    names = f"trial {first.trial.number} and trial {other.trial.number}"
    if len(seeds) < 2:
        return f"{names.capitalize()} share {len(seeds)} finished seeds, too few to tell them apart."
    sign = 1 if maximize else -1
    lead = mean([sign * (first.found[seed].value - other.found[seed].value) for seed in seeds])
    interval = f"[{lead.low:.4g}, {lead.high:.4g}]"
    how = f"leads trial {other.trial.number} by {lead.value:.4g} in {metric} over {lead.n} seeds, 95% interval of the paired difference {interval}"
    if lead.low > 0:
        return f"Trial {first.trial.number} {how}: it is distinguishable from the next."
    return f"Trial {first.trial.number} {how}, which holds 0: {names} cannot be told apart."


class _Again:
    """A retested point's run with one seed."""

    def __init__(self, study: Study, result: Retested, seed: int, console: Console) -> None:
        self.study, self.result, self.seed, self.console = study, result, seed, console
        point = restored(study, result.trial.params)
        name = f"{result.trial.number:04d}-seed{seed}"
        self.attempt = Attempt(study.at(point, study.directory / "retest", name, seed=seed))

    def begin(self, device: str | None) -> None:
        self.attempt.start(device)

    def follow(self) -> None:
        pass

    def end(self) -> None:
        said = self.attempt.failure()
        if said is None:
            try:
                found = outcome(self.attempt.lines(), self.study.recipe.objective)
                self.result.found[self.seed] = found
                said = f"{self.study.recipe.objective.metric} {shown(found.value)}"
            except PosttrainError as error:
                self.result.failed[self.seed] = said = str(error)
        else:
            self.result.failed[self.seed] = said
        text = f"retest of trial {self.result.trial.number}, seed {self.seed}: {said}"
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)
