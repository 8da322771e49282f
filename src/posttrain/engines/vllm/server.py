"""An HTTP server around vLLM for one trainer: token ids in and out, and weights.

Run it with `python -m posttrain.engines.vllm.server MODEL`. It needs vLLM and none of posttrain's dependencies. A
client can replace the weights, so the server listens on this machine only, unless a token is set that every request
must carry.
"""

import argparse
import asyncio
import contextlib
import hmac
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from posttrain.engines.vllm.host import Host
from posttrain.engines.vllm.settings import TOKEN, Settings

CALLS = (
    *("info", "ping", "generate", "sleep"),
    *("begin_weights", "finish_weights", "join_transfer", "receive_buffer"),
)
"""Methods of `Host` that every client may call. Those that take paths need `trusts_paths`."""
_LOCAL = ("127.0.0.1", "localhost", "::1")
_SHUTDOWN_SECONDS = 8
"""Time for vLLM to shut down before it is killed."""


class Server:
    """The methods of a `Host` by their names, as an ASGI application."""

    def __init__(self, host: Host, token: str | None, trusts_paths: bool) -> None:
        """`trusts_paths`: accept file paths instead of contents, from a trainer on this machine."""
        self.host = host
        self.token = token
        self.trusts_paths = trusts_paths
        self.folder = Path(tempfile.mkdtemp(prefix="posttrain-received-"))
        self.trainer_folders: set[Path] = set()
        """Folders of the trainer that contained weights."""

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        headers = {name.decode().lower(): value.decode("latin-1") for name, value in scope["headers"]}
        if self.token is not None and not hmac.compare_digest(
            headers.get("authorization", "").encode(), f"Bearer {self.token}".encode()
        ):
            await _send_json(send, 401, {"error": "the token is missing or wrong"})
            return
        try:
            result = await self._serve(scope["path"].removeprefix("/"), headers, receive)
            await _send_json(send, 200, {"result": result})
        except _Disconnected:
            return
        except Exception as error:
            if self.host.dead:
                # The engine's processes are gone; the trainer restarts the server.
                print(f"the engine died: {error}", file=sys.stderr, flush=True)
                os._exit(1)
            await _send_json(send, 400, {"error": f"{type(error).__name__}: {error}"})

    async def _serve(self, name: str, headers: dict[str, str], receive: Any) -> Any:
        """The result of the method `name` of the host."""
        uploaded = headers.get("content-type") == "application/octet-stream"
        if uploaded and name in ("receive_weights", "load_adapter"):
            adapter = name == "load_adapter"
            folder = Path(tempfile.mkdtemp(dir=self.folder))
            file = folder / ("adapter_model.safetensors" if adapter else "bucket.safetensors")
            with file.open("wb") as out:
                async for part in _parts(receive):
                    out.write(part)
            if adapter:
                (folder / "adapter_config.json").write_text(headers["x-adapter"])
                return await self.host.load_adapter(str(folder), int(headers["x-version"]))
            await self.host.receive_weights(str(file))
            shutil.rmtree(folder)
            return None
        body = b"".join([part async for part in _parts(receive)])
        if uploaded and name == "receive_image":
            return self.host.receive_image(headers["x-image"], body)
        arguments = json.loads(body or b"{}")
        if self.trusts_paths and name in ("receive_weights", "load_adapter"):
            self.trainer_folders.add(Path(arguments["path"]).parent)
        elif name not in CALLS:
            raise ValueError(f"unknown call {name}")
        work = getattr(self.host, name)(**arguments)
        return await (_until_disconnect(work, receive) if name == "generate" else work)


class _Disconnected(Exception):
    """The client closed the connection."""


async def _parts(receive: Any) -> AsyncIterator[bytes]:
    """The body of a request, part by part."""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _Disconnected
        yield message.get("body", b"")
        if not message.get("more_body"):
            return


async def _until_disconnect(work: Any, receive: Any) -> dict[str, Any]:
    """The result of `work`, which is cancelled if the client disconnects."""

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, closed = asyncio.ensure_future(work), asyncio.ensure_future(disconnected())
    await asyncio.wait({task, closed}, return_when=asyncio.FIRST_COMPLETED)
    if not task.done():
        task.cancel()
        raise _Disconnected
    closed.cancel()
    return await task


async def _send_json(send: Any, status: int, content: dict[str, Any]) -> None:
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(prog="python -m posttrain.engines.vllm.server", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=8700, help="0: any free port")
    parser.add_argument("--announce", default="", help=argparse.SUPPRESS)
    parser.add_argument("--owned", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("model", help="directory or hub id; the trainer sends the weights")
    for field in fields(Settings)[1:]:
        switch: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
        kind = switch if isinstance(field.default, bool) else {"type": type(field.default)}
        parser.add_argument(f"--{field.name.replace('_', '-')}", default=field.default, **kind)
    arguments = parser.parse_args()
    token = os.environ.get(TOKEN) or None
    if token is None and arguments.host not in _LOCAL:
        sys.exit(f"a server on {arguments.host} is reachable from other machines; set a token in {TOKEN}")
    settings = Settings(**{field.name: getattr(arguments, field.name) for field in fields(Settings)})
    asyncio.run(_serve(arguments, settings, token))


async def _serve(arguments: argparse.Namespace, settings: Settings, token: str | None) -> None:
    import uvicorn

    host = await Host.open(settings)
    listening = socket.create_server((arguments.host, arguments.port))
    port = listening.getsockname()[1]
    application = Server(host, token, arguments.owned)
    limits: Any = {"timeout_keep_alive": 3600, "timeout_graceful_shutdown": 1}
    config = uvicorn.Config(application, log_level="warning", access_log=False, lifespan="off", **limits)
    server = uvicorn.Server(config)
    # uvicorn's handlers would end this process before vLLM's processes are stopped.
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, setattr, server, "should_exit", True)
    orphaned = threading.Event()

    def remove_files() -> None:
        for path in (*application.trainer_folders, Path(arguments.announce).parent):
            shutil.rmtree(path, ignore_errors=True)

    def exit_with_stdin() -> None:
        """Exit, with all processes of this group and the files of a killed trainer, when it closes standard input."""
        while os.read(0, 4096):
            time.sleep(0.5)
        orphaned.set()
        server.should_exit = True
        time.sleep(_SHUTDOWN_SECONDS)
        remove_files()
        os.killpg(0, signal.SIGKILL)

    if arguments.owned:
        threading.Thread(target=exit_with_stdin, daemon=True, name="exit with the trainer").start()
    if arguments.announce:
        # Write and rename: the trainer polls for the file and must not read an incomplete one.
        part = Path(f"{arguments.announce}.part")
        part.write_text(str(port))
        part.rename(arguments.announce)
    print(f"vLLM serves {settings.model} at http://{arguments.host}:{port}", flush=True)
    try:
        await server.serve(sockets=[listening])
    finally:
        host.close()
        shutil.rmtree(application.folder, ignore_errors=True)
        if orphaned.is_set():
            remove_files()


if __name__ == "__main__":
    main()
