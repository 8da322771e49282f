"""Rendered text to tokens.

Only the chat template writes control tokens. The text of a control token inside a message stays text: `marked` breaks it
with a mark before the template is applied, and `TextEncoder.encode` removes the mark. Other tokens of the tokenizer, such
as `<tool_call>` in Qwen, are encoded wherever their text is. A template that deletes text inside of messages could still
join a control token. No published one is known to.

The later parts of a text are encoded as its continuation, because SentencePiece tokenizers put a space before a text.
"""

import re
from collections.abc import Collection, Iterable
from functools import cached_property
from typing import Any

from posttrain.errors import InputError

MARK = "\ufdd0"
"""Breaks the text of a control token. A noncharacter of Unicode; where a message contains it, it is doubled."""
_ESCAPED = "\\ufdd0"
_SINGLE = re.compile(f"(?<!{MARK}){MARK}(?!{MARK})")
_THINKING = frozenset({"<think>", "</think>"})
"""Tokens that answers contain as text, and that end no turn. They stay tokens even if the tokenizer calls them special."""
_TAIL = 200
"""Number of characters of the text before a part that can influence its tokens."""


class TextEncoder:
    """Encodes rendered text with a fast tokenizer."""

    def __init__(self, tokenizer: Any, control: Collection[int]) -> None:
        """`control`: ids of added tokens that structure conversations, besides those that the tokenizer calls special."""
        self.tokenizer = tokenizer
        self._added = tokenizer.added_tokens_decoder
        self.control = frozenset(
            number
            for number, token in self._added.items()
            if (token.special or number in control) and token.content not in _THINKING
        )
        """Ids of control tokens."""
        self._control = either([_ESCAPED, *(self._added[number].content for number in self.control)])
        self._normalizer = tokenizer.backend_tokenizer.normalizer

    # -- messages
    # -------------------------------------------------------------------------------------------------------

    def marked(self, value: Any) -> Any:
        """Return a message, a tool or a text with a mark in every control token that its texts contain."""
        if isinstance(value, str):
            return self._mark(value) if MARK in value or self._has_control(value) else value
        if isinstance(value, dict):
            return {self.marked(key): self.marked(item) for key, item in value.items()}
        return [self.marked(item) for item in value] if isinstance(value, list | tuple) else value

    def _has_control(self, text: str) -> bool:
        """Whether the tokenizer would find a control token in `text`, before or after it normalizes the text."""
        if self._control.search(text):
            return True
        if self._normalizer is None or (text.isascii() and not self._changes_ascii):
            return False
        return self._control.search(self._normalizer.normalize_str(text)) is not None

    @cached_property
    def _changes_ascii(self) -> bool:
        return "Aa" not in self._normalizer.normalize_str("Aa")

    def _mark(self, text: str) -> str:
        marked, count = text.replace(MARK, MARK * 2), 1
        while count:
            marked, count = self._control.subn(_broken, marked)
        if any(map(self._has_control, _parts(marked))):
            # Normalization makes a control token of other characters.
            return MARK.join(text)
        return marked

    @staticmethod
    def unescaped(rendered: str) -> str:
        """Return rendered text in which a template has escaped the marks, as in ASCII JSON."""
        return rendered.replace(_ESCAPED, MARK)

    # -- tokens
    # ---------------------------------------------------------------------------------------------------------

    def encode(self, text: str, after: str = "") -> list[int]:
        """Return the token ids of rendered text that continues the rendered text `after`."""
        if MARK not in text:
            return self._continued(text, after)
        ids: list[int] = []
        for part in self._tokens.split(text):
            plain = self._plain(part) if MARK in part and not self._contextual else None
            if plain is not None:
                ids += plain
            else:
                for piece in _parts(part):
                    ids += self._continued(piece, after)
                    after = piece or after
            after = part or after
        return ids

    @cached_property
    def _tokens(self) -> re.Pattern[str]:
        special = {token.content for token in self._added.values() if token.special}
        return either(special.union(self._added[number].content for number in self.control))

    @cached_property
    def _added_texts(self) -> re.Pattern[str]:
        return either(token.content for token in self._added.values())

    def _plain(self, part: str) -> list[int] | None:
        """The tokens of text without any special token; None if the vocabulary has the control token as a word."""
        ids = self._ids("".join(_parts(part)), split_special_tokens=True)
        return None if self.control.intersection(ids) else ids

    def _ids(self, text: str, **settings: bool) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, **settings)["input_ids"]

    @cached_property
    def _contextual(self) -> bool:
        """Whether the tokens of a text depend on the text before it, other than by merges across the border."""
        if any(token.rstrip for token in self._added.values()):
            return True
        starts = ["\n", *[self._added[number].content for number in sorted(self.control)[:1]]]
        texts = ("a b", " a", "0", "\n<")
        return any(
            self._ids(start + text) != [*self._ids(start), *self._ids(text)]
            for start in starts
            for text in texts
            if start != text[:1]
        )

    def _continued(self, text: str, after: str) -> list[int]:
        if not (text and after and self._contextual):
            return self._ids(text)
        tail = after[-_TAIL:]
        starts = [match.start() for match in self._added_texts.finditer(tail)]
        # The actual text before is replaced only if a token would extend across the border.
        for start in (tail[starts[-1] if starts else -16 :], "\n", "x", "0"):
            before, ids = self._ids(start), self._ids(start + text)
            if ids[: len(before)] == before:
                return ids[len(before) :]
        return self._ids(text)


def either(texts: Iterable[str]) -> re.Pattern[str]:
    """A pattern that matches any of `texts`, longer ones first, as group 1; nothing if there are none."""
    return re.compile("(" + ("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)") + ")")


def _broken(match: re.Match[str]) -> str:
    if len(match[0]) == 1:
        raise InputError(
            f"a message contains {match[0]!r}, which is a special token of the tokenizer and cannot be encoded as text; "
            "remove it from the message, or from the special tokens of the tokenizer"
        )
    return f"{match[0][0]}{MARK}{match[0][1:]}"


def _parts(marked: str) -> list[str]:
    """The parts between marks, with doubled marks as they were written."""
    return [part.replace(MARK * 2, MARK) for part in _SINGLE.split(marked)]
