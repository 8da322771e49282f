"""What befell a run outside its loop, such as a worker that died and was replaced: told at the end of the step."""

from collections import deque

_told: deque[str] = deque()


def tell(message: str) -> None:
    """Leave a sentence for the user, from any thread."""
    _told.append(message)


def take() -> list[str]:
    """The sentences since the last call."""
    return [_told.popleft() for _ in range(len(_told))]
