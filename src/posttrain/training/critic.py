"""Training of the critic: values of a step's episodes, their targets, and updates."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from posttrain.credit.assign import (
    discounted_returns,
    sampled_rewards,
    sampled_values,
    value_targets,
)
from posttrain.credit.returns import explained_variance
from posttrain.episode import Episode, PerToken, RewardStreams
from posttrain.errors import InputError
from posttrain.models.critic import Critic, SharedCritic, ValueHead
from posttrain.models.policy import Policy
from posttrain.recipe.credit import CriticCredit, CriticRecipe
from posttrain.recipe.model import LearnerRecipe
from posttrain.training.objectives import ValueObjective
from posttrain.training.optimizer import Optimizer
from posttrain.training.updater import Sample, Totals, Updater, computed, on_stream


class CriticLearner:
    """The critic with its optimizer. It learns from the same episodes as the policy.

    A critic with its own trunk makes all of its updates. A critic that shares the policy's trunk makes only those of
    the value warm-up; after that, the policy's learner trains its head together with the policy.
    """

    def __init__(
        self,
        settings: CriticRecipe,
        credit: CriticCredit,
        policy: Policy,
        learner: LearnerRecipe,
        updates: int,
        seed: int = 0,
        stored_statistics: bool = False,
    ) -> None:
        """Create the critic of `policy`.

        Args:
            credit: determines the targets of the values.
            updates: optimizer steps of the critic in the whole run.
            stored_statistics: whether rewards are normalized by statistics stored with the reward model. A critic that
                starts from that reward model then begins with values in these units.

        Raises:
            InputError: the critic's tokenizer is not the policy's.
        """
        self.settings = settings
        self.credit = credit
        if settings.backbone == "shared":
            self.model: Critic | SharedCritic = SharedCritic(policy)
        else:
            self.model = _own_critic(settings, policy, seed, stored_statistics)
        self.optimizer = Optimizer(self.model.trainable(), settings.optimizer, updates)
        self.learner: Updater[torch.Tensor] = Updater(
            self.model, self.optimizer, learner, self._forward, key="critic.optimizer"
        )
        self.objective = ValueObjective(settings.clip)
        self._fit: Totals = {}

    @property
    def head(self) -> ValueHead | None:
        """The head on the policy's trunk; None for a critic with its own trunk."""
        return self.model.head if isinstance(self.model, SharedCritic) else None

    @property
    def policy_waits(self) -> bool:
        """Whether the next update is one of the value warm-up, in which the policy does not learn."""
        return self.optimizer.updates < self.settings.updates_before_policy

    def estimate_values(
        self, episodes: Sequence[Episode], samples: Sequence[Sample], rewards: RewardStreams
    ) -> PerToken:
        """The value before each sampled token, zero elsewhere. Also sets `values` and `returns` of the samples.

        The targets `returns` come from `value_targets`. The share of the variance of discounted returns that the values
        explain is among the metrics of the next update.
        """
        self._evaluate([s for s in samples if s.values is None])
        values: PerToken = []
        left = iter(samples)
        for episode in episodes:
            values.append([on_stream(computed(next(left).values), stream.sampled) for stream in episode.streams])
        rewards_of, values_of = sampled_rewards(episodes, rewards), sampled_values(episodes, values)
        targets = np.concatenate([np.zeros(0), *value_targets(self.credit, episodes, rewards_of, values_of)])
        ends = np.cumsum([0, *(s.sampled_tokens for s in samples)])
        for sample, start, end in zip(samples, ends[:-1], ends[1:], strict=True):
            sample.returns = targets[start:end].astype(np.float32)
        returns = np.concatenate([np.zeros(0), *discounted_returns(self.credit, episodes, rewards_of)])
        flat = np.concatenate([np.zeros(0), *values_of])
        self._fit = {"critic/value": (float(flat.sum()), len(flat)), "critic/return": (float(returns.sum()), len(flat))}
        explained = explained_variance(returns, flat)
        self._fit |= {"critic/explained_variance": (explained, 1.0)} if np.isfinite(explained) else {}
        return values

    def update(self, samples: Sequence[Sample]) -> Totals:
        """Make one optimizer step of the critic alone. Returns its metrics, with names that begin with `critic/`."""
        totals = self.take_fit()
        for key, value in self.learner.update(samples, self.objective).items():
            if key != "loss/total":
                totals[key.replace("optimizer/", "critic/")] = value
        return totals

    def take_fit(self) -> Totals:
        """Return the metrics of the last `estimate_values` and clear them."""
        fit, self._fit = self._fit, {}
        return fit

    def take_warnings(self) -> list[str]:
        """As `Updater.take_warnings`."""
        return [
            f"critic: {warning}; lower critic.optimizer.learning_rate if it happens again"
            for warning in self.learner.take_warnings()
        ]

    def tensors(self) -> dict[str, torch.Tensor]:
        """The optimizer's tensors, and the trained weights that have no float32 masters."""
        tensors = {f"optimizer/{name}": tensor for name, tensor in self.optimizer.tensors().items()}
        for name, parameter in self.model.trainable():
            if f"optimizer/{name}/master" not in tensors:
                tensors[f"weights/{name}"] = parameter.detach()
        return tensors

    def state_dict(self) -> dict[str, Any]:
        """The counters of optimizer and learner."""
        counts = {"skipped_in_a_row": self.learner.skipped_in_a_row, "version": self.model.version}
        return {"optimizer": self.optimizer.state_dict(), **counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`. Call it after the tensors were read."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.learner.skipped_in_a_row, self.model.version = state["skipped_in_a_row"], state["version"]

    def _forward(self, samples: Sequence[Sample]) -> torch.Tensor:
        return self.model.values([s.stream.ids for s in samples], [s.stream.sampled for s in samples])

    def _evaluate(self, samples: Sequence[Sample]) -> None:
        for group, values in self.learner.without_gradient(samples):
            ends = np.cumsum([samples[i].sampled_tokens for i in group])[:-1]
            for i, of_sample in zip(group, np.split(values.cpu().numpy(), ends), strict=True):
                samples[i].values = of_sample


def _own_critic(settings: CriticRecipe, policy: Policy, seed: int, stored_statistics: bool) -> Critic:
    critic = Critic(settings.model(policy.recipe), seed)
    if critic.tokenizer.get_vocab() != policy.tokenizer.get_vocab():
        raise InputError(
            f"critic.path: {settings.path} has another tokenizer than {policy.recipe.path}; the critic reads the "
            "policy's tokens, so start it from a model of the same family, or leave critic.path out"
        )
    critic.values_in_reward_units = stored_statistics
    return critic
