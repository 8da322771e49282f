"""How episodes are sampled, in training and in evaluation."""

import itertools
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from posttrain.recipe.base import BaseConfig, Text
from posttrain.recipe.components import AnyEnvironment, EnvironmentRecipe
from posttrain.recipe.detectable import shown
from posttrain.recipe.metrics import HELD_OUT, Metric, Panel
from posttrain.recipe.needs import TRAINED, Needs, needs, unless
from posttrain.recipe.plan import TaskSplit, counted, named_tasks, plural, shown_seeds

SCORES = "score/"
"""Prefix of environment scores in the evaluation lines of the metrics log."""
ENVIRONMENT_TIMEOUT = 600.0
"""Default time-out of one call of an environment, in seconds."""
MOST_EPISODES = 1_000_000
"""Episodes that may be requested at a time: those of a step or of an evaluation."""
CURVE, FINAL = 64, 256
"""Default numbers of held-out tasks for the learning curve and for the final table."""
HeldOut = Annotated[int, Field(ge=1)] | Annotated[float, Field(gt=0, lt=1)]
"""A number of tasks or rows, or a share of them."""


def _not_empty(text: str) -> str:
    if not text:
        raise ValueError("an empty stop string would end every answer at its first token; remove it")
    return text


StopString = Annotated[Text, AfterValidator(_not_empty)]
"""A text that ends an answer."""


class SamplingRecipe(BaseConfig):
    """How tokens are sampled."""

    temperature: float = Field(1.0, ge=0)
    """Sampling temperature; 0 is greedy, and others are at least 0.001. Log-probabilities refer to the distribution after the temperature and before truncation by `top_p`, `top_k` and `min_p`; those of vLLM at temperatures other than 1, after both."""
    top_p: Annotated[float, needs("temperature")] = Field(1.0, gt=0, le=1)
    """Sample from the smallest set of tokens with at least this total probability. 1: off."""
    top_k: Annotated[int, needs("temperature")] = Field(0, ge=0, lt=1 << 31)
    """Sample from the `top_k` most probable tokens. 0: off."""
    min_p: Annotated[float, needs("temperature")] = Field(0.0, ge=0, lt=1)
    """Sample from tokens whose probability is at least `min_p` times that of the most probable token. 0: off."""

    def _check(self) -> None:
        if 0 < self.temperature < 1e-3:
            raise ValueError(f"`temperature` {self.temperature} is between 0 and 0.001; use 0 for greedy decoding")


class FailureRecipe(BaseConfig):
    """What happens to an episode whose environment or reward failed or timed out."""

    action: Literal["retry", "drop", "score"] = "drop"
    """`retry`: play it again with other random numbers, then drop it. `drop`: leave it out of the update. `score`: give it `reward`. Failures are counted in every case."""
    retries: Annotated[int, needs("action", "retry")] = Field(1, ge=0)
    """For `retry`: attempts after the first one."""
    reward: Annotated[float, needs("action", "score")] = 0.0
    """For `score`: the reward of a failed episode."""
    max_share: float = Field(0.5, gt=0, le=1)
    """The run stops if more than this share of the episodes of a step, or of an evaluation, failed."""


class FilterRecipe(BaseConfig):
    """Which groups are used for the update."""

    type: Literal["none", "uncertainty", "dynamic"] = "none"
    """`none`: use all groups. `uncertainty`: keep the groups with the largest standard deviation of returns (StarPO-S). `dynamic`: drop groups with equal returns and sample more tasks until the step is full (DAPO)."""
    keep: Annotated[float, needs("type", "uncertainty")] = Field(0.25, gt=0, le=1)
    """For `uncertainty`: share of the groups to keep."""
    max_rounds: Annotated[int, needs("type", "dynamic")] = Field(3, ge=1)
    """For `dynamic`: largest number of sampling rounds per step. After that the step continues with the groups it has, and a warning is logged."""


class OverlongRecipe(BaseConfig):
    """Soft penalty on long episodes (DAPO): grows linearly from 0 to `penalty` over the last `buffer` tokens before `limit`."""

    limit: int = Field(ge=1)
    """Sampled tokens of an episode at which the full penalty applies."""
    buffer: int = Field(ge=1)
    """Number of tokens before `limit` over which the penalty grows."""
    penalty: float = Field(1.0, gt=0)
    """Full penalty, subtracted from the reward."""


REWARDED = unless("stage", "distill")
LOADED = unless("engine.type", "openai")
"""The need of keys about the model of this process."""


class RolloutRecipe(BaseConfig):
    """How many episodes are sampled per step, and their limits."""

    groups_per_step: Annotated[int, TRAINED] = Field(8, ge=1)
    """Tasks per step (prompts per batch)."""
    episodes_per_group: Annotated[int, TRAINED] = Field(8, ge=1)
    """Episodes per task (generations per prompt)."""
    sampling: Annotated[SamplingRecipe, TRAINED] = SamplingRecipe()
    tokens_per_turn: int = Field(64, ge=1)
    """Maximum number of tokens sampled in one turn."""
    tokens_per_episode: Annotated[int, LOADED] = Field(2048, ge=16)
    """Longest context of an episode in tokens, prompt included."""
    stop_strings: list[StopString] = []
    """Strings that end a turn, in addition to the model's end token. The string is part of the answer."""
    environment_timeout: float | None = Field(ENVIRONMENT_TIMEOUT, gt=0, allow_inf_nan=False)
    """Time-out of one call of the environment or its reward, in seconds; the episode then fails. Calls run in daemon threads, for which neither the rollout nor the end of the program waits: one at a time until one takes longer than a tenth of the time-out, in parallel for `async` rewards, judges, MCP servers and `blocking` environments. SystemExit is raised in a call that is given up; more than 256 that still run end the run. A call that holds Python's interpreter lock, such as one regular expression, has no limit. `signal.alarm` does not work in them. Null: no limit."""
    failures: FailureRecipe = FailureRecipe()
    filter: Annotated[FilterRecipe, TRAINED] = FilterRecipe()
    overlong_penalty: Annotated[OverlongRecipe | None, TRAINED, REWARDED] = None
    async_rollouts: Annotated[int, TRAINED, REWARDED] = Field(0, ge=0)
    """Steps that sampling may run ahead of learning. With k, sampling for step n starts when the weights after step n - k - 1 exist. 0: sample, then learn (on-policy)."""
    on_new_weights: Annotated[Literal["finish", "continue"], TRAINED, REWARDED, needs("async_rollouts")] = "finish"
    """What happens to unfinished episodes when new weights arrive. `finish`: keep the old weights. `continue`: use the new weights from the next token on."""
    max_staleness: Annotated[int | None, TRAINED, REWARDED, needs("async_rollouts")] = Field(None, ge=0)
    """Maximum number of optimizer updates between sampling a token and training on it. Episodes with an older token are dropped and counted in `rollout/stale`. Null: train on all episodes."""
    missing_eos_penalty: Annotated[float, TRAINED, REWARDED] = Field(0.0, ge=0)
    """Subtracted from the training reward of an episode whose last answer has no end token, after reward normalization."""

    def _check(self) -> None:
        refuse_many(self.groups_per_step, self.episodes_per_group, "episodes_per_group")

    def warnings(self, *max_turns: int) -> list[str]:
        """Limits that episodes exceed or never reach. `max_turns`: of training, and of evaluation."""
        warnings = [
            f"{turns} turns of rollout.tokens_per_turn {self.tokens_per_turn} exceed rollout.tokens_per_episode "
            f"{self.tokens_per_episode} even without observations; long episodes will be cut"
            for turns in dict.fromkeys(max_turns)
            if turns * self.tokens_per_turn > self.tokens_per_episode
        ]
        if self.overlong_penalty is not None and self.overlong_penalty.limit > max_turns[0] * self.tokens_per_turn:
            limit = "rollout.overlong_penalty.limit"
            warnings.append(f"{limit} is more than an episode can sample; the full penalty never applies")
        return warnings


def refuse_many(tasks: int, episodes: int, key: str) -> None:
    """Raise ValueError for more episodes than can be played at a time. `key`: that of the `episodes` of each task."""
    if tasks * episodes > MOST_EPISODES:
        raise ValueError(f"tasks x `{key}` are more than {MOST_EPISODES:,} episodes at a time; use fewer")


class SeedRange(BaseConfig):
    """Environment seeds start, start + 1, ..., start + count - 1."""

    start: int | None = Field(None, ge=0, lt=2**62)
    """First seed. Null: tasks that are rows of a file are drawn from its rows; seeds of generated tasks start at their usual number."""
    count: int | None = Field(None, ge=1, le=100_000_000)
    """Number of seeds; of rows that are drawn to train on, at most. Null: with `start`, all rows of a file from there on; otherwise the usual number."""

    def of_generated(self, key: str) -> range:
        """The seeds if tasks are generated. `key`: the recipe key of this section."""
        start, count = USUAL_SEEDS[key]
        start = start if self.start is None else self.start
        return range(start, start + (self.count or count))


USUAL_SEEDS = {
    "seeds": (0, 100_000),
    "experts.seeds": (200_000, 64),
    "evaluation.seeds": (1_000_000, CURVE),
    "evaluation.final_seeds": (2_000_000, FINAL),
}
"""Recipe key -> default first seed and number of seeds, for generated tasks."""


def evaluated_environment(recipe: BaseConfig) -> EnvironmentRecipe | None:
    """The environment of the held-out episodes of a recipe of any stage; None if it has none."""
    evaluation = getattr(recipe, "evaluation", None)
    return getattr(evaluation, "environment", None) or getattr(recipe, "environment", None)


def return_source(recipe: BaseConfig, by_model: bool = True) -> str:
    """What gives the returns of a recipe's held-out episodes: environment or agent, and reward model. Two returns are
    comparable only if it is the same. Empty without an environment.

    `by_model`: of episodes that a model plays. Baseline policies are computed without agent and reward model.
    """
    environment = evaluated_environment(recipe)
    if environment is None:
        return ""
    names = [environment.reward_name]
    if by_model:
        agent, source = getattr(recipe, "agent", None), getattr(recipe, "reward", None)
        if agent is not None and agent.reward != "environment":
            names = [] if agent.reward == "none" else [f"agent ({agent.reward})"]
        names += [source.name] if source is not None else []
    return " + ".join(name for name in names if name) or environment.type


def same_tasks(environment: EnvironmentRecipe, other: EnvironmentRecipe) -> bool:
    """Whether a seed is the same task in both environments: they are of one type, and their rows of one source."""
    one, two = (
        None if each.rows_key is None else getattr(each, each.rows_key.removeprefix("environment."))
        for each in (environment, other)
    )
    return environment.type == other.type and one == two


def refuse_overlap(
    training: Mapping[str, SeedRange], environment: EnvironmentRecipe, evaluation: "EvaluationRecipe"
) -> None:
    """Raise ValueError if two of the ranges of seeds (by recipe key), those of `training` and the held-out ones, have a task
    in common.

    If tasks are rows of a file, ranges without a start cannot overlap, because they are drawn from the remaining rows.
    """
    held_out = evaluation.environment or environment
    if not same_tasks(environment, held_out):
        training = {}
    for (one, first), (other, second) in itertools.combinations({**training, **evaluation.ranges}.items(), 2):
        if held_out.rows_key is not None and (first.start is None or second.start is None):
            continue
        a, b = first.of_generated(one), second.of_generated(other)
        if a.start < b.stop and b.start < a.stop:
            raise ValueError(
                f"`{one}` ({shown_seeds(a)}) and the held-out `{other}` ({shown_seeds(b)}) overlap; move one `start`"
            )


RETURN = Panel("Return", "reward per episode", smoothed=True, figure="reward")
ANSWERS = Panel("Answers", "tokens per answer", figure="lengths")
TURNS = Panel("Episodes", "turns per episode", figure="lengths")
REJECTED = Panel("Rejected answers", "share of answers", percent=True, figure="lengths")


CURVE_ONLY = unless("stage", "evaluate")
SEVERAL = needs("sampling.temperature", reason="greedy episodes of one seed are identical", refused=True)


class EvaluationRecipe(BaseConfig):
    """Held-out evaluation. With `every` above 0, the learning curve is measured before training, every `every` steps and after training, and the final table with the initial model and with the exported checkpoint; `start: false` leaves out both measurements before training. With `every: 0`, only the exported checkpoint is evaluated, for the final table."""

    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("success", "share of held-out episodes that succeed"),
        Metric("return", "held-out episodes", RETURN, HELD_OUT),
        Metric("score/*", "mean of a score of the held-out episodes"),
        Metric("tokens_per_answer", "held-out", ANSWERS),
        Metric("turns", "held-out", TURNS),
        Metric("rejected_share", "held-out", REJECTED),
    )

    every: Annotated[int, CURVE_ONLY] = Field(10, ge=0)
    """Steps between evaluations for the learning curve. 0: no curve and nothing before training, only the final table."""
    start: bool = True
    """With `every` above 0, evaluate the model before training, too. Without it the tables have no row for the start, and the best checkpoint is chosen among later ones."""
    held_out: HeldOut | None = None
    """Tasks held out of a file of tasks: a number (100) or a share (0.1). At most half of them, and at most 64 unless `seeds.count` is given, are for the learning curve, the others for the final table. Null: a tenth of the tasks each for the curve and the table, at most 64 and 256."""
    seeds: Annotated[
        SeedRange,
        Needs(
            lambda find: find("stage") != "evaluate" or find("held_out") != "all",
            "stage is evaluate, which plays evaluation.final_seeds",
        ),
    ] = SeedRange()
    """Held-out seeds of the learning curve, on which the best checkpoint is selected. Usual for generated tasks: 64 from 1,000,000 on."""
    final_seeds: SeedRange = SeedRange()
    """Held-out seeds of the final table. Nothing is selected on them, so the final numbers have no selection bias. Usual for generated tasks: 256 from 2,000,000 on."""
    episodes_per_seed: Annotated[int, SEVERAL] = Field(1, ge=1)
    """Episodes per held-out seed."""
    sampling: SamplingRecipe = SamplingRecipe(temperature=0.0)
    """Sampling in evaluations; greedy by default."""
    environment: AnyEnvironment | None = None
    """Environment of the held-out episodes: the keys in which it differs from `environment`, or one of another `type`; its keys are those of `environment`. Null: the environment of training."""
    metric: Annotated[Literal["success", "return"] | None, CURVE_ONLY] = None
    """Metric that selects the best checkpoint: the mean over the held-out seeds, larger is better. Null: `success` if the environment reports it, else `return`."""

    @property
    def ranges(self) -> dict[str, SeedRange]:
        """The seeds by recipe key."""
        return {"evaluation.seeds": self.seeds, "evaluation.final_seeds": self.final_seeds}

    def _check(self) -> None:
        for seeds in self.ranges.values():
            refuse_many(seeds.count or 1, self.episodes_per_seed, "episodes_per_seed")

    def batch_lines(self, tasks: TaskSplit | None, steps: int) -> list[str]:
        """Episodes of the learning curve and of the final table in a run of `steps` steps."""
        final = f"final table, {self.played()}: {self.episodes(tasks, 2)}, "
        count = len(tasks.held_out[1]) if tasks is not None else 0
        kind = {"success": "rate", "return": "mean"}.get(str(self.metric))
        sees = f"; {shown(count, self.episodes_per_seed, kind)}" if count else ""
        if self.every == 0:
            return [f"{final}after training{sees}"]
        during = (steps - 1) // self.every
        between = f"{counted(during, 'time')} during and after training"
        first = ("before, ", "before and ") if self.start else ("", "")
        return [
            f"evaluation, {self.played()}: {self.episodes(tasks, 1)}, {first[0]}{between}",
            f"{final}{first[1]}after training{sees}",
        ]

    def episodes(self, tasks: TaskSplit | None, part: int) -> str:
        """The episodes on held-out tasks, 1 for those of the learning curve, 2 for those of the final table."""
        count = len(tasks.held_out[part - 1]) if tasks is not None else 0
        return f"{count * self.episodes_per_seed or 'one or more'} episodes on {named_tasks(tasks, part)}"

    def played(self) -> str:
        """How episodes are sampled and, if it differs, in which environment."""
        greedy = self.sampling.temperature == 0
        how = "greedy" if greedy else f"at temperature {self.sampling.temperature:g}"
        if (other := self.environment) is None:
            return how
        return f"{how}, in {other.type} with at most {other.max_turns} {plural('turn', other.max_turns)}"
