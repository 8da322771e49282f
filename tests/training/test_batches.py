"""Packing to the token budget."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.errors import RunError
from posttrain.models.packing import pack_row, prompt_length
from posttrain.training.rows import stream_of
from posttrain.training.updater import Sample, pack


def sample(prompt, answer, label="step 1 group 0 episode 0"):
    ids = np.array([*prompt, *answer], dtype=np.int64)
    stream = stream_of(ids, np.arange(len(ids)) >= len(prompt))
    return Sample(stream, label, np.ones(len(answer), dtype=np.float32))


SAMPLES = st.lists(
    st.tuples(st.integers(1, 4), st.integers(1, 30)).map(lambda s: sample([s[0]] * 3 * s[0], range(s[1]))),
    min_size=1,
    max_size=30,
)


@settings(max_examples=200, deadline=None)
@given(samples=SAMPLES, budget=st.integers(42, 200))
def test_every_sample_is_in_one_group_and_no_row_is_over_the_budget(samples, budget):
    groups = pack(samples, budget)
    assert sorted(i for group in groups for i in group) == list(range(len(samples)))
    for group in groups:
        row = pack_row([samples[i].stream.ids for i in group], [samples[i].stream.sampled for i in group])
        assert len(row.ids) <= budget


@settings(max_examples=100, deadline=None)
@given(samples=SAMPLES)
def test_packing_is_close_to_the_optimum(samples):
    budget = 60
    shared = {prompt_length(s.stream.sampled): 0 for s in samples}
    least = sum(shared) + sum(s.sampled_tokens for s in samples)
    # First-fit never leaves two rows that would fit in one; the prompts of split bundles come on top.
    assert len(pack(samples, budget)) <= 2 * (least // budget + 1) + len(shared)


def test_a_stream_longer_than_the_budget_is_named():
    with pytest.raises(RunError, match=r"group 7 episode 2 has 30 tokens, more than learner.tokens_per_batch = 20"):
        pack([sample([1], [2]), sample([1] * 10, [3] * 20, "group 7 episode 2")], 20)
