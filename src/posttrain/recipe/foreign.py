"""Names of keys in TRL, transformers, OpenRLHF and verl -> the keys here, for error messages.

`foreign.json` is generated from the rules of `posttrain import`; a test of that plug-in compares them.
"""

import json
from functools import cache
from importlib import resources
from typing import Any


@cache
def hints() -> dict[str, dict[str, Any]]:
    """`keys`: name -> the keys here. `reasons`: name -> why there is none. `units`: key here -> its unit."""
    return json.loads((resources.files("posttrain.recipe") / "foreign.json").read_text(encoding="utf-8"))


def native_key(name: str, keys: list[str]) -> str | None:
    """What to type for a dotted key of another framework, with a note on its unit; None if it is not known.

    `keys`: the keys of the stage. The longest end of `name` that is known counts; of its keys, the first that the stage
    has.
    """
    known = hints()
    parts = name.replace("-", "_").split(".")
    for start in range(len(parts)):
        end = ".".join(parts[start:])
        for native in known["keys"].get(end, ()):
            if native in keys:
                unit = known["units"].get(native)
                return f"use {native} ({unit})" if unit else f"use {native}"
        if end in known["reasons"]:
            return f"it has no counterpart: {known['reasons'][end]}"
    return None
