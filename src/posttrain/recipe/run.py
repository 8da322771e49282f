"""Keys that every stage has: directories, checkpoints, collapse guards, and the environment of stages that use one."""

import json
import os
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, SerializeAsAny, field_validator, model_validator

from posttrain.recipe.base import CONNECTS, BaseConfig, Connects, Text, Writes
from posttrain.recipe.components import EnvironmentRecipe, environment_recipe
from posttrain.recipe.engines import LocalEngineRecipe, PolicyEngineRecipe
from posttrain.recipe.metrics import TRAINING, Metric, Panel
from posttrain.recipe.model import ModelRecipe
from posttrain.recipe.needs import Needs, needs, unless
from posttrain.recipe.rollout import ANSWERS, REJECTED, RETURN, TURNS, RolloutRecipe, SeedRange


class CheckpointRecipe(BaseConfig):
    """When checkpoints are saved, and which are kept: the latest whole, of others the policy, which every `model.path` accepts."""

    every: int = Field(10, ge=1)
    """Steps between checkpoints. One is always written at the end, and on Ctrl-C or SIGTERM."""
    keep: Annotated[int, Field(ge=1)] | Literal["all"] = 2
    """Number of latest checkpoints to keep whole, so that a run can resume from them. Of the best one, the policy is kept as well. `all`: keep the latest two whole, and the policies of all others."""
    keep_every: Annotated[int | None, unless("keep", "all", refused=True)] = Field(None, ge=1)
    """Keep the policies of checkpoints whose step is a multiple of this number. Null: none."""
    keep_state: Literal["while_running", "always"] = "while_running"
    """`while_running`: when the run has ended, all checkpoints are reduced to their policies, so it cannot be continued. `always`: the latest ones stay whole, so that `--resume RUN steps=N` can continue the run."""

    asynchronous: bool = False
    """Copy the state to CPU memory and write it in a thread while training goes on. Takes as much CPU memory as a checkpoint has bytes; the first of several processes gathers the policy. A run killed during the writing resumes from the checkpoint before."""

    @model_validator(mode="after")
    def _kept_by_one_rule(self):
        if self.keep_every is not None and self.keep_every % self.every:
            raise ValueError(
                f"`keep_every` {self.keep_every} is not a multiple of `every` {self.every}, so some of these steps have "
                "no checkpoint; change one of them"
            )
        return self


ExportedStep = Literal["best", "last"]


Guard = Literal["max_zero_groups", "min_reward_spread", "min_entropy", "max_gradient_norm", "max_repeated_share"]
_THRESHOLDS: dict[Guard, float | None] = {"max_zero_groups": 0.8, "max_repeated_share": 0.8}


class GuardRecipe(BaseConfig):
    """Collapse detection. A guard triggers after `patience` consecutive steps beyond its threshold."""

    action: Literal["warn", "stop"] = "warn"
    """`warn`: log a warning. `stop`: end the run, also when it is resumed, and keep the last good checkpoint."""
    patience: int = Field(5, ge=1)
    """Consecutive steps beyond a threshold before a guard triggers."""
    thresholds: dict[Guard, Annotated[float, Field(ge=0)] | None] = Field(_THRESHOLDS, validate_default=True)
    """Threshold of each guard; null: off. `max_zero_groups`: share of groups without credit, because all their episodes have the same return. `min_reward_spread`: mean standard deviation of returns within groups. `min_entropy`: mean entropy at sampled tokens, in nats. `max_gradient_norm`: before clipping. `max_repeated_share`: share of sampled tokens that repeat the token before them."""

    @field_validator("thresholds", mode="after")
    @classmethod
    def _with_defaults(cls, value: dict[Guard, float | None]) -> dict[Guard, float | None]:
        return {**_THRESHOLDS, **value}


SinkName = Literal["tensorboard", "wandb", "trackio"]
LOGGED_IN = ("runs", "sinks", "tracking", "plots")
"""Keys that control only storage, logging and figures of a run. They do not change its results."""


def _read_by(*sinks: str) -> Needs:
    """The need of keys that only `sinks` read."""
    return Needs(
        lambda find: not set(sinks).isdisjoint(find("sinks")),
        lambda find: f"sinks is {json.dumps(find('sinks'))}",
        f"add {' or '.join(sinks)} to sinks",
    )


class TrackingRecipe(BaseConfig):
    """Where, under which name and with how many completions the sinks record the run."""

    project: Annotated[Connects | None, _read_by("wandb", "trackio")] = Field(None, min_length=1)
    """Project. Null: for W&B the environment variable `WANDB_PROJECT`, else `posttrain`."""
    entity: Annotated[Connects | None, _read_by("wandb")] = Field(None, min_length=1)
    """W&B user or team that owns the project. Null: the environment variable `WANDB_ENTITY`, else the account's default."""
    run_name: Annotated[Text | None, _read_by("wandb", "trackio")] = Field(None, min_length=1)
    """Name of the run in the project. Null: for W&B the environment variable `WANDB_NAME`, else `name`."""
    group: Annotated[Text | None, _read_by("wandb", "trackio")] = Field(None, min_length=1)
    """Group of runs in the project, as for the seeds of one recipe. Null: for W&B the environment variable `WANDB_RUN_GROUP`, else none."""
    completions: Annotated[
        int,
        Needs(lambda find: bool(find("sinks")), "sinks is []"),
        needs("stage", "rl", "distill", reason=lambda find: f"{find('stage')} has no training episodes"),
    ] = Field(0, ge=0)
    """Training episodes per step that the sinks show as a table, with their texts, from the first groups of the step. 0: none."""
    tags: Annotated[list[Text], _read_by("wandb")] = []
    """W&B tags of the run. Empty: the environment variable `WANDB_TAGS`."""


ENTROPY = Panel("Entropy", "nats per token", figure="entropy")


class StageRecipe(BaseConfig):
    """A run of one stage."""

    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("time/run", "seconds since the run started"),
        Metric("time/step", "seconds of the step"),
        Metric("time/*", "seconds of a phase of the step"),
        Metric("speed/tokens_per_second", "tokens per second: sampled, or trained on"),
    )

    name: Text = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run. Its directory is `<runs>/<name>`."""
    runs: Writes = "runs"
    """Directory that holds the runs."""
    seed: int = Field(0, ge=0)
    """Run seed; every random number is derived from it."""
    model: Annotated[
        ModelRecipe, unless("engine.type", "openai", reason="engine.type is openai, and the server has the model")
    ] = ModelRecipe()
    sinks: Annotated[list[SinkName], CONNECTS] = []
    """Additional metric loggers; `metrics.jsonl` is always written."""
    tracking: TrackingRecipe = TrackingRecipe()
    plots: Annotated[
        bool | None,
        unless("stage", "evaluate", "generate", reason=lambda find: f"the {find('stage')} stage draws no figures"),
    ] = None
    """Whether a training run draws its figures when it ends. `posttrain plot` draws them at any time. Null: unless the environment variable `POSTTRAIN_PLOTS` is 0."""

    @property
    def draws_plots(self) -> bool:
        """Whether a training run draws its figures: `plots`, else the environment variable."""
        return os.environ.get("POSTTRAIN_PLOTS") != "0" if self.plots is None else self.plots

    @property
    def remote(self) -> BaseConfig | None:
        """The engine if a remote model answers and no model is loaded; None here."""
        return None


class PlayedRecipe(StageRecipe):
    """A stage that runs episodes of an environment."""

    environment: SerializeAsAny[EnvironmentRecipe] = Field(
        default_factory=lambda: environment_recipe({"type": "bandit"})
    )
    """The environment; its keys depend on `environment.type`."""

    @field_validator("environment", mode="before")
    @classmethod
    def _environment_by_type(cls, value: Any) -> Any:
        return environment_recipe(value) if isinstance(value, dict) else value


class SampledRecipe(PlayedRecipe):
    """A stage that trains on the episodes that the policy samples."""

    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("rollout/return", "training episodes", RETURN, TRAINING),
        Metric("rollout/success", "success of the training episodes"),
        Metric("rollout/score/*", "mean of a score of the training episodes"),
        Metric("rollout/score_n/*", "number of training episodes with this score"),
        Metric("rollout/tokens_per_answer", "training", ANSWERS, TRAINING),
        Metric("rollout/turns", "training", TURNS, TRAINING),
        Metric("rollout/rejected_share", "training", REJECTED, TRAINING),
        Metric("rollout/episodes", "episodes of the step"),
        Metric("rollout/kept", "episodes of the step after `rollout.filter`"),
        Metric("rollout/failed", "episodes that failed"),
        Metric("rollout/unscored", "episodes to which no reward applies"),
        Metric(
            "reward/group_spread",
            "mean standard deviation of a group's returns",
            Panel("Spread within groups", "standard deviation", figure="reward"),
            TRAINING,
        ),
        Metric("policy/entropy", "entropy of the policy", ENTROPY),
        Metric(
            "policy/repeated_share",
            "same token twice in a row",
            Panel("Repetition", "share of sampled tokens", percent=True, figure="entropy"),
        ),
        Metric("tokens/sampled", "tokens sampled"),
        Metric("tokens/prefilled", "prompt tokens computed"),
        Metric("tokens/reused", "prompt tokens taken from the cache"),
        Metric("tools/calls", "well-formed tool calls per episode"),
        Metric(
            "tools/failed_share",
            "share of the well-formed calls of unknown tools, with wrong arguments, or that raised an error",
        ),
        Metric("tools/malformed_share", "share of all calls that could not be parsed"),
        Metric("time/weights", "seconds of sending weights to the engine, part of `time/rollout`"),
    )

    steps: int = Field(100, ge=1)
    """Number of steps. Each samples groups_per_step x episodes_per_group episodes and makes updates_per_step x epochs_per_step updates."""
    max_minutes: float | None = Field(None, gt=0)
    """Start no step after this many minutes; the run then ends as usual. Null: no limit."""
    seeds: SeedRange = SeedRange()
    """Training seeds of the environment, reshuffled on every pass over them. Usual for generated tasks: 100,000 from 0 on; for rows of a file: all that are not held out."""
    engine: PolicyEngineRecipe = LocalEngineRecipe()
    """Engine that samples episodes: in this process on the weights in training, or vLLM."""
    rollout: RolloutRecipe = RolloutRecipe()
    export: ExportedStep = "best"
    """Which checkpoint becomes `model/`, and is measured for the final table: the best one of the evaluations, or the last one."""
