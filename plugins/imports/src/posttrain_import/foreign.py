"""Write the hints of posttrain for names of other frameworks: `python -m posttrain_import.foreign`.

The hints are in the core, so that an unknown key is explained without this package. They follow from the rules of all
trainers and from `hints.yaml`, which has names of other programs, and names whose hint is not the key of their rule.
"""

import json
from importlib import resources
from pathlib import Path
from typing import Any

from posttrain import recipe
from posttrain_import.rules import read_file, read_files

PLACE = Path(recipe.__file__).parent / "foreign.json"


def _keys(rule: Any) -> list[str]:
    """The recipe keys of a rule that only renames or translates a value."""
    rule = {"key": rule} if isinstance(rule, str) else rule
    if not isinstance(rule, dict):
        return []
    choices = rule.get("choice", {}).values()
    if choices and all(isinstance(value, dict) for value in choices):
        return []
    return rule["key"].partition(" as ")[0].split(", ") if "key" in rule else list(rule.get("switch", ()))


def hints() -> dict[str, dict[str, Any]]:
    """`keys`: name -> the keys here. `reasons`: name -> why there is none. `units`: key -> its unit."""
    own = read_file(resources.files("posttrain_import") / "hints.yaml")
    keys: dict[str, list[str]] = {}
    reasons: dict[str, str] = {}
    for file in read_files():
        sections = [*file.get("parts", {}).values(), *file["programs"].values()]
        if any("command" in section for section in sections):  # scripts, whose keys are options and files too
            continue
        for section in sections:
            for name, rule in section.get("rules", {}).items():
                keys.setdefault(name, _keys(rule))
    shared = next(file["parts"]["trl"] for file in read_files() if "trl" in file.get("parts", {}))
    for kind in ("no effect", "not supported"):
        reasons |= {name: sentence for sentence, names in shared.get(kind, {}).items() for name in names}
    reasons |= {name: rule["not supported"] for name, rule in shared["rules"].items() if "not supported" in rule}
    keys = {name: found for name, found in keys.items() if found and found != [name]}
    for name in [name for names in own["keys"].values() for name in names]:
        keys[name] = []
    for native, names in own["keys"].items():
        for name in names:
            keys[name] += native.split(", ")
    reasons |= {name: sentence for sentence, names in own["reasons"].items() for name in names}
    return {
        "keys": dict(sorted(keys.items())),
        "reasons": dict(sorted(reasons.items())),
        "units": own["units"],
    }


def text() -> str:
    """The hints as JSON, with a line for each name."""
    lines = [
        f"  {json.dumps(title)}: {{\n"
        + ",\n".join(
            f"    {json.dumps(name)}: {json.dumps(hint, ensure_ascii=False)}" for name, hint in section.items()
        )
        + "\n  }"
        for title, section in hints().items()
    ]
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    PLACE.write_text(text(), encoding="utf-8")
