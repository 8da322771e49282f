"""How episodes are sampled, in training and in evaluation."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from posttrain.recipe.base import BaseConfig
from posttrain.recipe.credit import FilterRecipe, OverlongRecipe
from posttrain.recipe.model import LearnerRecipe

SCORES = "score/"
"""What the names of scores that an environment reports begin with in an evaluation's line of the metrics log."""


def _not_empty(text: str) -> str:
    if not text:
        raise ValueError("an empty stop string would end every answer at its first token; remove it")
    return text


StopString = Annotated[str, AfterValidator(_not_empty)]
"""A text that ends an answer."""


class SamplingRecipe(BaseConfig):
    """How tokens are drawn."""

    temperature: float = Field(1.0, ge=0)
    """0 is greedy. Log-probabilities are those of the tempered distribution, before any truncation."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Draw from the fewest tokens whose probabilities add up to this; 1 is off."""
    top_k: int = Field(0, ge=0)
    """Draw from this many most probable tokens; 0 is off."""
    min_p: float = Field(0.0, ge=0, lt=1)
    """Draw from tokens at least this share as probable as the most probable one; 0 is off."""


class EngineRecipe(BaseConfig):
    """The in-process engine: the policy's own weights, continuous batching, a cache shared across turns and groups."""

    type: Literal["local"] = "local"
    """`local`: in this process, with the weights that are being trained."""
    slots: int = Field(64, ge=1)
    """Sequences held in the key/value cache."""
    tokens_per_forward: int = Field(2048, ge=16)
    """Tokens of one forward pass, new prompts and decoding together, beyond which no more of a prompt is read in it."""


class FailureRecipe(BaseConfig):
    """What becomes of an episode whose environment failed or timed out."""

    action: Literal["retry", "drop", "score"] = "drop"
    """`retry` with a new sampling stream, then drop; `drop` from the update; `score` with `reward`. All are counted."""
    retries: int = Field(1, ge=0)
    """`retry`: attempts after the first."""
    reward: float = 0.0
    """`score`: the reward of a failed episode."""
    max_share: float = Field(0.5, gt=0, le=1)
    """A step in which more than this share of episodes failed stops the run."""


class RolloutRecipe(BaseConfig):
    """Episodes per step and their limits."""

    groups_per_step: int = Field(8, ge=1)
    """Tasks drawn per step."""
    episodes_per_group: int = Field(8, ge=1)
    """Episodes per task."""
    sampling: SamplingRecipe = SamplingRecipe()
    tokens_per_turn: int = Field(64, ge=1)
    """Most tokens sampled in one turn."""
    tokens_per_episode: int = Field(2048, ge=16)
    """Most tokens of an episode's context, prompt included."""
    stop_strings: list[StopString] = []
    """Texts that end a turn besides the model's end token; the text itself is kept."""
    environment_timeout: float | None = Field(None, gt=0)
    """Time-out of one environment call, which then runs in a thread; null calls it directly."""
    failures: FailureRecipe = FailureRecipe()
    filter: FilterRecipe = FilterRecipe()
    overlong_penalty: OverlongRecipe | None = None
    async_rollouts: int = Field(0, ge=0)
    """Steps by which sampling may run ahead of learning: a step's episodes begin once the weights after the step `ahead + 1` before it exist. 0 samples, then learns."""
    on_new_weights: Literal["finish", "continue", "restart"] = "finish"
    """What becomes of episodes in flight when newer weights are there: `finish` with the old ones, `continue` with the new ones from the next token on, or `restart` with them."""
    max_staleness: int | None = Field(None, ge=0)
    """Most optimizer updates between sampling a token and learning from it. Episodes with an older token are dropped and counted in `rollout/stale`. Null trains on all episodes."""
    replay: str | None = None
    """Directory of a run whose order of events is followed: new weights come to the episodes where they came there. Null takes them as they come."""
    missing_eos_penalty: float = Field(0.0, ge=0)
    """Subtracted in training from the reward of an episode whose last answer was cut off before its end, after the reward is normalized."""


class SeedRange(BaseConfig):
    """Environment seeds start, start + 1, ..., start + count - 1."""

    start: int = Field(ge=0)
    """The first seed."""
    count: int = Field(ge=1)
    """How many seeds."""

    @property
    def stop(self) -> int:
        return self.start + self.count

    def overlaps(self, other: "SeedRange") -> bool:
        return self.start < other.stop and other.start < self.stop

    def __str__(self) -> str:
        return f"{self.start}..{self.stop - 1}"


class EvaluationRecipe(BaseConfig):
    """Held-out evaluation before, during and after training."""

    every: int = Field(10, ge=0)
    """Steps between evaluations; 0 evaluates before and after only."""
    seeds: SeedRange = SeedRange(start=1_000_000, count=64)
    """Held-out environment seeds of the learning curve; the best checkpoint is chosen on them."""
    final_seeds: SeedRange = SeedRange(start=2_000_000, count=256)
    """Held-out environment seeds of the final table. No choice is made on them, so the table is not flattered by it."""
    episodes_per_seed: int = Field(1, ge=1)
    """Episodes sampled for each held-out seed."""
    sampling: SamplingRecipe = SamplingRecipe(temperature=0.0)
    """Its own sampling; temperature 0 is greedy."""
    metric: Literal["success", "return"] | None = None
    """What chooses the best checkpoint: mean over the held-out seeds, larger is better. Null is `success` where the environment reports it, else `return`."""

    @model_validator(mode="after")
    def _final_seeds_are_apart(self):
        if self.seeds.overlaps(self.final_seeds):
            raise ValueError(
                "`evaluation.seeds` and `evaluation.final_seeds` overlap; move `evaluation.final_seeds.start`"
            )
        return self

    @model_validator(mode="after")
    def _greedy_once(self):
        if self.sampling.temperature == 0 and self.episodes_per_seed > 1:
            raise ValueError("greedy episodes of one seed are all alike; set `episodes_per_seed: 1` or a temperature")
        return self


def updates_behind(rollout: RolloutRecipe, learner: LearnerRecipe) -> int:
    """The most optimizer updates between the weights that a step's episodes begin with and those that learn from them."""
    return rollout.async_rollouts * learner.updates_per_step * learner.epochs_per_step


def refuse_ahead(
    rollout: RolloutRecipe, learner: LearnerRecipe, processes: int, scored: bool, ray: bool, engine: str
) -> None:
    """Refuse rules on stale episodes that contradict each other or that no episode could pass, and what cannot be kept
    with `engine`."""
    if rollout.replay is not None and (ray or engine != "local"):
        raise ValueError(
            "`rollout.replay` follows the forward passes of an engine in this process, and those of engines outside are not "
            "counted; replay with `engine.type: local` and without `hardware.ray`"
        )
    if rollout.async_rollouts and processes > 1 and scored:
        raise ValueError(
            "with `rollout.async_rollouts` above 0 the first process samples and scores by itself, and with `hardware.processes` above "
            "1 the reward model of `reward.path` is divided among all; set one of the three otherwise"
        )
    if rollout.async_rollouts and rollout.on_new_weights == "continue" and ray:
        raise ValueError(
            "engines of a Ray cluster take new weights between rollouts alone, so `rollout.on_new_weights: continue` cannot be "
            "kept; use finish or restart"
        )
    behind = updates_behind(rollout, learner)
    if rollout.max_staleness is not None and rollout.on_new_weights == "finish" and rollout.max_staleness < behind:
        raise ValueError(
            f"with `rollout.on_new_weights: finish` every episode is {behind} updates old when it is learned from "
            f"(`rollout.async_rollouts` {rollout.async_rollouts} x updates per step), so `rollout.max_staleness` = {rollout.max_staleness} would "
            "drop them all; raise it, or use continue or restart"
        )
