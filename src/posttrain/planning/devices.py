"""The GPUs that `--on` names."""

import math

from posttrain.errors import InputError
from posttrain.recipe.plan import Device

DEVICES = {name: Device(name, gigabytes * 1e9) for name, gigabytes in (("h200", 141), ("h100", 80), ("a100", 80))}
"""Name -> GPU. `a100` is the module with 80 GB."""


def device_of(word: str) -> Device:
    """The GPU for the option `--on`: a key of `DEVICES`, or a number of gigabytes such as `48`.

    Raises `InputError` for other words.
    """
    if word in DEVICES:
        return DEVICES[word]
    try:
        gigabytes = float(word)
    except ValueError:
        gigabytes = math.nan
    if not 0 < gigabytes < 1e6:
        raise InputError(f"--on: {word} is not a known GPU; give {', '.join(DEVICES)}, or its memory in GB, such as 48")
    return Device(f"a GPU of {gigabytes:g} GB", gigabytes * 1e9)
