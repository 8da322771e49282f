"""The data of a stage: sources, column names, and what happens to rows that do not fit."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_validator

from posttrain.recipe.base import BaseConfig, Reads, Text, Writes
from posttrain.recipe.metrics import PURPLE, Metric
from posttrain.recipe.model import LOSS_TERMS
from posttrain.recipe.needs import needs, unless
from posttrain.recipe.rollout import HeldOut

DEPTH = 200
"""Largest nesting of a row that can be allowed, because later steps recurse."""


class ConversationColumns(BaseConfig):
    """Column names of conversations. Columns that a row does not need may be missing."""

    messages: Text = "messages"
    """A conversation: a list of `{"role", "content"}`. A message with `"train": false` is not trained on."""
    prompt: Text = "prompt"
    """The prompt: text, which becomes a user message, or a list of messages."""
    text: Text = "text"
    """For `sft`: plain text, for rows without messages and prompt. It is not rendered with the chat template, ends with the end token, and every token but the first has a loss."""
    context_messages: Text = "context_messages"
    """The prompt as a list of messages, for data without the column `prompt`."""
    completion: Text = "completion"
    """The answer: text, which becomes an assistant message, or a list of messages."""
    tools: Text = "tools"
    """Tool descriptions for the chat template: a list, or a list as JSON text."""


class ColumnsRecipe(ConversationColumns):
    """Column names. Columns that a stage does not need may be missing."""

    chosen: Text = "chosen"
    """The preferred answer: text or messages. Without a prompt column, the whole conversation."""
    rejected: Text = "rejected"
    """The other answer, in the same form."""
    label: Text = "label"
    """For KTO: whether the answer is good (true or false, 1 or 0). For prompts: the reference answer that a rule compares with."""
    margin: Text = "margin"
    """Margin of the preference: a number, 0 or more."""
    domain: Text = "domain"
    """Domain of a row. Metrics are also reported per domain."""
    weight: Text | None = None
    """Weight of a row in the training loss, a number above 0. The loss of an update is the weighted mean over its tokens (`sft`), pairs (`dpo`, `reward`) or answers (`kto`). Null: all rows have weight 1."""


class SourceRecipe(BaseConfig):
    """One source of rows."""

    path: Reads
    """A `.parquet`, `.jsonl`, `.json` or `.csv` file, a directory of those, or a hub id."""
    split: Text = Field("train", min_length=1)
    """Split of a hub data set, and the part of its rows or of those of a file, in percent: `train[:50%]` and `train[50%:]` are disjoint, for a second reward model that audits the first."""
    subset: Text | None = None
    """Configuration, for a hub data set."""
    weight: float = Field(1.0, gt=0)
    """Passes over these rows per epoch. 0.5 uses half of the rows in each epoch; 2 uses each row twice."""
    max_row_mib: float = Field(16.0, gt=0)
    """Maximum size of a row in its file, in MiB. Larger rows are skipped without being read into memory, and counted."""
    max_expansion: float = Field(200.0, ge=1)
    """Maximum ratio of the content of a `.jsonl.gz` file, or of the values of a `.parquet` file or row group, to its compressed size. What exceeds it and 64 MiB is not read further, and counted as a broken file."""
    max_depth: int = Field(32, ge=1, le=DEPTH)
    """Maximum nesting depth of lists and objects in a row. Deeper rows are skipped and counted."""

    @field_validator("split")
    @classmethod
    def _whole_percents(cls, value: str) -> str:
        match = re.fullmatch(r"[^\[\]]+(\[(\d+%)?:(\d+%)?\])?", value)
        if match is None:
            raise ValueError("a part of a split is in whole percents; write it as in `train[:33%]`")
        first, last = int((match[2] or "0%")[:-1]), int((match[3] or "100%")[:-1])
        if not first < last <= 100:
            raise ValueError(f"the part from {first}% to {last}% has no rows; widen it, within 0% to 100%")
        return value

    @property
    def folder(self) -> Path | None:
        """The directory of the rows, whose files they may name; None for a hub data set."""
        path = Path(self.path).expanduser()
        return path if path.is_dir() else path.parent if path.exists() else None

    @property
    def part(self) -> tuple[str, int, int]:
        """The name in `split`, and the first and the last percent of its rows."""
        name, _, limits = self.split.removesuffix("]").partition("[")
        first, _, last = limits.replace("%", "").partition(":")
        return name, int(first or 0), int(last or 100)


class TaskSourceRecipe(SourceRecipe):
    """One source of tasks."""

    use: Literal["training", "validation", "test"] = "training"
    """What its tasks are for. `training`: to train on, less the held-out tasks. `validation`: the learning curve. `test`: the final table."""


def _sources(value: Any) -> Any:
    """`path` alone, or a list of paths and sections, as a list of sections."""
    listed = value if isinstance(value, list) else [value]
    return [{"path": item} if isinstance(item, str) else item for item in listed]


Sources = Annotated[list[SourceRecipe], BeforeValidator(_sources)]
"""A path, or a list of paths and of sections with `path`, `split`, `subset` and `weight`."""
TaskSources = Annotated[list[TaskSourceRecipe], BeforeValidator(_sources)]
"""As `Sources`; a section may say what its tasks are for (`use`)."""


class RowsRecipe(BaseConfig):
    """Rows to train on."""

    kind: ClassVar[str] = "conversation"

    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("validation/rows", "number of validation rows"),
        Metric("test/rows", "number of test rows"),
        Metric("test/loss", "loss of the test rows"),
    )

    train: Sources = Field(min_length=1)
    """Rows to train on: a path, or a list of paths and sections."""
    columns: ConversationColumns = ConversationColumns()
    max_rows: int | None = Field(None, ge=1)
    """Use at most this many training rows of each source. Null: all."""
    max_tokens: int = Field(2048, ge=8)
    """Maximum number of tokens of a row, prompt included."""
    overlong: Literal["drop", "truncate"] = "drop"
    """What happens to longer rows. `drop`: leave them out. `truncate`: cut their end; a truncated answer has no end token. Both are counted."""
    strict: bool = False
    """true: a row that cannot be used is an error. false: such rows are dropped, counted and reported."""
    cache: Writes | None = None
    """Directory of the cache of tokenized rows. Null: the user's cache directory."""


class DataRecipe(RowsRecipe):
    """Training and validation rows of a supervised stage."""

    columns: ColumnsRecipe = ColumnsRecipe()
    validation: Sources = []
    """Validation rows, for the learning curve and the choice of the best checkpoint."""
    test: Sources = []
    """Test rows, for the final table; nothing is selected on them. If empty, and `held_out` is too, the final table uses the validation rows and has a selection bias."""
    held_out: Annotated[
        HeldOut | Literal[0], unless("validation", reason="`validation` names the validation rows", refused=True)
    ] = 0
    """Training rows to hold out if `validation` is empty: a number (100) or a share (0.1). They are for validation; if `test` is empty, half of them are for the final table instead. Rows with the same prompt stay together."""
    streaming: bool = False
    """Read rows during training instead of at the start. Needs `steps`."""
    shuffle_buffer: Annotated[int, needs("streaming")] = Field(10_000, ge=1)
    """With `streaming`: size of the shuffle buffer, in rows."""


class FixedRowsRecipe(BaseConfig):
    """Supervised rows that a stage with sampled episodes trains on as well."""

    if TYPE_CHECKING:
        loss_on: Literal["assistant", "last_assistant", "all"]

    data: RowsRecipe
    """The rows: conversations in `data.train`. All are loaded at the start, and nothing is evaluated on them."""


class PtxRecipe(FixedRowsRecipe):
    """Supervised rows mixed into every policy update, against forgetting (PPO-ptx; Ouyang et al. 2022, arXiv 2203.02155)."""

    metrics: ClassVar[tuple[Metric, ...]] = (Metric("ptx/loss", "supervised rows", LOSS_TERMS, PURPLE),)

    coefficient: float = Field(1.0, gt=0)
    """Weight of their negative log-likelihood, averaged over the trained tokens of the update, in the policy's loss."""
    rows_per_update: int = Field(16, ge=1)
    """Rows per optimizer update."""
    loss_on: Literal["assistant", "last_assistant", "all"] = "assistant"
    """Which tokens carry loss: those of all assistant messages, of the last one, or all tokens. Their likelihood is that of the model at temperature 1, whatever `rollout.sampling.temperature` is."""
