"""`posttrain evaluate`: a model in an environment, predictions against references, predictions under reward models."""

from typing import Any

import typer

from posttrain.cli import stages
from posttrain.cli.evaluate_judge import judge
from posttrain.cli.evaluate_reward import reward
from posttrain.cli.evaluate_text import text
from posttrain.cli.plugins import PluginGroup

_DEFAULT = "model"
_ABOUT = """Evaluate a model in an environment, or files of predictions.

Without one of the words below, a model in an environment is evaluated.

Examples:

posttrain evaluate environment.type=sokoban name=before

posttrain evaluate text predictions.jsonl --out results.json
"""


class _ModelUnlessNamed(PluginGroup):
    """`posttrain evaluate recipe.yaml key=value` is `posttrain evaluate model recipe.yaml key=value`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or args[0] not in (*self.list_commands(ctx), "--help"):
            args = [_DEFAULT, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(cls=_ModelUnlessNamed, help=_ABOUT)


def model(
    words: stages.Words = None,
    dry_run: stages.DryRun = False,
    on: stages.On = None,
    resume: stages.Resume = None,
    overwrite: stages.Overwrite = False,
) -> None:
    """Evaluate a model in an environment on held-out seeds. The word `model` may be left out.

    Examples:

    posttrain evaluate environment.type=sokoban name=before

    posttrain evaluate environment.type=bandit model.path=runs/run/model evaluation.sampling.temperature=0.7
    """
    stages.run("evaluate", words or [], dry_run, on, resume, overwrite)


app.command(context_settings=stages.OPEN)(model)
app.command()(text)
app.command()(reward)
app.command()(judge)
