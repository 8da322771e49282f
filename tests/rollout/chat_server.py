"""A small server of chat completions for tests, with a model that is a function of the request."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from posttrain.environments.protocol import Environment
from tests.listening import listening


@dataclass
class Reply:
    """The reply of the server: a chat completion of `text`, or `body` if it is set."""

    text: str | None = ""
    reason: str = "stop"
    status: int = 200
    body: str | None = None
    tokens: int | None = 7
    message: dict[str, Any] = field(default_factory=dict)
    """Further fields of the message, such as `reasoning_content`."""
    choice: dict[str, Any] = field(default_factory=dict)
    """Further fields of the choice, such as `stop_reason`."""
    delay: float = 0.0
    headers: dict[str, str] = field(default_factory=lambda: {"Retry-After-Ms": "5"})
    cut: bool = False
    """Whether the server dies before the end of the body."""

    def json(self) -> str:
        if self.body is not None:
            return self.body
        message = {"role": "assistant", "content": self.text, **self.message}
        choice = {"index": 0, "finish_reason": self.reason, "message": message, **self.choice}
        usage = {} if self.tokens is None else {"usage": {"completion_tokens": self.tokens, "prompt_tokens": 1}}
        return json.dumps(
            {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice], **usage}
        )


class ChatServer(ThreadingHTTPServer):
    """Answers with `model(request)`; stores the requests in `asked`, and the maximum number of concurrent ones."""

    daemon_threads = True

    def __init__(self, model: Callable[[dict[str, Any]], Reply]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.model = model
        self.asked: list[dict[str, Any]] = []
        self.open, self.most = 0, 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    def reply(self, request: dict[str, Any]) -> Reply:
        with self.lock:
            return self.model(request)


class _Handler(BaseHTTPRequestHandler):
    server: ChatServer

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.asked.append({"path": self.path, "key": self.headers["Authorization"], **request})
            self.server.open += 1
            self.server.most = max(self.server.most, self.server.open)
        reply = self.server.reply(request)
        if reply.delay:
            time.sleep(reply.delay)
        with self.server.lock:
            self.server.open -= 1
        content = reply.json().encode()
        try:
            self.send_response(reply.status)
            self.send_header("Content-Type", "application/json")
            # A length that is never reached is what a server that dies half-way leaves behind.
            self.send_header("Content-Length", str(len(content) + 50 * reply.cut))
            for name, value in reply.headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)
            self.close_connection = reply.cut
        except OSError:
            pass  # the client has disconnected

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@contextmanager
def serving(model: Callable[[dict[str, Any]], Reply]) -> Iterator[ChatServer]:
    """A server of `model` in a thread."""
    with listening(ChatServer(model)) as server:
        yield server


def scripted(kind: type[Environment], recipe: Any, seeds: range) -> Callable[[dict[str, Any]], str]:
    """A model that knows the expert's answers on `seeds`: it goes by the first user message of the conversation and
    the number of answers in it. The question of a conversation that starts again counts as its first."""
    answers: dict[str, list[str]] = {}
    for seed in seeds:
        environment = kind(recipe)
        opening = environment.reset(seed).messages
        while True:
            said = environment.expert()
            answers.setdefault(_question(opening), []).append(said)
            step = environment.step(said)
            if step.terminated or step.truncated:
                break
            opening = step.messages if step.new_conversation else opening

    def model(request: dict[str, Any]) -> str:
        messages = request["messages"]
        return answers[_question(messages)][sum(message["role"] == "assistant" for message in messages)]

    return model


def _question(messages: list[dict[str, str]]) -> str:
    return next(message["content"] for message in messages if message["role"] == "user")
