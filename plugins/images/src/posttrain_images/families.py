"""The families of models that read images, as data: their classes in transformers and how images reach their decoder."""

import json
from dataclasses import dataclass
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

from posttrain.distributed.world import current_world
from posttrain.errors import InputError
from posttrain_images.model import reads_images
from posttrain_images.tokens import PROCESSOR_FILES, Images, reading_images


@dataclass(frozen=True)
class Family:
    """One family: a value of `posttrain.models`."""

    name: str
    """The `model_type` of its models."""
    processor: str
    """Its processor in transformers, `module:class`."""
    inputs: tuple[str, ...] = ("pixel_values", "pixel_attention_mask")
    """Inputs of the image encoder that the processor makes."""
    axis: int = 0
    """Along which axis the inputs of several images are joined."""
    decoder: str = "language_model"
    """The attribute of the decoder."""
    wrappers: tuple[str, ...] = ()
    """Tokens that chat templates write before and after the placeholder of an image. The processor writes the others."""
    layers_of: str = ""
    """The `model_type` of a language model with the layers of the decoder; empty if transformers loads the decoder alone."""
    token_types: str | None = None
    """The input of transformers' own pass that marks the tokens of images."""
    grid: bool = False
    """Whether positions have three parts, of which those of images are a grid (multimodal rotary positions)."""
    deepstack: bool = False
    """Whether features of images are also added after the first layers."""
    both_ways: bool = False
    """Whether the tokens of an image attend to each other in both directions."""
    not_in_vllm: str = ""
    """Why vLLM does not sample for its models; empty if it does."""

    def at(self, path: str) -> "Family | None":
        """This family if the model at `path` has an image processor; None for one that is only its text."""
        settings = json.loads(_file(path, "processor_config.json") or b"{}")
        return self if "image_processor" in settings or _file(path, "preprocessor_config.json") else None

    def policy_class(self) -> Any:
        """The class of transformers that loads a policy."""
        from transformers import AutoModelForImageTextToText

        return AutoModelForImageTextToText

    def language_model(self, text: Any) -> Any:
        """The configuration of a language model with the layers of the decoder, whose configuration is `text`."""
        from transformers import AutoConfig

        if not self.layers_of:
            return text
        values = {key: value for key, value in text.to_dict().items() if key != "model_type"}
        values["rope_parameters"] = {key: one for key, one in text.rope_parameters.items() if "mrope" not in key}
        return AutoConfig.for_model(self.layers_of, **values)

    def images(self, tokenizer: Any, path: str) -> Images:
        """The images of the model at `path`, a directory or hub id. InputError without a usable processor."""
        from transformers import AutoImageProcessor

        files = {name: content for name in PROCESSOR_FILES if (content := _file(path, name)) is not None}
        try:
            settings = json.loads(files.get("processor_config.json", b"{}"))
            encoder = AutoImageProcessor.from_pretrained(path, backend="pil", trust_remote_code=False)
            length = next((settings[key] for key in ("image_seq_len", "image_seq_length") if key in settings), None)
            processor = self._processor(encoder, tokenizer, length)
        except Exception as error:
            raise InputError(
                f"model.path: {path} has no image processor that transformers can load ({type(error).__name__}: "
                f"{str(error).splitlines()[0] if str(error) else ''}); complete its files, or install what the error names"
            ) from error
        images = Images(processor, self.inputs, self.axis, files, self.wrappers)
        images.not_in_vllm = self.not_in_vllm
        return images

    def _processor(self, encoder: Any, tokenizer: Any, length: int | None) -> Any:
        """The processor without its part for videos, which needs torchvision. `length`: its tokens of a tile, if set."""
        module, _, name = self.processor.partition(":")
        cls = getattr(import_module(f"transformers.models.{module}"), name)
        parts = ["image_processor", "tokenizer"]
        images_only = type(name, (cls,), {"get_attributes": classmethod(lambda cls: parts)})
        key = "image_seq_length" if self.name == "gemma3" else "image_seq_len"
        videos = {"video_processor": None} if "video_processor" in signature(cls.__init__).parameters else {}
        return images_only(encoder, tokenizer, **videos, **({} if length is None else {key: length}))

    def tokenizer(self, tokenizer: Any, path: str) -> Any:
        """`tokenizer`, changed so that its messages may have images."""
        if not tokenizer.chat_template and (content := _file(path, "chat_template.json")) is not None:
            tokenizer.chat_template = json.loads(content)["chat_template"]
        return reading_images(tokenizer, self.images(tokenizer, path))

    def prepare(self, model: Any, path: str) -> None:
        """Make `model` compute ids of images, in place. InputError for a run that divides rows, or has Ray's machines."""
        from transformers import AutoTokenizer

        hardware = current_world().hardware
        if hardware.sequence_parallel > 1 or hardware.ray is not None:
            raise InputError(
                f"hardware: {self.name} models that read images are trained on whole rows, by processes of one machine; set "
                "hardware.sequence_parallel=1, and remove hardware.ray"
            )
        reads_images(model, self, self.images(AutoTokenizer.from_pretrained(path, trust_remote_code=False), path))


def _file(path: str, name: str) -> bytes | None:
    """The content of a file of the model at `path`; None if it has none."""
    from transformers.utils import cached_file

    found = cached_file(
        path, name, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
    )
    return None if found is None else Path(found).read_bytes()


IDEFICS3 = Family("idefics3", "idefics3.processing_idefics3:Idefics3Processor", axis=1, decoder="text_model")
SMOLVLM = Family("smolvlm", "smolvlm.processing_smolvlm:SmolVLMProcessor", axis=1, decoder="text_model")
QWEN2_5_VL = Family(
    "qwen2_5_vl",
    "qwen2_5_vl.processing_qwen2_5_vl:Qwen2_5_VLProcessor",
    ("pixel_values", "image_grid_thw"),
    wrappers=("<|vision_start|>", "<|vision_end|>"),
    layers_of="qwen2",
    token_types="mm_token_type_ids",
    grid=True,
)
QWEN3_VL = Family(
    "qwen3_vl",
    "qwen3_vl.processing_qwen3_vl:Qwen3VLProcessor",
    ("pixel_values", "image_grid_thw"),
    wrappers=("<|vision_start|>", "<|vision_end|>"),
    layers_of="qwen3",
    token_types="mm_token_type_ids",
    grid=True,
    deepstack=True,
)
GEMMA3 = Family(
    "gemma3",
    "gemma3.processing_gemma3:Gemma3Processor",
    ("pixel_values",),
    token_types="token_type_ids",
    both_ways=True,
    not_in_vllm="on a processor, its kernels let no token of an image of gemma3 attend to a later one, and on a GPU it was not tried",
)
