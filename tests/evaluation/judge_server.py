"""A real local server that judges by a rule, or misbehaves as configured."""

import json
import re
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.listening import listening


@dataclass(frozen=True)
class Trouble:
    """A misbehavior of the server."""

    status: int = 200
    body: str = "{}"
    headers: dict = field(default_factory=dict)
    seconds: float = 0
    """It waits so long first."""
    cut: bool = False
    """It dies before the end of the body."""


def completion(text, reason="stop"):
    choice = {"index": 0, "finish_reason": reason, "message": {"role": "assistant", "content": text}}
    return json.dumps({"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]})


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
    return Trouble(400, json.dumps({"error": error}))


class Server(ThreadingHTTPServer):
    """`rule` gets the frames by name and the number of the request; it gives JSON values, text, or a Trouble.

    A `reasoning` server refuses the fields that o3 refuses.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, rule, reasoning=False):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.rule, self.reasoning, self.requests, self.times, self.lock = rule, reasoning, [], [], threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_port}/v1"


@contextmanager
def serving(rule, reasoning=False):
    """Serve inside the context."""
    with listening(Server(rule, reasoning)) as made:
        yield made


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.requests.append({**asked, "authorization": self.headers["Authorization"]})
            self.server.times.append(time.monotonic())
            number = len(self.server.requests)
        answer = refused(asked) if self.server.reasoning else None
        answer = answer or self.server.rule(dict(framed(asked["messages"])[0]), number)
        if isinstance(answer, Trouble):
            time.sleep(answer.seconds)
            status, body, headers = answer.status, answer.body, answer.headers
        else:
            text = answer if isinstance(answer, str) else json.dumps(answer)
            status, body, headers = 200, completion(text), {}
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        # A length that is never reached is what a server that dies half-way leaves behind.
        cut = isinstance(answer, Trouble) and answer.cut
        self.send_header("Content-Length", str(len(body.encode()) + (50 if cut else 0)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        try:
            self.wfile.write(body.encode())
        except OSError:
            # The client has disconnected.
            return
        self.close_connection = cut

    def log_message(self, format, *args):
        pass
