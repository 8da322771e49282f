"""The best trial of a study, or why it has none."""

from collections import Counter
from collections.abc import Sequence

from optuna.trial import FrozenTrial, TrialState

from posttrain.recipe.study_file import Study


def best_of(study: Study, trials: Sequence[FrozenTrial]) -> FrozenTrial | None:
    """The best trial, of equal ones the first; None if no finished trial satisfies all limits."""
    sign = -1 if study.recipe.objective.direction == "maximize" else 1
    finished = [trial for trial in trials if trial.state == TrialState.COMPLETE and feasible(trial)]
    return min(finished, key=lambda trial: (sign * (trial.value or 0.0), trial.number), default=None)


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
