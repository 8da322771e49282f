"""With which settings of an environment rows were made: kept in the rows, and compared with a recipe's."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posttrain.data.readers import read_rows
from posttrain.recipe.components import EnvironmentRecipe
from posttrain.recipe.data import SourceRecipe

COLUMN = "environment"
"""The column of rows that an environment's expert made: its keys as JSON text, which any file format holds."""
_SHOWN = 3
"""Most keys that are named."""


def settings_text(recipe: EnvironmentRecipe) -> str:
    """The environment's keys with every default written out, for the column `COLUMN`."""
    return json.dumps(recipe.model_dump(mode="json"), sort_keys=True)


def other_settings(recipe: EnvironmentRecipe, sources: Sequence[SourceRecipe]) -> list[str]:
    """A sentence for each local source whose first row was made in this environment with other settings.

    Rows without the column, of another environment, or on the hub are taken as they are.
    """
    present, found = _keys(recipe.model_dump(mode="json")), []
    for source in sources:
        made = _keys(_settings_of(source))
        if made.get("type") != recipe.type:
            continue
        other = [key for key in present if key in made and made[key] != present[key]]
        named = [f"environment.{key} {json.dumps(made[key])} (here {json.dumps(present[key])})" for key in other]
        more = f" and {len(named) - _SHOWN} more" if len(named) > _SHOWN else ""
        if named:
            found.append(
                f"the rows of {source.path} were made with {', '.join(named[:_SHOWN])}{more}, so what they teach is not "
                "what is evaluated; make them anew, or set these keys"
            )
    return found


def _settings_of(source: SourceRecipe) -> dict[str, Any]:
    if not Path(source.path).expanduser().exists():
        return {}
    first = next((row for _, row in read_rows(source) if isinstance(row, dict)), {})
    try:
        settings = json.loads(first.get(COLUMN) or "")
    except (TypeError, ValueError, RecursionError):
        return {}
    return settings if isinstance(settings, dict) else {}


def _keys(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted keys of the values that are no sections."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= _keys(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found
