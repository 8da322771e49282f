"""`posttrain reward`."""

from posttrain.cli import stages


def reward(
    words: stages.Words = None,
    dry_run: stages.DryRun = False,
    on: stages.On = None,
    resume: stages.Resume = None,
    overwrite: stages.Overwrite = False,
) -> None:
    """Train a reward model on pairs of answers.

    Examples:

    posttrain reward data.train=pairs_train.jsonl data.validation=pairs_val.jsonl name=rm

    posttrain reward recipes/helpsteer3/reward.yaml model.path=packaged:smollm2-135m --dry-run
    """
    stages.run("reward", words or [], dry_run, on, resume, overwrite)
