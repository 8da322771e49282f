"""`posttrain rl`."""

from posttrain.cli import stages


def rl(
    words: stages.Words = None,
    dry_run: stages.DryRun = False,
    on: stages.On = None,
    resume: stages.Resume = None,
    overwrite: stages.Overwrite = False,
) -> None:
    """Train a policy by reinforcement learning in an environment.

    Examples:

    posttrain rl environment.type=bandit

    posttrain rl recipes/ragen/sokoban.yaml model.path=packaged:smollm2-135m --steps 20

    posttrain rl environment.type=frozen_lake --dry-run --on h200

    posttrain rl --resume runs/run steps=200
    """
    stages.run("rl", words or [], dry_run, on, resume, overwrite)
