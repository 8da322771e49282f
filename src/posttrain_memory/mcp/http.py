"""The MCP server over HTTP: on the loopback address only, for clients with the token, and never for web pages."""

import hmac
import os
import secrets
import socket
import sys
from typing import TYPE_CHECKING, Any

from posttrain.errors import InputError
from posttrain.loopback import ADDRESS, App, Receive, Scope, Send, header, names_this_server, refuse, serve

if TYPE_CHECKING:
    from mcp.server import Server

PATH = "/mcp"
_TOKEN_CHARS = 16
"""Minimum length of a token chosen by the user."""
_BODY_BYTES = 262_144
"""Maximum size of a request body in bytes; larger ones get status 413."""


def read_token(variable: str | None) -> str:
    """The token from the environment variable, or a random one. Raises InputError if the variable holds no valid
    token.
    """
    if variable is None:
        return secrets.token_urlsafe(32)
    token = os.environ.get(variable, "")
    if len(token) < _TOKEN_CHARS or not all("!" <= sign <= "~" for sign in token):
        raise InputError(
            f"--token-variable names {variable}, which does not hold a token of at least {_TOKEN_CHARS} visible ASCII "
            "characters; set one, or drop the option to get a random token"
        )
    return token


class Guard:
    """ASGI middleware that passes on only requests from a client on this machine with the token.

    Other requests get a status and one sentence: 403 for a Host header that is not this address (DNS rebinding) and
    for any Origin header (web pages), 401 without the token. Bodies are not read here; `app` limits their size.
    """

    def __init__(self, app: App, port: int, token: str) -> None:
        self._app = app
        self._port = port
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refused = self.refusal(scope) if scope["type"] != "lifespan" else None
        if refused is None:
            await self._app(scope, receive, send)
            return
        status, why = refused
        await refuse(send, status, why, [(b"www-authenticate", b"Bearer")] if status == 401 else None)

    def refusal(self, scope: Scope) -> tuple[int, str] | None:
        """Status and reason for a request that is not passed on; None for one that is."""
        if scope["type"] != "http":
            return 403, "this is not an HTTP request"
        tokens = header(scope, b"authorization")
        if not names_this_server(scope, self._port):
            return 403, "the Host header is not the address of this server"
        if header(scope, b"origin"):
            return 403, "web pages may not use this server"
        # The scheme is case-insensitive, the token is not.
        scheme, _, token = tokens[0].partition(b" ") if len(tokens) == 1 else (b"", b"", b"")
        if scheme.lower() != b"bearer" or not hmac.compare_digest(token, self._token):
            return 401, "send the token that the server printed at its start, as `Authorization: Bearer TOKEN`"
        return None


def serve_http(server: "Server[Any]", on: socket.socket, token: str) -> None:
    """Serve any number of clients until a signal ends the process. Prints the address to stderr."""
    port = on.getsockname()[1]
    app = server.streamable_http_app(streamable_http_path=PATH, max_request_body_size=_BODY_BYTES)
    guard = Guard(app, port, token)
    print(f"posttrain: serving the vault at http://{ADDRESS}:{port}{PATH}", file=sys.stderr, flush=True)
    serve(guard, on, lambda scope: guard.refusal(scope) is None)
