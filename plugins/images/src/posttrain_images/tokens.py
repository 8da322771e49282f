"""Images as tokens: the tokenizer of a model that reads images, and what the model's processor makes of an image.

The text that the processor of transformers writes for an image is tokenized together with the text around it. Its placeholders
then become the ids of the image (`posttrain.images`).
"""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save

from posttrain.errors import InputError
from posttrain.images import FIRST, KEY_DIGITS, MARK, TOKEN_BITS, decoding, first_id, key_of, mark, number_of, parts_of
from posttrain_images.store import keep, load

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""Files beside those of the tokenizer from which transformers makes a processor."""
CACHE_BYTES = 256 << 20
"""Bytes of processed images that are kept in memory."""


@dataclass(frozen=True)
class ProcessedImage:
    """What a processor makes of one image."""

    inputs: dict[str, torch.Tensor]
    """Inputs of the image encoder."""
    text: str
    """The text that takes the place of the image, with its placeholders."""
    tokens: int
    """Number of placeholders."""

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.inputs.values())


class _Held(OrderedDict[tuple[str, str], ProcessedImage]):
    """Processed images in the order in which they were made, of `bytes` bytes together. Threads share them."""

    bytes = 0
    lock = threading.Lock()


_held = _Held()


class Images:
    """The images of one model, by its processor of transformers."""

    def __init__(
        self, processor: Any, names: Sequence[str], axis: int, files: Mapping[str, bytes], wrappers: Sequence[str] = ()
    ) -> None:
        """`names`: the inputs of the encoder; `axis`: the one along which the first is joined. `files`: those of the processor.
        `wrappers`: what chat templates write around placeholders."""
        self.processor = processor
        self.names = names
        self.axis = axis
        self.files = files
        self.placeholder: str = processor.image_token
        """What a chat template writes for an image."""
        self.token = int(processor.image_token_ids[0])
        """The id of each placeholder in the processor's text."""
        lengths = [getattr(processor, name, None) for name in ("image_seq_len", "image_seq_length")]
        self.not_in_vllm = ""
        """Why vLLM does not sample for the model; empty if it does."""
        vocabulary = processor.tokenizer.get_vocab()
        self.wrappers = {vocabulary[one] for one in wrappers if one in vocabulary}
        """Tokens that a chat template writes before and after the placeholder of an image."""
        self.gate_keys: set[str] = set()
        """Keys of images that are no data."""
        self._name = repr((type(processor).__name__, processor.image_processor.to_dict(), lengths))
        self._digest = hashlib.blake2b(self._name.encode(), digest_size=4).hexdigest()

    def __repr__(self) -> str:
        """What the tokens of an image depend on."""
        return self._name

    def __deepcopy__(self, memo: Any) -> "Images":
        return self

    def processed(self, key: str) -> ProcessedImage:
        """The inputs and the text of a stored image, which the run then keeps. InputError if the processor refuses it."""
        if key not in self.gate_keys:
            keep(key)
        if (made := _held.get((self._name, key))) is not None:
            return made
        pixels = load(key)
        try:
            # Otherwise it takes an image of height 1 or 3 for one whose channels come first.
            settings = {"input_data_format": "channels_last", "return_tensors": "pt"}
            settings = {**getattr(self.processor, "images_kwargs", {}), **settings}
            outputs = self.processor.image_processor([pixels], **settings)
            text = self.processor.replace_image_token(outputs, image_idx=0)
        except Exception as error:
            size = f"{pixels.shape[1]} x {pixels.shape[0]}"
            raise InputError(f"the image processor refuses the image {key} of {size}: {error}; resize it") from error
        tokens = text.count(self.processor.tokenizer.convert_ids_to_tokens(self.token))
        if not 0 < tokens < 1 << TOKEN_BITS:
            raise InputError(
                f"the image {key} has {tokens} tokens, and at most {1 << TOKEN_BITS} are possible; resize it"
            )
        made = ProcessedImage({name: outputs[name] for name in self.names if name in outputs}, text, tokens)
        with _held.lock:
            if (self._name, key) not in _held:
                _held[self._name, key] = made
                _held.bytes += made.bytes
            while _held.bytes > CACHE_BYTES and len(_held) > 1:
                _held.bytes -= _held.popitem(last=False)[1].bytes
        return made

    def around(self, ids: np.ndarray) -> np.ndarray:
        """Where `ids` [T] int64 have tokens that are written for images [T] bool: those of images, and what the processor and the
        chat template write before, between and after them."""
        found = ids >= FIRST
        starts = [at for at in np.flatnonzero(found).tolist() if number_of(int(ids[at])) == 0]
        for start in starts:
            before, inside, after = self._frame(key_of(int(ids[start])))
            stop = min(start + inside, len(ids))
            found[start:stop] = True
            for step, at, expected in ((-1, start - 1, before[::-1]), (1, stop, after)):
                for token in expected:
                    if 0 <= at < len(ids) and ids[at] == token:
                        found[at], at = True, at + step
                while 0 <= at < len(ids) and ids[at] in self.wrappers:
                    found[at], at = True, at + step
        return found

    def _frame(self, key: str) -> tuple[list[int], int, list[int]]:
        """The tokens of an image's text before its first placeholder and after its last, and how many are from the one to the
        other."""
        ids = self.processor.tokenizer(self.processed(key).text, add_special_tokens=False)["input_ids"]
        places = [at for at, token in enumerate(ids) if token == self.token]
        return ids[: places[0]], places[-1] + 1 - places[0], ids[places[-1] + 1 :]

    def inputs(self, keys: Iterable[str], device: torch.device) -> dict[str, torch.Tensor]:
        """The inputs of the encoder for several images, in their order."""
        each = [self.processed(key).inputs for key in keys]
        return {name: torch.cat([one[name] for one in each], self.axis).to(device) for name in each[0]}

    def placed(self, ids: Sequence[int]) -> dict[str, Any]:
        """A prompt for an engine elsewhere: `prompt_ids` with placeholders, and `images` with the key of each image and the
        spans [start, stop) of its placeholders."""
        places: list[dict[str, Any]] = []
        for at, token in enumerate(ids):
            if token < FIRST:
                continue
            if number_of(token) == 0:
                places.append({"key": key_of(token) + self._digest, "spans": [[at, at]]})
            spans = places[-1]["spans"]
            if spans[-1][1] != at:
                spans.append([at, at])
            spans[-1][1] += 1
        return {"prompt_ids": [self.token if token >= FIRST else token for token in ids], "images": places}

    def content(self, key: str) -> bytes:
        """The inputs of the encoder for the image of a key of `placed`, as vLLM names them, in a safetensors file."""
        inputs = self.processed(key[:KEY_DIGITS]).inputs
        if "image_grid_thw" not in inputs:
            inputs = {name: tensor.squeeze(0) if self.axis else tensor for name, tensor in inputs.items()}
            inputs["num_patches"] = torch.tensor([len(inputs["pixel_values"])])
        return save({name: tensor.contiguous() for name, tensor in inputs.items()})

    def encode(self, text: str, encode: Callable[[str], Any]) -> Any:
        """The encoding of text with marks by `encode`, in which placeholders have the ids of the images. InputError if a
        placeholder is no token."""
        keys = MARK.findall(text)
        encoding = encode(MARK.sub(lambda match: self.processed(match[1]).text, text))
        ids = encoding["input_ids"]
        places = [place for place, token in enumerate(ids) if token == self.token]
        wanted = [first_id(key) + number for key in keys for number in range(self.processed(key).tokens)]
        if len(places) != len(wanted):
            raise InputError(
                f"a text with {len(keys)} images has {len(places)} placeholders of images instead of {len(wanted)}; remove the "
                f"text {self.placeholder!r} from messages"
            )
        for place, token in zip(places, wanted, strict=True):
            ids[place] = token
        return encoding


def as_parts(message: Mapping[str, Any], always: bool) -> Mapping[str, Any]:
    """A message with its content as the parts that chat templates read: if it has images, or `always`."""
    content = message.get("content")
    if not isinstance(content, str) or not (always or MARK.search(content)):
        return message
    parts = parts_of(content)
    return {**message, "content": [{"type": "text", "text": content}] if isinstance(parts, str) else parts}


class _ReadsImages:
    """A tokenizer whose messages and texts may have images."""

    images: Images
    only_parts: bool
    """Whether the chat template shows no content that is text."""

    def apply_chat_template(self, conversation: Any, *arguments: Any, **settings: Any) -> Any:
        if settings.get("tokenize", True) or not all(isinstance(one, Mapping) for one in conversation):
            return super().apply_chat_template(conversation, *arguments, **settings)  # type: ignore[misc]
        keys = [key for one in conversation for key in MARK.findall(str(one.get("content")))]
        shown = [as_parts(message, self.only_parts) for message in conversation]
        text = super().apply_chat_template(shown, *arguments, **settings)  # type: ignore[misc]
        if not keys:
            return text
        pieces = text.split(self.images.placeholder)
        if len(pieces) != len(keys) + 1:
            raise InputError(
                f"the chat template shows {len(pieces) - 1} of the {len(keys)} images of a conversation; put images into "
                "messages of users, or set another template in model.chat_template"
            )
        marks = [*map(mark, keys), ""]
        return "".join(piece + shown for piece, shown in zip(pieces, marks, strict=True))

    def __call__(self, text: Any = None, *arguments: Any, **settings: Any) -> Any:
        call = super().__call__  # type: ignore[misc]
        if not isinstance(text, str) or not MARK.search(text):
            return call(text, *arguments, **settings)
        whole = partial(call, *arguments, **{**settings, "split_special_tokens": False})
        if not settings.get("split_special_tokens"):
            return self.images.encode(text, whole)
        # The tokens around an image are special, those of the text between images are not.
        parts = [
            self.images.encode(mark(piece), whole) if number % 2 else call(piece, *arguments, **settings)
            for number, piece in enumerate(MARK.split(text))
        ]
        return {"input_ids": [token for part in parts for token in part["input_ids"]]}

    def decode(self, token_ids: Any, *arguments: Any, **settings: Any) -> Any:
        decode = super().decode  # type: ignore[misc]
        ids = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids
        if isinstance(ids, list | tuple) and any(isinstance(token, int) and token >= FIRST for token in ids):
            return decoding(lambda part: decode(part, *arguments, **settings))(ids)
        return decode(token_ids, *arguments, **settings)

    def save_pretrained(self, directory: Any, *arguments: Any, **settings: Any) -> Any:
        for name, content in self.images.files.items():
            Path(directory).mkdir(parents=True, exist_ok=True)
            (Path(directory) / name).write_bytes(content)
        return super().save_pretrained(directory, *arguments, **settings)  # type: ignore[misc]


def reading_images(tokenizer: Any, images: Images) -> Any:
    """`tokenizer`, changed in place so that it reads images."""
    cls = type(tokenizer)
    tokenizer.__class__ = type(cls.__name__, (_ReadsImages, cls), {"__module__": cls.__module__})
    tokenizer.images, tokenizer.only_parts = images, False
    try:
        probe = [{"role": "user", "content": "posttrain"}]
        tokenizer.only_parts = "posttrain" not in tokenizer.apply_chat_template(probe, tokenize=False)
    except Exception:  # templates raise errors of any type; the renderer reports one that shows nothing
        tokenizer.only_parts = True
    return tokenizer
