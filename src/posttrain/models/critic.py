"""Critics: a decoder with a scalar head that estimates a value before each sampled token, or a head on the policy."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from posttrain.errors import InputError
from posttrain.models.forward import path_of, transformer
from posttrain.models.load import load_reward_model
from posttrain.models.packing import RowPart
from posttrain.models.policy import Policy
from posttrain.models.reward import RewardModel


class Critic(RewardModel):
    """A value model. Its head starts at zero, or is that of the reward model that the recipe names."""

    values_in_reward_units = False
    """Whether values are normalized by the reward model's stored mean and standard deviation, as its rewards are."""

    def load(self) -> torch.nn.Module:
        return load_reward_model(self.recipe, head_seed=0, head_scale=0.0, device=self.load_device)

    def values(self, streams: Sequence[np.ndarray], sampled: Sequence[np.ndarray]) -> torch.Tensor:
        """Values [N] float32 of all sampled tokens, differentiable, in one packed forward pass.

        `streams`: token ids [T_i] int64; `sampled`: [T_i] bool. Values are ordered stream by stream. Each is the value
        of the state before the token is sampled, read at the position that predicts it. A prefix that several streams
        share is computed once.
        """
        row = self.pack(streams, sampled)
        raw = self._read(row.ids, row.layout, row.predictors)
        mean, std = (self.values_in_reward_units and self.statistics) or (0.0, 1.0)
        return (raw - mean) / std


class ValueHead(torch.nn.Module):
    """A linear head in float32, initialized to zero: hidden states [N, hidden] -> values [N]."""

    def __init__(self, hidden: int, device: torch.device) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, hidden, dtype=torch.float32, device=device))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        # Computed in float32 for any dtype of the trunk, as the values of a separate critic are.
        return torch.nn.functional.linear(states.float(), self.weight)[:, 0]


class SharedCritic:
    """A value head on the policy's last hidden states, as a model that trains the head alone. To train head and trunk
    together, pass the head to `Policy.score`. The head is not part of the policy's model, so neither the policy's
    checkpoint nor its export contains it."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        if not path_of(policy.model).projects:
            raise InputError(
                f"critic.backbone: the logits of {transformer(policy.model).config.model_type} models are not a projection of "
                "hidden states that a value head could read; set `critic.backbone: separate`"
            )
        hidden = transformer(policy.model).get_output_embeddings().weight.shape[1]
        self.head = ValueHead(hidden, policy.device)
        self.version = 0

    @property
    def device(self) -> torch.device:
        return self.policy.device

    def trainable(self) -> list[tuple[str, torch.nn.Parameter]]:
        """The parameters of the head, as in `TrainedModel.trainable`."""
        return list(self.head.named_parameters())

    def reshard(self) -> None:
        """Reshard the trunk, as `TrainedModel.reshard` does."""
        self.policy.reshard()

    def set_last_backward(self, last: bool) -> None:
        """No effect: the trunk has no gradient."""

    @contextmanager
    def training_mode(self, *draw: int | str) -> Iterator[None]:
        """No effect: the trunk does not learn here, so it runs without dropout."""
        yield

    def values(self, streams: Sequence[np.ndarray], sampled: Sequence[np.ndarray]) -> torch.Tensor:
        """Values [N] float32, as `Critic.values` returns; differentiable in the head alone."""
        row = self.policy.pack(streams, sampled)
        part = RowPart(row.ids, row.layout, row.predictors, self.device)
        with torch.no_grad():
            states = self.policy.compute(part.states, self.policy.model)
        return part.gather(self.head(states))
