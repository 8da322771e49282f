"""Environments whose seeds are rows of a file."""

from collections.abc import Sequence

from posttrain.errors import InputError


def require_rows(what: str, count: int, training: range, held_out: Sequence[range]) -> None:
    """InputError naming the key where seeds go beyond the `count` rows of `what`, the key that names their file.

    `held_out`: the seeds of the curve and, last, those of the final table.
    """
    keys = ("seeds", "evaluation.seeds", "evaluation.final_seeds")
    for key, seeds in zip(keys, (training, held_out[0], held_out[-1]), strict=True):
        if seeds.stop > count:
            raise InputError(
                f"{key} go to {seeds.stop - 1}, but {what} has {count} usable rows (0 to {count - 1}), and a seed is a "
                f"row; set `{key}.start` and `{key}.count`"
            )
