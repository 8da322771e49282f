"""The base of all trained models: weights, tokenizer, optional LoRA adapters, sharding, checkpoints and export."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

from posttrain.distributed.sharding import ShardedModel, gather_to_rank0, set_shard
from posttrain.distributed.world import current_world, threads_per_process
from posttrain.errors import InputError
from posttrain.models.forward import transformer
from posttrain.models.load import add_adapters, load_end_tokens, load_tokenizer, resolve_device
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
            trained: whether the weights will be optimized; otherwise sharded weights keep their dtype instead of float32 master weights.
            settings: further keys of the `model` section, for example `dtype="bfloat16"` or `lora={"rank": 16}`.

        Raises:
            InputError: there is no such model, or a setting is wrong.
        """
        named = {} if isinstance(model, ModelRecipe) else {"path": str(model)}
        recipe = section(ModelRecipe, model if isinstance(model, ModelRecipe) else None, **named, **settings)
        if (threads := threads_per_process(recipe.threads)) is not None:
            torch.set_num_threads(threads)
        self.recipe = recipe
        self.seed = seed
        self.tokenizer: Any = load_tokenizer(recipe)
        self.end_tokens = load_end_tokens(recipe.path, self.tokenizer)
        """Token ids that end a completion: the end tokens of the tokenizer and of the generation configuration."""
        self.model = self.load()
        self.version = 0
        if recipe.lora is not None:
            torch.manual_seed(derive_seed(seed, "adapters"))
            # peft returns the model in training mode, with dropout on.
            self.model = add_adapters(self.model, recipe.lora, self.task).eval()
        if recipe.gradient_checkpointing:
            inner = transformer(self.model)
            # The method has two names in the supported versions of transformers.
            enable = getattr(inner, "activation_checkpointing_enable", None) or inner.gradient_checkpointing_enable
            enable({"use_reentrant": False})
            inner.enable_input_require_grads()
        self.sharded = self.shard(self.model, trained)

    def load(self) -> torch.nn.Module:
        """Load the initial model, without adapters."""
        raise NotImplementedError

    # -- device and sharding ------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """The device that the model computes on."""
        return next(self.model.parameters()).device if self.sharded is None else resolve_device(self.recipe.device)

    @property
    def load_device(self) -> torch.device | None:
        """The device that `load` puts weights on; None for the device that computes.

        A model that will be sharded is loaded to CPU memory, so that no GPU ever holds all of it.
        """
        return torch.device("cpu") if current_world().sharded else None

    def shard(self, model: torch.nn.Module, trained: bool) -> ShardedModel | None:
        """Shard `model` in place if the run shards models; None otherwise."""
        if not current_world().sharded:
            return None
        inner = transformer(model)
        layers = getattr(getattr(inner, inner.base_model_prefix), "layers", ())
        return ShardedModel(model, list(layers), resolve_device(self.recipe.device), trained)

    def compute(self, function: Callable[..., T], *arguments: Any) -> T:
        """Return `function(*arguments)`; sharded weights are gathered while it computes with them.

        Outputs that need a gradient must be a tensor or a tuple of tensors.
        """
        return function(*arguments) if self.sharded is None else self.sharded(function, *arguments)

    def reshard(self) -> None:
        """Free weights that a forward pass without a backward pass left gathered."""
        if self.sharded is not None:
            self.sharded.reshard()

    def set_last_backward(self, last: bool) -> None:
        """Say before a backward pass whether it is the last of the update."""
        if self.sharded is not None:
            self.sharded.set_last_backward(last)

    # -- training -----------------------------------------------------------------------------------------------------

    def trainable(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Names and parameters that the optimizer changes, in a fixed order."""
        self.reshard()
        return [(name, parameter) for name, parameter in self.model.named_parameters() if parameter.requires_grad]

    @contextmanager
    def training_mode(self) -> Iterator[None]:
        """Enable adapter dropout and gradient checkpointing inside the block."""
        self.model.train()
        try:
            yield
        finally:
            self.model.eval()

    # -- checkpoints and export ---------------------------------------------------------------------------------------

    def save(self, directory: Path) -> None:
        """Write the trained weights for a checkpoint: the whole model, or the adapters alone.

        All ranks call it; rank 0 writes.
        """
        tensors = self.gather_weights(dict(self.trainable())) if self.recipe.lora is not None else self.gather_weights()
        current_world().on_rank0(lambda: self._write(self.model, directory, tensors))

    def gather_weights(self, tensors: dict[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor] | None:
        """Gather `tensors` (default: the model's whole state) in rank 0's CPU memory; None for a model that is not sharded."""
        if self.sharded is None:
            return None
        self.sharded.reshard()
        return gather_to_rank0(self.model.state_dict(keep_vars=True) if tensors is None else tensors)

    def _write(self, model: Any, directory: Path, tensors: dict[str, torch.Tensor] | None) -> None:
        model.save_pretrained(directory, **({} if tensors is None else {"state_dict": tensors}))
        self.tokenizer.save_pretrained(directory)

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
            raise InputError(f"{directory}: weights have other shapes than those of {self.recipe.path}") from error
        if mismatched:
            raise InputError(f"{directory} holds another model than {self.recipe.path}: they differ in {mismatched[0]}")

    def export(self, directory: Path) -> None:
        """Write the model so that transformers (or peft, with `lora.export: adapter`) loads it from `directory`."""
        if self.recipe.lora is None or self.recipe.lora.export != "merged":
            self.save(directory)
            return
        tensors = self.gather_weights()
        current_world().on_rank0(lambda: self._write(self._merged(tensors), directory, None))

    def _restore_shards(self, tensors: dict[str, torch.Tensor]) -> list[str]:
        """Set this rank's shards; returns names that only the files or only the model have."""
        state = self.model.state_dict(keep_vars=True)
        missing = [name for name, _ in self.trainable() if name not in tensors]
        if self.recipe.lora is not None:
            from peft import get_peft_model_state_dict

            # Rename the state as peft does in its files.
            state = get_peft_model_state_dict(self.model, state_dict=state)
            missing = [name for name in state if name not in tensors]
        for name, tensor in tensors.items():
            if name in state and state[name].shape != tensor.shape:
                raise RuntimeError(name)
            if name in state:
                set_shard(state[name], tensor)
        return [*[name for name in tensors if name not in state], *missing]

    def _merged(self, tensors: dict[str, torch.Tensor] | None) -> Any:
        """A whole copy of the model with its adapters merged. `tensors`: the gathered state of a sharded model."""
        assert self.recipe.lora is not None
        merged = add_adapters(self.load(), self.recipe.lora, self.task)
        merged.load_state_dict(self.model.state_dict() if tensors is None else tensors)
        whole: Any = merged.merge_and_unload()  # type: ignore[operator]
        whole.config = transformer(self.model).config
        return whole
