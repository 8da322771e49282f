"""Credit of a batch of answers by the functions that training calls; the wrong channels are put together by hand."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from pydantic import TypeAdapter

from posttrain.credit.assign import compute_advantages
from posttrain.credit.units.estimators import loo, prefix
from posttrain.credit.units.mixing import UnitAdvantages, UnitRewards, with_unit_advantages, with_unit_rewards
from posttrain.credit.units.spans import Spans
from posttrain.episode import Episode, Outcome, RewardStreams, Stream
from posttrain.recipe.credit import CreditRecipe
from posttrain.seeds import random_stream
from toy.tasks import UNITS, Task

SPANS = Spans.from_cuts(UNITS, np.arange(UNITS))
"""A token a unit."""
_GAE = TypeAdapter(CreditRecipe).validate_python({"type": "gae", "gae_lambda": 1.0})
_BEGINNINGS = np.tril(np.ones((UNITS + 1, UNITS), bool), -1)
_LACKING = ~np.eye(UNITS, dtype=bool)

Estimate = Callable[[Task, np.ndarray, np.random.Generator], list[np.ndarray]]
"""(task, answers [N, K], random numbers) -> credits [K] of each answer's units."""


@dataclass(frozen=True)
class Way:
    """A row of the study."""

    name: str
    channel: str
    """`reward` or `advantage`."""
    right: bool
    """Whether this is the channel that posttrain uses it in."""
    estimate: Estimate
    beta: float = 1.0


def worths(task: Task, answers: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """[N, M]: what answers [N, K] are worth with the units of each row of `kept` [M, K] alone."""
    many = len(answers), len(kept)
    return task.worth(np.repeat(answers, many[1], axis=0), np.tile(kept, (many[0], 1))).reshape(many)


def _prefix(task: Task, answers: np.ndarray, draws: np.random.Generator) -> list[np.ndarray]:
    return [prefix(own) for own in worths(task, answers, _BEGINNINGS)]


def _trunc(task: Task, answers: np.ndarray, draws: np.random.Generator) -> list[np.ndarray]:
    return [own[-1] - own[:-1] for own in worths(task, answers, _BEGINNINGS)]


def _loo(task: Task, answers: np.ndarray, draws: np.random.Generator) -> list[np.ndarray]:
    pairs = zip(task.worth(answers).tolist(), worths(task, answers, _LACKING), strict=True)
    return [loo(outcome, own) for outcome, own in pairs]


def _even(task: Task, answers: np.ndarray, draws: np.random.Generator) -> list[np.ndarray]:
    return [np.full(UNITS, outcome / UNITS) for outcome in task.worth(answers).tolist()]


def _last(task: Task, answers: np.ndarray, draws: np.random.Generator) -> list[np.ndarray]:
    return [np.append(np.zeros(UNITS - 1), outcome) for outcome in task.worth(answers).tolist()]


WAYS = [
    Way("outcome", "reward", True, _last),
    Way("even", "reward", True, _even),
    Way("prefix", "reward", True, _prefix),
    Way("trunc", "advantage", True, _trunc),
    Way("loo", "advantage", True, _loo),
    Way("drca_published", "reward", False, _trunc, beta=0.8),
    Way("trunc", "reward", False, _trunc),
    Way("loo", "reward", False, _loo),
    Way("prefix", "advantage", False, _prefix),
]


def episodes(count: int) -> list[Episode]:
    """Answers as the rollout hands them over: a token of the prompt, then a token a unit."""
    sampled = np.array([False] + [True] * UNITS)
    stream = Stream(np.arange(UNITS + 1), sampled, *[np.zeros(UNITS + 1, np.float32)] * 2, sampled - 1, sampled - 1)
    return [Episode(0, 0, index, 0, [stream], [], Outcome.TERMINATED) for index in range(count)]


def advantages(
    way: Way, task: Task, played: list[Episode], answers: np.ndarray, draws: np.random.Generator
) -> np.ndarray:
    """[N, K]: as PPO has them with lambda 1, whitened over the batch; the critic's values are the batch's mean returns."""
    outcomes = task.worth(answers)
    credits = way.estimate(task, answers, draws)
    paid = np.zeros((len(answers), UNITS + 1), np.float32)
    paid[:, -1] = outcomes
    rewards = RewardStreams([[own] for own in paid])
    if way.channel == "reward":
        paid_units = [UnitRewards(SPANS, d, r, 0.0) for d, r in zip(credits, outcomes.tolist(), strict=True)]
        rewards = with_unit_rewards(played, rewards, paid_units, way.beta, "end")
    found = np.stack([streams[0] for streams in rewards.values])
    values = np.cumsum(found[:, ::-1], axis=1)[:, ::-1].mean(axis=0)
    credit = compute_advantages(played, _GAE, rewards, None, [[values]] * len(played))
    if way.channel == "advantage":
        judged = [UnitAdvantages(SPANS, d, r, 0.0) for d, r in zip(credits, outcomes.tolist(), strict=True)]
        credit = with_unit_advantages(played, credit, judged, way.beta)
    return np.stack([streams[0][1:] for streams in credit.values])


def summed(name: str, task: Task, answers: np.ndarray) -> np.ndarray:
    """[N]: the sum of the credits that the way `name` gives to the units of each answer."""
    way = next(way for way in WAYS if way.name == name)
    return np.array([own.sum() for own in way.estimate(task, answers, random_stream(0, "toy", "orders"))])
