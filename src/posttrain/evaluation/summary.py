"""What a set of episodes says about the policy that played them."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from posttrain.episode import Episode, Outcome
from posttrain.evaluation.statistics import Estimate, clustered_rate, mean
from posttrain.recipe.rollout import SCORES, EvaluationRecipe
from posttrain.rollout.driver import EpisodeRequest, EpisodeWorker, collect_episodes

PASS = "pass@k/"
"""What the keys of pass@k begin with in a line of the metrics log."""
MEAN = "mean@k/"
"""What the key of mean@k begins with."""


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that at least one of k attempts, drawn without replacement from n of which c succeeded, succeeded.

    1 - C(n - c, k) / C(n, k), which is unbiased for the chance that k new attempts hold a success; ValueError unless
    0 <= c <= n and 1 <= k <= n. Computed as a product, for the binomials overflow.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@{k} needs at least {k} attempts and 0 to n successes, got n = {n} and c = {c}")
    if n - c < k:
        return 1.0
    return 1.0 - float(np.prod(1.0 - k / np.arange(n - c + 1, n + 1)))


def powers_up_to(n: int) -> list[int]:
    """1, 2, 4, ... and n itself."""
    found = [2**power for power in range(n.bit_length())]
    return found if found[-1] == n else [*found, n]


def attempts(successes: Mapping[int, Sequence[bool]]) -> int:
    """Attempts that every seed has at least; 0 without seeds. `successes`: seed -> whether each attempt succeeded."""
    return min((len(own) for own in successes.values()), default=0)


def passes(successes: Mapping[int, Sequence[bool]]) -> dict[int, Estimate]:
    """pass@k for k = 1, 2, 4, ... up to the attempts that every seed has, which is the last k.

    The mean over seeds, with the interval of `clustered_rate`: n attempts of a seed hold n / k that share none.
    """
    found = {}
    for k in powers_up_to(n) if (n := attempts(successes)) else []:
        of_seeds = [pass_at_k(len(own), sum(own), k) for own in successes.values()]
        found[k] = clustered_rate(of_seeds, sum(len(own) // k for own in successes.values()))
    return found


def mean_at_k(successes: Mapping[int, Sequence[bool]]) -> Estimate:
    """Share of a seed's attempts that succeeded, as a mean over seeds: what one attempt gives, whatever k is."""
    rates = [sum(own) / len(own) for own in successes.values()]
    return clustered_rate(rates, sum(map(len, successes.values())))


_NO_RETURN = Estimate(math.nan, math.nan, math.nan, 0)


@dataclass(frozen=True)
class Evaluation:
    """Success and return on a set of seeds."""

    success: Estimate | None
    """Over all seeds; a failed episode counts as not successful. None where the environment knows no success."""
    mean_return: Estimate
    """Over the seeds with an episode that did not fail, for a failed episode's return is unknown; NaN without any."""
    n: int
    """Seeds."""
    episodes: int
    """Episodes, failed ones included."""
    failed: int
    """Episodes that failed."""
    rejected_share: float
    """Share of all turns whose answer was not understood, in [0, 1]; NaN without turns."""
    tokens_per_answer: float
    """Sampled tokens per turn, over the turns whose tokens are known (a server may not tell); NaN without any."""
    turns: float
    """Turns per episode."""
    scores: Mapping[str, Estimate] = field(default_factory=dict)
    """What the environment reports besides its reward, by name, over the seeds whose episodes report it."""
    attempts: Mapping[str, Estimate] = field(default_factory=dict)
    """pass@k and mean@k by their keys of the metrics log, where seeds were played several times and success is known."""

    def metrics(self) -> dict[str, float | int]:
        """Values of an evaluation line of the metrics log."""
        success = {} if self.success is None else _with_limits("success", self.success)
        return (
            success
            | {
                "n": self.n,
                "return": self.mean_return.value,
                "return_low": self.mean_return.low,
                "return_high": self.mean_return.high,
                "episodes": self.episodes,
                "failed": self.failed,
                "rejected_share": self.rejected_share,
                "tokens_per_answer": self.tokens_per_answer,
                "turns": self.turns,
            }
            | {key: v for name, own in self.scores.items() for key, v in _with_limits(f"{SCORES}{name}", own).items()}
            | {key: v for name, own in self.attempts.items() for key, v in _with_limits(name, own).items()}
        )


def summarise(episodes: Sequence[Episode]) -> Evaluation:
    """Success, return and lengths of `episodes`, any number per seed; ValueError without episodes.

    Intervals are over seeds: the episodes of one seed count as one mean (see `clustered_rate`).
    """
    if not episodes:
        raise ValueError("no episodes to summarise")
    successes: dict[int, list[bool]] = defaultdict(list)
    returns: dict[int, list[float]] = defaultdict(list)
    for episode in episodes:
        successes[episode.seed].append(episode.success)
        if episode.outcome is not Outcome.FAILED:
            returns[episode.seed].append(episode.total_reward)
    scores: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for episode in episodes:
        for name, value in reported(episode).items():
            scores[name][episode.seed].append(value)
    turns = [turn for episode in episodes for turn in episode.turns]
    rates = [_average(played) for played in successes.values()]
    return Evaluation(
        success=clustered_rate(rates, len(episodes)) if knows_success(episodes) else None,
        mean_return=mean([_average(paid) for paid in returns.values()]) if returns else _NO_RETURN,
        n=len(successes),
        episodes=len(episodes),
        failed=sum(episode.outcome is Outcome.FAILED for episode in episodes),
        rejected_share=_average([bool(turn.info.get("rejected")) for turn in turns]),
        tokens_per_answer=_average([turn.stop - turn.start for turn in turns if turn.stop > turn.start]),
        turns=len(turns) / len(episodes),
        scores={name: _score(by_seed) for name, by_seed in scores.items()},
        attempts=_attempts(successes) if knows_success(episodes) else {},
    )


def reported(episode: Episode) -> dict[str, float]:
    """The scores by name that the environment reports of an episode besides its reward."""
    return dict(episode.turns[-1].info.get("scores", {})) if episode.turns else {}


def knows_success(episodes: Sequence[Episode]) -> bool:
    """Whether any episode says if it succeeded; one that all failed counts as if it did."""
    ended = [episode for episode in episodes if episode.outcome is not Outcome.FAILED and episode.turns]
    return not ended or any("success" in episode.turns[-1].info for episode in ended)


def _attempts(successes: Mapping[int, Sequence[bool]]) -> dict[str, Estimate]:
    if (n := attempts(successes)) < 2:
        return {}
    return {f"{MEAN}{n}": mean_at_k(successes)} | {f"{PASS}{k}": own for k, own in passes(successes).items()}


def _score(by_seed: Mapping[int, Sequence[float]]) -> Estimate:
    """The mean over seeds; of a score that is 0 or 1, such as success in one kind of tasks, with a rate's interval."""
    means = [_average(own) for own in by_seed.values()]
    values = {value for own in by_seed.values() for value in own}
    return clustered_rate(means, sum(map(len, by_seed.values()))) if values <= {0.0, 1.0} else mean(means)


def _with_limits(name: str, estimate: Estimate) -> dict[str, float | int]:
    return {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}


def _average(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def evaluate(
    player: EpisodeWorker[Any], recipe: EvaluationRecipe, run_seed: int, left_out: frozenset[int] = frozenset()
) -> tuple[Evaluation, list[Episode]]:
    """Play every held-out seed that is not `left_out`; returns the summary and the episodes.

    The random numbers depend on the run seed and the held-out seed alone, so two evaluations of one run differ by
    the policy and by nothing else. `player.sampling` should be `recipe.sampling`.
    """
    places = [
        EpisodeRequest(seed, group, index, (run_seed, "evaluation", group, index))
        for group, seed in enumerate(range(recipe.seeds.start, recipe.seeds.stop))
        if seed not in left_out
        for index in range(recipe.episodes_per_seed)
    ]
    episodes = collect_episodes(player, places)
    return summarise(episodes), episodes
