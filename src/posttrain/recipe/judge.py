"""The server of a language model that judges."""

from pydantic import Field

from posttrain.recipe.base import Part


class JudgeServerRecipe(Part):
    """A language model that judges, behind an OpenAI-compatible server."""

    url: str = Field(pattern=r"^https?://\S+$")
    """Base URL of the server, for example `http://localhost:8000/v1`."""
    model: str = Field(min_length=1)
    """Name of the model, as the server knows it."""
    api_key_variable: str | None = None
    """Name of the environment variable that holds the server's key; null sends none that means anything."""
    seconds: float = Field(60, gt=0)
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
