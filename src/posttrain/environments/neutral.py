"""Text from notes and users, made harmless: it can open no turn, close no result and hide no sign.

Chat templates mark turns with tokens that a tokenizer also finds in plain text: `<|im_start|>` (ChatML),
`<|start_header_id|>` (Llama 3), `<start_of_turn>` (Gemma), `[INST]` (Mistral), `<｜User｜>` (DeepSeek), and many
tokenizers have more, such as `<pad>` or `<file_sep>`. All of them, and the blocks of the agent's own format, begin with
a sign for a tag, or are a word in capitals in square brackets. So the first sign of whatever looks like one is replaced
by a similar one that no tokenizer knows as a mark. What is shown this way cannot be pasted back as an exact match, which
an update then reports.
"""

import re
import unicodedata

ANGLE, SQUARE = "‹", "⟦"
"""What stands for `<` and `[` where they would begin a mark."""
_INVISIBLE = "\u200b\u200c\u200d\u2060\ufeff\u00ad"
_TAG = re.compile(r"[<＜﹤〈](?=[/|｜!?▁_A-Za-z])")
_SPACED = re.compile(
    r"[<＜﹤〈](?=\s*/?\s*(?:think|python|reply|result|filter|system|user|assistant|tool|model)\b)", re.IGNORECASE
)
_WORDS = (
    "INST|SYS|SYSTEM|SYSTEM_PROMPT|BOS|EOS|PAD|UNK|SEP|CLS|MASK|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS|TOOL_CONTENT"
    "|ARGS|CALL_ID|THINK|IMG|IMG_BREAK|IMG_END|PREFIX|MIDDLE|SUFFIX|gMASK|sMASK|control_\\d+"
)
_SQUARE = re.compile(rf"\[(?=/?(?:{_WORDS})\])")


def neutral(text: str) -> str:
    """`text` without control signs, and with no mark of a turn, a block or a special token in it.

    Applying it twice changes nothing more. Line breaks and tabs stay; other line separators become line breaks.
    """
    lines = re.sub("\r\n|[\r\v\f\x1c\x1d\x1e\x85\u2028\u2029]", "\n", text)
    visible = "".join(sign for sign in lines if sign in "\n\t" or not _unseen(sign))
    return _SQUARE.sub(SQUARE, _SPACED.sub(ANGLE, _TAG.sub(ANGLE, visible)))


def _unseen(sign: str) -> bool:
    """Control signs, signs without width or that turn the direction of writing, and halves of surrogate pairs."""
    return sign in _INVISIBLE or unicodedata.category(sign) in ("Cc", "Cf", "Cs", "Co")
