"""The definition of a valid example, independent of the code that makes examples."""

import copy
import json
import math
import re
from dataclasses import asdict

from posttrain.data.examples import Example
from posttrain.data.messages import ConversationExample, PairExample, PromptExample, TextExample, UnpairedExample


def check(example: Example) -> None:
    """That an example keeps every promise of `posttrain.data.messages`."""
    letters = {"system": "s", "user": "u", "assistant": "a", "tool": "t"}

    def spoken(messages, answer_at_end):
        assert isinstance(messages, list)
        for message in messages:
            assert isinstance(message["content"], str)
            assert None not in message.values()
            assert type(message.get("train", True)) is bool
            assert type(message.get("primer", "")) is str
            for call in message.get("tool_calls", []):
                arguments = call["function"].get("arguments", {})
                assert isinstance(arguments, dict)
                json.dumps(arguments, allow_nan=False)
            if message["role"] == "assistant" and not message["content"].strip():
                assert len(message["tool_calls"]) > 0
        roles = "".join(letters[message["role"]] for message in messages)
        assert re.match(r"[su]|au", roles)
        assert not re.search(r"aa|[su]t", roles)
        opens = int(roles.startswith("a"))
        assert "".join(m["content"] for m in messages[opens : (roles + "a").index("a", opens)]).strip()
        if answer_at_end is not None:
            assert (roles[-1] == "a") == answer_at_end
        return roles

    def learnable(messages):
        assert any(m["role"] == "assistant" and m.get("train", True) for m in messages)

    if isinstance(example, ConversationExample):
        roles = spoken(example.messages, None)
        assert "a" in roles[1:]
    elif isinstance(example, TextExample):
        assert example.text.strip()
        example.text.encode()
        return
    elif isinstance(example, PromptExample):
        spoken(example.messages, False)
        json.dumps(copy.deepcopy(example.row), default=str, ensure_ascii=False).encode()
    elif isinstance(example, UnpairedExample):
        assert type(example.label) is bool
        spoken(example.prompt, False)
        spoken(example.prompt + example.completion, True)
        learnable(example.completion)
    else:
        assert isinstance(example, PairExample)
        for side in (example.chosen, example.rejected):
            assert side
            spoken(example.prompt + side, True)
            learnable(side)
        chosen, rejected = (
            [{key: value for key, value in m.items() if key not in ("train", "primer")} for m in side]
            for side in (example.chosen, example.rejected)
        )
        assert chosen != rejected
        assert example.margin is None or (type(example.margin) is float and 0 <= example.margin < math.inf)
    assert example.domain is None or (isinstance(example.domain, str) and example.domain)
    assert example.tools is None or (example.tools and all(isinstance(tool, dict) for tool in example.tools))
    parts = asdict(example)
    parts.pop("row", None)
    json.dumps(parts, sort_keys=True, ensure_ascii=False).encode()
