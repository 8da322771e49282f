"""Rewards of units: what a unit-level reward model computes for samples, and what its training minimises."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from posttrain.losses.units import unevenness, unit_entropies, unit_means, unit_spreads
from posttrain.models.reward import RewardModel, UnitValues
from posttrain.recipe.preference import RewardLossRecipe
from posttrain.recipe.unit_rewards import UnitRewardsRecipe
from posttrain.training.batches import Sample, pack
from posttrain.training.comparisons import Judgement, RewardObjective
from posttrain.training.learner import Totals
from posttrain.training.unit_reader import UnitReader


def unit_reward_forward(model: RewardModel, reader: UnitReader) -> Callable[[Sequence[Sample]], UnitValues]:
    """Rewards of the units of each sample."""

    def forward(samples: Sequence[Sample]) -> UnitValues:
        streams = [sample.stream for sample in samples]
        return model.unit_rewards([s.ids for s in streams], [s.sampled for s in streams], reader.ends(samples))

    return forward


def unit_rewards(
    model: RewardModel, reader: UnitReader, samples: Sequence[Sample], budget: int, key: str
) -> list[np.ndarray]:
    """[K_i] float32 of each sample: the rewards of its units, without gradient; `reader` remembers where they end.

    `budget`: most tokens in a forward pass; `key` is its name in messages.
    """
    reader.remember(samples)
    forward = unit_reward_forward(model, reader)
    found: dict[int, np.ndarray] = {}
    for group in pack(samples, budget, key):
        with torch.no_grad():
            values = forward([samples[i] for i in group])
        cuts = np.cumsum(np.bincount(values.stream.cpu().numpy(), minlength=len(group)))[:-1]
        found |= dict(zip(group, np.split(values.rewards.cpu().numpy(), cuts), strict=True))
    return [found[i] for i in range(len(samples))]


class UnitRewardObjective(RewardObjective):
    """Bradley-Terry on the mean rewards of the units of two answers, + coefficient x unevenness of both."""

    def __init__(self, loss: RewardLossRecipe, units: UnitRewardsRecipe) -> None:
        super().__init__(loss)
        self.units = units

    def judge(self, output: UnitValues, samples: Sequence[Sample]) -> Judgement:  # type: ignore[override]
        """Losses without the regulariser."""
        return super().judge(unit_means(output.rewards, output.stream, output.streams), samples)

    def __call__(  # type: ignore[override]
        self, output: UnitValues, samples: Sequence[Sample], weights: Sequence[float]
    ) -> tuple[torch.Tensor, Totals]:
        judged = self.judge(output, samples)
        loss, totals = judged.losses.sum(), self.totals(judged)
        parts = (output.rewards, output.stream, output.streams)
        with torch.no_grad():
            answers = float(output.streams)
            totals["units/per_answer"] = (float(len(output.rewards)), answers)
            totals["units/effective"] = (float(unit_entropies(*parts).exp().sum()), answers)
            totals["units/spread"] = (float(unit_spreads(*parts).sum()), answers)
        if self.units.entropy:
            uneven = unevenness(*parts, self.units.entropy_form).sum()
            loss = loss + self.units.entropy * uneven
            totals["loss/unevenness"] = (float(uneven.detach()), float(len(judged.rows)))
        return loss, totals
