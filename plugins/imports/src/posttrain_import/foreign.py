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


def hints() -> dict[str, dict[str, Any]]:
    """`keys`: name -> the keys here. `reasons`: name -> why there is none. `units`: key -> its unit."""
    listed = read_file(resources.files("posttrain_import") / "hints.yaml")
    keys: dict[str, list[str]] = {}
    parts = {name: part for file in read_files() for name, part in file.get("parts", {}).items()}
    for file in read_files():
        sections = [*file.get("parts", {}).values(), *file["programs"].values()]
        # The keys of scripts are options and files too, and launchers have no stage.
        if all("stage" in section and "command" not in section for section in file["programs"].values()):
            for name, rule in [item for section in sections for item in section.get("rules", {}).items()]:
                rule = {"key": rule} if isinstance(rule, str) else rule if isinstance(rule, dict) else {}
                choices = rule.get("choice", {}).values()
                translated = choices and all(isinstance(value, dict) for value in choices)
                named = rule["key"].partition(" as ")[0].split(", ") if "key" in rule else list(rule.get("switch", ()))
                keys.setdefault(name, [] if translated else named)
    keys = {name: natives for name, natives in keys.items() if natives and natives != [name]}
    keys |= {name: [] for names in listed["keys"].values() for name in names}
    for native, names in listed["keys"].items():
        for name in names:
            keys[name] += native.split(", ")
    trl = parts["trl"]
    sentences = trl["no effect"] | trl["not supported"]
    reasons = {name: sentence for sentence, names in sentences.items() for name in names}
    reasons |= {name: rule["not supported"] for name, rule in trl["rules"].items() if "not supported" in rule}
    reasons |= {name: sentence for sentence, names in listed["reasons"].items() for name in names}
    return {"keys": dict(sorted(keys.items())), "reasons": dict(sorted(reasons.items())), "units": listed["units"]}


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
