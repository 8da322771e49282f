"""The policy: a causal language model with its tokenizer, and its frozen start as reference."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from posttrain.errors import InputError
from posttrain.models.forward import TokenScores, causal_lm, hidden_states, token_scores
from posttrain.models.load import add_adapters, load_model, load_tokenizer
from posttrain.models.packing import pack_row
from posttrain.recipe.model import ModelRecipe
from posttrain.seeds import derive_seed


class Policy:
    """The model being trained. `version` counts the optimizer updates made to its weights."""

    def __init__(self, recipe: ModelRecipe, seed: int = 0) -> None:
        """Load the model of `recipe`; `seed` names the stream that initialises adapters."""
        if recipe.threads is not None:
            torch.set_num_threads(recipe.threads)
        self.recipe = recipe
        self.tokenizer: Any = load_tokenizer(recipe)
        self.model = load_model(recipe)
        self.version = 0
        self._reference: torch.nn.Module | None = None
        if recipe.lora is not None:
            torch.manual_seed(derive_seed(seed, "adapters"))
            self.model = add_adapters(self.model, recipe.lora)
        if recipe.gradient_checkpointing:
            inner = causal_lm(self.model)
            # The name changed within the versions of transformers that are supported.
            enable = getattr(inner, "activation_checkpointing_enable", None) or inner.gradient_checkpointing_enable
            enable({"use_reentrant": False})
            causal_lm(self.model).enable_input_require_grads()

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def end_tokens(self) -> frozenset[int]:
        """Token ids that end an answer: the tokenizer's and the generation configuration's end tokens."""
        configured = getattr(causal_lm(self.model).generation_config, "eos_token_id", None)
        listed = configured if isinstance(configured, list) else [configured]
        return frozenset(token for token in [self.tokenizer.eos_token_id, *listed] if token is not None)

    def trainable(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Names and parameters that the optimizer changes, in a fixed order."""
        return [(name, parameter) for name, parameter in self.model.named_parameters() if parameter.requires_grad]

    def score(
        self, streams: Sequence[np.ndarray], sampled: Sequence[np.ndarray], temperature: float, positions_per_chunk: int
    ) -> TokenScores:
        """Scores of every sampled token of several streams, in one packed forward pass.

        `streams`: token ids [T_i] int64; `sampled`: [T_i] bool. Each sampled token is predicted from the position
        before it, so the first token of a stream cannot be one. A prompt that streams share is computed once.
        Returns [N] over all sampled tokens, stream by stream.
        """
        row = pack_row(streams, sampled)
        ids, positions = torch.from_numpy(row.ids).to(self.device), row.layout.positions().to(self.device)
        hidden = hidden_states(self.model, ids, positions, row.layout)
        targets = torch.from_numpy(row.targets).to(self.device)
        predictors = torch.from_numpy(row.predictors).to(self.device)
        return token_scores(self.model, hidden[predictors], targets, temperature, positions_per_chunk)

    @contextmanager
    def in_training(self) -> Iterator[None]:
        """Inside, dropout of the adapters and gradient checkpointing are in force."""
        self.model.train()
        try:
            yield
        finally:
            self.model.eval()

    @contextmanager
    def as_reference(self) -> Iterator[None]:
        """Inside, the policy scores as it did at its start: adapters off, or a frozen copy of the weights in place."""
        with torch.no_grad():
            if self.recipe.lora is not None:
                with self.model.disable_adapter():  # type: ignore[operator]
                    yield
                return
            if self._reference is None:
                self._reference = load_model(self.recipe)
            self.model, self._reference = self._reference, self.model
            try:
                yield
            finally:
                self.model, self._reference = self._reference, self.model

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
        """Write the policy so that transformers (or peft, for `lora.export: adapter`) loads it from `directory`."""
        model = self.model
        if self.recipe.lora is not None and self.recipe.lora.export == "merged":
            model = self._merged()
        model.save_pretrained(directory)  # type: ignore[operator]
        self.tokenizer.save_pretrained(directory)

    def _merged(self) -> Any:
        """A copy of the whole model with the adapters folded in; the policy itself stays as it is."""
        merged = add_adapters(load_model(self.recipe), self.recipe.lora)  # type: ignore[arg-type]
        merged.load_state_dict(self.model.state_dict())
        return merged.merge_and_unload()  # type: ignore[operator]
