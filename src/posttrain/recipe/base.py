"""The base class of every section of a recipe."""

from pydantic import BaseModel, ConfigDict, model_validator


class BaseConfig(BaseModel):
    """A section of a recipe: typed and immutable. Unknown keys are errors; the docstring of a field describes its key."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )

    @model_validator(mode="after")
    def _numbers_fit(self):
        for name, value in self:
            for number in value if isinstance(value, list | tuple) else [value]:
                if isinstance(number, int) and not -(2**63) <= number < 2**63:
                    raise ValueError(f"`{name}` does not fit into 64 bits; use a smaller number")
        return self
