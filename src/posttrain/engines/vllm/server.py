"""vLLM behind HTTP, for one trainer: token ids in and out, and weights. `python -m posttrain.engines.vllm.server MODEL`.

It needs vLLM and no other package of posttrain's. Everyone who may ask it may replace its weights, so it listens on
this machine alone unless a token is set, which every request then has to carry.
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
from dataclasses import fields
from pathlib import Path
from typing import Any

from posttrain.engines.vllm.host import Host
from posttrain.engines.vllm.settings import Settings

TOKEN = "POSTTRAIN_VLLM_TOKEN"
"""Environment variable with the token of the server."""
_LOCAL = ("127.0.0.1", "localhost", "::1")
_LOOK_EVERY = 0.5
_END_SECONDS = 8
"""What vLLM has to end by itself before it is killed."""


class Server:
    """The routes over a `Host`, as an ASGI application."""

    def __init__(self, host: Host, token: str | None, trusts_paths: bool) -> None:
        """`trusts_paths`: the trainer is on this machine, and names files instead of sending them."""
        self.host = host
        self.token = token
        self.trusts_paths = trusts_paths
        self.folder = Path(tempfile.mkdtemp(prefix="posttrain-received-"))
        self.named: set[Path] = set()
        """Folders of the trainer's in which weights lay."""
        self._adapters = 0

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        headers = {name.decode().lower(): value.decode("latin-1") for name, value in scope["headers"]}
        if self.token is not None and not hmac.compare_digest(
            headers.get("authorization", "").encode(), f"Bearer {self.token}".encode()
        ):
            await _answer(send, 401, {"error": "the token is missing or wrong"})
            return
        try:
            found = await self._serve(scope["method"], scope["path"], headers, receive)
            await _answer(send, 200, found)
        except _Gone:
            return
        except Exception as error:
            if self.host.dead:
                # The engine's processes are gone: let the trainer start all of it again.
                print(f"the engine died: {error}", file=sys.stderr, flush=True)
                os._exit(1)
            await _answer(send, 400, {"error": f"{type(error).__name__}: {error}"})

    async def _serve(self, method: str, path: str, headers: dict[str, str], receive: Any) -> dict[str, Any]:
        if (method, path) == ("GET", "/about"):
            return self.host.about()
        if (method, path) == ("POST", "/weights/bucket") and headers.get("content-type") == "application/octet-stream":
            file = self.folder / "bucket.safetensors"
            await _keep(receive, file)
            await self.host.receive_weights(str(file))
            file.unlink()
            return {}
        if (method, path) == ("POST", "/adapter") and headers.get("content-type") == "application/octet-stream":
            self._adapters += 1
            folder = self.folder / f"adapter-{self._adapters}"
            folder.mkdir()
            (folder / "adapter_config.json").write_text(headers["x-adapter"])
            await _keep(receive, folder / "adapter_model.safetensors")
            await self.host.load_adapter(str(folder), int(headers["x-version"]))
            return {}
        if (method, path) == ("GET", "/respond"):
            await self.host.respond()
            return {}
        job = json.loads(await _body(receive) or b"{}")
        if (method, path) == ("POST", "/generate"):
            return await _unless_gone(self.host.generate(job), receive)
        if (method, path) == ("POST", "/weights/begin"):
            await self.host.begin_weights(job["version"])
        elif (method, path) == ("POST", "/weights/finish"):
            return {"missing": await self.host.finish_weights()}
        elif (method, path) == ("POST", "/weights/bucket") and self.trusts_paths:
            self.named.add(Path(job["path"]).parent)
            await self.host.receive_weights(job["path"])
        elif (method, path) == ("POST", "/adapter") and self.trusts_paths:
            self.named.add(Path(job["folder"]).parent)
            await self.host.load_adapter(job["folder"], job["version"])
        elif (method, path) == ("POST", "/sleep"):
            await self.host.sleep()
        else:
            raise ValueError(f"there is no {method} {path} here")
        return {}


class _Gone(Exception):
    """The one who asked hung up."""


async def _body(receive: Any) -> bytes:
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _Gone
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


async def _keep(receive: Any, file: Path) -> None:
    """Write the body of a request to a file, piece by piece."""
    with file.open("wb") as out:
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _Gone
            out.write(message.get("body", b""))
            if not message.get("more_body"):
                return


async def _unless_gone(work: Any, receive: Any) -> dict[str, Any]:
    """The result of `work`, which is given up when the one who asked hangs up."""

    async def hung_up() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(hung_up())
    await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
    if not task.done():
        task.cancel()
        raise _Gone
    gone.cancel()
    return await task


async def _answer(send: Any, status: int, content: dict[str, Any]) -> None:
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def main() -> None:
    """Serve until interrupted."""
    arguments = _parser().parse_args()
    token = os.environ.get(TOKEN) or None
    if token is None and arguments.host not in _LOCAL:
        sys.exit(f"a server on {arguments.host} can be reached from elsewhere; set a token in {TOKEN}")
    settings = Settings(**{field.name: getattr(arguments, field.name) for field in fields(Settings)})
    asyncio.run(_serve(arguments, settings, token))


async def _serve(arguments: argparse.Namespace, settings: Settings, token: str | None) -> None:
    import uvicorn

    host = await Host.open(settings, alone=True)
    listening = socket.create_server((arguments.host, arguments.port))
    port = listening.getsockname()[1]
    application = Server(host, token, arguments.owned)
    config = uvicorn.Config(
        application,
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_keep_alive=3600,
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    # Its own handlers would end this process, and leave vLLM's, before it could be closed.
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, setattr, server, "should_exit", True)
    orphan = _end_with_stdin(server, application, Path(arguments.announce).parent) if arguments.owned else None
    if arguments.announce:
        # Whole or not at all: the trainer looks at it again and again.
        part = Path(f"{arguments.announce}.part")
        part.write_text(str(port))
        part.rename(arguments.announce)
    print(f"vLLM serves {settings.model} at http://{arguments.host}:{port}", flush=True)
    try:
        await server.serve(sockets=[listening])
    finally:
        host.close()
        shutil.rmtree(application.folder, ignore_errors=True)
        if orphan is not None and orphan.is_set():
            _tidy(application, Path(arguments.announce).parent)


def _end_with_stdin(server: Any, application: Server, folder: Path) -> threading.Event:
    """End, with all processes of this group, once the other end of standard input is closed: the trainer is gone.

    The event is set then. What the trainer left on this machine goes too, `folder` first: it may have been killed.
    """
    orphan = threading.Event()

    def look() -> None:
        while os.read(0, 4096):
            time.sleep(_LOOK_EVERY)
        orphan.set()
        server.should_exit = True
        time.sleep(_END_SECONDS)
        _tidy(application, folder)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=look, daemon=True, name="end with the trainer").start()
    return orphan


def _tidy(application: Server, folder: Path) -> None:
    for left in (*application.named, folder):
        shutil.rmtree(left, ignore_errors=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m posttrain.engines.vllm.server", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=8700, help="0 takes a free one")
    parser.add_argument("--announce", default="", help=argparse.SUPPRESS)
    parser.add_argument("--owned", action="store_true", help=argparse.SUPPRESS)
    for field in fields(Settings):
        if field.name == "model":
            parser.add_argument("model", help="directory or hub id; its weights are sent by the trainer")
        elif field.type in (bool, "bool"):
            option = f"--{field.name.replace('_', '-')}"
            parser.add_argument(option, action=argparse.BooleanOptionalAction, default=field.default)
        else:
            option = f"--{field.name.replace('_', '-')}"
            parser.add_argument(option, type=type(field.default), default=field.default)
    return parser


if __name__ == "__main__":
    main()
