"""`posttrain doctor`."""

from functools import partial
from typing import Annotated

import typer


def doctor(
    quick: Annotated[bool, typer.Option("--quick", help="Do not measure the speed.")] = False,
) -> None:
    """Describe this machine, what posttrain selects on it and what would make it faster, and measure its speed.

    The measurement samples and trains SmolLM2-135M on the task of the demo for about 10 seconds after loading it,
    longer on a slow machine, and estimates the time of the demo. Add the output to bug reports.

    Examples:

    posttrain doctor

    posttrain doctor --quick
    """
    from posttrain.doctor import report

    for line in report(speed=not quick, announce=partial(typer.echo, err=True)):
        typer.echo(line)
