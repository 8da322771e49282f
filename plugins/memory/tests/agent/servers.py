"""Chat servers whose answers a function of the messages gives."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.rollout import chat_server
from tests.rollout.chat_server import ChatServer, Reply


def replied(said: str | dict | int) -> Reply:
    """A reply with this text, this message, or this status of a failure."""
    if isinstance(said, int):
        return Reply(status=said, body='{"error": {"message": "out of order"}}')
    return Reply(said) if isinstance(said, str) else Reply(message=said)


@contextmanager
def serving(answer: Callable[[list[dict]], str | dict | int]) -> Iterator[ChatServer]:
    """Serve while inside. `answer` gives what `replied` takes."""
    with chat_server.serving(lambda request: replied(answer(request["messages"]))) as server:
        yield server


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
