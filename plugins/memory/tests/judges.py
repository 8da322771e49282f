"""A real server on this machine that plays a judge by a rule, and reads frames as instructed."""

import json
from contextlib import contextmanager
from dataclasses import dataclass

from plugins.memory.tests.agent.servers import replied

from tests.evaluation.judge_server import framed
from tests.rollout import chat_server


def frames(messages):
    """Name -> text of the frames of a prompt."""
    found = framed(messages)[0]
    assert len(dict(found)) == len(found)
    return dict(found)


def points(number, reason="so"):
    """A rule: the same verdict on everything."""
    return lambda asked: json.dumps({"reason": reason, "score": number})


@dataclass
class Judge:
    """Where it is, and the requests that it got."""

    url: str
    requests: list[dict]

    def keys(self, **more):
        """The keys of a recipe that names this judge."""
        return {"url": self.url, "model": "m", "retries": 0, **more}

    def seen(self):
        """The frames of each request."""
        return [frames(asked["messages"]) for asked in self.requests]


@contextmanager
def judge(rule):
    """A judge that serves inside the context. `rule` gets the request and gives the text of the reply, or a status."""
    with chat_server.serving(lambda request: replied(rule(request))) as server:
        yield Judge(server.url, server.asked)
