"""QLoRA: frozen matrices in 4-bit NormalFloat numbers, which adapters correct (`model.load_in_4bit`).

Source: Dettmers et al. 2023, "QLoRA", arXiv 2305.14314: blocks of 64 numbers with a scale each, and the scales in 8 bits.
"""

from typing import Any

import torch

from posttrain.errors import InputError
from posttrain.plugins import require_module


def require_gpu(device: torch.device) -> None:
    """InputError for 4-bit weights on a CPU, where every product would first restore them."""
    if device.type != "cuda":
        raise InputError("model.load_in_4bit: 4-bit weights need a GPU; remove it, or set model.device to cuda on one")


def quantize(model: torch.nn.Module, device: torch.device) -> None:
    """Replace the linear layers of `model` except its heads by 4-bit ones with the same weights, in place. The weights
    are in CPU memory, and quantized when they are moved to the GPU `device`."""
    require_gpu(device)
    bnb: Any = require_module("bitsandbytes", "model.load_in_4bit")
    owner: Any
    for owner in list(model.modules()):
        for name, layer in list(owner.named_children()):
            if not isinstance(layer, torch.nn.Linear) or name in ("lm_head", "score"):
                continue
            shape = (layer.in_features, layer.out_features, layer.bias is not None, layer.weight.dtype)
            four = bnb.nn.Linear4bit(*shape, quant_type="nf4", device="meta")
            four.weight = bnb.nn.Params4bit(
                layer.weight.data, requires_grad=False, quant_type="nf4", module=four, compress_statistics=True
            )
            if layer.bias is not None:
                four.bias = torch.nn.Parameter(layer.bias.data, requires_grad=False)
            setattr(owner, name, four.eval())
    whole: Any = model
    whole.is_loaded_in_4bit = True  # read by peft and `decoder_of`


def dequantized(weight: torch.Tensor) -> torch.Tensor:
    """The numbers that a 4-bit `weight` stands for, in the dtype that it was quantized from; any other tensor as it is."""
    state = getattr(weight, "quant_state", None)
    if state is None:
        return weight
    bnb: Any = require_module("bitsandbytes", "model.load_in_4bit")
    return bnb.functional.dequantize_4bit(weight.data, state)
