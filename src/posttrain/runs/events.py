"""Out-of-band events of a run, such as a worker restart, which the training loop reports at the end of the step."""

from collections import deque

_events: deque[str] = deque()


def record(message: str) -> None:
    """Add a message for the user. Thread-safe."""
    _events.append(message)


def drain() -> list[str]:
    """Remove and return the messages recorded since the last call, in order."""
    return [_events.popleft() for _ in range(len(_events))]
