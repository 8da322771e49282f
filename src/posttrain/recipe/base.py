"""The base class of every section of a recipe, and the marks of its keys."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, ValidationInfo, model_validator
from pydantic_core import PydanticKnownError

from posttrain.recipe.metrics import Metric
from posttrain.recipe.needs import Around, unmet_needs


@dataclass(frozen=True)
class Mark:
    """What the value of a key makes this machine do; part of the annotation of every key that takes free text.

    Values that execute, load, connect or write need trust in the recipe of somebody else, see `recipe.trust`. An unmarked
    text counts as code, so that keys of plug-ins are safe without a mark.
    """

    does: Literal["executes", "loads", "connects", "writes", "reads", "nothing"]
    beside: str = ""
    """Another key of the section that the value belongs to, such as the address that a key is sent to."""

    @property
    def needs_trust(self) -> bool:
        """Whether a value of somebody else needs trust."""
        return self.does not in ("reads", "nothing")


EXECUTES, CONNECTS, NOTHING = Mark("executes"), Mark("connects"), Mark("nothing")
Executes = Annotated[str, EXECUTES]
"""A program, a command line, code, a name to import, or an argument of such code."""
Loads = Annotated[str, Mark("loads")]
"""A file that becomes a template."""
Connects = Annotated[str, CONNECTS]
"""An address, or what is sent to it, such as the name of the environment variable with its key."""
Writes = Annotated[str, Mark("writes")]
"""A file or folder outside of the run that is written to."""
Reads = Annotated[str, Mark("reads")]
"""Files, or a repository of the hub, that are read as data: rows, weights without pickles, templates in a sandbox."""
Text = Annotated[str, NOTHING]
"""Words for people, models or servers, and names of columns and of parts of this package."""
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$"
"""Pattern of the name of a folder; file systems allow 255 bytes, and files that are being written have longer names."""


class BaseConfig(BaseModel):
    """A section of a recipe: typed and immutable. Unknown keys are errors; the docstring of a field describes its key.

    A method `_check(self)` raises ValueError for keys that do not fit together. Those of all parents run, too, before it.
    """

    # Validators are built on first use, and `recipe.reference` reads the docstrings: both would be most of a short command.
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False, defer_build=True)

    metrics: ClassVar[tuple[Metric, ...]] = ()
    """The metrics of runs whose recipe has this section."""

    @model_validator(mode="after")
    def _valid(self):
        for _, sentence in unmet_needs(self, Around((("", self),)), refused=True):
            raise ValueError(sentence)
        for name, value in self:
            for number in value if isinstance(value, list | tuple) else [value]:
                if isinstance(number, int) and not -(2**63) <= number < 2**63:
                    raise ValueError(f"`{name}` does not fit into 64 bits; use a smaller number")
        for kind in reversed(type(self).__mro__):
            if "_check" in vars(kind):
                vars(kind)["_check"](self)
        return self


def validated(part: type[BaseConfig], value: Mapping[str, Any], info: ValidationInfo) -> BaseConfig:
    """`value` as the section `part`, in a validator of pydantic, which puts its place before the errors."""
    if info.mode == "json":
        return part.model_validate_json(json.dumps(value), strict=True)
    return part.model_validate(dict(value))


def unknown_kind(key: str, name: str, names: Iterable[str]) -> PydanticKnownError:
    """The error of a validator about a section whose `key` names none of the kinds `names`."""
    tags = {"discriminator": f"'{key}'", "tag": name, "expected_tags": ", ".join(f"'{one}'" for one in names)}
    return PydanticKnownError("union_tag_invalid", tags)
