"""`posttrain view`: look at runs while they train."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from posttrain.cli.runs import only_looking


@only_looking
def view(
    folder: Annotated[
        Path, Argument(metavar="[RUNS_FOLDER]", help="Folder of runs, or the directory of one run.")
    ] = Path("runs"),
    port: Annotated[int, Option(help="Port of the loopback address; 0 picks a free one.", min=0, max=65535)] = 0,
    browser: Annotated[bool, Option("--browser/--no-browser", help="Open the page in a browser.")] = True,
) -> None:
    """Serve a local page about runs: live curves, episodes with their credit, comparisons.

    Only this machine can open it, with the token in the printed address. Nothing is loaded from the network, and no code
    that a run names is imported. Over SSH, forward the port: `ssh -L 8321:127.0.0.1:8321 HOST`.

    Examples:
    posttrain view
    posttrain view runs --port 8321 --no-browser
    """
    import secrets
    import webbrowser
    from urllib.parse import quote

    from posttrain.errors import InputError
    from posttrain.loopback import ADDRESS, http_server, open_listener
    from posttrain.plugins import require_module
    from posttrain.terminal import printable

    for module in ("starlette", "uvicorn"):
        require_module(module, "posttrain view")
    from posttrain.view.server import guarded

    if not folder.is_dir():
        raise InputError(
            f"there is no folder {folder}; name the folder of your runs, for example `posttrain view runs`"
        )
    single = (folder / "recipe.yaml").is_file() and (folder / "environment.json").is_file()
    path = f"/run/{quote(printable(folder.resolve().name))}" if single else "/"
    with open_listener(port, "--port") as on:
        token, bound = secrets.token_urlsafe(24), on.getsockname()[1]
        guard = guarded(folder.resolve().parent if single else folder, bound, token)
        address = f"http://{ADDRESS}:{bound}{path}?token={token}"
        typer.echo(f"{address}\nCtrl-C ends it")
        if browser:
            webbrowser.open(address)
        http_server(guard).run([on])
