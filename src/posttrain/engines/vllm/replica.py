"""One engine among those that answer: what is asked of it, wherever it runs."""

from pathlib import Path
from typing import Any, Protocol


class Died(Exception):
    """The engine is gone, and what was asked of it with it."""


class Refused(Exception):
    """The engine lives and will not do what was asked."""


class Replica(Protocol):
    """An engine that answers with the weights it was sent. Its methods run in the event loop of `VllmEngine`."""

    name: str
    """What messages call it."""

    async def start(self) -> None:
        """Start it, or start it again after it died; RunError where it cannot be."""
        ...

    async def about(self) -> dict[str, Any]:
        """As `Host.about`."""
        ...

    async def respond(self) -> None:
        """As `Host.respond`."""
        ...

    async def generate(self, job: dict[str, Any]) -> dict[str, Any]:
        """As `Host.generate`; Died where the engine did."""
        ...

    async def begin_weights(self, version: int) -> None:
        """As `Host.begin_weights`."""
        ...

    async def receive_weights(self, path: Path) -> None:
        """As `Host.receive_weights`."""
        ...

    async def finish_weights(self) -> list[str]:
        """As `Host.finish_weights`."""
        ...

    async def load_adapter(self, folder: Path, version: int) -> None:
        """As `Host.load_adapter`; `folder` holds the two files that peft writes."""
        ...

    async def sleep(self) -> None:
        """As `Host.sleep`."""
        ...

    def let_go(self) -> None:
        """Tell it that `close` follows, so that several end side by side."""
        ...

    def close(self) -> None:
        """End it, where it was started here."""
        ...
