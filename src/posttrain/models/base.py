"""What every model that is trained has: weights, a tokenizer, adapters or not, saving, restoring and exporting."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from posttrain.errors import InputError
from posttrain.models.forward import transformer
from posttrain.models.load import add_adapters, load_end_tokens, load_tokenizer
from posttrain.recipe.model import ModelRecipe
from posttrain.seeds import derive_seed


class TrainedModel:
    """A model with its tokenizer. `version` counts the optimizer updates made to its weights."""

    task = "CAUSAL_LM"
    """What peft calls the kind of model."""

    def __init__(self, recipe: ModelRecipe, seed: int = 0) -> None:
        """Load the model of `recipe`; `seed` names the stream that initialises adapters and new heads."""
        if recipe.threads is not None:
            torch.set_num_threads(recipe.threads)
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

    def load(self) -> torch.nn.Module:
        """The model as it starts, without adapters."""
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def trainable(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Names and parameters that the optimizer changes, in a fixed order."""
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
        """Write the trained weights for a checkpoint: the whole model, or the adapters alone."""
        self.model.save_pretrained(directory)  # type: ignore[operator]
        self.tokenizer.save_pretrained(directory)

    def restore(self, directory: Path) -> None:
        """Read back what `save` wrote, bit for bit; InputError when it is of another model."""
        from peft import set_peft_model_state_dict
        from safetensors.torch import load_file

        files = sorted(directory.glob("*.safetensors"))
        tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
        try:
            if self.recipe.lora is not None:
                loaded: Any = set_peft_model_state_dict(self.model, tensors)
                strange = [] if tensors else ["nothing"]
            else:
                loaded = self.model.load_state_dict(tensors, strict=False)
                # Tied weights are saved and named once.
                strange = [name for name, _ in self.trainable() if name not in tensors]
        except RuntimeError as error:
            raise InputError(f"{directory} holds weights of other shapes than those of {self.recipe.path}") from error
        strange += loaded.unexpected_keys
        if strange:
            raise InputError(f"{directory} holds another model than {self.recipe.path}: they differ in {strange[0]}")

    def export(self, directory: Path) -> None:
        """Write the model so that transformers (or peft, for `lora.export: adapter`) loads it from `directory`."""
        model = self.model
        if self.recipe.lora is not None and self.recipe.lora.export == "merged":
            model = self._merged()
        model.save_pretrained(directory)  # type: ignore[operator]
        self.tokenizer.save_pretrained(directory)

    def _merged(self) -> Any:
        """A copy of the whole model with the adapters folded in; the model itself stays as it is."""
        assert self.recipe.lora is not None
        merged = add_adapters(self.load(), self.recipe.lora, self.task)
        merged.load_state_dict(self.model.state_dict())
        whole: Any = merged.merge_and_unload()  # type: ignore[operator]
        whole.config = transformer(self.model).config
        return whole
