"""vLLM replicas: engines behind existing servers, or behind servers that this process starts."""

import asyncio
import io
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from posttrain.distributed.process import ChildProcess
from posttrain.engines.vllm.settings import TOKEN, Settings, preloaded_libraries, process_environment
from posttrain.errors import InputError, RunError

T = TypeVar("T")


class EngineDied(Exception):
    """The engine is gone, and its requests are lost."""


class EngineRefused(Exception):
    """The engine is alive and rejected a request."""


class HangDetector:
    """Pings an engine while calls to it are in flight, and fails the calls when it stops responding. The duration of a
    call does not indicate whether the engine is healthy, so calls have no time-out."""

    def __init__(self, ping: Callable[[], Awaitable[None]], timeout: float) -> None:
        """`ping` returns once the engine has responded. An engine that is silent for `timeout` seconds counts as hanging."""
        self._ping = ping
        self._timeout = timeout
        self._calls: set[asyncio.Future[Any]] = set()
        self._hung: set[asyncio.Future[Any]] = set()

    async def run(self, call: Coroutine[Any, Any, T]) -> T:
        """The result of `call`, a call to the engine. EngineDied if the engine hangs."""
        task = asyncio.ensure_future(call)
        self._calls.add(task)
        if len(self._calls) == 1:
            self._pinging = asyncio.ensure_future(self._ping_until_cancelled())
        try:
            return await task
        except asyncio.CancelledError:
            if task in self._hung:
                raise EngineDied(f"it did not respond for {self._timeout:g} s") from None
            raise
        finally:
            self._calls.discard(task)
            self._hung.discard(task)
            if not self._calls:
                self._pinging.cancel()

    async def _ping_until_cancelled(self) -> None:
        while True:
            await asyncio.sleep(self._timeout / 4)
            calls = set(self._calls)
            try:
                async with asyncio.timeout(3 * self._timeout / 4):
                    await self._ping()
            except TimeoutError:
                self._hung = calls & self._calls
                for task in self._hung:
                    task.cancel()
            except (EngineDied, EngineRefused):
                pass  # the calls raise it as well


async def http_request(url: str, path: str, headers: dict[str, str], content: bytes | Path) -> dict[str, Any]:
    """POST `content`, the body or a file with it, to the server at `url`, and return the JSON of its response. Raises
    EngineRefused for a status other than 200 and EngineDied if the connection fails or closes early."""
    address = urlsplit(url)
    secure = address.scheme == "https"
    port = address.port or (443 if secure else 80)
    try:
        async with asyncio.timeout(10):
            reader, writer = await asyncio.open_connection(address.hostname, port, ssl=secure)
    except OSError as error:
        raise EngineDied(str(error) or type(error).__name__) from error
    try:
        # Responses may take any time, so that the other machine is gone shows by TCP keep-alive only.
        connection = writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, option):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        length = content.stat().st_size if isinstance(content, Path) else len(content)
        lines = {"host": address.netloc, "connection": "close", "content-length": str(length)} | headers
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        writer.write(f"POST {address.path.rstrip('/')}{path} HTTP/1.1\r\n{head}\r\n".encode())
        with content.open("rb") if isinstance(content, Path) else io.BytesIO(content) as file:
            while chunk := file.read(2**20):
                writer.write(chunk)
                await writer.drain()
        answer = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        status = int(answer[0].split()[1])
        sizes = [line.partition(":")[2] for line in answer if line.lower().startswith("content-length:")]
        body = await reader.readexactly(int(sizes[0])) if sizes else await reader.read()
    except (asyncio.IncompleteReadError, OSError) as error:
        closed = isinstance(error, asyncio.IncompleteReadError)
        raise EngineDied("it closed the connection" if closed else str(error) or type(error).__name__) from error
    finally:
        writer.close()
    try:
        response = json.loads(body)
    except ValueError as error:
        raise EngineRefused(f"{url} is not a vLLM server of posttrain") from error
    if status != 200:
        reason = response.get("error") if isinstance(response, dict) else None
        raise EngineRefused(reason or f"status {status}")
    return response


_SHUTDOWN_SECONDS = 10
"""Time for a server to shut down before it is killed."""


class ServerReplica:
    """A vLLM server at `url`, which is empty until the server is running, with the weights that were sent to it.
    Methods run in the event loop of `VllmEngine`. `call` raises EngineDied if the engine is gone and EngineRefused if
    it rejects the call."""

    def __init__(
        self,
        name: str,
        url: str,
        token: str | None,
        start_timeout: float,
        same_machine: bool,
        required: Settings | None = None,
    ) -> None:
        """`required`: settings that an existing server must satisfy."""
        self.name = name
        self.url = url
        self.start_timeout = start_timeout
        self.same_machine = same_machine
        """Whether weights are sent as file paths instead of contents."""
        self.required = required
        self._headers = {"authorization": f"Bearer {token}"} if token else {}

    async def start(self) -> None:
        """Wait until the server responds. RunError if it does not."""
        ends = time.monotonic() + self.start_timeout
        while True:
            try:
                async with asyncio.timeout(max(1.0, ends - time.monotonic())):
                    self._check_settings(await self.call("info"))
                return
            except (EngineDied, TimeoutError) as error:
                if time.monotonic() > ends:
                    raise RunError(
                        f"{self.name} does not respond ({str(error) or 'it accepts connections only'}); start it with "
                        "`python -m posttrain.engines.vllm.server`, or correct engine.urls"
                    ) from error
            except EngineRefused as error:
                raise RunError(
                    f"{self.name} refused the connection: {error}; check the environment variable {TOKEN}"
                ) from error
            await asyncio.sleep(1)

    def _check_settings(self, info: dict[str, Any]) -> None:
        """RunError if the settings of the server are incompatible with this run."""
        if (required := self.required) is None:
            return
        for key, needed in (("logprobs", required.logprobs), ("adapter_rank", required.adapter_rank)):
            if info[key] != needed:
                option = key.replace("_", "-")
                raise RunError(f"{self.name} was started with --{option} {info[key]}, but the recipe needs {needed}")
        switches = {
            "deterministic": "hardware.deterministic is true",
            "router_replay": "model.router_replay is true",
            "images": "the model reads images",
        }
        for key, cause in switches.items():
            if getattr(required, key) and not info[key]:
                option = key.replace("_", "-")
                raise RunError(f"{self.name} was started without --{option}, but {cause}; start it again with it")
        if 0 < (length := info["max_model_len"]) < required.max_model_len:
            needed = required.max_model_len
            raise RunError(f"{self.name} was started with --max-model-len {length}, but the recipe needs {needed}")

    async def call(self, name: str, **arguments: Any) -> Any:
        """The result of the method `name` of `Host`. Weights and adapters are sent as paths or, elsewhere, as contents, and
        images as contents."""
        headers = self._headers
        content: bytes | Path
        if name == "receive_image":
            headers = headers | {"content-type": "application/octet-stream", "x-image": arguments["key"]}
            content = arguments["content"]
        elif not self.same_machine and name in ("receive_weights", "load_adapter"):
            content = path = Path(arguments["path"])
            headers = headers | {"content-type": "application/octet-stream"}
            if name == "load_adapter":
                config = " ".join((path / "adapter_config.json").read_text().split())
                headers |= {"x-adapter": config, "x-version": str(arguments["version"])}
                content = path / "adapter_model.safetensors"
        else:
            content = json.dumps(arguments, default=str).encode()
        return (await http_request(self.url, f"/{name}", headers, content))["result"]

    def request_stop(self) -> None:
        """Ask a server that this process started to shut down, before `close`, so that several do so in parallel."""

    def close(self) -> None:
        """Stop a server that this process started."""


class LaunchedServerReplica(ServerReplica):
    """A server that this run starts: a process group that ends with the run."""

    def __init__(
        self, number: int, settings: Settings, python: str | None, devices: list[int], start_timeout: float, logs: Path
    ) -> None:
        """`devices`: indices of its GPUs among those visible to this process. `logs`: directory of the log file."""
        self.python = python or sys.executable
        if not Path(self.python).is_file():
            raise InputError(f"engine.python: interpreter not found: {self.python}")
        self.settings = settings
        self.devices = devices
        self.log = logs / f"vllm-{number}.log"
        self._process: ChildProcess | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="posttrain-vllm-")
        self._token = secrets.token_hex(16)
        super().__init__(f"vLLM server {number}", "", self._token, start_timeout, same_machine=True)

    async def start(self) -> None:
        self._kill()
        self.url = ""
        port_file = Path(self._folder.name) / "port"
        port_file.unlink(missing_ok=True)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        options: list[str] = []
        for field in fields(Settings)[1:]:
            value, name = getattr(self.settings, field.name), field.name.replace("_", "-")
            if isinstance(value, bool):
                options.append(f"--{'' if value else 'no-'}{name}")
            else:
                options += [f"--{name}", str(value)]
        options += ["--port", "0", "--owned", "--announce", str(port_file)]
        command = [self.python, "-m", "posttrain.engines.vllm.server", self.settings.model, *options]
        with self.log.open("ab") as log:
            self._process = ChildProcess(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, environment=self._environment()
            )
        ends = time.monotonic() + self.start_timeout
        while not port_file.exists():
            code = self._process.code
            if code is not None or time.monotonic() > ends:
                self._kill()
                how = f"no response after {self.start_timeout:g} s" if code is None else f"it exited with status {code}"
                lines = self.log.read_text(errors="replace").splitlines()
                errors = [line for line in lines if "Error" in line or "error:" in line.lower()] or lines
                shown = "".join(f"\n  {line[:300]}" for line in dict.fromkeys(errors[-6:]))
                raise RunError(f"{self.name} did not start: {how}; end of its log {self.log}:{shown}")
            await asyncio.sleep(0.1)
        self.url = f"http://127.0.0.1:{port_file.read_text()}"

    def request_stop(self) -> None:
        if self._process is not None:
            self._process.close_pipes()

    def close(self) -> None:
        """Stop the server's processes and remove its files."""
        if self._process is None:
            return
        self._process.stop(_SHUTDOWN_SECONDS if self.url else 0)
        self._process = None
        self._folder.cleanup()

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process = None

    @property
    def pid(self) -> int | None:
        """Id of the server's first process; None if it is not running."""
        return self._process.pid if self._process is not None else None

    def _environment(self) -> dict[str, str]:
        """Environment variables of the server. It can import this posttrain, but no other package of this interpreter."""
        import posttrain

        package = Path(self._folder.name) / "path"
        if not package.exists():
            package.mkdir()
            (package / "posttrain").symlink_to(Path(posttrain.__file__).parent, target_is_directory=True)
        # Neither the learner's rank nor its number of threads applies to the engine.
        learners = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        excluded = ("LD_PRELOAD", "OMP_NUM_THREADS", *learners)
        kept = (name for name in os.environ if not name.startswith(("PYTHON", "TORCHELASTIC")) and name not in excluded)
        variables = {name: os.environ[name] for name in kept}
        temporary = Path(self._folder.name) / "tmp"
        temporary.mkdir(exist_ok=True)
        # Temporary files of vLLM are removed with the folder.
        variables |= {"PYTHONPATH": str(package), "PYTHONSAFEPATH": "1", TOKEN: self._token, "TMPDIR": str(temporary)}
        variables |= process_environment(self.settings) | preloaded_libraries(self.python)
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is None and self.devices and Path("/dev/nvidiactl").exists():
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, self.devices))
        elif visible and self.devices:
            seen = [name for name in visible.split(",") if name]
            if max(self.devices) >= len(seen):
                raise InputError(
                    f"{self.name} needs the visible GPU {max(self.devices)}, and CUDA_VISIBLE_DEVICES={visible} has {len(seen)}, from "
                    "0 on; lower engine.first_device, engine.servers or engine.tensor_parallel, or make more GPUs visible"
                )
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(seen[device] for device in self.devices)
        return variables
