"""The weights of a model as whole tensors, under the names that an exported model has, one layer at a time."""

import re
from collections.abc import Iterator
from typing import Any

import torch

from posttrain.distributed.sharding import is_sharded, whole

_LAYER = re.compile(r"\.\d+\.")


def exported_weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors that `save_pretrained` would write: adapters folded in, tied weights once, on the model's device.

    Tensors are the parameters themselves where nothing has to be computed, so use each before the next update. At most
    one layer's worth of computed tensors exists at a time. Where a model is divided among processes all of them ask for
    the same tensors, and each gets them whole.
    """
    layer = ""
    held: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for name, tensor in _folded(model):
            found = _LAYER.search(name)
            start = name[: found.end()] if found else name
            if start != layer:
                yield from _as_written(model, held)
                layer, held = start, {}
            held[name] = tensor
        yield from _as_written(model, held)


def adapter_tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors of the adapters as peft writes them."""
    from peft import get_peft_model_state_dict

    for name, tensor in get_peft_model_state_dict(model).items():
        yield name, whole(tensor).detach()


def _folded(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters of the model beneath the adapters, with what these add."""
    beneath = _beneath(model)
    adapted = {
        f"{name}.": module
        for name, module in beneath.named_modules()
        if hasattr(module, "base_layer") and hasattr(module, "get_delta_weight")
    }
    for name, parameter in beneath.named_parameters():
        owner = next((start for start in _parents(name) if start in adapted), None)
        if owner is None:
            yield name, whole(parameter).detach()
        elif name.startswith(f"{owner}base_layer."):
            last = name.removeprefix(f"{owner}base_layer.")
            tensor = whole(parameter).detach()
            if last == "weight":
                for adapter in adapted[owner].active_adapters:
                    tensor = tensor + _delta(adapted[owner], adapter)
            yield owner + last, tensor


def _delta(module: Any, adapter: str) -> torch.Tensor:
    """What the adapter adds to the weight beneath it."""
    inner, outer = module.lora_A[adapter].weight, module.lora_B[adapter].weight
    if not is_sharded(inner) and not is_sharded(outer):
        return module.get_delta_weight(adapter)
    return (whole(outer) @ whole(inner)) * module.scaling[adapter]


def _parents(name: str) -> Iterator[str]:
    """`a.b.c` -> `a.b.`, `a.`"""
    while "." in name:
        name = name.rpartition(".")[0]
        yield f"{name}."


def _as_written(model: Any, tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of one layer under their names in files; transformers holds some, such as experts, joined in memory."""
    from transformers.core_model_loading import revert_weight_conversion

    yield from revert_weight_conversion(_beneath(model), tensors).items()


def _beneath(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model
