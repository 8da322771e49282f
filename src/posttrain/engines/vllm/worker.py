"""What vLLM's own workers do besides: take weights from files, and end with the process that started them.

vLLM mixes `WeightReceiver` into its worker class; its methods are called by name on every worker.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_LOOK_EVERY = 1.0
"""Seconds between two looks at whether the parent lives."""


def _parent_of(process: int) -> int | None:
    """Null where the system does not tell."""
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


class WeightReceiver:
    """Weights in the layout of exported files, bucket by bucket, into the engine's own layout."""

    model_runner: Any
    vllm_config: Any
    model_config: Any
    _expected: dict[str, int]

    def end_with_parent(self, first: int) -> None:
        """End this process once its parent is gone, however that went; and the scheduler between the process `first`, which
        started vLLM, and this one, once `first` is gone."""
        parent = os.getppid()
        between = parent != first and _parent_of(parent) == first

        def look() -> None:
            while os.getppid() == parent and not (between and _parent_of(parent) != first):
                time.sleep(_LOOK_EVERY)
            if os.getppid() == parent:
                os.kill(parent, signal.SIGKILL)
            os._exit(1)

        threading.Thread(target=look, daemon=True, name="end with parent").start()

    def respond(self) -> None:
        """A sign of life."""

    def begin_weights(self) -> None:
        """Forget the weights and wait for all of them."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(self._model)

    def receive_weights(self, path: str) -> None:
        """Load the tensors of a safetensors file; each name is that of the exported model."""
        import torch
        from safetensors import safe_open
        from vllm.config import set_current_vllm_config

        def tensors() -> Iterator[tuple[str, Any]]:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (a safetensors file is no mapping)
                    yield name, file.get_tensor(name)

        with torch.no_grad(), set_current_vllm_config(self.vllm_config):
            self._model.load_weights(tensors())

    def finish_weights(self) -> list[str]:
        """Lay the weights out for computing; returns the parameters of which not every number has come."""
        import torch
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        with torch.no_grad(), set_current_vllm_config(self.vllm_config):
            tied = [layer for layer in self._layers("ParallelLMHead") if self._is_tied]
            missing = self._missing(tied)
            finalize_layerwise_reload(self._model, self.model_config)
            for layer in tied:
                # It shares the embedding's numbers, and what was laid out of the old ones for a processor stays else.
                layer.quant_method.process_weights_after_loading(layer)
        return missing

    @property
    def _model(self) -> Any:
        return self.model_runner.get_model()

    @property
    def _is_tied(self) -> bool:
        return bool(getattr(self.model_config.hf_text_config, "tie_word_embeddings", False))

    def _layers(self, kind: str) -> list[Any]:
        return [module for module in self._model.modules() if type(module).__name__ == kind]

    def _missing(self, tied: list[Any]) -> list[str]:
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        found = []
        for name, module in self._model.named_modules():
            info = get_layerwise_info(module)
            wanted = sum(parameter.numel() for parameter in module.parameters(recurse=False))
            if not info.can_load() or not wanted or any(module is layer for layer in tied):
                continue
            # Vocabularies are padded, and nobody sends the padding.
            enough = 1 if isinstance(module, VocabParallelEmbedding) else wanted
            if info.load_numel < enough:
                found += [f"{name}.{own}" for own, _ in module.named_parameters(recurse=False)]
        return found
