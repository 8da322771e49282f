"""The sampler of a study: what it draws for a trial depends on the seed, the trial's number and the finished trials."""

from collections.abc import Sequence
from typing import Any

from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, TPESampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from posttrain.recipe.study import SamplerRecipe
from posttrain.seeds import derive_seed


class NumberedSampler(BaseSampler):
    """Multivariate TPE with random numbers of its own for every trial.

    A generator that is carried along would start again in a resumed study and draw its first points once more, and
    would draw otherwise where several processes share a study.
    """

    def __init__(self, recipe: SamplerRecipe) -> None:
        self.recipe = recipe

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return self._of(trial).infer_relative_search_space(study, trial)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        return self._of(trial).sample_relative(study, trial, search_space)

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        return self._of(trial, param_name).sample_independent(study, trial, param_name, param_distribution)

    def after_trial(self, study: Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None) -> None:
        self._of(trial).after_trial(study, trial, state, values)

    def _of(self, trial: FrozenTrial, name: str = "") -> TPESampler:
        # NumPy's old generator, which Optuna uses, takes 32 bits.
        seed = derive_seed(self.recipe.seed, "sampler", trial.number, name) % 2**32
        return TPESampler(
            seed=seed,
            multivariate=True,
            n_startup_trials=self.recipe.startup_trials,
            constant_liar=True,
        )
