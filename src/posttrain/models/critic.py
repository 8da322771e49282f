"""The critic: a decoder with a scalar head, read before every sampled token; or such a head on the policy's own trunk."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from posttrain.models.forward import hidden_states, transformer
from posttrain.models.load import load_reward_model
from posttrain.models.packing import pack_row
from posttrain.models.policy import Policy
from posttrain.models.reward import RewardModel


class Critic(RewardModel):
    """A model of values. It starts from a language model with a head of zeros, or from a reward model with its own."""

    in_units_of_reward = False
    """Whether values are scaled by the mean and standard deviation that the reward model kept, as its rewards are."""

    def load(self) -> torch.nn.Module:
        return load_reward_model(self.recipe, head_seed=0, head_scale=0.0, place=self.place)

    def values(self, streams: Sequence[np.ndarray], sampled: Sequence[np.ndarray]) -> torch.Tensor:
        """Values [N] float32, differentiable, of several streams, in one packed forward pass.

        `streams`: token ids [T_i] int64; `sampled`: [T_i] bool. There is one for each sampled token, stream by stream:
        that of the state before it is sampled, read at the position that predicts it. A prompt that streams share is
        computed once.
        """
        row = pack_row(streams, sampled)
        ids, positions = torch.from_numpy(row.ids).to(self.device), row.layout.positions().to(self.device)
        at = torch.from_numpy(row.predictors).to(self.device)

        def read() -> torch.Tensor:
            before = hidden_states(self.model, ids, positions, row.layout)[at]
            # In float32 whatever the weights are in, as rewards are.
            return torch.nn.functional.linear(before.float(), self._head().weight.float()).squeeze(1)

        raw = self.compute(read)
        mean, std = (self.in_units_of_reward and self.statistics) or (0.0, 1.0)
        return (raw - mean) / std


class ValueHead(torch.nn.Module):
    """Values [N] float32 = hidden states [N, hidden] x `weight` [1, hidden], which starts at 0 and is float32."""

    def __init__(self, hidden: int, device: torch.device) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, hidden, dtype=torch.float32, device=device))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        # In float32 whatever the trunk is in, as those of a critic of its own are.
        return torch.nn.functional.linear(states.float(), self.weight)[:, 0]


class SharedCritic:
    """A value head on the policy's last hidden states, as a model in which the head alone is trained.

    `Policy.score` with this head is what trains both at once. The head is no part of the policy's model: neither its
    checkpoint nor its export holds it.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        hidden = transformer(policy.model).get_output_embeddings().weight.shape[1]
        self.head = ValueHead(hidden, policy.device)
        self.version = 0

    @property
    def device(self) -> torch.device:
        return self.policy.device

    def trainable(self) -> list[tuple[str, torch.nn.Parameter]]:
        """The head alone, as `TrainedModel.trainable`."""
        return list(self.head.named_parameters())

    def settle(self) -> None:
        """As `TrainedModel.settle`, of the trunk."""
        self.policy.settle()

    def reduce_next(self, last: bool) -> None:
        """The trunk has no gradient."""

    @contextmanager
    def in_training(self) -> Iterator[None]:
        """Changes nothing: a trunk that does not learn is read without dropout."""
        yield

    def values(self, streams: Sequence[np.ndarray], sampled: Sequence[np.ndarray]) -> torch.Tensor:
        """Values [N] float32 as `Critic.values` gives them, differentiable in the head alone."""
        with torch.no_grad():
            states = self.policy.states(streams, sampled)
        return self.head(states)
