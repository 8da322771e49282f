"""Evaluation of a policy from its episodes: success, return, pass@k, lengths."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from posttrain.episode import Episode, Outcome, reports_success, require_episodes, score_names
from posttrain.errors import InputError
from posttrain.recipe.rollout import SCORES
from posttrain.rollout.driver import EpisodeRequest, EpisodeWorker, Played, collect_episodes, quiet
from posttrain.runs.intervals import Estimate, clustered_rate, mean, within

PASS = "pass@k/"
"""Prefix of the pass@k keys in the metrics log."""
MEAN = "mean@k/"
"""Prefix of the mean@k key."""


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased estimate of pass@k from n attempts with c successes: 1 - C(n - c, k) / C(n, k) (Chen et al. 2021).

    Computed as a product, because the binomials overflow. Raises `ValueError` unless 0 <= c <= n and 1 <= k <= n.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@{k} needs at least {k} attempts and 0 to n successes, got n = {n} and c = {c}")
    if n - c < k:
        return 1.0
    return 1.0 - float(np.prod(1.0 - k / np.arange(n - c + 1, n + 1)))


def powers_up_to(n: int) -> list[int]:
    """1, 2, 4, ... up to n, and n itself."""
    sizes = [2**power for power in range(n.bit_length())]
    return sizes if sizes[-1] == n else [*sizes, n]


def attempts(successes: Mapping[int, Sequence[bool]]) -> int:
    """The smallest number of attempts of any seed; 0 without seeds. `successes`: seed -> success of each attempt."""
    return min((len(outcomes) for outcomes in successes.values()), default=0)


def pass_rates(successes: Mapping[int, Sequence[bool]]) -> dict[int, Estimate]:
    """k -> pass@k for k = 1, 2, 4, ... up to `attempts(successes)`.

    The mean over seeds with the interval of `clustered_rate`; n attempts contain n // k disjoint sets of k.
    """
    rates = {}
    for k in powers_up_to(n) if (n := attempts(successes)) else []:
        seed_rates = [pass_at_k(len(outcomes), sum(outcomes), k) for outcomes in successes.values()]
        rates[k] = clustered_rate(seed_rates, sum(len(outcomes) // k for outcomes in successes.values()))
    return rates


def mean_at_k(successes: Mapping[int, Sequence[bool]]) -> Estimate:
    """Mean over seeds of the fraction of successful attempts."""
    rates = [sum(outcomes) / len(outcomes) for outcomes in successes.values()]
    return clustered_rate(rates, sum(map(len, successes.values())))


_NO_RETURN = Estimate(math.nan, math.nan, math.nan, 0)


@dataclass(frozen=True)
class Evaluation:
    """Success and return on a set of seeds."""

    success: Estimate | None
    """Success rate over all seeds; failed episodes count as unsuccessful. None if the environment reports none."""
    mean_return: Estimate
    """Mean return over seeds with an episode that has a return; NaN without such seeds."""
    n: int
    """Number of seeds, without those to whose episodes no reward applies."""
    episodes: int
    """Number of episodes, including failed ones."""
    failed: int
    """Number of failed episodes."""
    unscored: int
    """Number of episodes to which no reward applies. They count in no rate and no mean."""
    rejected_share: float
    """Fraction of turns whose answer could not be parsed; NaN without turns."""
    tokens_per_answer: float
    """Sampled tokens per turn, over turns with known tokens (servers may not report them); NaN if there are none."""
    turns: float
    """Turns per episode. This and the other two are over episodes that have a return; NaN without such episodes."""
    scores: Mapping[str, Estimate] = field(default_factory=dict)
    """Further scores of the environment by name, over the seeds whose episodes report them."""
    attempts: Mapping[str, Estimate] = field(default_factory=dict)
    """pass@k and mean@k by metrics key, if seeds have several episodes and the environment reports success."""

    def metrics(self) -> dict[str, float | int | None]:
        """The values of an evaluation line of the metrics log; None where the episodes do not determine one."""
        values: dict[str, float | int] = {} if self.success is None else _with_limits("success", self.success)
        values |= {"n": self.n, **_with_limits("return", self.mean_return)}
        values |= {"episodes": self.episodes, "failed": self.failed}
        values |= {"unscored": self.unscored} if self.unscored else {}
        values |= {"rejected_share": self.rejected_share, "tokens_per_answer": self.tokens_per_answer}
        values["turns"] = self.turns
        named = {f"{SCORES}{name}": score for name, score in self.scores.items()} | dict(self.attempts)
        for name, estimate in named.items():
            values |= _with_limits(name, estimate)
        return {key: None if math.isnan(value) else value for key, value in values.items()}


def summarize(episodes: Sequence[Episode], return_range: tuple[float, float] | None = None) -> Evaluation:
    """Success, return and lengths of `episodes`, with any number of episodes per seed.

    Intervals are over seeds, see `clustered_rate` and, for the return, `mean`. `return_range`: the least and the greatest
    return of an episode, as in `Environment.return_range`; without it, returns of fewer than 64 seeds have no interval.
    Raises `InputError` without episodes, or for a return outside of the range.
    """
    require_episodes(episodes)
    if not episodes:
        raise InputError("there are no episodes to summarize; play at least one")
    successes: dict[int, list[bool]] = defaultdict(list)
    returns: dict[int, list[float]] = defaultdict(list)
    for episode in episodes:
        if episode.outcome is not Outcome.UNSCORED:
            successes[episode.seed].append(episode.success)
        if episode.has_return:
            returns[episode.seed].append(episode.total_reward)
            if return_range and not within(episode.total_reward, return_range):
                raise InputError(
                    f"environment seed {episode.seed} has the return {episode.total_reward:g}, which is not between "
                    f"{return_range[0]:g} and {return_range[1]:g}; correct `return_range` of the environment"
                )
    played = [episode for episode in episodes if episode.has_return]
    scores: dict[str, dict[int, list[float]]] = {name: defaultdict(list) for name in score_names(played)}
    for episode in played:
        for name in scores.keys() & episode.scores.keys():
            scores[name][episode.seed].append(episode.scores[name])
    turns = [turn for episode in played for turn in episode.turns]
    rates = [_average(flags) for flags in successes.values()]
    has_success = bool(successes) and reports_success(episodes)
    repeated: dict[str, Estimate] = {}
    if has_success and (n := attempts(successes)) > 1:
        repeated = {f"{MEAN}{n}": mean_at_k(successes)}
        repeated |= {f"{PASS}{k}": rate for k, rate in pass_rates(successes).items()}
    return Evaluation(
        success=clustered_rate(rates, sum(map(len, successes.values()))) if has_success else None,
        mean_return=_over_seeds(returns, return_range) if returns else _NO_RETURN,
        n=len(successes),
        episodes=len(episodes),
        failed=sum(episode.outcome is Outcome.FAILED for episode in episodes),
        unscored=sum(episode.outcome is Outcome.UNSCORED for episode in episodes),
        rejected_share=_average([bool(turn.info.get("rejected")) for turn in turns]),
        tokens_per_answer=_average([turn.stop - turn.start for turn in turns if turn.stop > turn.start]),
        turns=_average([len(episode.turns) for episode in played]),
        # Scores of 0 and 1 only are successes, also where all are equal.
        scores={name: _over_seeds(one, (0.0, 1.0) if _levels(one) <= {0, 1} else None) for name, one in scores.items()},
        attempts=repeated,
    )


def _over_seeds(by_seed: Mapping[int, Sequence[float]], bounds: tuple[float, float] | None = None) -> Estimate:
    """Mean over seeds of values in `bounds`; it is a rate if all values are one of the bounds."""
    if bounds is None or not _levels(by_seed) <= {round(bound, 6) for bound in bounds}:
        return mean([_average(values) for values in by_seed.values()], bounds)
    rates = [_average([2 * value > sum(bounds) for value in values]) for values in by_seed.values()]
    return clustered_rate(rates, sum(map(len, by_seed.values()))).scaled(*bounds)


def _levels(by_seed: Mapping[int, Sequence[float]]) -> set[float]:
    return {round(value, 6) for values in by_seed.values() for value in values}


def _with_limits(name: str, estimate: Estimate) -> dict[str, float | int]:
    return {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}


def _average(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def evaluate(
    worker: EpisodeWorker[Any],
    seeds: Sequence[int],
    episodes_per_seed: int,
    run_seed: int,
    left_out: frozenset[int] = frozenset(),
    played: Played = quiet,
    return_range: tuple[float, float] | None = None,
) -> tuple[Evaluation, list[Episode]]:
    """Play all `seeds` except those in `left_out`. Returns the summary, for which `return_range` is, and the episodes.

    Random numbers depend only on the run seed and the position of the held-out seed, so two evaluations of one run
    differ only by the policy. `played` is called as each episode ends.
    """
    requests = [
        EpisodeRequest(seed, group, index, (run_seed, "evaluation", group, index))
        for group, seed in enumerate(seeds)
        if seed not in left_out
        for index in range(episodes_per_seed)
    ]
    episodes = collect_episodes(worker, requests, played)
    return summarize(episodes, return_range), episodes
