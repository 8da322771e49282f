import math

import pytest

from posttrain.episode import Outcome
from posttrain.errors import InputError
from posttrain.evaluation.summary import summarize
from posttrain.runs.intervals import clustered_rate, mean, success_rate
from tests.rollout.episodes import played


def test_each_seed_once_and_seeds_and_not_episodes_are_counted():
    found = summarize([played(seed, (0.0, float(seed)), success=seed > 2, tokens=seed + 1) for seed in range(4)])
    assert found.success == success_rate(1, 4)
    assert (found.mean_return.value, found.mean_return.n) == (1.5, 4)
    assert (found.n, found.episodes, found.failed, found.turns) == (4, 4, 0, 2.0)
    assert found.tokens_per_answer == 2.5
    found = summarize([played(seed, success=seed == 0) for seed in (0, 1) for _ in range(3)])
    assert (found.n, found.success.n, found.episodes) == (2, 2, 6)
    assert found.success == success_rate(1, 2)


def test_a_failed_episode_is_reported_and_not_a_success():
    broken = played(1, (5.0,), success=True, outcome=Outcome.FAILED, failure="time-out")
    found = summarize([played(0), played(2), broken])
    assert found.success == success_rate(2, 3)
    assert (found.failed, found.episodes, found.mean_return.n, found.mean_return.value) == (1, 3, 2, 1.0)
    nothing = summarize([played(0, (), outcome=Outcome.FAILED)])
    assert nothing.success.value == 0
    assert nothing.mean_return.n == 0
    assert math.isnan(nothing.mean_return.value)
    assert math.isnan(nothing.tokens_per_answer)


def test_metrics_are_those_of_an_evaluation_line():
    found = summarize([played(0), played(1, success=False)])
    line = found.metrics()
    assert line["success"] == 0.5
    assert (line["success_low"], line["success_high"]) == (found.success.low, found.success.high)
    keys = ("n", "return", "rejected_share", "tokens_per_answer", "turns")
    assert [line[key] for key in keys] == [2, 1, 0, 3, 1]
    assert summarize([played(0, (0.0, 0.0), rejected="no tag"), played(1), played(2)]).rejected_share == 0.5
    with pytest.raises(InputError, match="play at least one"):
        summarize([])


def test_a_score_that_is_right_or_wrong_is_a_rate_and_any_other_a_mean():
    episodes = [played(seed) for seed in range(3)]
    for episode, scores in zip(
        episodes, ({"hard": 0.0, "length": 0.5}, {"hard": 0.0, "length": 2.0}, {"easy": 1.0}), strict=True
    ):
        episode.turns[-1].info["scores"] = scores
    found = summarize(episodes)
    assert found.scores["hard"] == success_rate(0, 2)
    assert found.scores["easy"] == success_rate(1, 1)
    assert math.isnan(found.scores["length"].low), "the range of lengths is unknown"
    assert found.scores["hard"].high > 0.5, "two failures do not prove that it never succeeds"


def test_a_return_of_known_range_has_the_interval_of_its_rate():
    """One success of 64 tasks is a return of 0.016; Student's t goes from -0.016 to 0.047, and covers 48% at a rate of 1%."""
    episodes = [played(seed, (0.7, 0.3) if seed == 5 else (0.0,), success=seed == 5) for seed in range(64)]
    assert summarize(episodes, (0, 1)).mean_return.limits == pytest.approx(success_rate(1, 64).limits)
    assert math.isnan(summarize(episodes).mean_return.low), "other returns may be rare"
    attempts = [played(seed, (-1.0,) if (seed + number) % 4 else (3.0,)) for seed in range(8) for number in range(4)]
    known = summarize(attempts, (-1, 3)).mean_return
    assert known.value == pytest.approx(0)
    assert known.limits[1:] == pytest.approx([4 * limit - 1 for limit in clustered_rate([0.25] * 8, 32).limits[1:]])
    assert -1 <= known.low < known.high <= 3
    other = summarize(attempts, (-2, 3)).mean_return
    assert other.limits == pytest.approx(mean([0.0] * 8, (-2, 3)).limits)
    failures = [played(seed, (0.0,), success=False) for seed in range(64)]
    assert math.isnan(summarize(failures).mean_return.low)
    known = summarize(failures, (0, 2))
    assert known.mean_return.high == pytest.approx(2 * known.success.high)
    assert 0 < known.success.high < 0.06
    with pytest.raises(InputError, match="environment seed 3 has the return"):
        summarize([played(3, (0.75, 0.75))], (0, 1))
