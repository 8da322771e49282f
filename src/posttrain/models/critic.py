"""The critic: a decoder with a scalar head, read before every sampled token."""

from collections.abc import Sequence

import numpy as np
import torch

from posttrain.models.forward import hidden_states
from posttrain.models.load import load_reward_model
from posttrain.models.packing import pack_row
from posttrain.models.reward import RewardModel


class Critic(RewardModel):
    """A model of values. It starts from a language model with a head of zeros, or from a reward model with its own."""

    in_units_of_reward = False
    """Whether values are scaled by the mean and standard deviation that the reward model kept, as its rewards are."""

    def load(self) -> torch.nn.Module:
        return load_reward_model(self.recipe, head_seed=0, head_scale=0.0)

    def values(self, streams: Sequence[np.ndarray], sampled: Sequence[np.ndarray]) -> torch.Tensor:
        """Values [N] float32, differentiable, of several streams, in one packed forward pass.

        `streams`: token ids [T_i] int64; `sampled`: [T_i] bool. There is one for each sampled token, stream by stream:
        that of the state before it is sampled, read at the position that predicts it. A prompt that streams share is
        computed once.
        """
        row = pack_row(streams, sampled)
        ids, positions = torch.from_numpy(row.ids).to(self.device), row.layout.positions().to(self.device)
        hidden = hidden_states(self.model, ids, positions, row.layout)
        before = hidden[torch.from_numpy(row.predictors).to(self.device)]
        # In float32 whatever the weights are in, as rewards are.
        raw = torch.nn.functional.linear(before.float(), self._head().weight.float())[:, 0]
        mean, std = (self.in_units_of_reward and self.statistics) or (0.0, 1.0)
        return (raw - mean) / std
