"""Thinking blocks, found in the text that the tokens decode to and measured in tokens."""

import re

from posttrain.credit.units.offsets import AlignedText

OPENING, CLOSING = "<think>", "</think>"


def thinking_tokens(answer: AlignedText, opened: bool = False) -> int:
    """How many tokens at the start of an answer are its thinking: up to `</think>`, and the white space after it.

    `opened`: the prompt ended with `<think>`, so the answer begins inside the block. 0 for an answer without thinking;
    all tokens where the block was not closed. A token that holds the end of the block and something after it is counted
    as thinking. The published code drops the first four tokens of every answer, which is the empty block of one model.
    """
    total = len(answer.offsets) - 1
    if not opened and not answer.text.lstrip().startswith(OPENING):
        return 0
    found = answer.text.find(CLOSING)
    visible = re.compile(r"\S").search(answer.text, found + len(CLOSING)) if found >= 0 else None
    if visible is None:
        return total
    end = found + len(CLOSING)
    token = int(answer.cuts([(visible.start(), visible.start())])[0])
    while token < total and (answer.offsets[token] < end or not answer.whole[token]):
        token += 1
    return token
