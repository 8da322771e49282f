"""One engine among those that answer: what is asked of it, wherever it runs."""

import asyncio
import contextlib
import importlib.util
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import fields
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from posttrain.engines.vllm.settings import Settings, preloaded_libraries, process_environment
from posttrain.errors import InputError, RunError


class EngineDied(Exception):
    """The engine is gone, and what was asked of it with it."""


class EngineRefused(Exception):
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
        """As `Host.generate`; EngineDied where the engine did."""
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


class InProcessReplica:
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
            raise EngineDied("it is being started again")
        try:
            return await getattr(host, method)(*arguments)
        except Exception as error:
            if host.dead:
                raise EngineDied(_last_line(error)) from error
            raise EngineRefused(_last_line(error)) from error


def _last_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1][:300]


_CONNECT_SECONDS = 10
_PIECE = 2**20


async def ask(url: str, method: str, path: str, headers: dict[str, str], content: bytes | Path = b"") -> dict[str, Any]:
    """The JSON that the server at `url` answers; `content` is the body, or the file that holds it.

    Raises EngineRefused for a status that is not 200, and EngineDied where the connection fails or ends early.
    """
    address = urlsplit(url)
    secure = address.scheme == "https"
    port = address.port or (443 if secure else 80)
    try:
        async with asyncio.timeout(_CONNECT_SECONDS):
            reader, writer = await asyncio.open_connection(address.hostname, port, ssl=secure)
    except (OSError, TimeoutError) as error:
        raise EngineDied(_words(error)) from error
    try:
        _notice_loss(writer.get_extra_info("socket"))
        length = content.stat().st_size if isinstance(content, Path) else len(content)
        lines = {"host": address.netloc, "connection": "close", "content-length": str(length)} | headers
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        writer.write(f"{method} {address.path.rstrip('/')}{path} HTTP/1.1\r\n{head}\r\n".encode())
        async for piece in _pieces(content):
            writer.write(piece)
            await writer.drain()
        status, body = await _response(reader)
    except (OSError, asyncio.IncompleteReadError) as error:
        raise EngineDied(_words(error)) from error
    finally:
        writer.close()
    try:
        found = json.loads(body)
    except ValueError as error:
        raise EngineRefused(f"{url} is no vLLM server of posttrain's") from error
    if status != 200:
        raise EngineRefused(found.get("error", f"status {status}") if isinstance(found, dict) else f"status {status}")
    return found


async def _response(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    status = int(head[0].split()[1])
    sizes = [line.partition(":")[2] for line in head if line.lower().startswith("content-length:")]
    return status, await reader.readexactly(int(sizes[0])) if sizes else await reader.read()


async def _pieces(content: bytes | Path) -> AsyncIterator[bytes]:
    if isinstance(content, bytes):
        yield content
        return
    with content.open("rb") as file:
        while piece := file.read(_PIECE):
            yield piece


def _notice_loss(connection: socket.socket | None) -> None:
    """Let the system find out that the other machine is gone: an answer may take any time, so no time-out tells."""
    if connection is None:
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _words(error: BaseException) -> str:
    if isinstance(error, asyncio.IncompleteReadError):
        return "it hung up"
    return str(error) or type(error).__name__


_LOOK_EVERY = 0.1
_END_SECONDS = 10
"""What a server has to end by itself before it is killed."""
_TOKEN = "POSTTRAIN_VLLM_TOKEN"
_BINARY = {"content-type": "application/octet-stream"}
_SHOWN = 6
"""Lines of a log that an error shows."""


class ServerReplica:
    """Asks a server. `url` is empty until one is there."""

    def __init__(
        self,
        name: str,
        url: str,
        token: str | None,
        start_timeout: float,
        same_machine: bool,
        wanted: Settings | None = None,
    ) -> None:
        """`wanted`: what a server that was started by someone else has to agree with."""
        self.name = name
        self.url = url
        self.start_timeout = start_timeout
        self.same_machine = same_machine
        """Files are named instead of sent."""
        self.wanted = wanted
        self._headers = {"authorization": f"Bearer {token}"} if token else {}

    async def start(self) -> None:
        """Wait until the server answers."""
        ends = time.monotonic() + self.start_timeout
        while True:
            try:
                async with asyncio.timeout(max(1.0, ends - time.monotonic())):
                    self._agree(await self.about())
                return
            except (EngineDied, TimeoutError) as error:
                if time.monotonic() > ends:
                    raise RunError(
                        f"{self.name} does not answer ({str(error) or 'it takes connections and says nothing'}); start it with "
                        "`python -m posttrain.engines.vllm.server`, or correct engine.urls"
                    ) from error
            except EngineRefused as error:
                raise RunError(f"{self.name} refuses: {error}; look at engine.token_variable") from error
            await asyncio.sleep(1)

    def _agree(self, about: dict[str, Any]) -> None:
        """RunError where the server was started with what this run cannot use."""
        if self.wanted is None:
            return
        for key, option in (("logprobs", "logprobs"), ("adapter_rank", "adapter-rank")):
            own, needed = about[key], getattr(self.wanted, key)
            if own != needed:
                raise RunError(f"{self.name} was started with --{option} {own} and the recipe needs {needed}")
        if 0 < about["context"] < self.wanted.context:
            raise RunError(
                f"{self.name} was started with --context {about['context']} and the recipe needs {self.wanted.context}"
            )

    async def about(self) -> dict[str, Any]:
        return await self._ask("/about")

    async def respond(self) -> None:
        await self._ask("/respond")

    async def generate(self, job: dict[str, Any]) -> dict[str, Any]:
        return await self._ask("/generate", job)

    async def begin_weights(self, version: int) -> None:
        await self._ask("/weights/begin", {"version": version})

    async def receive_weights(self, path: Path) -> None:
        if self.same_machine:
            await self._ask("/weights/bucket", {"path": str(path)})
        else:
            await self._ask("/weights/bucket", path, _BINARY)

    async def finish_weights(self) -> list[str]:
        return (await self._ask("/weights/finish", {}))["missing"]

    async def load_adapter(self, folder: Path, version: int) -> None:
        if self.same_machine:
            await self._ask("/adapter", {"folder": str(folder), "version": version})
            return
        config = " ".join((folder / "adapter_config.json").read_text().split())
        weights = folder / "adapter_model.safetensors"
        await self._ask("/adapter", weights, _BINARY | {"x-adapter": config, "x-version": str(version)})

    async def sleep(self) -> None:
        await self._ask("/sleep", {})

    def let_go(self) -> None:
        """Leave it running: someone else started it."""

    def close(self) -> None:
        """Leave it running: someone else started it."""

    async def _ask(
        self, path: str, content: bytes | Path | dict[str, Any] | None = None, headers: dict[str, str] | None = None
    ) -> dict[str, Any]:
        """GET without content, else POST; a dictionary goes as JSON."""
        method = "GET" if content is None else "POST"
        body = content if isinstance(content, bytes | Path) else json.dumps(content or {}).encode()
        return await ask(self.url, method, path, self._headers | (headers or {}), body)


class LaunchedServerReplica(ServerReplica):
    """A server of this run's own: a process group that ends when the run does."""

    def __init__(
        self, number: int, settings: Settings, python: str | None, devices: list[int], start_timeout: float, logs: Path
    ) -> None:
        """`devices`: numbers of the GPUs it may see, among those that this process sees. `logs`: a directory."""
        self.python = python or sys.executable
        if not Path(self.python).is_file():
            raise InputError(f"engine.python: there is no interpreter {self.python}")
        self.settings = settings
        self.devices = devices
        self.log = logs / f"vllm-{number}.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="posttrain-vllm-")
        self._token = secrets.token_hex(16)
        super().__init__(f"vLLM server {number}", "", self._token, start_timeout, same_machine=True)

    async def start(self) -> None:
        self._kill()
        self.url = ""
        announced = Path(self._folder.name) / "port"
        announced.unlink(missing_ok=True)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command(announced),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=self._environment(),
                start_new_session=True,
            )
        ends = time.monotonic() + self.start_timeout
        while not announced.exists():
            code = self._process.poll()
            if code is not None or time.monotonic() > ends:
                self._kill()
                how = f"it ended with status {code}" if code is not None else f"{self.start_timeout:g} s are over"
                raise RunError(f"{self.name} did not start: {how}; {self._last_words()}")
            await asyncio.sleep(_LOOK_EVERY)
        self.url = f"http://127.0.0.1:{announced.read_text()}"

    def let_go(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    def close(self) -> None:
        """End its processes, if there are any; they tidy up where they can."""
        if self._process is None:
            return
        self.let_go()
        if self.url:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_SECONDS)
        self._kill()
        self._folder.cleanup()

    def _kill(self) -> None:
        if self._process is None:
            return
        if self._process.poll() != 0:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process = None

    @property
    def pid(self) -> int | None:
        """Of the server's first process."""
        return self._process.pid if self._process is not None else None

    def _command(self, announced: Path) -> list[str]:
        options: list[str] = []
        for field in fields(Settings):
            value, name = getattr(self.settings, field.name), field.name.replace("_", "-")
            if field.name == "model" or value == field.default:
                continue
            options += (
                [f"--{name}", str(value)] if not isinstance(value, bool) else [f"--{'' if value else 'no-'}{name}"]
            )
        module = "posttrain.engines.vllm.server"
        own = ["--port", "0", "--owned", "--announce", str(announced)]
        return [self.python, "-m", module, self.settings.model, *own, *options]

    def _environment(self) -> dict[str, str]:
        """Of the server: it sees this very posttrain and nothing else of this interpreter's packages."""
        import posttrain

        package = Path(self._folder.name) / "path"
        if not package.exists():
            package.mkdir()
            (package / "posttrain").symlink_to(Path(posttrain.__file__).parent, target_is_directory=True)
        variables = {
            name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TORCHELASTIC"))
        }
        for name in (
            "RANK",
            "LOCAL_RANK",
            "WORLD_SIZE",
            "LOCAL_WORLD_SIZE",
            "MASTER_ADDR",
            "MASTER_PORT",
            "LD_PRELOAD",
        ):
            variables.pop(name, None)
        # The learner's own number of threads is not that of an engine.
        variables.pop("OMP_NUM_THREADS", None)
        temporary = Path(self._folder.name) / "tmp"
        temporary.mkdir(exist_ok=True)
        # What vLLM leaves lying goes with the folder.
        variables |= {"PYTHONPATH": str(package), _TOKEN: self._token, "TMPDIR": str(temporary)}
        variables |= process_environment(self.settings) | preloaded_libraries(self.python)
        seen = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        chosen = [seen[device] if device < len(seen) else str(device) for device in self.devices]
        if self.devices and (seen or Path("/dev/nvidiactl").exists()):
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(chosen)
        return variables

    def _last_words(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        told = [line for line in lines if "Error" in line or "error:" in line.lower()] or lines
        shown = "\n".join(f"  {line[:300]}" for line in dict.fromkeys(told[-_SHOWN:]))
        return f"the last of its log {self.log}:\n{shown}"
