"""Generation: the rows of a data set answered by a model, into a file of predictions."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from posttrain.recipe.base import BaseConfig
from posttrain.recipe.data import ColumnsRecipe, Sources
from posttrain.recipe.engines import OpenAIEngineRecipe, VllmEngineRecipe, refuse_lone_adapters, refuse_unknown_sampling
from posttrain.recipe.rollout import EngineRecipe, SamplingRecipe, StopString
from posttrain.recipe.run import StageRecipe

OWN_COLUMNS = (
    "id",
    "prompt",
    "prediction",
    "reference",
    "sample",
    "seed",
    "stop_reason",
    "tokens",
    "thinking_tokens",
    "thinking_characters",
)
"""What a prediction has besides the columns of `keep_columns`."""


class PromptsRecipe(BaseConfig):
    """The rows to answer."""

    test: Sources = Field(min_length=1)
    """Rows to answer: a path, or a list of paths and sections. A row has a prompt, or a conversation or pair whose last answer is left out."""
    columns: ColumnsRecipe = ColumnsRecipe()
    """What the columns are called. `completion`, else `label`, else the last answer of `messages` or `chosen` is the reference."""
    id: str | None = None
    """Column with the id of a row, text or a whole number that no other row has; null numbers the usable rows from 0."""
    max_rows: int | None = Field(None, ge=1)
    """Usable rows that are answered, the first of all sources together; null answers all."""
    strict: bool = False
    """Whether a row that cannot be used, or leaves no room for an answer, is an error; otherwise such rows are left out, counted and named."""

    @model_validator(mode="after")
    def _each_once(self):
        if any(source.weight != 1 for source in self.test):
            raise ValueError("`test.weight` means nothing here, for every row is answered; remove it")
        return self


class LimitsRecipe(BaseConfig):
    """How long an answer may be."""

    tokens_per_turn: int = Field(512, ge=1)
    """Most tokens of an answer."""
    tokens_per_episode: int = Field(4096, ge=16)
    """Most tokens of a prompt and its answer, lowered to what the model can read. A prompt that leaves less than `tokens_per_turn` of them is not answered, but named."""
    stop_strings: list[StopString] = []
    """Texts that end an answer besides the model's end token; the text itself is kept."""

    @model_validator(mode="after")
    def _some_room(self):
        if self.tokens_per_turn >= self.tokens_per_episode:
            raise ValueError(
                f"`tokens_per_turn` {self.tokens_per_turn} leaves no room for a prompt within `tokens_per_episode` "
                f"{self.tokens_per_episode}; raise `tokens_per_episode`"
            )
        return self


class GenerateRecipe(StageRecipe):
    """Answers of a model to the rows of a data set, as a file of predictions."""

    stage: Literal["generate"] = "generate"
    """Which stage the recipe is for; `posttrain generate` takes this one."""
    data: PromptsRecipe
    system: str | None = None
    """System message put before every prompt; it takes the place of one that the row has."""
    engine: Annotated[EngineRecipe | VllmEngineRecipe | OpenAIEngineRecipe, Field(discriminator="type")] = (
        EngineRecipe()
    )
    """Who answers: the model of `model.path` in this process or in vLLM, or one behind a server."""
    rollout: LimitsRecipe = LimitsRecipe()
    sampling: SamplingRecipe = SamplingRecipe(temperature=0.0)
    """How tokens are drawn; temperature 0 is greedy."""
    samples: int = Field(1, ge=1)
    """Answers to each row."""
    thinking: Literal["keep", "remove"] = "keep"
    """`remove` leaves out the thinking at the start of an answer, up to `</think>`, and counts it; `keep` leaves it in the prediction."""
    keep_columns: list[str] = []
    """Columns of the data that the predictions have too."""
    window: int = Field(512, ge=1)
    """Local engine: answers that are computed together before the next ones are begun. A resumed run computes the window it was killed in anew, to the same bits, and keeps what was written of it; small windows save that work, large ones keep the engine full."""
    out: str | None = None
    """The file of predictions (JSON lines); null is `predictions.jsonl` in the run's directory."""

    @property
    def remote(self) -> OpenAIEngineRecipe | None:
        """The engine, where a remote model answers."""
        return self.engine if isinstance(self.engine, OpenAIEngineRecipe) else None

    @property
    def predictions(self) -> Path:
        """Where the predictions are written."""
        return (
            Path(self.out).expanduser() if self.out is not None else Path(self.runs) / self.name / "predictions.jsonl"
        )

    @model_validator(mode="after")
    def _samples_differ(self):
        if self.sampling.temperature == 0 and self.samples > 1:
            raise ValueError("greedy answers to one row are all alike; set `samples: 1` or a `sampling.temperature`")
        return self

    @model_validator(mode="after")
    def _nothing_overwritten(self):
        for name in self.keep_columns:
            if name in OWN_COLUMNS:
                hint = "; give it as `data.id`" if name == "id" else ""
                raise ValueError(f"`keep_columns` names {name}, which a prediction has already{hint}")
        if self.out is not None and Path(self.out).suffix != ".jsonl":
            raise ValueError(f"`out` is {self.out}; predictions are JSON lines, so let its name end in `.jsonl`")
        if self.out is not None and any(_same(self.out, source.path) for source in self.data.test):
            raise ValueError(f"`out` is {self.out}, which `data.test` reads; choose another file")
        return self

    @model_validator(mode="after")
    def _what_an_engine_can_do(self):
        refuse_lone_adapters(self.engine, self.model)
        if self.remote is not None:
            refuse_unknown_sampling(self.sampling, "sampling")
        return self


def _same(one: str, other: str) -> bool:
    return Path(one).expanduser().absolute() == Path(other).expanduser().absolute()
