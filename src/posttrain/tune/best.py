"""Which trial is the best, and what there is to say where none is."""

from collections.abc import Sequence

from optuna.trial import FrozenTrial, TrialState

from posttrain.recipe.study_file import Study


def ranked(study: Study, trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """The finished trials that keep every limit, best first, the earlier one of equals before the later."""
    sign = -1 if study.recipe.objective.direction == "maximize" else 1
    finished = [trial for trial in trials if trial.state == TrialState.COMPLETE and feasible(trial)]
    return sorted(finished, key=lambda trial: (sign * (trial.value or 0.0), trial.number))


def best_of(study: Study, trials: Sequence[FrozenTrial]) -> FrozenTrial | None:
    """The first of `ranked`; None where there is none."""
    return next(iter(ranked(study, trials)), None)


def feasible(trial: FrozenTrial) -> bool:
    """Whether every limit is kept."""
    return all(distance <= 0 for distance in trial.constraints.values())


def why_none(study: Study, trials: Sequence[FrozenTrial]) -> str:
    """One sentence on a study without a best trial."""
    failed = [trial for trial in trials if trial.state == TrialState.FAIL]
    finished = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    place = f"{study.directory}: "
    if failed and len(failed) == len(trials):
        reason, count = most_frequent([trial.user_attrs.get("reason", "unknown") for trial in failed])
        how = "because" if count == len(failed) else f"most often ({count} of them) because"
        return f"{place}all {len(failed)} trials failed, {how}: {reason}; nothing is written as best"
    if finished:
        nearest = min(finished, key=lambda trial: sum(max(0.0, d) for d in trial.constraints.values()))
        limits = study.recipe.objective.within
        over = [metric for metric, distance in nearest.constraints.items() if distance > 0]
        said = ", ".join(
            f"{metric} {nearest.user_attrs['limited'][metric]:.4g} where "
            + (f"at most {limit.max:g}" if (limit := limits[metric]).max is not None else f"at least {limit.min:g}")
            for metric in over
        )
        return (
            f"{place}none of the {len(finished)} finished trials keeps its limits, nearest is trial {nearest.number} "
            f"({said} is asked); nothing is written as best"
        )
    return f"{place}no trial was finished, {len(failed)} failed and the others were pruned; nothing is written as best"


def most_frequent(reasons: Sequence[str]) -> tuple[str, int]:
    """The reason given most often, the first of equals, and how often; `reasons` is not empty."""
    best = max(dict.fromkeys(reasons), key=list(reasons).count)
    return best, list(reasons).count(best)
