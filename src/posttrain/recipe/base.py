"""What every part of a recipe shares: strictness."""

from pydantic import BaseModel, ConfigDict


class Part(BaseModel):
    """A part of a recipe: typed, immutable, and an error on any key it does not know."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )
