"""The policy: a causal language model with its tokenizer, and its frozen start as reference."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from posttrain.distributed.sharding import ShardedModel
from posttrain.models.base import TrainedModel
from posttrain.models.forward import TokenScores, hidden_states, token_scores
from posttrain.models.load import load_model
from posttrain.models.packing import PackedRow, pack_row
from posttrain.models.weights import adapter_tensors, exported_weights
from posttrain.recipe.model import ModelRecipe


class Policy(TrainedModel):
    """A causal language model with its tokenizer.

    policy = Policy("packaged:smollm2-135m", lora={"rank": 16})
    policy.export("my_model")  # loads with AutoModelForCausalLM.from_pretrained
    """

    def __init__(self, model: ModelRecipe | str | Path, seed: int = 0, trained: bool = True, **settings: Any) -> None:
        super().__init__(model, seed, trained, **settings)
        self._reference: tuple[torch.nn.Module, ShardedModel | None] | None = None

    def load(self) -> torch.nn.Module:
        return load_model(self.recipe, self.place)

    def replica(self) -> "Policy":
        """A policy with whole trained weights and a tokenizer of its own, for another thread of this process to use.

        Frozen weights are shared where this process has them whole. Where weights are divided among processes the replica is
        loaded anew, with those that training began with; no other process takes part.
        """
        if self.sharded is not None:
            with torch.random.fork_rng(devices=[]):
                return Policy(self.recipe, self.seed, trained=False)
        replica = copy.copy(self)
        frozen = {id(parameter): parameter for parameter in self.model.parameters() if not parameter.requires_grad}
        replica.model = copy.deepcopy(self.model, frozen)
        # A tokenizer refuses to be used by two threads at a time.
        replica.tokenizer = copy.deepcopy(self.tokenizer)
        replica._reference = None
        return replica

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The whole tensors of the model as it is now, under the names that `export` writes, adapters folded in."""
        self.settle()
        return exported_weights(self.model)

    def adapter_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The whole tensors of the adapters as they are now, under the names that peft writes."""
        self.settle()
        return adapter_tensors(self.model)

    def score(
        self,
        streams: Sequence[np.ndarray],
        sampled: Sequence[np.ndarray],
        temperature: float,
        positions_per_chunk: int,
        head: torch.nn.Module | None = None,
    ) -> TokenScores:
        """Scores of every sampled token of several streams, in one packed forward pass.

        `streams`: token ids [T_i] int64; `sampled`: [T_i] bool. Each sampled token is predicted from the position
        before it, so the first token of a stream cannot be one. A prompt that streams share is computed once.
        Returns [N] over all sampled tokens, stream by stream; `head` reads values from the same hidden states.
        """
        row = pack_row(streams, sampled)
        targets = torch.from_numpy(row.targets).to(self.device)

        def scored() -> tuple[torch.Tensor, ...]:
            before = self._states(row)
            found = token_scores(self.model, before, targets, temperature, positions_per_chunk)
            return found.logprobs, found.entropies, before

        logprobs, entropies, before = self.compute(scored)
        scores = TokenScores(logprobs, entropies)
        return scores if head is None else replace(scores, values=head(before))

    def states(self, streams: Sequence[np.ndarray], sampled: Sequence[np.ndarray]) -> torch.Tensor:
        """The last hidden states [N, hidden] from which `score` predicts the sampled tokens."""
        return self.compute(self._states, pack_row(streams, sampled))

    def _states(self, row: PackedRow) -> torch.Tensor:
        ids, positions = torch.from_numpy(row.ids).to(self.device), row.layout.positions().to(self.device)
        hidden = hidden_states(self.model, ids, positions, row.layout)
        return hidden[torch.from_numpy(row.predictors).to(self.device)]

    @contextmanager
    def as_reference(self) -> Iterator[None]:
        """Inside, the policy scores as it did at its start: adapters off, or a frozen copy of the weights in place."""
        with torch.no_grad():
            if self.recipe.lora is not None:
                with self.model.disable_adapter():  # type: ignore[operator]
                    yield
                return
            if self._reference is None:
                model = self.load()
                self._reference = model, self.shard(model, trained=False)
            own = self.model, self.sharded
            self.model, self.sharded = self._reference
            try:
                yield
            finally:
                self.model, self.sharded = own
