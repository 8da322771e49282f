"""A small real HTTP server with chat completions, whose answers a function of the messages gives."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Server:
    """Where it is, and the bodies of the requests it got."""

    url: str
    asked: list[dict] = field(default_factory=list)


@contextmanager
def serving(answer: Callable[[list[dict]], str | dict | int]) -> Iterator[Server]:
    """Serve while inside. `answer` gives the text of a message, a whole message, or a status of a failure."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            server.asked.append(body)
            said = answer(body["messages"])
            status = said if isinstance(said, int) else 200
            message = said if isinstance(said, dict) else {"content": said}
            choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", **message}}
            completion = {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
            data = json.dumps(completion if status == 200 else {"error": {"message": "out of order"}}).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_):
            """Clients that go away in the middle are part of the tests."""

    listening = Quiet(("127.0.0.1", 0), Handler)
    server = Server(f"http://127.0.0.1:{listening.server_port}/v1")
    thread = threading.Thread(target=listening.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        listening.shutdown()
        listening.server_close()
        thread.join()


def turns(*script: str) -> Callable[[list[dict]], str]:
    """Answers in order since the last question; every question starts again with the first one."""

    def answer(messages):
        given = 0
        for message in reversed(messages[1:]):
            if message["role"] == "user" and not message["content"].startswith("<result>"):
                break
            given += message["role"] == "assistant"
        return script[given]

    return answer
