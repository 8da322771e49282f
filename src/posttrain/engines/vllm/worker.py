"""Extension of vLLM's workers: load weights from files, and exit together with the process that started them.

vLLM mixes `WeightReceiver` into its worker class; its methods are called by name on every worker.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_POLL_SECONDS = 1.0
"""Seconds between two checks of whether the parent process is alive."""


def _parent_of(process: int) -> int | None:
    """Id of the parent of `process`; None if the system does not provide it."""
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


class WeightReceiver:
    """Loads weights, named and shaped as in exported files, bucket by bucket into the engine's own layout."""

    model_runner: Any
    vllm_config: Any
    model_config: Any
    device: Any
    rank: int
    _group: Any

    def end_with_parent(self, first: int) -> None:
        """Exit when the parent process is gone, even if it was killed.

        `first`: id of the process that started vLLM. If the parent is the scheduler between `first` and this process, it is
        killed as well when `first` is gone.
        """
        parent = os.getppid()
        between = parent != first and _parent_of(parent) == first

        def watch() -> None:
            while os.getppid() == parent and not (between and _parent_of(parent) != first):
                time.sleep(_POLL_SECONDS)
            if os.getppid() == parent:
                os.kill(parent, signal.SIGKILL)
            os._exit(1)

        threading.Thread(target=watch, daemon=True, name="end with parent").start()

    def ping(self) -> None:
        """Return at once: shows that the worker responds."""

    def begin_weights(self) -> None:
        """Prepare for a complete new set of weights."""
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
                for name in file.keys():  # noqa: SIM118 (a safetensors file is not a mapping)
                    yield name, file.get_tensor(name)

        with torch.no_grad(), set_current_vllm_config(self.vllm_config):
            self._model.load_weights(tensors())

    def join_transfer(self, address: str, port: int, first: int, size: int) -> None:
        """Join the process group of the learner. `first`: the rank of this engine's first worker."""
        from posttrain.engines.vllm.transfer import joined_group

        self._group = joined_group(address, port, first + self.rank, size, self.device.type == "cuda")

    def receive_buffer(self, described: dict[str, Any]) -> None:
        """Load the tensors of a buffer: one in this GPU's memory that the learner shares, or else the next broadcast."""
        import torch
        from vllm.config import set_current_vllm_config

        from posttrain.engines.vllm.transfer import broadcast, opened_memory, unpacked

        if "shared" in described:
            # vLLM keeps tensors until those of a layer are complete, and the learner frees the buffer before that.
            buffer = opened_memory(described["shared"], self.device.index).clone()
            torch.cuda.synchronize(self.device)
        else:
            buffer = torch.empty(described["size"], dtype=torch.uint8, device=self.device)
            broadcast(self._group, buffer)
        with torch.no_grad(), set_current_vllm_config(self.vllm_config):
            self._model.load_weights(unpacked(buffer, described["entries"]))

    def finish_weights(self) -> list[str]:
        """Convert the weights to the layout of the kernels. Returns the names of parameters that are not complete."""
        import torch
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        with torch.no_grad(), set_current_vllm_config(self.vllm_config):
            tied = []
            if getattr(self.model_config.hf_text_config, "tie_word_embeddings", False):
                tied = [module for module in self._model.modules() if type(module).__name__ == "ParallelLMHead"]
            missing = self._missing(tied)
            finalize_layerwise_reload(self._model, self.model_config)
            for layer in tied:
                # Tied to the embedding: without this call, the copy packed from the old weights for a CPU would stay.
                layer.quant_method.process_weights_after_loading(layer)
        return missing

    @property
    def _model(self) -> Any:
        return self.model_runner.get_model()

    def _missing(self, tied: list[Any]) -> list[str]:
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        missing = []
        for name, module in self._model.named_modules():
            info = get_layerwise_info(module)
            expected = sum(parameter.numel() for parameter in module.parameters(recurse=False))
            if not info.can_load() or not expected or any(module is layer for layer in tied):
                continue
            # Vocabularies are padded, and the padding is not sent.
            enough = 1 if isinstance(module, VocabParallelEmbedding) else expected
            if info.load_numel < enough:
                missing += [f"{name}.{parameter}" for parameter, _ in module.named_parameters(recurse=False)]
        return missing
