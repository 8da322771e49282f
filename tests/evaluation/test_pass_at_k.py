"""pass@k against its definition by enumeration, and in the summary of an evaluation."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.evaluation.statistics import success_rate
from posttrain.evaluation.summary import mean_at_k, pass_at_k, pass_rates, powers_up_to, summarize
from tests.rollout.episodes import played

COUNTS = st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n)))


@given(COUNTS)
def test_it_is_the_share_of_subsets_with_a_success(counts):
    n, c, k = counts
    subsets = list(combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


def test_known_values_and_large_numbers():
    assert pass_at_k(100_000, 1, 10) == pytest.approx(1e-4)
    for n, c, k in ((3, 4, 1), (3, -1, 1), (3, 1, 4), (3, 1, 0)):
        with pytest.raises(ValueError):
            pass_at_k(n, c, k)
    assert [powers_up_to(n) for n in (1, 2, 5, 8)] == [[1], [1, 2], [1, 2, 4, 5], [1, 2, 4, 8]]
    found = pass_rates({seed: [seed % 4 == 0, False] for seed in range(80)})
    assert (found[2].low, found[2].high) == pytest.approx(
        (success_rate(20, 80).low, success_rate(20, 80).high), abs=1e-9
    )


@given(st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=1, max_size=20))
def test_it_grows_with_k_and_begins_with_the_mean(lists):
    successes = dict(enumerate(lists))
    found = pass_rates(successes)
    assert list(found) == [1, 2, 4, 6]
    assert found[1].value == pytest.approx(mean_at_k(successes).value)
    assert found[6].value == pytest.approx(sum(map(any, lists)) / len(lists))
    values = [one.value for one in found.values()]
    assert values == sorted(values)
    for one in found.values():
        assert 0 <= one.low <= one.value <= one.high <= 1
        assert one.n == len(lists)


def test_a_summary_has_it_where_seeds_were_played_several_times():
    episodes = [played(seed=seed, success=seed == attempt) for seed in range(3) for attempt in range(2)]
    values = summarize(episodes).metrics()
    assert values["mean@k/2"] == pytest.approx(1 / 3)
    assert values["pass@k/1"] == pytest.approx(1 / 3)
    assert values["pass@k/2"] == pytest.approx(2 / 3)
    assert values["pass@k/2_low"] < values["pass@k/2"] < values["pass@k/2_high"]
    once = summarize([played(seed=seed, success=True) for seed in range(3)]).metrics()
    assert not [key for key in once if "@k" in key]
