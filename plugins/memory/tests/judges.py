"""A real server on this machine that plays a judge by a rule, and reads frames as instructed."""

import json
import re
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.listening import listening


def frames(messages):
    """Name -> text of the frames of a prompt, read with the mark that the system message names."""
    system, user = (message["content"] for message in messages)
    mark = re.search(r"line \[/(\w+)\]", system).group(1)
    found = re.findall(rf"^\[{mark} (\w+)\]\n(.*?)\n\[/{mark}\]$", user, re.DOTALL | re.MULTILINE)
    assert len(dict(found)) == len(found)
    assert user.count(mark) == 2 * len(found)
    return dict(found)


def points(number, reason="so"):
    """A rule: the same verdict on everything."""
    return lambda asked: json.dumps({"reason": reason, "score": number})


class Judge(ThreadingHTTPServer):
    """`rule` gets the request (JSON) and gives the text of the reply, or a status."""

    daemon_threads = True

    def __init__(self, rule):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.rule, self.requests = rule, []
        self.url = f"http://127.0.0.1:{self.server_port}/v1"

    def keys(self, **more):
        """The keys of a recipe that names this judge."""
        return {"url": self.url, "model": "m", "retries": 0, **more}

    def seen(self):
        """The frames of each request."""
        return [frames(asked["messages"]) for asked in self.requests]


@contextmanager
def judge(rule):
    """A judge that serves inside the context."""
    with listening(Judge(rule)) as made:
        yield made


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append({**asked, "authorization": self.headers["Authorization"]})
        text = self.server.rule(asked)
        status = 200 if isinstance(text, str) else text
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
        whole = {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
        body = json.dumps(whole if status == 200 else {"error": "down"}).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format, *args):
        pass
