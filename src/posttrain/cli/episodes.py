"""`posttrain episodes RUN`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class SplitName(StrEnum):
    """Which episodes of a step."""

    TRAIN = "train"
    EVALUATION = "evaluation"
    FINAL = "final"


def episodes(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run, for example runs/run.")],
    step: Annotated[
        int | None, typer.Option(help="Step to show; without it, the steps that have episodes.", min=0)
    ] = None,
    split: Annotated[
        SplitName, typer.Option(help="Training, the held-out seeds of the curve, or those of the final table.")
    ] = SplitName.TRAIN,
    group: Annotated[int | None, typer.Option(help="Only this group.")] = None,
    episode: Annotated[int | None, typer.Option(help="Only this place within its group.")] = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="Show sampled tokens, coloured by their advantage.")] = False,
    limit: Annotated[int, typer.Option(help="Most episodes to show.", min=1)] = 8,
) -> None:
    """Show the episodes of a run: the conversation, and reward, stop reason and advantages of each turn.

    Where credit is of units (`unit_credit`), an answer is shown unit by unit: the credit of each, its tokens and its
    text.

    Examples:

    posttrain episodes runs/run

    posttrain episodes runs/run --step 20 --group 0

    posttrain episodes runs/run --step 20 --group 0 --episode 1 --tokens
    """
    from rich.console import Console

    from posttrain.errors import InputError
    from posttrain.rollout.store import episodes_file, read_episodes, stored_steps
    from posttrain.rollout.view import token_decoder, unit_credit, view_episode, view_steps
    from posttrain.runs.directory import RunDirectory

    directory, console = RunDirectory.open(run), Console(highlight=False)
    if step is None:
        found = list(stored_steps(directory.episodes))
        if not found:
            raise InputError(f"{directory.episodes} holds no episodes yet; wait for the first step")
        console.print(view_steps(found))
        return
    stored = read_episodes(episodes_file(directory.episodes, step, split.value))
    played, advantages, units = stored.episodes, stored.advantages, stored.units
    chosen = [
        number
        for number, one in enumerate(played)
        if (group is None or one.group == group) and (episode is None or one.index == episode)
    ]
    if not chosen:
        groups = sorted({one.group for one in played})
        raise InputError(
            f"step {step} has no such {split.value} episode; its groups are {groups}, see --group and --episode"
        )
    if tokens and any(played[number].turns and not played[number].streams for number in chosen):
        raise InputError(
            "--tokens: these episodes were played by a remote model, whose tokens are not known; leave it out"
        )
    in_units = any(units[number] is not None for number in chosen[:limit])
    decode = token_decoder(directory) if tokens or in_units else None
    credited = unit_credit(directory) if in_units else None
    for number in chosen[:limit]:
        own = advantages.values[number] if advantages is not None else None
        console.print(view_episode(played[number], own, decode, tokens, units[number], credited))
    if len(chosen) > limit:
        console.print(f"and {len(chosen) - limit} more; show them with --limit {len(chosen)}")
