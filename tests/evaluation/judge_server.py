"""A real local server that judges by a rule, or misbehaves as configured."""

import json
import re
import time
from contextlib import contextmanager

from tests.listening import listening
from tests.rollout.chat_server import ChatServer, Reply


def framed(messages):
    """(name, text) of each frame of a prompt, read as the system message says, and the text around them."""
    system, user = (message["content"] for message in messages)
    mark = re.search(r"line \[/(\w+)\]", system).group(1)
    frame = rf"^\[{mark} (\w+)\]\n(.*?)\n\[/{mark}\]$"
    found = re.findall(frame, user, re.DOTALL | re.MULTILINE)
    assert user.count(mark) == 2 * len(found)
    around = re.sub(frame, "<>", user, flags=re.DOTALL | re.MULTILINE)
    return found, system.replace(mark, "MARK"), around


def refused(asked):
    """What OpenAI answers where a request to a reasoning model such as o3 has a field that it does not take; else None."""
    without = ("max_tokens", "top_p", "stop", "logprobs", "presence_penalty", "frequency_penalty")
    if asked.get("temperature", 1) != 1:
        name, code = "temperature", "unsupported_value"
        said = f"Unsupported value: 'temperature' does not support {asked[name]} with this model. Only the default (1) value is supported."
    elif name := next((name for name in without if name in asked), None):
        instead = " Use 'max_completion_tokens' instead." if name == "max_tokens" else ""
        said, code = (
            f"Unsupported parameter: '{name}' is not supported with this model.{instead}",
            "unsupported_parameter",
        )
    elif asked.get("reasoning_effort", "low") not in ("low", "medium", "high"):
        name, code = "reasoning_effort", "invalid_value"
        said = f"Invalid value: '{asked[name]}'. Supported values are: 'low', 'medium', and 'high'."
    else:
        return None
    error = {"message": said, "type": "invalid_request_error", "param": name, "code": code}
    return Reply(status=400, body=json.dumps({"error": error}))


class Server(ChatServer):
    """`rule` gets the frames by name and the number of the request; it gives JSON values, text, or a Reply.

    A `reasoning` server refuses the fields that o3 refuses.
    """

    request_queue_size = 64

    def __init__(self, rule, reasoning=False):
        super().__init__(None)
        self.rule, self.reasoning, self.requests, self.times = rule, reasoning, self.asked, []

    def reply(self, request):
        with self.lock:
            self.times.append(time.monotonic())
            number = len(self.times)
        answer = refused(request) if self.reasoning else None
        answer = answer or self.rule(dict(framed(request["messages"])[0]), number)
        if isinstance(answer, Reply):
            return answer
        return Reply(answer if isinstance(answer, str) else json.dumps(answer), headers={})


@contextmanager
def serving(rule, reasoning=False):
    """Serve inside the context."""
    with listening(Server(rule, reasoning)) as made:
        yield made
