"""The server of a language model that judges."""

import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from posttrain.recipe.base import BaseConfig


class JudgeServerRecipe(BaseConfig):
    """A language model that judges, behind an OpenAI-compatible server."""

    url: str = Field(pattern=r"^https?://\S+$")
    """Base URL of the server, for example `http://localhost:8000/v1`."""
    model: str = Field(min_length=1)
    """Name of the model, as the server knows it."""
    api_key_variable: str | None = None
    """Name of the environment variable that holds the server's key; null sends none that means anything."""
    timeout: float = Field(60, gt=0)
    """Time-out of one request, in seconds."""
    retries: int = Field(3, ge=0)
    """Further requests after a time-out, a lost connection, or an answer of status 429 or 5xx; each waits longer."""
    requests_per_minute: float | None = Field(None, gt=0)
    """Most requests per minute of this process, those of retries included, evenly spaced; null sets no limit."""
    max_tokens: int | None = Field(None, ge=1)
    """Most tokens of a reply, thinking included; a reply that is cut off is no score. Null leaves it to the server."""
    structured: bool = False
    """Whether the server is also sent the JSON schema of the reply (`response_format`), which some servers refuse. The reply is checked in either case."""
    cache: str | None = None
    """File that keeps what the judge replied, so that nothing is asked twice; several runs may share it. Null keeps nothing."""


FIELDS = ("prompt", "prediction", "reference")
"""What a template may show of a row."""
FIELD = re.compile(r"\{([A-Za-z_]\w*)\}")
"""A field in a template; other braces are text."""


class Anchor(BaseConfig):
    """What a number of points means."""

    points: int
    """A whole number."""
    means: str = Field(min_length=1)
    """What a prediction with so many points is like."""


class PointsScale(BaseConfig):
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


class ClaimsScale(BaseConfig):
    """The judge lists the claims of a prediction and says of each whether it holds; the score is the share that does."""

    type: Literal["claims"]
    claim: str = Field(min_length=1)
    """What counts as one claim."""
    supported: str = Field(min_length=1)
    """When a claim holds."""


class Rubric(BaseConfig):
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


class ReasoningGymRecipe(BaseConfig):
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
