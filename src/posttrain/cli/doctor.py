"""`posttrain doctor`."""

import typer


def doctor() -> None:
    """Describe this machine: versions, devices and missing extras. Add the output to bug reports.

    Example:
    posttrain doctor
    """
    from posttrain.doctor import machine

    for name, fact in machine():
        typer.echo(f"{name:<14}  {fact}")
