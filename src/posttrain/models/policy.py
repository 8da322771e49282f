"""The policy: a causal language model with its tokenizer, its frozen initial weights as reference model, and its weights
as whole tensors for engines."""

import copy
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from posttrain.distributed.sharding import ShardedModel, full_tensor, is_sharded
from posttrain.models.base import TrainedModel
from posttrain.models.forward import Measure, TokenScores, hidden_states, logits_of, token_scores, transformer
from posttrain.models.load import load_model
from posttrain.models.packing import PackedRow, pack_row
from posttrain.recipe.model import ModelRecipe

_LAYER = re.compile(r"\.\d+\.")


class Policy(TrainedModel):
    """A causal language model with its tokenizer.

    policy = Policy("packaged:smollm2-135m", lora={"rank": 16})
    policy.export("my_model")  # loads with AutoModelForCausalLM.from_pretrained
    """

    def __init__(self, model: ModelRecipe | str | Path, seed: int = 0, trained: bool = True, **settings: Any) -> None:
        super().__init__(model, seed, trained, **settings)
        self._reference: tuple[torch.nn.Module, ShardedModel | None] | None = None

    def load(self) -> torch.nn.Module:
        return load_model(self.recipe, self.load_device)

    def replica(self) -> "Policy":
        """A policy with its own trained weights and tokenizer, for use in another thread of this process.

        Frozen weights are shared where this process holds them whole. If the model is sharded, the replica is loaded
        from its files with the initial weights, without any collective call.
        """
        if self.sharded is not None:
            with torch.random.fork_rng(devices=[]):
                return Policy(self.recipe, self.seed, trained=False)
        replica = copy.copy(self)
        frozen = {id(parameter): parameter for parameter in self.model.parameters() if not parameter.requires_grad}
        replica.model = copy.deepcopy(self.model, frozen)
        # A fast tokenizer raises when two threads use it at a time.
        replica.tokenizer = copy.deepcopy(self.tokenizer)
        replica._reference = None
        return replica

    # -- scores -------------------------------------------------------------------------------------------------------

    def score(
        self,
        streams: Sequence[np.ndarray],
        sampled: Sequence[np.ndarray],
        temperature: float,
        positions_per_chunk: int,
        head: torch.nn.Module | None = None,
        measure: Measure | None = None,
    ) -> TokenScores:
        """Log-probability and entropy of every sampled token of several streams, in one packed forward pass.

        `streams`: token ids [T_i] int64. `sampled`: [T_i] bool; the first token of a stream cannot be sampled, because
        each sampled token is predicted from the position before it. A prompt that streams share is computed once.
        Returns float32 [N] over all sampled tokens, stream by stream. `head` adds values from the same hidden states,
        `measure` a number from each distribution.
        """
        row = pack_row(streams, sampled)
        targets = torch.from_numpy(row.targets).to(self.device)

        def score() -> tuple[torch.Tensor, ...]:
            states = self._states(row)
            scores = token_scores(self.model, states, targets, temperature, positions_per_chunk, measure)
            measured = () if scores.measured is None else (scores.measured,)
            return scores.logprobs, scores.entropies, states, *measured

        logprobs, entropies, states, *measured = self.compute(score)
        scores = TokenScores(logprobs, entropies, measured=measured[0] if measured else None)
        return scores if head is None else replace(scores, values=head(states))

    def distributions(
        self,
        streams: Sequence[np.ndarray],
        sampled: Sequence[np.ndarray],
        temperature: float,
        positions_per_chunk: int,
        vocabulary: int,
        top_k: int | None,
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """The next-token distribution at every sampled token of several streams, without gradient.

        Token ids from `vocabulary` on, which are padding of the output layer, have no share in it. Returns log-probabilities
        [N, vocabulary] float32 and None; or, with `top_k` below `vocabulary`, those of the most probable tokens and last that
        of all others together, [N, top_k + 1], and the ids [N, top_k] int32 of the former.
        """
        row = pack_row(streams, sampled)
        divisor = temperature if temperature > 0 else 1.0

        def computed() -> tuple[np.ndarray, np.ndarray | None]:
            states, logprobs, ids = self._states(row), [], []
            for chunk in states.split(positions_per_chunk):
                whole = torch.log_softmax(logits_of(self.model, chunk)[:, :vocabulary] / divisor, dim=-1)
                if top_k is None or top_k >= vocabulary:
                    logprobs.append(whole.cpu().numpy())
                    continue
                best, chosen = whole.topk(top_k, dim=1)
                others = whole.scatter(1, chosen, -torch.inf).logsumexp(1, keepdim=True)
                logprobs.append(torch.cat([best, others], 1).cpu().numpy())
                ids.append(chosen.int().cpu().numpy())
            return np.concatenate(logprobs), np.concatenate(ids) if ids else None

        with torch.no_grad():
            return self.compute(computed)

    def states(self, streams: Sequence[np.ndarray], sampled: Sequence[np.ndarray]) -> torch.Tensor:
        """The last hidden states [N, hidden] from which `score` predicts the sampled tokens."""
        return self.compute(self._states, pack_row(streams, sampled))

    def _states(self, row: PackedRow) -> torch.Tensor:
        ids, positions = torch.from_numpy(row.ids).to(self.device), row.layout.positions().to(self.device)
        hidden = hidden_states(self.model, ids, positions, row.layout)
        return hidden[torch.from_numpy(row.predictors).to(self.device)]

    @contextmanager
    def as_reference(self) -> Iterator[None]:
        """Score as the reference model inside the block: with adapters off, or with a frozen copy of the initial weights."""
        with torch.no_grad():
            if self.recipe.lora is not None:
                with self.model.disable_adapter():  # type: ignore[operator]
                    yield
                return
            if self._reference is None:
                model = self.load()
                self._reference = model, self.shard(model, trained=False)
            trained = self.model, self.sharded
            self.model, self.sharded = self._reference
            try:
                yield
            finally:
                self.model, self.sharded = trained

    # -- weights for engines ------------------------------------------------------------------------------------------

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and whole tensors that `export` would write, with adapters merged and tied weights once.

        Tensors are on the model's device and share memory with the parameters where nothing is computed, so use each
        before the next update. At most one layer of computed tensors exists at a time. A collective call for a sharded
        model: all ranks iterate.
        """
        self.reshard()
        layer = ""
        tensors: dict[str, torch.Tensor] = {}
        with torch.no_grad():
            for name, tensor in _merged_parameters(self.model):
                match = _LAYER.search(name)
                prefix = name[: match.end()] if match else name
                if prefix != layer:
                    yield from _as_exported(self.model, tensors)
                    layer, tensors = prefix, {}
                tensors[name] = tensor
            yield from _as_exported(self.model, tensors)

    def adapter_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and whole tensors of the adapters, as peft writes them. All ranks iterate."""
        from peft import get_peft_model_state_dict

        self.reshard()
        for name, tensor in get_peft_model_state_dict(self.model).items():
            yield name, full_tensor(tensor).detach()


def _merged_parameters(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Whole parameters of the base model; adapted weights include the adapters' contribution."""
    base = transformer(model)
    adapted = {
        f"{name}.": module
        for name, module in base.named_modules()
        if hasattr(module, "base_layer") and hasattr(module, "get_delta_weight")
    }
    for name, parameter in base.named_parameters():
        owner = next((prefix for prefix in _module_prefixes(name) if prefix in adapted), None)
        if owner is None:
            yield name, full_tensor(parameter).detach()
        elif name.startswith(f"{owner}base_layer."):
            last = name.removeprefix(f"{owner}base_layer.")
            tensor = full_tensor(parameter).detach()
            if last == "weight":
                for adapter in adapted[owner].active_adapters:
                    tensor = tensor + _adapter_delta(adapted[owner], adapter)
            yield owner + last, tensor


def _adapter_delta(module: Any, adapter: str) -> torch.Tensor:
    """What the adapter adds to the weight of its base layer."""
    down, up = module.lora_A[adapter].weight, module.lora_B[adapter].weight
    if not is_sharded(down) and not is_sharded(up):
        return module.get_delta_weight(adapter)
    return (full_tensor(up) @ full_tensor(down)) * module.scaling[adapter]


def _module_prefixes(name: str) -> Iterator[str]:
    """`a.b.c` -> `a.b.`, `a.`"""
    while "." in name:
        name = name.rpartition(".")[0]
        yield f"{name}."


def _as_exported(model: Any, tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of one layer under the names of exported files.

    transformers holds some weights, such as those of experts, fused in memory and separate in files.
    """
    from transformers.core_model_loading import revert_weight_conversion

    yield from revert_weight_conversion(transformer(model), tensors).items()
