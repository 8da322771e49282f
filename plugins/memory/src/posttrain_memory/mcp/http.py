"""The MCP server over HTTP: on the loopback address only, for clients with the token, and never for web pages."""

import hmac
import os
import secrets
import socket
import sys
from typing import TYPE_CHECKING, Any

from posttrain.errors import InputError
from posttrain.loopback import ADDRESS, App, Guard, Refusal, Scope, header, http_server

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


def guarded(app: App, port: int, token: str) -> Guard:
    """`app`, restricted to programs of this machine that send `token`. Bodies are not read here; `app` limits their size."""

    def check(scope: Scope) -> Refusal | None:
        sent = header(scope, b"authorization")
        # The scheme is case-insensitive, the token is not.
        scheme, _, given = sent[0].partition(b" ") if len(sent) == 1 else (b"", b"", b"")
        if scheme.lower() != b"bearer" or not hmac.compare_digest(given, token.encode()):
            return 401, "send the token that the server printed at its start, as `Authorization: Bearer TOKEN`"
        return None

    return Guard(app, port, check)


def serve_http(server: "Server[Any]", on: socket.socket, token: str) -> None:
    """Serve any number of clients until a signal ends the process. Prints the address to stderr."""
    port = on.getsockname()[1]
    app = server.streamable_http_app(streamable_http_path=PATH, max_request_body_size=_BODY_BYTES)
    print(f"posttrain: serving the vault at http://{ADDRESS}:{port}{PATH}", file=sys.stderr, flush=True)
    http_server(guarded(app, port, token)).run([on])
