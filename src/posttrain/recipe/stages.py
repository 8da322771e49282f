"""The recipes of `posttrain evaluate` and `posttrain generate`, and the schemas of all stages by name."""

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from posttrain.recipe.agent import AgentRecipe, refuse_with_agent
from posttrain.recipe.base import BaseConfig, Text, Writes
from posttrain.recipe.data import ColumnsRecipe, Sources
from posttrain.recipe.distill import DistillRecipe
from posttrain.recipe.engines import (
    LocalEngineRecipe,
    OpenAIEngineRecipe,
    VllmEngineRecipe,
    refuse_lone_adapters,
    refuse_unknown_sampling,
)
from posttrain.recipe.metrics import Metric
from posttrain.recipe.model import RewardSource
from posttrain.recipe.needs import unless
from posttrain.recipe.rl import RlRecipe
from posttrain.recipe.rollout import (
    MOST_EPISODES,
    OWN_CONTEXT,
    EvaluationRecipe,
    HeldOut,
    RolloutRecipe,
    SamplingRecipe,
    StopString,
)
from posttrain.recipe.run import PlayedRecipe, StageRecipe
from posttrain.recipe.supervised import DpoRecipe, RewardRecipe, SftRecipe

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
"""Columns of a prediction, besides those of `keep_columns`."""


NOT_EVALUATED = {
    "engine": ("adapters",),
    "evaluation": ("every", "metric"),
    "model": ("lora", "gradient_checkpointing"),
    "rollout": (
        *("groups_per_step", "episodes_per_group", "sampling", "filter", "overlong_penalty", "missing_eos_penalty"),
        *("async_rollouts", "on_new_weights", "max_staleness"),
    ),
}
"""Section -> keys of training that have no effect in an evaluation."""


class FinalEvaluation(EvaluationRecipe):
    """One evaluation, on `final_seeds`."""

    held_out: HeldOut | Literal["all"] | None = "all"  # type: ignore[assignment]
    """Which tasks of a file of tasks to evaluate on. `all`: every one, or those of sources with `use: test`. A number, a share or null: those that a training run with the same value holds out for its final table."""


class EvaluateRecipe(PlayedRecipe):
    """Evaluation of a model in an environment on held-out seeds."""

    stage: Literal["evaluate"] = "evaluate"
    """Which stage the recipe is for; `posttrain evaluate` takes this one."""
    engine: Annotated[LocalEngineRecipe | VllmEngineRecipe | OpenAIEngineRecipe, Field(discriminator="type")] = (
        LocalEngineRecipe()
    )
    """The engine that answers: `model.path` in this process or in vLLM, or a remote model behind a server."""
    rollout: RolloutRecipe = RolloutRecipe()
    reward: RewardSource | None = None
    """Reward model whose score is added to the environment's reward. Null: none."""
    agent: AgentRecipe | None = None
    """Program that plays the episodes. Null: the environment is played turn by turn."""
    evaluation: FinalEvaluation = FinalEvaluation()

    @property
    def remote(self) -> OpenAIEngineRecipe | None:
        """The engine if a remote model answers, else None."""
        return self.engine if isinstance(self.engine, OpenAIEngineRecipe) else None

    @model_validator(mode="after")
    def _what_an_engine_can_do(self):
        refuse_lone_adapters(self.engine, self.model)
        if self.agent is not None:
            refuse_with_agent(self, self.agent)
        if self.remote is not None:
            refuse_unknown_sampling(self.evaluation.sampling, "evaluation.sampling")
            if self.reward is not None:
                raise ValueError(
                    "`reward.path` needs token ids, which a server does not return; remove `reward`, or set "
                    "environment.judge"
                )
        return self


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

    @model_validator(mode="after")
    def _each_once(self):
        if any(source.weight != 1 for source in self.test):
            raise ValueError("`test.weight` has no effect, because every row is answered; remove it")
        return self


class LimitsRecipe(BaseConfig):
    """Limits of an answer."""

    tokens_per_turn: int = Field(512, ge=1)
    """Maximum number of tokens of an answer."""
    tokens_per_episode: Annotated[int, OWN_CONTEXT] = Field(4096, ge=16)
    """Longest context in tokens, prompt and answer together, reduced to the model's own limit. A prompt that leaves less than `tokens_per_turn` is skipped and reported."""
    stop_strings: list[StopString] = []
    """Strings that end an answer, in addition to the model's end token. The string is part of the answer."""

    @model_validator(mode="after")
    def _some_room(self):
        if self.tokens_per_turn >= self.tokens_per_episode:
            raise ValueError(
                f"`tokens_per_turn` {self.tokens_per_turn} leaves no room for a prompt within `tokens_per_episode` "
                f"{self.tokens_per_episode}; raise `tokens_per_episode`"
            )
        return self


class GenerateRecipe(StageRecipe):
    """Generation: a model answers the rows of a data set and writes a file of predictions."""

    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("generate/rows", "rows answered"),
        Metric("generate/answers", "answers written"),
        Metric("generate/missing", "rows without an answer"),
        Metric("generate/tokens", "tokens sampled"),
        Metric("generate/cut_off", "answers truncated at the token limit"),
        Metric("generate/cut_off_share", "share of truncated answers, a mean over rows"),
        Metric("generate/thinking", "answers with a thinking block"),
        Metric("generate/thinking_only", "answers truncated inside their thinking block"),
        Metric("generate/thinking_tokens", "tokens of thinking blocks"),
    )

    stage: Literal["generate"] = "generate"
    """Which stage the recipe is for; `posttrain generate` takes this one."""
    data: PromptsRecipe
    system: Text | None = None
    """System message of every prompt; it replaces the row's own."""
    engine: Annotated[LocalEngineRecipe | VllmEngineRecipe | OpenAIEngineRecipe, Field(discriminator="type")] = (
        LocalEngineRecipe()
    )
    """The engine that answers: `model.path` in this process or in vLLM, or a remote model behind a server."""
    rollout: LimitsRecipe = LimitsRecipe()
    sampling: SamplingRecipe = SamplingRecipe(temperature=0.0)
    """Sampling; greedy by default."""
    samples: int = Field(1, ge=1, le=MOST_EPISODES)
    """Answers per row."""
    thinking: Literal["keep", "remove"] = "keep"
    """`keep`: predictions include thinking. `remove`: strip it, up to `</think>`, and record its length."""
    keep_columns: list[Text] = []
    """Columns of the data to copy into the predictions."""
    window: Annotated[
        int, unless("engine.type", "openai", reason="engine.type is openai, so answers are independent")
    ] = Field(512, ge=1)
    """Local engine: number of answers computed as one batch. A resumed run repeats the interrupted batch, to the same bits. Larger values use the engine better; smaller values lose less work."""
    out: Writes | None = None
    """Predictions file (JSON lines). Null: `predictions.jsonl` in the run directory."""

    @property
    def remote(self) -> OpenAIEngineRecipe | None:
        """The engine if a remote model answers, else None."""
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
            raise ValueError("greedy answers to one row are identical; set `samples: 1` or a `sampling.temperature`")
        return self

    @model_validator(mode="after")
    def _nothing_overwritten(self):
        for name in self.keep_columns:
            if name in OWN_COLUMNS:
                hint = "; give it as `data.id`" if name == "id" else ""
                raise ValueError(f"`keep_columns` names {name}, which every prediction already has{hint}")
        if self.out is not None and Path(self.out).suffix != ".jsonl":
            raise ValueError(f"`out` is {self.out}; predictions are JSON lines, so the name must end in `.jsonl`")
        if self.out is not None and any(_same(self.out, source.path) for source in self.data.test):
            raise ValueError(f"`out` is {self.out}, which `data.test` reads; choose another file")
        return self

    @model_validator(mode="after")
    def _what_an_engine_can_do(self):
        refuse_lone_adapters(self.engine, self.model)
        if self.remote is not None:
            refuse_unknown_sampling(self.sampling, "sampling")
        return self


Recipe = Annotated[
    RlRecipe | DistillRecipe | SftRecipe | RewardRecipe | DpoRecipe | EvaluateRecipe | GenerateRecipe,
    Field(discriminator="stage"),
]

STAGES: dict[
    str,
    type[RlRecipe]
    | type[DistillRecipe]
    | type[SftRecipe]
    | type[RewardRecipe]
    | type[DpoRecipe]
    | type[EvaluateRecipe]
    | type[GenerateRecipe],
] = {
    "rl": RlRecipe,
    "distill": DistillRecipe,
    "sft": SftRecipe,
    "reward": RewardRecipe,
    "dpo": DpoRecipe,
    "evaluate": EvaluateRecipe,
    "generate": GenerateRecipe,
}
"""Name of a stage -> schema of its recipe."""


def _same(one: str, other: str) -> bool:
    return Path(one).expanduser().absolute() == Path(other).expanduser().absolute()
