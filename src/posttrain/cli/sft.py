"""`posttrain sft`."""

from posttrain.cli import stages


def sft(
    words: stages.Words = None,
    dry_run: stages.DryRun = False,
    on: stages.On = None,
    resume: stages.Resume = None,
    overwrite: stages.Overwrite = False,
) -> None:
    """Train a policy on conversations, or on the traces of an environment's expert.

    Examples:

    posttrain sft data.train=conversations.jsonl data.held_out=100 name=first

    posttrain sft environment.type=sokoban name=warm

    posttrain sft --resume runs/warm
    """
    stages.run("sft", words or [], dry_run, on, resume, overwrite)
