"""How episodes are sampled, in training and in evaluation."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from posttrain.recipe.base import BaseConfig
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
    """How tokens are sampled."""

    temperature: float = Field(1.0, ge=0)
    """Sampling temperature; 0 is greedy. Log-probabilities refer to the distribution after the temperature and before truncation by `top_p`, `top_k` and `min_p`; those of vLLM at temperatures other than 1, after both."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the smallest set of tokens with at least this total probability. 1: off."""
    top_k: int = Field(0, ge=0)
    """Sample from the `top_k` most probable tokens. 0: off."""
    min_p: float = Field(0.0, ge=0, lt=1)
    """Sample from tokens whose probability is at least `min_p` times that of the most probable token. 0: off."""


class FailureRecipe(BaseConfig):
    """What happens to an episode whose environment or reward failed or timed out."""

    action: Literal["retry", "drop", "score"] = "drop"
    """`retry`: play it again with other random numbers, then drop it. `drop`: leave it out of the update. `score`: give it `reward`. Failures are counted in every case."""
    retries: int = Field(1, ge=0)
    """For `retry`: attempts after the first one."""
    reward: float = 0.0
    """For `score`: the reward of a failed episode."""
    max_share: float = Field(0.5, gt=0, le=1)
    """The run stops if more than this share of a step's episodes failed."""


class FilterRecipe(BaseConfig):
    """Which groups are used for the update."""

    type: Literal["none", "uncertainty", "dynamic"] = "none"
    """`none`: use all groups. `uncertainty`: keep the groups with the largest standard deviation of returns (StarPO-S). `dynamic`: drop groups with equal returns and sample more tasks until the step is full (DAPO)."""
    keep: float = Field(0.25, gt=0, le=1)
    """For `uncertainty`: share of the groups to keep."""
    max_rounds: int = Field(3, ge=1)
    """For `dynamic`: largest number of sampling rounds per step. After that the step continues with the groups it has, and a warning is logged."""


class OverlongRecipe(BaseConfig):
    """Soft penalty on long episodes (DAPO): grows linearly from 0 to `penalty` over the last `buffer` tokens before `limit`."""

    limit: int = Field(ge=1)
    """Sampled tokens of an episode at which the full penalty applies."""
    buffer: int = Field(ge=1)
    """Number of tokens before `limit` over which the penalty grows."""
    penalty: float = Field(1.0, gt=0)
    """Full penalty, subtracted from the reward."""


class RolloutRecipe(BaseConfig):
    """How many episodes are sampled per step, and their limits."""

    groups_per_step: int = Field(8, ge=1)
    """Tasks per step (prompts per batch)."""
    episodes_per_group: int = Field(8, ge=1)
    """Episodes per task (generations per prompt)."""
    sampling: SamplingRecipe = SamplingRecipe()
    tokens_per_turn: int = Field(64, ge=1)
    """Largest number of tokens sampled in one turn."""
    tokens_per_episode: int = Field(2048, ge=16)
    """Longest context of an episode in tokens, prompt included."""
    stop_strings: list[StopString] = []
    """Strings that end a turn, in addition to the model's end token. The string is part of the answer."""
    environment_timeout: float | None = Field(None, gt=0)
    """Timeout of one environment call, in seconds. The call then runs in a thread, so environments that wait do so in parallel. Null: call it directly."""
    failures: FailureRecipe = FailureRecipe()
    filter: FilterRecipe = FilterRecipe()
    overlong_penalty: OverlongRecipe | None = None
    async_rollouts: int = Field(0, ge=0)
    """Steps that sampling may run ahead of learning. With k, sampling for step n starts when the weights after step n - k - 1 exist. 0: sample, then learn (on-policy)."""
    on_new_weights: Literal["finish", "continue", "restart"] = "finish"
    """What happens to unfinished episodes when new weights arrive. `finish`: keep the old weights. `continue`: use the new weights from the next token on. `restart`: start over with the new weights."""
    max_staleness: int | None = Field(None, ge=0)
    """Largest number of optimizer updates between sampling a token and training on it. Episodes with an older token are dropped and counted in `rollout/stale`. Null: train on all episodes."""
    replay: str | None = None
    """Directory of a run whose event order is reproduced: new weights reach each episode at the same token as in that run. Null: weights apply when they arrive."""
    missing_eos_penalty: float = Field(0.0, ge=0)
    """Subtracted from the training reward of an episode whose last answer has no end token, after reward normalization."""


class SeedRange(BaseConfig):
    """Environment seeds start, start + 1, ..., start + count - 1."""

    start: int = Field(ge=0)
    """First seed."""
    count: int = Field(ge=1)
    """Number of seeds."""

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
    """Steps between evaluations. 0: only before and after training."""
    seeds: SeedRange = SeedRange(start=1_000_000, count=64)
    """Held-out environment seeds of the learning curve. The best checkpoint is selected on them."""
    final_seeds: SeedRange = SeedRange(start=2_000_000, count=256)
    """Held-out environment seeds of the final table. Nothing is selected on them, so the final numbers have no selection bias."""
    episodes_per_seed: int = Field(1, ge=1)
    """Episodes per held-out seed."""
    sampling: SamplingRecipe = SamplingRecipe(temperature=0.0)
    """Sampling in evaluations; greedy by default."""
    metric: Literal["success", "return"] | None = None
    """Metric that selects the best checkpoint: the mean over the held-out seeds, larger is better. Null: `success` if the environment reports it, else `return`."""

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
            raise ValueError("greedy episodes of one seed are identical; set `episodes_per_seed: 1` or a temperature")
        return self


def updates_behind(rollout: RolloutRecipe, learner: LearnerRecipe) -> int:
    """The most optimizer updates between the weights that a step's episodes begin with and those that learn from them."""
    return rollout.async_rollouts * learner.updates_per_step * learner.epochs_per_step


def refuse_ahead(
    rollout: RolloutRecipe, learner: LearnerRecipe, processes: int, scored: bool, ray: bool, engine: str
) -> None:
    """Raise ValueError for settings of asynchronous rollouts that no episode could satisfy or that `engine` does not support."""
    if rollout.replay is not None and (ray or engine != "local"):
        raise ValueError(
            "`rollout.replay` needs an engine in this process, because forward passes of external engines are not "
            "counted; set `engine.type: local` and remove `hardware.ray`"
        )
    if rollout.async_rollouts and processes > 1 and scored:
        raise ValueError(
            "with `rollout.async_rollouts` above 0 only the first process samples and scores, but with `hardware.processes` above "
            "1 the reward model of `reward.path` is sharded over all processes; change one of the three"
        )
    if rollout.async_rollouts and rollout.on_new_weights == "continue" and ray:
        raise ValueError(
            "engines on a Ray cluster load new weights only between rollouts, so `rollout.on_new_weights: continue` is not "
            "supported; use finish or restart"
        )
    behind = updates_behind(rollout, learner)
    if rollout.max_staleness is not None and rollout.on_new_weights == "finish" and rollout.max_staleness < behind:
        raise ValueError(
            f"with `rollout.on_new_weights: finish` every episode is {behind} updates old when it is used for training "
            f"(`rollout.async_rollouts` {rollout.async_rollouts} x updates per step), so `rollout.max_staleness` = {rollout.max_staleness} would "
            "drop them all; raise it, or use continue or restart"
        )
