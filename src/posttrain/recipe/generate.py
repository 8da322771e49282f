"""The recipe of `posttrain generate`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from posttrain.recipe.base import BaseConfig, Text, Writes
from posttrain.recipe.data import ColumnsRecipe, Sources
from posttrain.recipe.engines import AnyEngineRecipe, LocalEngineRecipe, refuse_unknown_sampling
from posttrain.recipe.metrics import Metric
from posttrain.recipe.needs import needs
from posttrain.recipe.plan import TaskSplit, counted
from posttrain.recipe.rollout import LOADED, MOST_EPISODES, SamplingRecipe, StopString
from posttrain.recipe.run import StageRecipe, imported

OWN_COLUMNS = (
    *("id", "prompt", "prediction", "reference", "sample", "seed", "stop_reason", "tokens"),
    *("thinking_tokens", "thinking_characters"),
)
"""Columns of a prediction, besides those of `keep_columns`."""


SEVERAL = needs("sampling.temperature", reason="greedy answers to one row are identical", refused=True)


class PromptsRecipe(BaseConfig):
    """The rows to answer."""

    test: Sources = Field(min_length=1)
    """Rows to answer: a path, or a list of paths and sections. A row has a prompt, or a conversation or pair, whose last answer is removed."""
    columns: ColumnsRecipe = ColumnsRecipe()
    """Column names. The reference answer is `completion`, else `label`, else the last answer of `messages` or `chosen`."""
    id: Text | None = None
    """Column with a unique row id (text or a whole number). Null: number the usable rows from 0."""
    max_rows: int | None = Field(None, ge=1)
    """Answer at most this many usable rows, in order. Null: all."""
    strict: bool = False
    """true: a row that cannot be used, or leaves no room for an answer, is an error. false: such rows are dropped, counted and reported."""

    def _check(self) -> None:
        if any(source.weight != 1 for source in self.test):
            raise ValueError("`test.weight` has no effect, because every row is answered; remove it")


class LimitsRecipe(BaseConfig):
    """Limits of an answer."""

    tokens_per_turn: int = Field(512, ge=1)
    """Maximum number of tokens of an answer."""
    tokens_per_episode: Annotated[int, LOADED] = Field(4096, ge=16)
    """Longest context in tokens, prompt and answer together, reduced to the model's own limit. A prompt that leaves less than `tokens_per_turn` is skipped and reported."""
    stop_strings: list[StopString] = []
    """Strings that end an answer, in addition to the model's end token. The string is part of the answer."""

    def _check(self) -> None:
        if self.tokens_per_turn >= self.tokens_per_episode:
            room = f"leaves no room for a prompt within `tokens_per_episode` {self.tokens_per_episode}"
            raise ValueError(f"`tokens_per_turn` {self.tokens_per_turn} {room}; raise the latter")


class GenerateRecipe(StageRecipe):
    """Generation: a model answers the rows of a data set and writes a file of predictions."""

    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("generate/rows", "rows answered"),
        Metric("generate/answers", "answers written"),
        Metric("generate/missing", "rows without an answer"),
        Metric("generate/tokens", "tokens sampled"),
        Metric("generate/truncated", "answers truncated at the token limit"),
        Metric("generate/truncated_share", "share of truncated answers, a mean over rows"),
        Metric("generate/thinking", "answers with a thinking block"),
        Metric("generate/thinking_only", "answers truncated inside their thinking block"),
        Metric("generate/thinking_tokens", "tokens of thinking blocks"),
    )

    stage: Literal["generate"] = "generate"
    """Which stage the recipe is for; `posttrain generate` takes this one."""
    data: PromptsRecipe
    system: Text | None = None
    """System message of every prompt; it replaces the row's own."""
    engine: AnyEngineRecipe = LocalEngineRecipe()
    """The engine that answers: `model.path` in this process or in vLLM, or a remote model behind a server."""
    rollout: LimitsRecipe = LimitsRecipe()
    sampling: SamplingRecipe = SamplingRecipe(temperature=0.0)
    """Sampling; greedy by default."""
    samples: Annotated[int, SEVERAL] = Field(1, ge=1, le=MOST_EPISODES)
    """Answers per row."""
    thinking: Literal["keep", "remove"] = "keep"
    """`keep`: predictions include thinking. `remove`: strip it, up to `</think>`, and record its length."""
    keep_columns: list[Text] = []
    """Columns of the data to copy into the predictions."""
    window: Annotated[int, LOADED] = Field(512, ge=1)
    """Local engine: number of answers computed as one batch. A resumed run repeats the interrupted batch, to the same bits. Larger values use the engine better; smaller values lose less work."""
    out: Writes | None = None
    """Predictions file (JSON lines). Null: `predictions.jsonl` in the run directory."""

    chooses_engine: ClassVar[bool] = True

    def run(self, directory: Any, *, resume: bool, overwrite: bool, console: Any, callbacks: Sequence[Any]) -> None:
        imported("posttrain.training.generate:run")(self, directory, resume, overwrite, console)

    def check(self) -> list[str]:
        return imported("posttrain.training.generate:check_prompts")(self)

    @property
    def predictions(self) -> Path:
        """Where the predictions are written."""
        if self.out is not None:
            return Path(self.out).expanduser()
        return Path(self.runs) / self.name / "predictions.jsonl"

    @property
    def outputs(self) -> list[Path]:
        return [*super().outputs, *([self.predictions] if self.out is not None else [])]

    def batch_lines(self, tasks: TaskSplit | None) -> list[str]:
        """Rows, sampling, engine and output."""
        paths, limits = ", ".join(source.path for source in self.data.test), self.rollout
        rows = f"the first {self.data.max_rows:,} usable rows" if self.data.max_rows else "every usable row"
        heat, engine = self.sampling.temperature, self.engine
        how = "greedy" if heat == 0 else f"at temperature {heat:g}"
        if engine.type == "openai":
            flight = f"{engine.model} at {engine.url}, {counted(engine.max_concurrent, 'request')} in flight"
        else:
            flight = f"{engine.slots} answers in flight, {self.window} per window"
        kept = "kept" if self.thinking == "keep" else "removed"
        return [
            f"{rows} of {paths}, {counted(self.samples, 'answer')} each, {how}",
            f"answers of at most {limits.tokens_per_turn:,} tokens, thinking {kept}",
            flight,
            f"predictions: {self.predictions}",
        ]

    def _check(self) -> None:
        self.engine.check(self.model)
        if self.remote is not None:
            refuse_unknown_sampling(self.sampling, "sampling")
        for name in self.keep_columns:
            if name in OWN_COLUMNS:
                hint = "; give it as `data.id`" if name == "id" else ""
                raise ValueError(f"`keep_columns` names {name}, which every prediction already has{hint}")
        if self.out is not None and Path(self.out).suffix != ".jsonl":
            raise ValueError(f"`out` is {self.out}; predictions are JSON lines, so the name must end in `.jsonl`")
        files = [Path(source.path).expanduser().absolute() for source in self.data.test]
        if self.out is not None and Path(self.out).expanduser().absolute() in files:
            raise ValueError(f"`out` is {self.out}, which `data.test` reads; choose another file")
