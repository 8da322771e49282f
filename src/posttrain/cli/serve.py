"""`posttrain serve`: a server for the model of a run."""

from typing import Annotated, Literal

import typer
from typer import Argument, Option

_MODEL = "Directory of a run, for example runs/run, or what `model.path` takes."
_SETTINGS = "Keys of the recipe's section `engine`, for example max_model_len=4096."
_ENGINE = "local: in this process. vllm: for many requests at once, needs the extra [vllm]."
_PORT = "Port of the loopback address; 0 picks a free one."
_KEY = "API key that clients must send. Default: any key."


def serve(
    model: Annotated[str, Argument(metavar="RUN", help=_MODEL)],
    settings: Annotated[list[str] | None, Argument(metavar="[KEY=VALUE]...", help=_SETTINGS)] = None,
    engine: Annotated[Literal["local", "vllm"], Option(help=_ENGINE)] = "local",
    port: Annotated[int, Option(help=_PORT, min=0, max=65535)] = 8000,
    key: Annotated[str | None, Option(envvar="POSTTRAIN_SERVE_KEY", help=_KEY)] = None,
    seed: Annotated[int, Option(help="Seed of requests that have none.", min=0)] = 0,
) -> None:
    """Serve a model to OpenAI clients on this machine: chats with tools, completions, models.

    Answers stream token by token with the local engine, and whole with vLLM. Over SSH, forward the port.

    Examples:
    posttrain serve runs/run
    posttrain serve packaged:smollm2-135m --port 0
    posttrain serve runs/run --engine vllm python=.venv-vllm/bin/python max_model_len=4096
    """
    from pathlib import Path

    from posttrain.loopback import ADDRESS, http_server, open_listener
    from posttrain.plugins import require_module

    for module in ("fastapi", "uvicorn"):
        require_module(module, "posttrain serve")
    from posttrain.models.files import require_model
    from posttrain.runs.directory import model_path

    path = model_path(model)
    require_model(path)  # before torch is imported
    from posttrain.engines.factory import open_inference_engine
    from posttrain.models.policy import Policy
    from posttrain.recipe.compose import section
    from posttrain.recipe.engines import LocalEngineRecipe, VllmEngineRecipe
    from posttrain.recipe.model import ModelRecipe
    from posttrain.recipe.sources import merge, read_overrides
    from posttrain.serving.policy import PolicyServer
    from posttrain.serving.server import guarded

    def check(given: str) -> str | None:
        return None if key in (None, given) else "wrong API key; use the one that `posttrain serve` was started with"

    values = merge(read_overrides(settings or [])).values
    recipe = section(LocalEngineRecipe, **values) if engine == "local" else section(VllmEngineRecipe, **values)
    context = recipe.max_model_len if isinstance(recipe, VllmEngineRecipe) else None
    with open_listener(port, "--port") as on:
        policy = Policy(section(ModelRecipe, path=path))
        server = PolicyServer(open_inference_engine(policy, recipe), Path(model).name, seed, context)
        bound = on.getsockname()[1]
        typer.echo(f"{server.name} at http://{ADDRESS}:{bound}/v1\nCtrl-C ends it")
        http_server(guarded(server.app(), bound, check)).run([on])
