"""`posttrain dpo`."""

from posttrain.cli import stages


def dpo(
    words: stages.Words = None,
    dry_run: stages.DryRun = False,
    on: stages.On = None,
    resume: stages.Resume = None,
    overwrite: stages.Overwrite = False,
) -> None:
    """Optimise a policy on preferences: dpo, ipo, cdpo, simpo, orpo on pairs, kto on judged answers.

    Examples:

    posttrain dpo data.train=pairs_train.jsonl data.validation=pairs_val.jsonl model.path=runs/sft/model name=dpo

    posttrain dpo data.train=pairs_train.jsonl loss.type=simpo loss.beta=2.5 data.held_out=100
    """
    stages.run("dpo", words or [], dry_run, on, resume, overwrite)
