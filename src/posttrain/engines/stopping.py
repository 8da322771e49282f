"""Stop strings, found in tokens: the text is only looked at, and the tokens stay what was sampled."""

from collections.abc import Sequence
from typing import Any

SPARE_TOKENS = 8
"""Tokens looked at beyond the length of a stop string, for those that stand for no character of their own."""


class StopStrings:
    """The texts that end an answer once its decoded tokens hold one of them."""

    def __init__(self, tokenizer: Any, texts: Sequence[str]) -> None:
        self.tokenizer = tokenizer
        self.texts = tuple(texts)
        # A stop string of n bytes ends within the last n tokens, each of which stands for one at least.
        self._looked_at = max((len(text.encode()) for text in self.texts), default=0) + SPARE_TOKENS

    def found(self, answer: Sequence[int]) -> bool:
        """Whether the answer, of which all but the last token were looked at before, ends here."""
        if not self.texts:
            return False
        text = self.tokenizer.decode(list(answer[-self._looked_at :]))
        return any(stop in text for stop in self.texts)
