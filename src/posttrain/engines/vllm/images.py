"""Images in vLLM: the trainer sends what its own processor made of each, and the server decodes none.

Only a server with `Settings.images` imports this module.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from safetensors.torch import load
from vllm.inputs import mm_input
from vllm.multimodal.inputs import MultiModalKwargsItem, MultiModalKwargsItems, PlaceholderRange

MOST_BYTES = 4 << 30
"""Bytes of images that are kept in memory."""
_PACKAGES = {"qwen2_5_vl": "torchvision", "qwen3_vl": "torchvision", "smolvlm": "num2words"}
"""Packages without which vLLM cannot import models of a type."""


def check_packages(model: str, trust_remote_code: bool) -> None:
    """ValueError if vLLM cannot import the class of `model`, a directory or hub id."""
    from transformers import AutoConfig

    kind = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code).model_type
    if (package := _PACKAGES.get(kind)) is not None and find_spec(package) is None:
        raise ValueError(f"vLLM needs {package} for {kind}; install it in the environment of engine.python")


class ReceivedImages:
    """The images that the trainer sent, by their keys; those used last are at the end."""

    def __init__(self, processor: Any, dtype: torch.dtype) -> None:
        """`processor`: that of vLLM, which names the inputs of the encoder. `dtype`: that of the model."""
        self._processor = processor
        self._dtype = dtype
        self._items: OrderedDict[str, MultiModalKwargsItem] = OrderedDict()
        self._unused: set[str] = set()
        """Keys of images that no request has used yet. They stay, because a request waits for them."""
        self._bytes = 0

    def put(self, key: str, content: bytes) -> None:
        """Keep an image. `content`: the inputs of the encoder, as a safetensors file."""
        self._remove(key)
        inputs: Any = {
            name: one.to(self._dtype) if one.is_floating_point() else one for name, one in load(content).items()
        }
        fields = self._processor._get_mm_fields_config(inputs, {})
        [self._items[key]] = MultiModalKwargsItems.from_hf_inputs(inputs, fields)["image"]
        self._unused.add(key)
        self._bytes += _bytes(self._items[key])
        for old in [one for one in self._items if one not in self._unused]:
            if self._bytes <= MOST_BYTES:
                break
            self._remove(old)

    def _remove(self, key: str) -> None:
        if (item := self._items.pop(key, None)) is not None:
            self._bytes -= _bytes(item)

    def settle(self) -> None:
        """Images whose requests were given up may be removed, too."""
        self._unused.clear()

    def missing(self, places: Sequence[Mapping[str, Any]]) -> list[str]:
        """Keys of images that are not here. `places`: as in `Host.generate`."""
        return [key for key in dict.fromkeys(place["key"] for place in places) if key not in self._items]

    def prompt(self, ids: list[int], places: Sequence[Mapping[str, Any]]) -> Any:
        """A prompt of vLLM, which changes neither its ids nor its images. All images are here."""
        ranges = []
        for place in places:
            self._items.move_to_end(place["key"])
            self._unused.discard(place["key"])
            start, stop = place["spans"][0][0], place["spans"][-1][1]
            marks = torch.zeros(stop - start, dtype=torch.bool)
            for first, last in place["spans"]:
                marks[first - start : last - start] = True
            ranges.append(PlaceholderRange(start, stop - start, None if marks.all() else marks))
        keys = [place["key"] for place in places]
        items: Any = MultiModalKwargsItems({"image": [self._items[key] for key in keys]})
        return mm_input(ids, items, {"image": keys}, {"image": ranges})


def _bytes(item: MultiModalKwargsItem) -> int:
    return sum(data.nbytes for data in item.get_data().values() if isinstance(data, torch.Tensor))
