"""Units: the spans of sampled tokens that get their own credit."""

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from posttrain.recipe.base import Part

STEP_PATTERN = r"^[ \t]*\*{0,2}(?:[Ss]tep[ \t]+)?(?P<label>[A-Z]{1,2}|\d{1,3})[.):]\*{0,2}[ \t]+"


class _CutUnits(Part):
    """Keys of the segmenters that find their own cuts inside an answer."""

    max_units: int | None = Field(None, ge=1)
    """Most units of one answer; thinking, what stands before the first label and what stands after the steps are not counted. null: no limit."""
    merge: Literal["merge_tail", "merge_small"] = "merge_tail"
    """With `max_units`. `merge_tail`: the last unit takes all that follows it. `merge_small`: again and again the unit with the fewest tokens joins the smaller of its neighbours."""
    thinking: Literal["whole", "split"] = "whole"
    """`whole`: a thinking block `<think>…</think>` is one unit apart from the others. `split`: it is cut like any other text."""


class StepUnits(_CutUnits):
    """Labelled steps: a unit begins at each label. What stands before the first label is a unit that is no step."""

    type: Literal["steps"]
    """`steps`: units begin at labels at the start of a line."""
    pattern: str = STEP_PATTERN
    """Regular expression of where a step starts, in multi-line mode over the text of the answer. Its group `label` is the step's label, a number or letters, which `ordinal` needs."""
    ordinal: bool = True
    """Labels must count 1, 2, 3, … or A, B, …, Z, AA, …; a line such as `OK. fine` is then no step. false: every match is a step."""
    closing: str | None = None
    """Regular expression, multi-line, of what ends the steps, such as `^Rationale:`; from its first match after the last label on, the answer is a unit that is no step. null: the last step runs to the end."""

    @field_validator("pattern", "closing")
    @classmethod
    def _is_a_pattern(cls, value: str | None) -> str | None:
        try:
            re.compile(value or "", re.MULTILINE)
        except re.error as error:
            raise ValueError(f"{value!r} is no regular expression ({error}); mend it") from error
        return value

    @model_validator(mode="after")
    def _labels_can_be_read(self) -> "StepUnits":
        if self.ordinal and "label" not in re.compile(self.pattern, re.MULTILINE).groupindex:
            raise ValueError("`pattern` has no group (?P<label>…) to check; add one or set `ordinal: false`")
        return self


class EntropyUnits(_CutUnits):
    """Segments that begin where the reference model was unsure of the next token."""

    type: Literal["entropy"]
    """`entropy`: units begin where the reference model was unsure."""
    threshold: float = Field(1.5, ge=0)
    """Nats. A token begins a unit where the entropy of the distribution it was drawn from, under the reference model at temperature 1, is above this. Published values: 1.5 to 2.25."""
    peak: Literal["threshold", "local_max"] = "threshold"
    """`threshold`: every such token begins a unit. `local_max`: only those whose entropy is above that of both neighbours."""


class TextUnits(_CutUnits):
    """Units of plain writing."""

    type: Literal["sentence", "paragraph"]
    """`sentence`: ends at `.`, `!`, `?` and their like before a space, and at the end of a line. `paragraph`: ends at a blank line."""


class WholeUnits(Part):
    """Units that need no reading."""

    type: Literal["turn", "token", "outcome"]
    """`turn`: one unit per answer. `token`: one per sampled token. `outcome`: one per episode."""


UnitsRecipe = Annotated[StepUnits | EntropyUnits | TextUnits | WholeUnits, Field(discriminator="type")]
