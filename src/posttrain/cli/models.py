"""`posttrain chat` and `posttrain serve`: use a model, or the model that a run exported."""

from pathlib import Path
from typing import Annotated, Literal

import typer
from typer import Argument, Option


def chat(
    model: Annotated[
        str, Argument(metavar="MODEL", help="What `model.path` takes, or the directory of a run, for example runs/run.")
    ],
    system: Annotated[str | None, Option(help="System message.")] = None,
    temperature: Annotated[float, Option(help="Sampling temperature; 0 is greedy.", min=0)] = 0.7,
    max_tokens: Annotated[int, Option(help="Maximum number of tokens of an answer.", min=1)] = 512,
) -> None:
    """Talk to a model in the terminal. `/new` starts another conversation, Ctrl-D leaves.

    Examples:
    posttrain chat packaged:smollm2-135m
    posttrain chat runs/run --temperature 0
    """
    import asyncio

    from posttrain.models.files import require_model
    from posttrain.runs.directory import model_path

    path = model_path(model)
    require_model(path)  # before torch is imported
    from posttrain.data.rendering import Renderer
    from posttrain.engines.local.engine import LocalEngine
    from posttrain.engines.protocol import Request
    from posttrain.models.policy import Policy
    from posttrain.recipe.compose import section
    from posttrain.recipe.model import ModelRecipe
    from posttrain.recipe.rollout import SamplingRecipe
    from posttrain.seeds import derive_seed
    from posttrain.terminal import printable

    sampling = section(SamplingRecipe, temperature=temperature)
    policy = Policy(section(ModelRecipe, path=path))
    engine, renderer = LocalEngine(policy), Renderer(policy.tokenizer, policy.end_tokens)

    async def answer(prompt: list[int], turn: int) -> tuple[int, ...]:
        """The tokens of an answer. The text is printed while they are sampled."""
        ids: list[int] = []
        shown = ""

        def show(token: int) -> None:
            nonlocal shown
            ids.append(token)
            text = renderer.answer_text(ids)
            text = text[: max(len(text) - len(renderer.before_end), 0)]
            # A character of several tokens is shown once it is complete.
            if text.startswith(shown) and not text.endswith("\ufffd"):
                typer.echo(printable(text[len(shown) :]), nl=False)
                shown = text

        request = Request(tuple(prompt), sampling, derive_seed(0, "chat", turn), max_tokens)
        with engine.episode():
            sampled = (await engine.generate(request, show)).ids
        typer.echo(printable(renderer.answer_text(sampled)[len(shown) :]), nl=False)
        return sampled

    start = [{"role": "system", "content": system}] if system else []
    messages, turn = list(start), 0
    typer.echo(f"{model}: /new starts another conversation, Ctrl-D leaves")
    while True:
        try:
            text = input("you> ").strip()
        except (EOFError, KeyboardInterrupt):
            typer.echo("")
            return
        if text == "/new":
            messages = list(start)
        if not text or text == "/new":
            continue
        messages.append({"role": "user", "content": text})
        ids = asyncio.run(answer(renderer.prompt(messages), turn))
        turn += 1
        messages.append({"role": "assistant", "content": renderer.answer_text(ids)})
        typer.echo("\n" if ids[-1] in policy.end_tokens else f" [truncated at {max_tokens} tokens]\n")


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
