"""An engine behind HTTP: one that is started here, or one that runs already."""

import asyncio
import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

from posttrain.engines.vllm.http import ask
from posttrain.engines.vllm.replica import Died, Refused
from posttrain.engines.vllm.settings import Settings, preloaded_libraries, process_environment
from posttrain.errors import InputError, RunError

_LOOK_EVERY = 0.1
_END_SECONDS = 10
"""What a server has to end by itself before it is killed."""
_TOKEN = "POSTTRAIN_VLLM_TOKEN"
_BINARY = {"content-type": "application/octet-stream"}
_SHOWN = 6
"""Lines of a log that an error shows."""


class ServedReplica:
    """Asks a server. `url` is empty until one is there."""

    def __init__(
        self,
        name: str,
        url: str,
        token: str | None,
        start_seconds: float,
        same_machine: bool,
        wanted: Settings | None = None,
    ) -> None:
        """`wanted`: what a server that was started by someone else has to agree with."""
        self.name = name
        self.url = url
        self.start_seconds = start_seconds
        self.same_machine = same_machine
        """Files are named instead of sent."""
        self.wanted = wanted
        self._headers = {"authorization": f"Bearer {token}"} if token else {}

    async def start(self) -> None:
        """Wait until the server answers."""
        ends = time.monotonic() + self.start_seconds
        while True:
            try:
                async with asyncio.timeout(max(1.0, ends - time.monotonic())):
                    self._agree(await self.about())
                return
            except (Died, TimeoutError) as error:
                if time.monotonic() > ends:
                    raise RunError(
                        f"{self.name} does not answer ({str(error) or 'it takes connections and says nothing'}); start it with "
                        "`python -m posttrain.engines.vllm.server`, or correct engine.urls"
                    ) from error
            except Refused as error:
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


class OwnReplica(ServedReplica):
    """A server of this run's own: a process group that ends when the run does."""

    def __init__(
        self, number: int, settings: Settings, python: str | None, devices: list[int], start_seconds: float, logs: Path
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
        super().__init__(f"vLLM server {number}", "", self._token, start_seconds, same_machine=True)

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
        ends = time.monotonic() + self.start_seconds
        while not announced.exists():
            code = self._process.poll()
            if code is not None or time.monotonic() > ends:
                self._kill()
                how = f"it ended with status {code}" if code is not None else f"{self.start_seconds:g} s are over"
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
