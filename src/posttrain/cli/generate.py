"""`posttrain generate`."""

from posttrain.cli import stages


def generate(
    words: stages.Words = None,
    dry_run: stages.DryRun = False,
    on: stages.On = None,
    resume: stages.Resume = None,
    overwrite: stages.Overwrite = False,
) -> None:
    """Answer the rows of a data set and write a file of predictions. Killed runs go on with --resume RUN.

    Examples:

    posttrain generate data.test=test.jsonl model.path=runs/run/model out=predictions.jsonl

    posttrain generate data.test=test.jsonl samples=4 sampling.temperature=0.7

    posttrain generate data.test=test.jsonl engine.type=openai engine.url=http://localhost:8000/v1 engine.model=NAME
    """
    if resume is not None and words:
        stages.require_same(words, resume, "generate")
        words = None
    stages.run("generate", words or [], dry_run, on, resume, overwrite)
