"""`posttrain evaluate`."""

from posttrain.cli import stages


def evaluate(
    words: stages.Words = None,
    dry_run: stages.DryRun = False,
    resume: stages.Resume = None,
    overwrite: stages.Overwrite = False,
) -> None:
    """Evaluate a model in an environment on held-out seeds.

    Examples:

    posttrain evaluate environment.type=sokoban name=before

    posttrain evaluate environment.type=bandit model.path=runs/run/model evaluation.sampling.temperature=0.7
    """
    stages.run("evaluate", words or [], dry_run, resume, overwrite)
