"""vLLM under this interpreter: its scheduler and its workers are processes of their own, with no server between."""

import importlib.util
from pathlib import Path
from typing import Any

from posttrain.engines.vllm.replica import Died, Refused
from posttrain.engines.vllm.settings import Settings
from posttrain.errors import InputError, RunError


class InsideReplica:
    """A `Host` in the event loop of the engine."""

    name = "the vLLM engine"

    def __init__(self, settings: Settings) -> None:
        if importlib.util.find_spec("vllm") is None:
            raise InputError(
                "engine.mode: in_process needs vLLM under this interpreter, which has none; install it there as "
                "docs/vllm.md says, or set engine.mode=servers and engine.python to an interpreter that has it"
            )
        self.settings = settings
        self._host: Any = None

    async def start(self) -> None:
        from posttrain.engines.vllm.host import Host

        self.close()
        try:
            self._host = await Host.open(self.settings, alone=False)
        except Exception as error:
            raise RunError(
                f"vLLM did not start for {self.settings.model}: {_last_line(error)}; what it wrote above says more"
            ) from error

    async def about(self) -> dict[str, Any]:
        return self._host.about()

    async def respond(self) -> None:
        await self._ask("respond")

    async def generate(self, job: dict[str, Any]) -> dict[str, Any]:
        return await self._ask("generate", job)

    async def begin_weights(self, version: int) -> None:
        await self._ask("begin_weights", version)

    async def receive_weights(self, path: Path) -> None:
        await self._ask("receive_weights", str(path))

    async def finish_weights(self) -> list[str]:
        return await self._ask("finish_weights")

    async def load_adapter(self, folder: Path, version: int) -> None:
        await self._ask("load_adapter", str(folder), version)

    async def sleep(self) -> None:
        await self._ask("sleep")

    def let_go(self) -> None:
        """It ends in `close`."""

    def close(self) -> None:
        if self._host is not None:
            self._host.close()
            self._host = None

    async def _ask(self, method: str, *arguments: Any) -> Any:
        # The one that is asked now: another request may start a new one meanwhile.
        host = self._host
        if host is None:
            raise Died("it is being started again")
        try:
            return await getattr(host, method)(*arguments)
        except Exception as error:
            if host.dead:
                raise Died(_last_line(error)) from error
            raise Refused(_last_line(error)) from error


def _last_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1][:300]
