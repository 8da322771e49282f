"""The base class of every section of a recipe."""

from pydantic import BaseModel, ConfigDict


class BaseConfig(BaseModel):
    """A section of a recipe: typed and immutable. Unknown keys are errors; the docstring of a field describes its key."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )
