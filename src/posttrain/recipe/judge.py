"""Language models as judges, rubrics, and tasks of reasoning-gym."""

import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from posttrain.recipe.base import EXECUTES, BaseConfig, Connects, Mark, Text, Writes


class JudgeSamplingRecipe(BaseConfig):
    """How a judge samples its replies. A key that is null is left out of the request."""

    temperature: float | None = Field(0.0, ge=0)
    """Sampling temperature. Null: not sent. Reasoning models such as o3 reject it."""
    reasoning_effort: Text | None = None
    """Effort of a reasoning model, such as `low`, `medium` or `high`. Null: not sent."""


class JudgeServerRecipe(BaseConfig):
    """A judge: a language model behind an OpenAI-compatible server."""

    url: Connects = Field(pattern=r"^https?://\S+$")
    """Base URL of the server, for example `http://localhost:8000/v1`."""
    model: Text = Field(min_length=1)
    """Model name to send to the server."""
    api_key_variable: Annotated[str | None, Mark("connects", "url")] = None
    """Name of the environment variable that holds the API key. Null: send a placeholder key."""
    timeout: float = Field(60, gt=0)
    """Timeout of one request in seconds, from sending it to the end of the response. Redirects to another server are not followed."""
    retries: int = Field(3, ge=0)
    """Retries after a timeout, a lost connection, or status 429 or 5xx, with exponential backoff."""
    requests_per_minute: float | None = Field(None, gt=0)
    """Rate limit of this process in requests per minute, retries included. Null: no limit."""
    max_tokens: int | None = Field(None, ge=1)
    """Maximum number of tokens of a reply, thinking included. A truncated reply counts as a failed request. Null: the server's default."""
    token_limit_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """Request field that carries `max_tokens`. Reasoning models such as o3 accept only `max_completion_tokens`."""
    sampling: JudgeSamplingRecipe = JudgeSamplingRecipe()
    structured: bool = False
    """Send the JSON schema of the reply (`response_format`). Some servers reject it. Replies are validated in either case."""
    cache: Writes | None = None
    """File that caches replies; several runs may share it. Null: no cache."""


FIELDS = ("prompt", "prediction", "reference")
"""Fields of a row that a template may use."""
FIELD = re.compile(r"\{([A-Za-z_]\w*)\}")
"""A field in a template; other braces are text."""


class Anchor(BaseConfig):
    """Meaning of one value of the scale."""

    points: int
    """Number of points, a whole number."""
    means: str = Field(min_length=1)
    """Description of a prediction that gets these points."""


class PointsScale(BaseConfig):
    """The judge assigns a whole number of points."""

    type: Literal["points"]
    anchors: list[Anchor] = Field(min_length=2)
    """Described values. The scale runs from the smallest to the largest; the largest is best."""

    @field_validator("anchors")
    @classmethod
    def _told_once(cls, value: list[Anchor]) -> list[Anchor]:
        if len({anchor.points for anchor in value}) < len(value):
            raise ValueError("two anchors have the same points; keep one")
        return sorted(value, key=lambda anchor: anchor.points)


class ClaimsScale(BaseConfig):
    """The judge lists the claims of a prediction and whether each is supported; the score is the supported share."""

    type: Literal["claims"]
    claim: str = Field(min_length=1)
    """What counts as one claim."""
    supported: str = Field(min_length=1)
    """When a claim counts as supported."""


class Rubric(BaseConfig):
    """Instructions for a judge that scores one prediction, or compares two."""

    name: str = Field(pattern=r"^[A-Za-z][\w-]*$")
    """Name of the rubric in results."""
    measures: str = Field(min_length=1)
    """Description of a good prediction, for the judge."""
    scale: Annotated[PointsScale | ClaimsScale, Field(discriminator="type")]
    """Form of the judge's reply."""
    template: str
    """Text shown to the judge, with the placeholders `{prompt}`, `{prediction}` and `{reference}`, each inserted as a marked block. If it uses `{reference}`, rows without a reference are skipped."""

    @field_validator("template")
    @classmethod
    def _known_fields(cls, value: str) -> str:
        named = FIELD.findall(value)
        for name in named:
            if name not in FIELDS:
                raise ValueError(f"there is no field {{{name}}}; use {', '.join(f'{{{field}}}' for field in FIELDS)}")
        if named.count("prediction") != 1:
            raise ValueError("the template must contain {prediction} exactly once")
        return value

    @property
    def needs_reference(self) -> bool:
        """Whether the template uses the reference."""
        return "reference" in FIELD.findall(self.template)


class ReasoningGymRecipe(BaseConfig):
    """Tasks that reasoning-gym makes, and their verifier. Any seed is a task."""

    dataset: Text
    """Name of a data set of reasoning-gym, for example `chain_sum`."""
    config: Annotated[dict[str, Any], EXECUTES] = {}
    """Keys of that data set's configuration, for example `max_terms: 3`."""
    part: Literal["all", "training", "held_out"] = "all"
    """Which questions are asked. Other seeds may ask the same question where there are few, so a fifth of all questions, by their text, are `held_out`: set `training` here and `held_out` in `evaluation.environment`."""

    @field_validator("config")
    @classmethod
    def _not_ours(cls, value: dict[str, Any]) -> dict[str, Any]:
        for key in ("seed", "size"):
            if key in value:
                raise ValueError(f"`{key}` is set by the environment seed, which makes one task; remove it")
        return value


class JudgeRecipe(JudgeServerRecipe):
    """A judge whose score is the reward of an answer."""

    rubric: Text = Field(min_length=1)
    """Description of a good answer, for the judge."""
    scale: int = Field(10, ge=1)
    """Maximum number of points; the reward is points / scale, in [0, 1]."""
