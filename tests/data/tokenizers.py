"""Tokenizers of several kinds, trained on a few lines, and templates of their families."""

import json
from functools import cache
from typing import Any

from posttrain.data.rendering import Renderer

from ..conftest import CHATML, CORPUS, make_tokenizer

ZEPHYR = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
LLAMA2 = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% else %} {{ m['content'] }} {{ eos_token }}{% endif %}{% endfor %}"
)
SCHEMES = ("first", "always", "never", "normalizer")
"""How a SentencePiece tokenizer puts a space before texts."""


@cache
def sentencepiece(kind: str, scheme: str, template: str = ZEPHYR) -> Any:
    """A tokenizer as converted from SentencePiece. `kind`: `bpe` or `unigram`."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<unk>", "<s>", "</s>"]
    trainer: Any
    if kind == "bpe":
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
        bytes_ = [f"<0x{number:02X}>" for number in range(256)]
        trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=[*special, *bytes_], show_progress=False)
    else:
        tokenizer = Tokenizer(models.Unigram())
        letters = sorted({*"".join(CORPUS), *"\n|[]/"})
        trainer = trainers.UnigramTrainer(
            vocab_size=150, special_tokens=special, unk_token="<unk>", initial_alphabet=letters, show_progress=False
        )
    if scheme == "normalizer":
        spaces = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        tokenizer.normalizer = normalizers.Sequence(spaces)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    # Bytes are tokens of the vocabulary, not added ones.
    stored = json.loads(tokenizer.to_str())
    stored["added_tokens"] = [token for token in stored["added_tokens"] if token["content"] in special]
    tokenizer = Tokenizer.from_str(json.dumps(stored))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    fast.chat_template = template
    return fast


def byte_level(template: str = CHATML, eos: str = "<|im_end|>", special: tuple = (), **flags: bool) -> Any:
    """The byte-level tokenizer of the tests, with more special tokens."""
    from tokenizers import AddedToken

    tokenizer = make_tokenizer()
    added = [AddedToken(text, special=True, normalized=False, **flags) for text in special]
    tokenizer.add_special_tokens({"additional_special_tokens": added})
    tokenizer.eos_token = eos
    tokenizer.chat_template = template
    return tokenizer


def made(tokenizer: Any) -> Renderer:
    """The renderer of a tokenizer."""
    return Renderer(tokenizer, frozenset({tokenizer.eos_token_id}))


def renderer(template: str = CHATML) -> Renderer:
    """A renderer of the tokenizer of the tests with this template."""
    return made(byte_level(template))


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}
