"""Parser for the agent's messages: a thought, then either Python code to run or a reply that ends the episode.

    <think>…</think><python>…</python>
    <think>…</think><reply>…</reply>

The thought ends at the first `</think>`, whatever other tags it contains. Code ends at the first `</python>` outside of
Python strings. A reply ends at the first `</reply>`. Any other text except white space makes the whole message
rejected, with a reason that says what to write instead.
"""

import re
from dataclasses import dataclass

from posttrain.environments.game import Rejected

TAGS = ("think", "python", "reply")
"""The names of the blocks of a message."""


@dataclass(frozen=True)
class Act:
    """Code to run. `thought` is empty in the format without thinking."""

    thought: str
    code: str


@dataclass(frozen=True)
class Reply:
    """An answer to the user. `thought` is empty in the format without thinking."""

    thought: str
    text: str


Parsed = Act | Reply | Rejected

_CODE = re.compile(
    r"""(?:
      [^\#'"<]++ | <(?!/python>)
    | \#(?:[^\n<]++|<(?!/python>))*+                                # a comment
    | '''(?:[^\\']++|\\(?:\r\n|.)|'(?!''))*+'''
    | \"\"\"(?:[^\\"]++|\\(?:\r\n|.)|"(?!""))*+\"\"\"
    | '(?!'')(?:[^\\\n']++|\\(?:\r\n|.))*+(?:'|(?=\n))
    | "(?!"")(?:[^\\\n"]++|\\(?:\r\n|.))*+(?:"|(?=\n))
    )*+""",
    re.DOTALL | re.VERBOSE,
)
"""Code up to its end, or up to a string that is not closed.

A string in single quotes ends with its line, as in Python, so a stray apostrophe does not hide the end of the code.
Neither does a comment.
"""
_FENCED = re.compile(r"\s*```(?:python|py)?[ \t]*\n(.*)\n[ \t]*```\s*", re.DOTALL)
"""Code in a Markdown fence around all of it; inner fences stay."""


def parse(message: str, thinking: bool = True) -> Parsed:
    """Parse a message. With `thinking`, a thought comes first; without, a think block is an error.

    A message that does not begin with `<think>` is read as if it did, because some chat templates (such as that of
    Qwen3-4B-Thinking-2507) already write the tag. It still needs `</think>`.
    """
    format_hint = "<think>…</think> and then " if thinking else ""
    format_hint += "either <python>…</python> or <reply>…</reply>"
    thought, rest = "", message
    if thinking:
        # Some files begin with a byte-order mark, and so do texts learned from them.
        text = re.sub(r"\A[\s\ufeff]+", "", message)
        if not text:
            return Rejected(f"the message is empty; write {format_hint}")
        thought, end, rest = text.removeprefix("<think>").partition("</think>")
        if not end:
            missing = "</think>" if text.startswith("<think>") else "<think>…</think>"
            return Rejected(f"no {missing}; write {format_hint}")
    block = re.match(r"\s*<(python|reply)>", rest)
    if block is None:
        return Rejected(_misplaced(rest.strip(), thinking, f"; write {format_hint}"))
    rest = rest[block.end() :]
    if block[1] == "reply":
        text, end, rest = rest.partition("</reply>")
        if not end:
            return Rejected("no </reply> after the reply; end it with </reply> and stop")
    else:
        code = _CODE.match(rest)
        assert code is not None  # the pattern matches nothing, too
        text, rest = code[0], rest[code.end() :]
        if not rest.startswith("</python>"):
            inside = " (a string in the code is not closed either)" if rest else ""
            return Rejected(f"no </python> after the code{inside}; end the block with </python> and stop")
        rest = rest.removeprefix("</python>")
    if rest.strip():
        after = re.match(r"\s*</?(\w+)>", rest)
        if after and after[1] == "result":
            return Rejected("do not write <result>; stop after </python>, and the result is sent to you")
        if after and after[1] in TAGS:
            advice = "write one block only, <python> now and <reply> after its result"
            return Rejected(f"<{after[1]}> after </{block[1]}>; {advice}")
        return Rejected(f"text after </{block[1]}>; stop there")
    if block[1] == "python":
        fenced = _FENCED.fullmatch(text)
        text = (fenced[1] if fenced else text).strip("\n").rstrip()
        return Act(thought.strip(), text) if text else Rejected("the <python> block is empty; write code in it")
    if "<reply>" in text:
        return Rejected("a second <reply> inside the reply; write one <reply>…</reply>")
    # Zero-width characters are not an answer.
    if not any(sign.isprintable() and not sign.isspace() for sign in text):
        return Rejected("the <reply> is empty; write your answer in it")
    return Reply(thought.strip(), text.strip())


def _misplaced(rest: str, thinking: bool, hint: str) -> str:
    """The error for `rest`, where a block should have begun."""
    if not rest:
        return f"no <python> or <reply> {'after </think>' if thinking else 'in the message'}{hint}"
    opened = re.match(r"</?(\w{1,40})>", rest)  # longer names are not repeated to the model
    name = opened[1] if opened else ""
    if name == "think":
        return "a second <think>; think once" if thinking else f"<think> is not used{hint}"
    if name in TAGS:
        return f"</{name}> without <{name}>{hint}"
    return f"<{name}> is not a block{hint}" if name else f"text outside the blocks{hint}"
