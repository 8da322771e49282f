"""Stop strings of a completion. Also imported by the vLLM server, so this module needs nothing but Python."""

from collections.abc import Sequence
from typing import Any

EXTRA_TOKENS = 8
"""Tokens decoded beyond the length of a stop string, for tokens that stand for no character of their own."""


class StopStrings:
    """Strings that end a completion as soon as its decoded tokens contain one of them."""

    def __init__(self, tokenizer: Any, texts: Sequence[str]) -> None:
        self.tokenizer = tokenizer
        self.texts = tuple(texts)
        # A stop string of n bytes ends within the last n tokens, each of which stands for at least one byte.
        self._tail = max((len(text.encode()) for text in self.texts), default=0) + EXTRA_TOKENS

    def matched(self, ids: Sequence[int]) -> bool:
        """Whether the completion `ids` ends here. Call it once for each sampled token."""
        if not self.texts:
            return False
        text = self.tokenizer.decode(list(ids[-self._tail :]))
        return any(stop in text for stop in self.texts)
