"""Training of the critic: values of a step's episodes, their targets, and updates."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from posttrain.credit.assign import sampled_rewards, sampled_values
from posttrain.credit.critic import CriticCredit
from posttrain.credit.returns import explained_variance
from posttrain.episode import Episode, PerToken, RewardStreams
from posttrain.errors import InputError, naming
from posttrain.models.critic import Critic, SharedCritic
from posttrain.models.policy import Policy
from posttrain.models.reward import vocabulary
from posttrain.recipe.components import Factory
from posttrain.recipe.credit import CriticRecipe
from posttrain.recipe.rl import RlRecipe
from posttrain.training.objectives import ValueObjective
from posttrain.training.optimizer import Optimizer
from posttrain.training.updater import Sample, Samples, Totals, Updater, by_sample, computed, per_sample, per_token


class CriticUpdater:
    """A critic with its optimizer, in this process: values of samples, and one optimizer step at a time."""

    def __init__(self, model: Critic | SharedCritic, recipe: RlRecipe) -> None:
        self.model = model
        self.head = model.head if isinstance(model, SharedCritic) else None
        """The head on the policy's trunk; None for a critic with its own trunk."""
        self.optimizer = Optimizer(model.trainable(), recipe.critic.optimizer, recipe.steps * recipe.updates)
        self.sleepers = [self.optimizer]
        """Optimizers whose state leaves the device while episodes are sampled."""

        def forward(samples: Samples) -> torch.Tensor:
            return model.values([s.stream.ids for s in samples], [s.stream.sampled for s in samples])

        self.learner = Updater(model, self.optimizer, recipe.learner, forward, key="critic.optimizer")
        self.objective = ValueObjective(recipe.critic.clip)

    @property
    def updates(self) -> int:
        return self.optimizer.updates

    def begin_values(self, samples: Samples) -> Callable[[], list[np.ndarray]]:
        """A function that returns the values [n] float32 before the sampled tokens of each sample. A critic on processes of
        its own computes them meanwhile."""
        return lambda: per_sample(self.learner, samples)

    def begin_update(self, samples: Samples) -> Callable[[], Totals]:
        """A function that returns the metrics of an optimizer step on the samples, which is made by then. A critic on
        processes of its own makes it meanwhile. Names of metrics begin with `critic/`."""
        made = self.learner.update(samples, self.objective)
        totals = {key.replace("optimizer/", "critic/"): value for key, value in made.items() if key != "loss/total"}
        return lambda: totals

    def take_warnings(self) -> list[str]:
        return self.learner.take_warnings()

    def tensors(self, saved: Mapping[str, Any] | None = None) -> dict[str, torch.Tensor]:
        """The optimizer's moments and the trained weights. `saved`: the `state_dict` of a checkpoint to read into them."""
        state = saved and saved["optimizer"]
        tensors = {f"optimizer/{name}": tensor for name, tensor in self.optimizer.moments(state).items()}
        return tensors | {f"weights/{name}": tensor for name, tensor in self.optimizer.weights(state).items()}

    def state_dict(self) -> dict[str, Any]:
        counts = {"skipped_in_a_row": self.learner.skipped_in_a_row, "version": self.model.version}
        return {"optimizer": self.optimizer.state_dict(), **counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`, after the tensors were read."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.learner.skipped_in_a_row, self.model.version = state["skipped_in_a_row"], state["version"]


@Factory
def open_critic(recipe: RlRecipe, policy: Policy) -> CriticUpdater:
    """The critic of `policy`. If rewards are normalized by statistics stored with the reward model, a critic that starts from
    that model begins with values in these units. InputError if the critic's tokenizer is not the policy's."""
    settings, reward = recipe.critic, recipe.reward
    if settings.backbone == "shared":
        return CriticUpdater(SharedCritic(policy), recipe)
    with naming(path="critic.path" if settings.path else "model.path"):
        critic = Critic(settings.model(policy.recipe), recipe.seed)
    if vocabulary(critic.tokenizer) != vocabulary(policy.tokenizer):
        raise InputError(
            f"critic.path: {settings.path} does not have the tokenizer of {policy.recipe.path}; the critic reads the "
            "policy's tokens, so start it from a model of the same family, or leave critic.path out"
        )
    critic.values_in_reward_units = reward is not None and reward.normalize == "stored"
    return CriticUpdater(critic, recipe)


class CriticLearner:
    """The critic and its targets. It learns from the same episodes as the policy.

    A critic with its own trunk makes all of its updates. A critic that shares the policy's trunk makes only those of
    the value warm-up; after that, the policy's learner trains its head together with the policy.
    """

    def __init__(self, settings: CriticRecipe, credit: CriticCredit, updater: CriticUpdater) -> None:
        """`credit`: determines the targets of the values."""
        self.settings, self.credit, self.updater = settings, credit, updater
        self.head = updater.head
        """The head on the policy's trunk; None for a critic with its own trunk."""
        self._fit: Totals = {}
        self._begun: tuple[list[Sample], Callable[[], list[np.ndarray]]] | None = None

    def begin_values(self, samples: Samples) -> None:
        """Let a critic on processes of its own compute the values that the next `estimate_values` needs."""
        missing = [sample for sample in samples if sample.values is None]
        self._begun = missing, self.updater.begin_values(missing)

    def estimate_values(self, episodes: Sequence[Episode], samples: Samples, rewards: RewardStreams) -> PerToken:
        """The value before each sampled token, zero elsewhere. Also sets `values` and `returns` of the samples.

        The targets `returns` come from `CriticCredit.targets`. The share of the variance of discounted returns that the values
        explain is among the metrics of the next update.
        """
        if self._begun is None:
            self.begin_values(samples)
        assert self._begun is not None
        (missing, computed_values), self._begun = self._begun, None
        for sample, sample_values in zip(missing, computed_values(), strict=True):
            sample.values = sample_values
        values = per_token(episodes, (computed(sample.values) for sample in samples))
        rewards_of, values_of = sampled_rewards(episodes, rewards), sampled_values(episodes, values)
        targets = np.concatenate([np.zeros(0), *self.credit.targets(episodes, rewards_of, values_of)])
        for sample, of_sample in zip(samples, by_sample(targets, samples), strict=True):
            sample.returns = of_sample.astype(np.float32)
        returns = np.concatenate([np.zeros(0), *self.credit.returns(episodes, rewards_of)])
        flat = np.concatenate([np.zeros(0), *values_of])
        self._fit = {"critic/value": (float(flat.sum()), len(flat)), "critic/return": (float(returns.sum()), len(flat))}
        explained = explained_variance(returns, flat)
        self._fit |= {"critic/explained_variance": (explained, 1.0)} if np.isfinite(explained) else {}
        return values

    def begin_update(self, samples: Samples) -> Callable[[], Totals]:
        """Make one optimizer step of the critic by itself. The returned function waits for a critic on processes of its own,
        and returns the metrics, under names that begin with `critic/`."""
        fit, finish = self.take_fit(), self.updater.begin_update(samples)
        return lambda: fit | finish()

    def take_fit(self) -> Totals:
        """Return the metrics of the last `estimate_values` and clear them."""
        fit, self._fit = self._fit, {}
        return fit

    def take_warnings(self) -> list[str]:
        return [
            f"critic: {warning}; lower critic.optimizer.learning_rate if it happens again"
            for warning in self.updater.take_warnings()
        ]
