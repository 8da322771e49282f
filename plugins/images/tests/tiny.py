"""Tiny random models that read images, with tokenizers and processors, one of each family."""

from pathlib import Path

from posttrain.models.forward import base_decoder

FAMILIES = ("idefics3", "smolvlm", "qwen2_5_vl", "qwen3_vl", "gemma3")
CORPUS = [
    "What shape is in the image? What color is the shape? Is there a red circle? yes no",
    "circle rectangle triangle red green blue black gray teal brown yellow not contain",
]
SPECIAL = {
    "idefics3": ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"],
    "qwen": ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"],
    "gemma3": ["<start_of_image>", "<end_of_image>", "<image_soft_token>"],
}
SPECIAL["smolvlm"] = [*SPECIAL["idefics3"], "<video>"]
IMAGE = {
    "idefics3": "<image>",
    "smolvlm": "<image>",
    "qwen2_5_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "qwen3_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "gemma3": "<start_of_image>",
}
ATTRIBUTES = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
"""The names under which Gemma's processor finds its tokens."""


def encoder_of(policy):
    """Parameters that only images go through."""
    base = base_decoder(policy.model)
    inside = {id(one) for one in getattr(base, base.family.decoder).parameters()}
    return {name: one for name, one in base.named_parameters() if id(one) not in inside}


def template(family: str) -> str:
    """A chat template; that of SmolVLM shows parts only."""
    text = "{% if m['content'] is string %}{{ m['content'] }}{% else %}PARTS{% endif %}"
    parts = (
        "{% for p in m['content'] %}{% if p['type'] == 'image' %}IMAGE{% elif p['type'] == 'text' %}{{ p['text'] }}{% endif %}"
        "{% endfor %}"
    ).replace("IMAGE", IMAGE[family])
    content = parts if family == "smolvlm" else text.replace("PARTS", parts)
    return (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\nCONTENT<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ).replace("CONTENT", content)


def make_tokenizer(family: str):
    """A byte-level BPE tokenizer with the special tokens of the family."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    bpe = ByteLevelBPETokenizer()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *SPECIAL["qwen" if "qwen" in family else family]]
    if family in ("idefics3", "smolvlm"):
        special += [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    bpe.train_from_iterator(CORPUS * 4, vocab_size=420, min_frequency=2, special_tokens=special, show_progress=False)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=ATTRIBUTES if family == "gemma3" else {},
    )
    tokenizer.chat_template = template(family)
    return tokenizer


def make_config(family: str, tokenizer, hidden: int = 32, layers: int = 2):
    """A configuration with two layers in the decoder and two in the encoder."""
    import transformers

    number, scale = tokenizer.convert_tokens_to_ids, hidden // 32
    shared = {"pad_token_id": 0, "eos_token_id": 2, "bos_token_id": 1}
    sides = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "num_attention_heads": 4}
    text = {"vocab_size": len(tokenizer), **sides, "num_hidden_layers": layers, "num_key_value_heads": 2, **shared}
    text |= {"head_dim": hidden // 4, "max_position_embeddings": 4096}
    vision = {**sides, "num_hidden_layers": layers, "image_size": 32, "patch_size": 8}
    if family in ("idefics3", "smolvlm"):
        cls = transformers.Idefics3Config if family == "idefics3" else transformers.SmolVLMConfig
        return cls(
            text_config={"model_type": "llama", **text},
            vision_config=vision,
            scale_factor=2,
            image_token_id=number("<image>"),
            **shared,
        )
    if family == "gemma3":
        windows = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"] * (layers // 2)}
        return transformers.Gemma3Config(
            text_config={**text, **windows},
            vision_config=vision,
            mm_tokens_per_image=4,
            image_token_id=number("<image_soft_token>"),
            boi_token_id=number("<start_of_image>"),
            eoi_token_id=number("<end_of_image>"),
            **shared,
        )
    tokens = {
        "image_token_id": number("<|image_pad|>"),
        "video_token_id": number("<|video_pad|>"),
        "vision_start_token_id": number("<|vision_start|>"),
        "vision_end_token_id": number("<|vision_end|>"),
    }
    vision = {"depth": layers, "hidden_size": hidden, "intermediate_size": 2 * hidden, "num_heads": 4, "patch_size": 8}
    if family == "qwen2_5_vl":
        rope = {"rope_type": "default", "mrope_section": [scale, scale, 2 * scale], "rope_theta": 10000.0}
        vision |= {"out_hidden_size": hidden, "window_size": 32, "fullatt_block_indexes": [layers - 1]}
        return transformers.Qwen2_5_VLConfig(
            text_config={**text, "rope_parameters": rope}, vision_config=vision, **tokens, **shared
        )
    rope = {"rope_type": "default", "mrope_section": [2 * scale, scale, scale], "mrope_interleaved": True}
    rope |= {"rope_theta": 10000.0}
    vision |= {"out_hidden_size": hidden, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
    return transformers.Qwen3VLConfig(
        text_config={**text, "rope_parameters": rope}, vision_config=vision, **tokens, **shared
    )


def make_encoder(family: str):
    """The image processor of a family, for small images."""
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    if family in ("idefics3", "smolvlm"):
        cls = Idefics3ImageProcessorPil if family == "idefics3" else SmolVLMImageProcessorPil
        return cls(size={"longest_edge": 64}, max_image_size={"longest_edge": 32})
    if family == "gemma3":
        return Gemma3ImageProcessorPil(size={"height": 32, "width": 32})
    return Qwen2VLImageProcessorPil(patch_size=8, size={"shortest_edge": 256, "longest_edge": 4096})


def make_processor(family: str, tokenizer, encoder):
    """transformers' own processor, without the part for videos, which needs torchvision."""
    from importlib import import_module

    from posttrain_images import families

    module, _, name = getattr(families, family.upper()).processor.partition(":")
    cls = getattr(import_module(f"transformers.models.{module}"), name)
    images_only = type(name, (cls,), {"get_attributes": classmethod(lambda cls: ["image_processor", "tokenizer"])})
    videos = {} if family in ("idefics3", "gemma3") else {"video_processor": None}
    length = {"idefics3": {"image_seq_len": 4}, "smolvlm": {"image_seq_len": 4}, "gemma3": {"image_seq_length": 4}}
    return images_only(encoder, tokenizer, **videos, **length.get(family, {}))


def save_tiny(directory: Path, family: str, seed: int = 0, **sizes) -> Path:
    """Write a random model of `family` with its tokenizer and processor to `directory`."""
    import json

    import torch
    from transformers import AutoModelForImageTextToText

    tokenizer = make_tokenizer(family)
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(make_config(family, tokenizer, **sizes), dtype=torch.float32)
    with torch.no_grad():  # random embeddings are so small that a wrong image would hardly change an output
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
            if not parameter.any() and parameter.dim() > 1:  # the projection of Gemma 3 begins at zero
                torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    encoder = make_encoder(family)
    encoder.save_pretrained(directory)
    length = {"gemma3": {"image_seq_length": 4}, "idefics3": {"image_seq_len": 4}, "smolvlm": {"image_seq_len": 4}}
    (Path(directory) / "processor_config.json").write_text(
        json.dumps(
            {"processor_class": type(make_processor(family, tokenizer, encoder)).__name__, **length.get(family, {})}
        )
    )
    return Path(directory)
