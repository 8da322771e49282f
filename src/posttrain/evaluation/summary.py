"""What a set of episodes says about the policy that played them."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from posttrain.evaluation.pass_at_k import MEAN, PASS, attempts, mean_at_k, passes
from posttrain.evaluation.statistics import Estimate, clustered_rate, mean
from posttrain.recipe.rollout import SCORES
from posttrain.rollout.streams import Episode, Outcome

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
