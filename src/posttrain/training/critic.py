"""The critic in training: values of a step's episodes, their targets, its own updates, and its state."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from posttrain.credit.assign import (
    critic_advantages,
    discounted_returns,
    sampled_rewards,
    sampled_values,
)
from posttrain.credit.returns import explained_variance
from posttrain.episode import Episode, PerToken, RewardStreams
from posttrain.errors import InputError
from posttrain.models.critic import Critic, SharedCritic, ValueHead
from posttrain.models.forward import TokenScores
from posttrain.models.policy import Policy
from posttrain.recipe.credit import CriticCredit
from posttrain.recipe.stages import RlRecipe
from posttrain.training.batches import Sample, on_stream
from posttrain.training.objectives import ValueObjective, known
from posttrain.training.optimizer import Optimizer
from posttrain.training.updater import Totals, Updater


class CriticLearner:
    """The critic with its optimizer. Its updates are made on the episodes of the policy's.

    A critic with a trunk of its own makes every update by itself. One on the policy's trunk makes those before the
    policy's first, and is then trained in the policy's: `train_with` hands its head over.
    """

    def __init__(self, recipe: RlRecipe, credit: CriticCredit, policy: Policy, updates: int) -> None:
        """`updates`: its optimizer steps in the whole run. `InputError` where its tokens are not the policy's."""
        self.recipe = recipe.critic
        self.credit = credit
        self.model = SharedCritic(policy) if recipe.critic.backbone == "shared" else _own_critic(recipe, policy)
        self.optimizer = Optimizer(self.model.trainable(), self.recipe.optimizer, updates)
        self.learner: Updater[torch.Tensor] = Updater(
            self.model, self.optimizer, recipe.learner, self._forward, key="critic.optimizer"
        )
        self.objective = ValueObjective(self.recipe.clip)
        self._fit: Totals = {}

    @property
    def head(self) -> ValueHead | None:
        """The head on the policy's trunk; None for a critic with a trunk of its own."""
        return self.model.head if isinstance(self.model, SharedCritic) else None

    def train_with(self, learner: Updater[TokenScores]) -> None:
        """Let the policy's learner make the head's updates with its own, where they share a trunk."""
        if self.head is not None:
            learner.also_train("critic", "critic.optimizer", self.optimizer)

    @property
    def learns_alone(self) -> bool:
        """Whether the policy waits for the critic's first updates."""
        return self.optimizer.updates < self.recipe.updates_before_policy

    def judge(self, episodes: Sequence[Episode], samples: Sequence[Sample], rewards: RewardStreams) -> PerToken:
        """The value before each sampled token, zero elsewhere; `samples` also get it, and the target of its loss.

        The target is A + V with the advantage as it is before whitening. How well the values foretell the discounted
        rewards that then came (explained variance) joins the metrics of the next update.
        """
        self._evaluate([s for s in samples if s.values is None])
        values: PerToken = []
        left = iter(samples)
        for episode in episodes:
            values.append([on_stream(known(next(left).values), stream.sampled) for stream in episode.streams])
        paid, judged = sampled_rewards(episodes, rewards), sampled_values(episodes, values)
        advantages = critic_advantages(self.credit, episodes, paid, judged)
        targets = np.concatenate([np.zeros(0), *(a + v for a, v in zip(advantages, judged, strict=True))])
        ends = np.cumsum([0, *(s.sampled_tokens for s in samples)])
        for sample, start, end in zip(samples, ends[:-1], ends[1:], strict=True):
            sample.returns = targets[start:end].astype(np.float32)
        returns = np.concatenate([np.zeros(0), *discounted_returns(self.credit, episodes, paid)])
        flat = np.concatenate([np.zeros(0), *judged])
        self._fit = {"critic/value": (float(flat.sum()), len(flat)), "critic/return": (float(returns.sum()), len(flat))}
        explained = explained_variance(returns, flat)
        self._fit |= {"critic/explained_variance": (explained, 1.0)} if np.isfinite(explained) else {}
        return values

    def update(self, samples: Sequence[Sample]) -> Totals:
        """One optimizer step of the critic alone; its metrics under names of their own."""
        found = self.take_fit()
        for key, value in self.learner.update(samples, self.objective).items():
            if key != "loss/total":
                found[key.replace("optimizer/", "critic/")] = value
        return found

    def take_fit(self) -> Totals:
        """What `judge` found out about the values, once."""
        found, self._fit = self._fit, {}
        return found

    def take_messages(self) -> list[str]:
        """As `Updater.take_messages`."""
        return [
            f"critic: {message}; lower critic.optimizer.learning_rate if it happens again"
            for message in self.learner.take_messages()
        ]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Weights that are trained, where the optimizer has no masters of them, and the optimizer's tensors."""
        found = {f"optimizer/{name}": tensor for name, tensor in self.optimizer.tensors().items()}
        for name, parameter in self.model.trainable():
            if f"optimizer/{name}/master" not in found:
                found[f"weights/{name}"] = parameter.detach()
        return found

    def state_dict(self) -> dict[str, Any]:
        """The counts of optimizer and learner."""
        counts = {"skipped_in_a_row": self.learner.skipped_in_a_row, "version": self.model.version}
        return {"optimizer": self.optimizer.state_dict(), **counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict` and the tensors that were read, bit for bit."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.learner.skipped_in_a_row, self.model.version = state["skipped_in_a_row"], state["version"]

    def _forward(self, samples: Sequence[Sample]) -> torch.Tensor:
        return self.model.values([s.stream.ids for s in samples], [s.stream.sampled for s in samples])

    def _evaluate(self, samples: Sequence[Sample]) -> None:
        for group, values in self.learner.without_gradient(samples):
            ends = np.cumsum([samples[i].sampled_tokens for i in group])[:-1]
            for i, own in zip(group, np.split(values.cpu().numpy(), ends), strict=True):
                samples[i].values = own


def open_critic(recipe: RlRecipe, policy: Policy, updates: int) -> CriticLearner | None:
    """The critic of the recipe; None where its credit uses no values. `updates`: those of the whole run."""
    credit = recipe.credit
    return CriticLearner(recipe, credit, policy, updates) if isinstance(credit, CriticCredit) else None


def _own_critic(recipe: RlRecipe, policy: Policy) -> Critic:
    critic = Critic(recipe.critic.model(recipe.model), recipe.seed)
    if critic.tokenizer.get_vocab() != policy.tokenizer.get_vocab():
        raise InputError(
            f"critic.path: {recipe.critic.path} has another tokenizer than {recipe.model.path}; the critic reads the "
            "policy's tokens, so start it from a model of the same family, or leave critic.path out"
        )
    # A critic that starts from the reward model then begins at what the rewards are.
    critic.values_in_reward_units = recipe.reward is not None and recipe.reward.normalize == "stored"
    return critic
