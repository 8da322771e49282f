"""Models that are trained: the base of all of them, and the policy.

`TrainedModel` has weights, tokenizer, optional LoRA adapters, sharding, checkpoints and export. `Policy` is a causal
language model with its frozen initial weights as reference model, and its weights as whole tensors for engines.
"""

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from posttrain.distributed.sharding import ShardedModel, full_tensor, gather_to_rank0, set_shard
from posttrain.distributed.world import current_world, threads_per_process
from posttrain.errors import InputError, require_type
from posttrain.models.adapters import add_adapters, coverage_warnings, merged_parameters
from posttrain.models.cuda.copies import copied_to
from posttrain.models.forward import (
    TokenMetric,
    TokenScores,
    base_decoder,
    logits_of,
    routing_of,
    token_scores,
    transformer,
    upload,
)
from posttrain.models.layers import lengths_of
from posttrain.models.load import load_end_tokens, load_model, load_tokenizer, resolve_device
from posttrain.models.packing import PackedRow, RowPart, pack_row
from posttrain.models.routing import Routing
from posttrain.models.shared import shared_weights
from posttrain.models.writing import write_gathered, write_weights
from posttrain.recipe.compose import section
from posttrain.recipe.model import ModelRecipe
from posttrain.seeds import derive_seed

T = TypeVar("T")


class TrainedModel:
    """A model with its tokenizer. `version` counts the optimizer updates of its weights."""

    task = "CAUSAL_LM"
    """The task type of peft."""

    def __init__(self, model: ModelRecipe | str | Path, seed: int = 0, trained: bool = True, **settings: Any) -> None:
        """Load a model.

        Args:
            model: a hub id, a directory, a `.gguf` file, `packaged:smollm2-135m`, or a complete `ModelRecipe`.
            seed: run seed; adapters and new heads are initialized from it.
            trained: whether the weights will be optimized; otherwise sharded weights keep their dtype instead of
                float32 master weights.
            settings: further keys of the `model` section, for example `dtype="bfloat16"` or `lora={"rank": 16}`.

        Raises:
            InputError: there is no such model, or a setting is wrong.
        """
        require_type("model", model, ModelRecipe, str, Path)
        require_type("seed", seed, int)
        named = {} if isinstance(model, ModelRecipe) else {"path": str(model)}
        recipe = section(ModelRecipe, model if isinstance(model, ModelRecipe) else None, **named, **settings)
        if (threads := threads_per_process(recipe.threads)) is not None:
            torch.set_num_threads(threads)
        self.recipe = recipe
        self.seed = seed
        if recipe.load_in_4bit and current_world().sharded:
            raise InputError(
                "model.load_in_4bit is for one process without hardware.offload: all; remove it, or set hardware.processes=1"
            )
        self.tokenizer: Any = load_tokenizer(recipe)
        self.end_tokens = load_end_tokens(recipe.path, self.tokenizer)
        """Token ids that end a completion: the end tokens of the tokenizer, the generation configuration and the chat
        template."""
        with shared_weights():
            self.model = self.load()
        self.version = 0
        self.warnings: list[str] = []
        """Sentences about the recipe's adapters; stages report them at their start."""
        if recipe.lora is not None:
            torch.manual_seed(derive_seed(seed, "adapters"))
            # peft returns the model in training mode, with dropout on.
            self.model = add_adapters(self.model, recipe.lora, self.task).eval()
            self.warnings += coverage_warnings(self.model)
            if recipe.load_in_4bit:  # peft makes adapters of packed matrices in float32
                dtype = self.model.get_input_embeddings().weight.dtype  # type: ignore[operator]
                for parameter in (p for p in self.model.parameters() if p.requires_grad):
                    parameter.data = parameter.data.to(dtype)
        if self.routing is None and (recipe.router_replay or recipe.router_aux_loss > 0):
            key = "router_replay" if recipe.router_replay else "router_aux_loss"
            raise InputError(
                f"model.{key}: the choices of experts of {recipe.path} cannot be read: it has no experts, chooses them in another "
                "way than by one top-k, or is not computed in packed rows; remove the key"
            )
        if recipe.gradient_checkpointing:
            checkpoint_layers(self.model, recipe.gradient_checkpointing == "selective")
        self.sharded = self.shard(self.model, trained)

    def load(self) -> torch.nn.Module:
        """Load the initial model, without adapters."""
        raise NotImplementedError

    # -- device and sharding ------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """The device that the model computes on."""
        return next(self.model.parameters()).device if self.sharded is None else resolve_device(self.recipe.device)

    def release_cached_memory(self) -> None:
        """Return the freed blocks that torch keeps for reuse, so that an engine on the same GPU can allocate them. No
        effect on a CPU."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @property
    def load_device(self) -> torch.device | None:
        """The device that `load` puts weights on; None for the device that the recipe names. A model that will be
        sharded is loaded to CPU memory, so that no GPU ever holds all of it."""
        return torch.device("cpu") if current_world().sharded else None

    def shard(self, model: torch.nn.Module, trained: bool) -> ShardedModel | None:
        """Shard `model` in place if the run shards models; None otherwise."""
        if not current_world().sharded:
            return None
        inner = transformer(model)
        layers = getattr(getattr(inner, inner.base_model_prefix), "layers", ())
        return ShardedModel(model, list(layers), resolve_device(self.recipe.device), trained)

    @property
    def routing(self) -> Routing | None:
        """The routers of a model with experts (`models.routing`)."""
        return routing_of(self.model)

    def pack(
        self, streams: Sequence[np.ndarray], sampled: Sequence[np.ndarray], experts: Sequence[np.ndarray | None] = ()
    ) -> PackedRow:
        """The row of `streams` for this model (`models.packing.pack_row`)."""
        return pack_row(streams, sampled, lengths_of(base_decoder(self.model)), experts)

    def compute(self, function: Callable[..., T], *arguments: Any) -> T:
        """Return `function(*arguments)`; sharded weights are gathered while it computes with them. Outputs that need a
        gradient must be a tensor or a tuple of tensors."""
        return function(*arguments) if self.sharded is None else self.sharded(function, *arguments)

    def reshard(self) -> None:
        """Free weights that are still gathered after a forward pass without a backward pass."""
        if self.sharded is not None:
            self.sharded.reshard()

    def set_last_backward(self, last: bool) -> None:
        """Declare, before a backward pass, whether it is the last one of the update."""
        if self.sharded is not None:
            self.sharded.set_last_backward(last)

    # -- training -----------------------------------------------------------------------------------------------------

    def trainable(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Names and parameters that the optimizer changes, in a fixed order."""
        self.reshard()
        return [(name, parameter) for name, parameter in self.model.named_parameters() if parameter.requires_grad]

    @contextmanager
    def training_mode(self, *draw: int | str) -> Iterator[None]:
        """Enable adapter dropout and gradient checkpointing inside the block, which includes the backward pass. Every
        other module stays in evaluation mode, so the dropout of a model's configuration is never applied. `draw` names
        the forward pass: dropout masks depend only on `draw` and the run seed, not on earlier draws."""
        torch.manual_seed(derive_seed(self.seed, "dropout", *draw))
        dropouts = [module for name, module in self.model.named_modules() if ".lora_dropout." in name]
        active = [*dropouts, *_checkpointed_layers(self.model)]
        for module in active:
            module.training = True
        try:
            yield
        finally:
            for module in active:
                module.training = False
            if self.routing is not None:
                self.routing.forget()

    # -- checkpoints and export ---------------------------------------------------------------------------------------

    def save(self, directory: Path) -> None:
        """Write the trained weights for a checkpoint: the whole model, or the adapters alone. All ranks call it; rank 0
        writes."""
        if self.sharded is not None:
            current_world().on_rank0(write_gathered(self.model, directory, self._saved_once()))
        else:
            write_weights(self.model, directory, None)
        current_world().on_rank0(lambda: self.tokenizer.save_pretrained(directory))

    def save_later(self, directory: Path) -> Callable[[], None]:
        """Copy the trained weights to CPU memory. Returns a function that writes the files of `save` with these weights
        and may run in another thread. All ranks call both; only rank 0 writes."""
        if self.sharded is not None:
            write_rest = write_gathered(self.model, directory, self._saved_once())
            current_world().on_rank0(lambda: self.tokenizer.save_pretrained(directory))
            return write_rest
        saved = self.saved_tensors()
        distinct = {id(tensor): tensor for tensor in saved.values()}  # a tensor with several names stays one
        copies = {number: tensor.detach().to("cpu", copy=True) for number, tensor in distinct.items()}
        tensors = {name: copies[id(tensor)] for name, tensor in saved.items()}
        # A fast tokenizer raises when two threads use it at a time.
        self.tokenizer.save_pretrained(directory)
        return lambda: write_weights(self.model, directory, tensors)

    def saved_tensors(self) -> dict[str, torch.Tensor]:
        """The tensors of a checkpoint: the model's whole state, or the adapters alone."""
        return self.model.state_dict(keep_vars=True) if self.recipe.lora is None else dict(self.trainable())

    def gather_weights(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
        """Gather `tensors` in rank 0's CPU memory; None for a model that is not sharded."""
        if self.sharded is None:
            return None
        self.sharded.reshard()
        return gather_to_rank0(tensors)

    def restore(self, directory: Path) -> None:
        """Read what `save` wrote, bit for bit. InputError if the files belong to another model."""
        from peft import set_peft_model_state_dict
        from safetensors.torch import load_file

        self.reshard()
        files = sorted(directory.glob("*.safetensors"))
        tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
        try:
            if self.sharded is not None:
                mismatched = self._restore_shards(tensors)
            elif self.recipe.lora is not None:
                loaded: Any = set_peft_model_state_dict(self.model, tensors)
                mismatched = [*loaded.unexpected_keys, *([] if tensors else ["nothing"])]
            else:
                loaded = self.model.load_state_dict(tensors, strict=False)
                # Tied weights are saved under one name.
                mismatched = [name for name, _ in self.trainable() if name not in tensors] + loaded.unexpected_keys
        except RuntimeError as error:
            raise InputError(f"{directory}: weights do not have the shapes of {self.recipe.path}") from error
        if mismatched:
            differ = f"they differ in {mismatched[0]}"
            raise InputError(f"{directory} does not have the model of {self.recipe.path}: {differ}")

    def export(self, directory: Path) -> None:
        """Write the model so that transformers (or peft, with `lora.export: adapter`) loads it from `directory`."""
        merged = self.recipe.lora is not None and self.recipe.lora.export == "merged"
        if self.sharded is not None:
            base = merged or self.recipe.lora is None
            named = self.weights() if base else self._saved_once()
            model = transformer(self.model) if base else self.model
            current_world().on_rank0(write_gathered(model, directory, named))
        else:
            write_weights(self._merged() if merged else self.model, directory, None, exported=True)
        current_world().on_rank0(lambda: self.tokenizer.save_pretrained(directory))

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and whole tensors that `export` would write, with adapters merged and tied weights once.

        Tensors are on the model's device and share memory with the parameters where nothing is computed, so use each
        before the next update. At most one layer of computed tensors exists at a time. A collective call for a sharded
        model: all ranks iterate.
        """
        self.reshard()
        from transformers.core_model_loading import revert_weight_conversion

        def layer(named: tuple[str, torch.Tensor]) -> str:
            match = re.search(r"\.\d+\.", named[0])
            return named[0][: match.end()] if match else named[0]

        with torch.no_grad():
            for _, tensors in groupby(merged_parameters(self.model), key=layer):
                # transformers holds some weights, such as those of experts, fused in memory and separate in files.
                yield from revert_weight_conversion(transformer(self.model), dict(tensors)).items()

    def _saved_once(self) -> Iterator[tuple[str, torch.Tensor]]:
        """`saved_tensors`, where a tensor with several names has its first one."""
        self.reshard()
        tensors = self.saved_tensors()
        firsts = {id(tensor): name for name, tensor in reversed(tensors.items())}
        yield from ((name, tensors[name]) for name in reversed(firsts.values()))

    def _restore_shards(self, tensors: dict[str, torch.Tensor]) -> list[str]:
        """Set this rank's shards; returns names that only the files or only the model have."""
        state = self.model.state_dict(keep_vars=True)
        missing = [name for name, _ in self.trainable() if name not in tensors]
        if self.recipe.lora is not None:
            from peft import get_peft_model_state_dict

            # Rename the state as peft does in its files.
            state = get_peft_model_state_dict(self.model, state_dict=state, save_embedding_layers=False)
            missing = [name for name in state if name not in tensors]
        for name, tensor in tensors.items():
            if name in state and state[name].shape != tensor.shape:
                raise RuntimeError(name)
            if name in state:
                set_shard(state[name], tensor)
        return [*[name for name in tensors if name not in state], *missing]

    def _merged(self) -> Any:
        """A copy of the model with its adapters merged."""
        assert self.recipe.lora is not None
        # Adapters of 4-bit matrices are added to the matrices that those were made from.
        four_bit, original = self.recipe.load_in_4bit, copy.copy(self)
        original.recipe = self.recipe.model_copy(update={"load_in_4bit": False})
        merged = add_adapters(original.load(), self.recipe.lora, self.task)
        merged.load_state_dict(dict(self.trainable()) if four_bit else self.model.state_dict(), strict=not four_bit)
        whole: Any = merged.merge_and_unload()  # type: ignore[operator]
        whole.config = transformer(self.model).config
        return whole


def checkpoint_layers(model: torch.nn.Module, selective: bool = False) -> None:
    """Make `model` recompute the activations of its layers in backward passes: `model.gradient_checkpointing`. `selective`: all
    but products with weights and attention."""
    inner = transformer(model)
    # The method has two names in the supported versions of transformers.
    enable = getattr(inner, "activation_checkpointing_enable", None) or inner.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    inner.enable_input_require_grads()
    for layer in _checkpointed_layers(inner):
        layer._gradient_checkpointing_func = partial(_checkpoint_in_evaluation_mode, layer, selective)


def _checkpointed_layers(model: torch.nn.Module) -> list[Any]:
    """The layers whose activations are recomputed in the backward pass, if they are in training mode."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    return [layer for layer in layers if layer.gradient_checkpointing]


_PRODUCT = re.compile(r"^aten::(mm|addmm|_grouped_mm)$|_linear_pointwise$")
_ATTENTION = re.compile(r"flash|varlen|efficient_attention")
_WIDE = 256
"""Selective checkpointing recomputes products of fewer terms, such as those of adapters."""


def _is_kept(_: Any, operation: Any, *arguments: Any, **keywords: Any) -> CheckpointPolicy:
    """Keeps products with weights, and attention on a GPU. A processor's attention returns numbers for each pair of tokens."""
    name = operation.name()
    if _PRODUCT.search(name):
        kept = arguments[name == "aten::addmm"].shape[-1] > _WIDE
    else:
        kept = _ATTENTION.search(name) is not None
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _checkpoint_in_evaluation_mode(
    layer: torch.nn.Module, selective: bool, forward: Callable[..., T], *inputs: Any
) -> T:
    """Compute a checkpointed layer without the dropout of its configuration, now and when it is recomputed."""

    def compute(*inputs: Any) -> T:
        layer.training = False
        try:
            return forward(*inputs)
        finally:
            layer.training = True

    kept = partial(create_selective_checkpoint_contexts, _is_kept)
    options: dict[str, Any] = {"context_fn": kept} if selective else {}
    return checkpoint(compute, *inputs, use_reentrant=False, **options)


class Policy(TrainedModel):
    """A causal language model with its tokenizer.

    policy = Policy("packaged:smollm2-135m", lora={"rank": 16})
    policy.export("my_model")  # loads with AutoModelForCausalLM.from_pretrained
    """

    _as_reference = False
    """Whether the model in use is the reference model."""

    def __init__(self, model: ModelRecipe | str | Path, seed: int = 0, trained: bool = True, **settings: Any) -> None:
        super().__init__(model, seed, trained, **settings)
        self._reference: tuple[torch.nn.Module, ShardedModel | None] | None = None

    def load(self) -> torch.nn.Module:
        model: Any = load_model(self.recipe, self.load_device)
        # Programs that generate with an exported model stop where the engines do.
        ends = sorted(self.end_tokens)
        model.generation_config.eos_token_id = ends if len(ends) > 1 else ends[0]
        return model

    def export(self, directory: Path) -> None:
        super().export(directory)
        if self.recipe.lora is not None and self.recipe.lora.export == "adapter":
            transformer(self.model).generation_config.save_pretrained(directory)

    def replica(self) -> "Policy":
        """A policy with its own trained weights and tokenizer, for use in another thread of this process. Frozen
        weights are shared where this process holds them whole. If the model is sharded, the replica is loaded from its
        files with the initial weights, without any collective call."""
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
        measure: TokenMetric | None = None,
        experts: Sequence[np.ndarray | None] = (),
    ) -> TokenScores:
        """Log-probability and entropy of every sampled token of several streams, in one packed forward pass.

        `streams`: token ids [T_i] int64. `sampled`: [T_i] bool; the first token of a stream cannot be sampled, because
        each sampled token is predicted from the position before it. Shared prefixes are computed once. Returns float32
        [N] over all sampled tokens, stream by stream. `head` adds values from the same hidden states, `measure` a
        number from each distribution. `experts`: `Stream.experts` of each stream, which the policy's routers use instead of
        their own choices; the reference model's do not.
        """
        row = self.pack(streams, sampled, () if self._as_reference else experts)
        # Logits cost as much as several layers, so shared tokens are scored once. `measure` needs each token separately.
        chosen, back = row.distinct() if measure is None else (np.arange(len(row.targets)), None)
        part = RowPart(row.ids, row.layout, row.predictors[chosen], self.device, row)
        targets = upload(row.targets[chosen][part.mine], self.device)
        whole = measure if measure is None or not part.divided else lambda logs, at: measure(logs, part.mine[at])

        def score() -> tuple[torch.Tensor, ...]:
            states = part.states(self.model)
            scores = token_scores(self.model, states, targets, temperature, positions_per_chunk, whole)
            measured = () if scores.measured is None else (scores.measured,)
            return scores.logprobs, scores.entropies, states, *measured

        logprobs, entropies, states, *measured = self.compute(score)
        values = None if head is None else head(states)
        scores = TokenScores(logprobs, entropies, values, measured[0] if measured else None).map(part.gather)
        if back is None:
            return scores
        places = upload(back, self.device)
        return scores.map(lambda numbers: numbers[places])

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

        Token ids from `vocabulary` on are padding of the output layer and get no probability. Returns log-probabilities
        [N, vocabulary] float32 and None. With `top_k` below `vocabulary`, returns the log-probabilities [N, top_k + 1]
        of the most probable tokens and, last, of all others together, and the ids [N, top_k] int32 of the most probable
        tokens.
        """
        row = self.pack(streams, sampled)
        part = RowPart(row.ids, row.layout, row.predictors, self.device)
        divisor = temperature if temperature > 0 else 1.0

        def computed() -> tuple[torch.Tensor, torch.Tensor | None]:
            states, logprobs, ids = part.states(self.model), [], []
            for chunk in states.split(positions_per_chunk):
                whole = torch.log_softmax(logits_of(self.model, chunk)[:, :vocabulary] / divisor, dim=-1)
                if top_k is None or top_k >= vocabulary:
                    logprobs.append(whole.cpu())
                    continue
                best, chosen = whole.topk(top_k, dim=1)
                others = whole.scatter(1, chosen, -torch.inf).logsumexp(1, keepdim=True)
                logprobs.append(torch.cat([best, others], 1).cpu())
                ids.append(chosen.int().cpu())
            return torch.cat(logprobs), torch.cat(ids) if ids else None

        with torch.no_grad():
            logprobs, ids = self.compute(computed)
            return part.gather(logprobs).numpy(), None if ids is None else part.gather(ids).numpy()

    @contextmanager
    def as_reference(self) -> Iterator[None]:
        """Score as the reference model inside the block: with adapters off, or with a copy of the initial weights.
        `MovingReference` updates this copy."""
        trained = self.model, self.sharded
        self._as_reference = True
        try:
            with torch.no_grad():
                if self.recipe.lora is not None:
                    with self.model.disable_adapter():  # type: ignore[operator]
                        yield
                    return
                model, sharded = self._reference_copy()
                self.model = copied_to(model, self.device) if self._offloads_reference else model
                self.sharded = sharded
                yield
        finally:
            (self.model, self.sharded), self._as_reference = trained, False

    def reference_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Parameters of the copy that `as_reference` scores with, by name. With adapters there is no copy."""
        assert self.recipe.lora is None, "the reference model is the policy with its adapters off"
        return dict(self._reference_copy()[0].named_parameters())

    @property
    def _offloads_reference(self) -> bool:
        """Whether the reference model is in CPU memory between its passes. FSDP moves sharded models itself."""
        return current_world().hardware.offload in ("optimizer", "rollouts") and not current_world().sharded

    def _reference_copy(self) -> tuple[torch.nn.Module, ShardedModel | None]:
        if self._reference is None:
            with shared_weights():
                model = load_model(self.recipe, torch.device("cpu")) if self._offloads_reference else self.load()
            self._reference = model, self.shard(model, trained=False)
        return self._reference

    # -- weights for engines ------------------------------------------------------------------------------------------

    def adapter_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and whole tensors of the adapters, as peft writes them. All ranks iterate."""
        from peft import get_peft_model_state_dict

        self.reshard()
        for name, tensor in get_peft_model_state_dict(self.model, save_embedding_layers=False).items():
            yield name, full_tensor(tensor).detach()
