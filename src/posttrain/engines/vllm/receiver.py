"""What vLLM's workers do with the weights that the trainer sends, behind vLLM's public interface of weight transfer.

It needs vLLM: `worker.py` registers it under `BACKEND`, and the workers import it when they start.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from posttrain.engines.vllm.transfer import broadcast, joined_group, opened_memory, unpacked


@dataclass
class GroupInfo(WeightTransferInitInfo):
    """The process group of the learner. `first`: the rank of this engine's first worker."""

    address: str
    port: int
    first: int
    size: int


@dataclass
class Part(WeightTransferUpdateInfo):
    """Some weights, named and shaped as in exported files: a safetensors file, or a buffer with its entries."""

    path: str | None = None
    shared: dict[str, Any] | None = None
    """Handles of buffers with the same contents, by the UUID of their GPU."""
    size: int = 0
    """Bytes of the next broadcast."""
    entries: list[Any] = field(default_factory=list)


class TrainerWeights(WeightTransferEngine[GroupInfo, Part]):
    """Loads weights part by part into the engine's own layout."""

    init_info_cls = GroupInfo
    update_info_cls = Part
    _group: Any = None

    def init_transfer_engine(self, init_info: GroupInfo) -> None:
        rank = init_info.first + self.parallel_config.rank
        self._group = joined_group(init_info.address, init_info.port, rank, init_info.size, self.device.type == "cuda")

    def start_weight_update(self) -> None:
        for module in self.model.modules() if self.device.type == "cpu" else ():
            # vLLM packs the weights of experts for a CPU only when it makes their kernel, so the kernel is made again.
            if getattr(getattr(module, "quant_method", None), "moe_kernel", None) is not None:
                module.quant_method.moe_kernel = None
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The inherited method waits for a GPU, which need not exist.
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @torch.no_grad()
    def receive_weights(self, update_info: Part) -> None:
        if update_info.path is not None:
            with safe_open(update_info.path, framework="pt") as file:
                self.model.load_weights((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118
            return
        if update_info.shared is not None:
            # vLLM keeps tensors until those of a layer are complete, and the learner frees the buffer before that.
            handle = update_info.shared[str(torch.cuda.get_device_properties(self.device).uuid)]
            buffer = opened_memory(handle, self.device.index).clone()
            torch.cuda.synchronize(self.device)
        else:
            buffer = torch.empty(update_info.size, dtype=torch.uint8, device=self.device)
            broadcast(self._group, buffer)
        self.model.load_weights(unpacked(buffer, update_info.entries))

    @torch.no_grad()
    def finish_weight_update(self) -> None:
        tied = self._tied()
        finalize_layerwise_reload(self.model, self.model_config)
        for layer in tied:
            # Tied to the embedding: without this call, the copy packed from the old weights for a CPU would stay.
            layer.quant_method.process_weights_after_loading(layer)

    def shutdown(self) -> None:
        self._group = None

    def missing(self) -> list[str]:
        """Names of parameters that are not complete. To be called before `finish_weight_update`."""
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        missing, tied = [], self._tied()
        for name, module in self.model.named_modules():
            info = get_layerwise_info(module)
            expected = sum(parameter.numel() for parameter in module.parameters(recurse=False))
            if not info.can_load() or not expected or any(module is layer for layer in tied):
                continue
            # Vocabularies are padded, and the padding is not sent.
            enough = 1 if isinstance(module, VocabParallelEmbedding) else expected
            if info.load_numel < enough:
                missing += [f"{name}.{parameter}" for parameter, _ in module.named_parameters(recurse=False)]
        return missing

    def _tied(self) -> list[Any]:
        """The output projections that share the embedding's weights."""
        if not getattr(self.model_config.hf_text_config, "tie_word_embeddings", False):
            return []
        return [module for module in self.model.modules() if type(module).__name__ == "ParallelLMHead"]
