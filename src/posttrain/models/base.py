"""What every model that is trained has: weights, a tokenizer, adapters or not, saving, restoring and exporting."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

from posttrain.distributed.sharding import ShardedModel, gathered, set_share
from posttrain.distributed.world import current, threads
from posttrain.errors import InputError
from posttrain.models.forward import transformer
from posttrain.models.load import add_adapters, load_end_tokens, load_tokenizer, resolve_device
from posttrain.recipe.compose import section
from posttrain.recipe.model import ModelRecipe
from posttrain.seeds import derive_seed

T = TypeVar("T")


class TrainedModel:
    """A model with its tokenizer. `version` counts the optimizer updates made to its weights."""

    task = "CAUSAL_LM"
    """What peft calls the kind of model."""

    def __init__(self, model: ModelRecipe | str | Path, seed: int = 0, trained: bool = True, **settings: Any) -> None:
        """Load a model.

        Args:
            model: a hub id, a directory, a `.gguf` file, `packaged:smollm2-135m`, or a complete `ModelRecipe`.
            seed: run seed; adapters and new heads are initialised from it.
            trained: whether the weights will be optimized; otherwise no float32 master weights are kept.
            settings: further keys of the `model` section, for example `dtype="bfloat16"` or `lora={"rank": 16}`.

        Raises:
            InputError: there is no such model, or a setting is wrong.
        """
        named = {} if isinstance(model, ModelRecipe) else {"path": str(model)}
        recipe = section(ModelRecipe, model if isinstance(model, ModelRecipe) else None, **named, **settings)
        if (own := threads(recipe.threads)) is not None:
            torch.set_num_threads(own)
        self.recipe = recipe
        self.seed = seed
        self.tokenizer: Any = load_tokenizer(recipe)
        self.end_tokens = load_end_tokens(recipe.path, self.tokenizer)
        """Token ids that end an answer: the tokenizer's and the generation configuration's end tokens."""
        self.model = self.load()
        self.version = 0
        if recipe.lora is not None:
            torch.manual_seed(derive_seed(seed, "adapters"))
            # peft hands the model back in training mode, with dropout on.
            self.model = add_adapters(self.model, recipe.lora, self.task).eval()
        if recipe.gradient_checkpointing:
            inner = transformer(self.model)
            # The name changed within the versions of transformers that are supported.
            enable = getattr(inner, "activation_checkpointing_enable", None) or inner.gradient_checkpointing_enable
            enable({"use_reentrant": False})
            inner.enable_input_require_grads()
        self.sharded = self.shard(self.model, trained)

    def load(self) -> torch.nn.Module:
        """The model as it starts, without adapters."""
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return next(self.model.parameters()).device if self.sharded is None else resolve_device(self.recipe.device)

    @property
    def place(self) -> torch.device | None:
        """Where `load` puts the weights: None is where they compute. A model that is to be divided waits beside, so that a
        GPU never holds all of it."""
        return torch.device("cpu") if current().sharded else None

    def shard(self, model: torch.nn.Module, trained: bool) -> ShardedModel | None:
        """Divide `model` among the processes, where there are several."""
        if not current().sharded:
            return None
        inner = transformer(model)
        layers = getattr(getattr(inner, inner.base_model_prefix), "layers", ())
        return ShardedModel(model, list(layers), resolve_device(self.recipe.device), trained)

    def compute(self, function: Callable[..., T], *arguments: Any) -> T:
        """`function(*arguments)`, which computes with the model's weights, in whose place there may be shares outside.
        What has a gradient is returned as a tensor or in a tuple."""
        return function(*arguments) if self.sharded is None else self.sharded(function, *arguments)

    def settle(self) -> None:
        """End what a forward pass began whose backward pass will not come."""
        if self.sharded is not None:
            self.sharded.settle()

    def reduce_next(self, last: bool) -> None:
        """Say before a backward pass whether it is the update's last."""
        if self.sharded is not None:
            self.sharded.reduce_next(last)

    def trainable(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Names and parameters that the optimizer changes, in a fixed order."""
        self.settle()
        return [(name, parameter) for name, parameter in self.model.named_parameters() if parameter.requires_grad]

    @contextmanager
    def in_training(self) -> Iterator[None]:
        """Inside, dropout of the adapters and gradient checkpointing are in force."""
        self.model.train()
        try:
            yield
        finally:
            self.model.eval()

    def save(self, directory: Path) -> None:
        """Write the trained weights for a checkpoint: the whole model, or the adapters alone. Every process calls it, and
        the first one writes."""
        tensors = self.whole_tensors(dict(self.trainable())) if self.recipe.lora is not None else self.whole_tensors()
        current().on_rank0(lambda: self._write(self.model, directory, tensors))

    def whole_tensors(self, chosen: dict[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor] | None:
        """The `chosen` tensors, or all of the model's state, gathered in the first process; None where nothing is divided
        and the model has them itself."""
        if self.sharded is None:
            return None
        self.sharded.settle()
        return gathered(self.model.state_dict(keep_vars=True) if chosen is None else chosen)

    def _write(self, model: Any, directory: Path, tensors: dict[str, torch.Tensor] | None) -> None:
        model.save_pretrained(directory, **({} if tensors is None else {"state_dict": tensors}))
        self.tokenizer.save_pretrained(directory)

    def restore(self, directory: Path) -> None:
        """Read back what `save` wrote, bit for bit; InputError when it is of another model."""
        from peft import set_peft_model_state_dict
        from safetensors.torch import load_file

        self.settle()
        files = sorted(directory.glob("*.safetensors"))
        tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
        try:
            if self.sharded is not None:
                strange = self._restore_shares(tensors)
            elif self.recipe.lora is not None:
                loaded: Any = set_peft_model_state_dict(self.model, tensors)
                strange = [*loaded.unexpected_keys, *([] if tensors else ["nothing"])]
            else:
                loaded = self.model.load_state_dict(tensors, strict=False)
                # Tied weights are saved and named once.
                strange = [name for name, _ in self.trainable() if name not in tensors] + loaded.unexpected_keys
        except RuntimeError as error:
            raise InputError(f"{directory} holds weights of other shapes than those of {self.recipe.path}") from error
        if strange:
            raise InputError(f"{directory} holds another model than {self.recipe.path}: they differ in {strange[0]}")

    def export(self, directory: Path) -> None:
        """Write the model so that transformers (or peft, for `lora.export: adapter`) loads it from `directory`."""
        if self.recipe.lora is None or self.recipe.lora.export != "merged":
            self.save(directory)
            return
        tensors = self.whole_tensors()
        current().on_rank0(lambda: self._write(self._merged(tensors), directory, None))

    def _restore_shares(self, tensors: dict[str, torch.Tensor]) -> list[str]:
        """Set this process's shares; returns names that the file has too many, or lacks."""
        own = self.model.state_dict(keep_vars=True)
        lacking = [name for name, _ in self.trainable() if name not in tensors]
        if self.recipe.lora is not None:
            from peft import get_peft_model_state_dict

            # Under the names that its files have.
            own = get_peft_model_state_dict(self.model, state_dict=own)
            lacking = [name for name in own if name not in tensors]
        for name, tensor in tensors.items():
            if name in own and own[name].shape != tensor.shape:
                raise RuntimeError(name)
            if name in own:
                set_share(own[name], tensor)
        return [*[name for name in tensors if name not in own], *lacking]

    def _merged(self, tensors: dict[str, torch.Tensor] | None) -> Any:
        """A copy of the whole model with the adapters folded in; the model itself stays as it is."""
        assert self.recipe.lora is not None
        merged = add_adapters(self.load(), self.recipe.lora, self.task)
        merged.load_state_dict(self.model.state_dict() if tensors is None else tensors)
        whole: Any = merged.merge_and_unload()  # type: ignore[operator]
        whole.config = transformer(self.model).config
        return whole
