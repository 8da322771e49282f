"""Where the one-shot tasks of `text_task` come from, and the judge that may score their answers."""

from typing import Any

from pydantic import Field, field_validator

from posttrain.recipe.base import Part
from posttrain.recipe.judge import JudgeServerRecipe


class ReasoningGymRecipe(Part):
    """Tasks that reasoning-gym makes, and their verifier. Any seed is a task."""

    dataset: str
    """Name of a data set of reasoning-gym, for example `chain_sum`."""
    config: dict[str, Any] = {}
    """Keys of that data set's configuration, for example `max_terms: 3`."""

    @field_validator("config")
    @classmethod
    def _not_ours(cls, value: dict[str, Any]) -> dict[str, Any]:
        for key in ("seed", "size"):
            if key in value:
                raise ValueError(f"`{key}` is set by the environment seed, which makes one task; remove it")
        return value


class JudgeRecipe(JudgeServerRecipe):
    """A language model that scores answers, behind an OpenAI-compatible server."""

    rubric: str = Field(min_length=1)
    """What a good answer is, in words for the judge."""
    scale: int = Field(10, ge=1)
    """The judge gives points from 0 to this; the reward is points / scale, in [0, 1]."""
