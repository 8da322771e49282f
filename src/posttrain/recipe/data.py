"""Which rows a stage reads, what their columns are called, and what becomes of rows that do not fit."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from posttrain.recipe.base import BaseConfig


class ColumnsRecipe(BaseConfig):
    """Names of columns. A column that a row does not need may be absent from the data."""

    messages: str = "messages"
    """A conversation: a list of `{"role", "content"}`; a message may say `"train": false`."""
    prompt: str = "prompt"
    """What is answered: text (becomes a user message) or a list of messages."""
    context_messages: str = "context_messages"
    """The same as a list of messages; read where the column `prompt` is absent."""
    completion: str = "completion"
    """The answer: text (becomes an assistant message) or a list of messages."""
    chosen: str = "chosen"
    """The better answer: text or messages; the whole conversation where no prompt is given."""
    rejected: str = "rejected"
    """The worse answer, in the same form."""
    label: str = "label"
    """KTO: whether the answer is good (true or false, 1 or 0). Prompts: what a rule compares answers with."""
    margin: str = "margin"
    """How much better the chosen answer is: a number, 0 or more."""
    tools: str = "tools"
    """Tool descriptions for the chat template: a list, or a JSON text of one."""
    domain: str = "domain"
    """Rows with the same text here are also measured by themselves."""


class SourceRecipe(BaseConfig):
    """One place that rows come from."""

    path: str
    """A `.parquet`, `.jsonl`, `.json` or `.csv` file, a directory of those, or a hub id."""
    split: str = "train"
    """Split of a hub data set."""
    subset: str | None = None
    """Configuration of a hub data set."""
    weight: float = Field(1.0, gt=0)
    """How often an epoch goes through these rows: 0.5 takes half of them each time, 2 takes each twice."""


def _sources(value: Any) -> Any:
    """`path` alone, or a list of paths and sections, as a list of sections."""
    listed = value if isinstance(value, list) else [value]
    return [{"path": item} if isinstance(item, str) else item for item in listed]


Sources = Annotated[list[SourceRecipe], BeforeValidator(_sources)]
"""A path, or a list of paths and of sections with `path`, `split`, `subset` and `weight`."""


class DataRecipe(BaseConfig):
    """The rows of a supervised stage."""

    train: Sources = Field(min_length=1)
    """Rows to train on: a path, or a list of paths and sections."""
    validation: Sources = []
    """Rows that measure progress and choose the best checkpoint."""
    test: Sources = []
    """Rows of the final table; no choice is made on them. Empty takes the validation rows, which flatters the table."""
    held_out: int = Field(0, ge=0)
    """Training rows held out for validation where `validation` is empty; rows with the same prompt stay together."""
    columns: ColumnsRecipe = ColumnsRecipe()
    max_rows: int | None = Field(None, ge=1)
    """Training rows taken from each source; null takes all."""
    max_tokens: int = Field(2048, ge=8)
    """Most tokens of a row, prompt included."""
    overlong: Literal["drop", "truncate"] = "drop"
    """A longer row is dropped, or cut at its end (without its end token, which is learned only where an answer ends). Counted either way."""
    strict: bool = False
    """Whether a row that cannot be used is an error; otherwise such rows are left out, counted and named."""
    streaming: bool = False
    """Read rows as training goes instead of all at the start; needs `steps`."""
    shuffle_buffer: int = Field(10_000, ge=1)
    """Streaming: rows held at a time to draw the next one from."""
    cache: str | None = None
    """Directory for tokenised rows, found again by their content; null is the user's cache directory."""

    @model_validator(mode="after")
    def _held_out_or_given(self):
        if self.held_out and self.validation:
            raise ValueError("`held_out` takes validation rows from `train`, and `validation` names others; keep one")
        return self


class PtxRecipe(BaseConfig):
    """Rows of text that join every update of the policy, so that it does not forget them (Ouyang et al. 2022, arXiv 2203.02155)."""

    data: DataRecipe
    """Conversations; `train` alone, since nothing is measured on them."""
    coefficient: float = Field(1.0, gt=0)
    """Weight of their negative log-likelihood, a mean over the rows' trained tokens of the update, beside the policy's loss."""
    rows_per_update: int = Field(16, ge=1)
    """Rows that join each optimizer step."""
    loss_on: Literal["assistant", "last_assistant", "all"] = "assistant"
    """Which tokens of a row are trained: all answers, the last one, or every token. They are scored at `rollout.sampling.temperature`."""

    @model_validator(mode="before")
    @classmethod
    def _there_are_rows(cls, values: Any) -> Any:
        if isinstance(values, dict) and values and not values.get("data"):
            raise ValueError(
                f"`{next(iter(values))}` would have no effect: there are no rows to train on beside the episodes; name "
                "some in `data.train`, or remove ptx"
            )
        return values

    @model_validator(mode="after")
    def _rows_are_for_training(self):
        for key in ("validation", "test", "held_out", "streaming"):
            if getattr(self.data, key):
                raise ValueError(
                    f"`data.{key}` has no place here: the rows are read at the start and trained on; remove it"
                )
        return self
