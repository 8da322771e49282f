"""`posttrain doctor`."""

import typer


def doctor() -> None:
    """Describe this machine, what posttrain selects on it and what would make it faster. Add the output to bug reports.

    Example:

    posttrain doctor
    """
    from posttrain.doctor import report

    for line in report():
        typer.echo(line)
