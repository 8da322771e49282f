"""A rubric: what a judge is told to look at in a prediction, and what it is shown of a row."""

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator

from posttrain.recipe.base import Part

FIELDS = ("prompt", "prediction", "reference")
"""What a template may show of a row."""
FIELD = re.compile(r"\{([A-Za-z_]\w*)\}")
"""A field in a template; other braces are text."""


class Anchor(Part):
    """What a number of points means."""

    points: int
    """A whole number."""
    means: str = Field(min_length=1)
    """What a prediction with so many points is like."""


class PointsScale(Part):
    """The judge gives a whole number of points."""

    type: Literal["points"]
    anchors: list[Anchor] = Field(min_length=2)
    """The scale goes from the least to the most points among them; the most are best."""

    @field_validator("anchors")
    @classmethod
    def _told_once(cls, value: list[Anchor]) -> list[Anchor]:
        if len({anchor.points for anchor in value}) < len(value):
            raise ValueError("two anchors have the same points; keep one")
        return sorted(value, key=lambda anchor: anchor.points)


class ClaimsScale(Part):
    """The judge lists the claims of a prediction and says of each whether it holds; the score is the share that does."""

    type: Literal["claims"]
    claim: str = Field(min_length=1)
    """What counts as one claim."""
    supported: str = Field(min_length=1)
    """When a claim holds."""


class Rubric(Part):
    """How a judge is to judge one prediction, or two against each other."""

    name: str = Field(pattern=r"^[A-Za-z][\w-]*$")
    """What results call it."""
    measures: str = Field(min_length=1)
    """What a good prediction is, in words for the judge."""
    scale: Annotated[PointsScale | ClaimsScale, Field(discriminator="type")]
    """How the judge answers."""
    template: str
    """What the judge is shown: text with `{prompt}`, `{prediction}` and `{reference}`, each of which becomes a frame of its own. Rows without a reference are left out where it names `{reference}`."""

    @field_validator("template")
    @classmethod
    def _known_fields(cls, value: str) -> str:
        named = FIELD.findall(value)
        for name in named:
            if name not in FIELDS:
                raise ValueError(f"there is no field {{{name}}}; use {', '.join(f'{{{field}}}' for field in FIELDS)}")
        if named.count("prediction") != 1:
            raise ValueError("it has to show {prediction} once")
        return value

    @property
    def needs_reference(self) -> bool:
        """Whether rows without a reference cannot be judged."""
        return "reference" in FIELD.findall(self.template)
