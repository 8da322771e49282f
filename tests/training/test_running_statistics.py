"""Mean and standard deviation of a reward model's rewards so far, against numpy and through a checkpoint."""

import json

import numpy as np
import pytest

from posttrain.episode import Episode
from posttrain.recipe.model import RewardSource
from posttrain.training.controllers import RAW, RunningStatistics
from tests.rollout.episodes import played


def scored(values) -> list[Episode]:
    """Episodes of one turn with their scores of a reward model."""
    episodes = []
    for value in values:
        made = played(rewards=(value,))
        made.turns[-1].info[RAW] = value
        episodes.append(made)
    return episodes


RUNNING = RewardSource(path="unread", normalize="running", clip=None)


def test_running_statistics_are_those_of_all_rewards_so_far():
    draws = np.random.default_rng(0)
    running, seen = RunningStatistics(RUNNING), []
    for size in (1, 3, 8, 5):
        values = list(draws.normal(100.0, 0.3, size))
        running.include(scored(values))
        seen += values
        if len(seen) < 2:
            continue
        mean, std = np.mean(seen), np.std(seen, ddof=1)
        assert running.count == len(seen)
        assert running.mean == pytest.approx(mean, rel=1e-12)
        for value in values:
            assert value + running.correction({RAW: value}) == pytest.approx((value - mean) / std, abs=1e-9)


def test_scaled_rewards_are_clipped_and_equal_ones_give_no_credit():
    running = RunningStatistics(RUNNING.model_copy(update={"clip": 0.5}))
    running.include(scored([1.0, 2.0, 9.0]))
    assert 9.0 + running.correction({RAW: 9.0}) == pytest.approx(0.5)
    assert 1.0 + running.correction({RAW: 1.0}) == pytest.approx(-0.5)
    for values in ([37.0], [37.0] * 6):
        running = RunningStatistics(RUNNING)
        running.include(scored(values))
        assert 37.0 + running.correction({RAW: 37.0}) == 0.0


def test_running_statistics_are_restored_from_their_state():
    one, two = RunningStatistics(RUNNING), RunningStatistics(RUNNING)
    one.include(scored([0.1, 1 / 3, -2.7]))
    two.load_state_dict(json.loads(json.dumps(one.state_dict())))
    for running in (one, two):
        running.include(scored([5.0, 0.2]))
    assert one.state_dict() == two.state_dict()
    assert one.correction({RAW: 0.3}) == two.correction({RAW: 0.3})


def test_without_running_normalization_or_a_score_nothing_is_counted_or_corrected():
    for source in (None, RewardSource(path="unread"), RewardSource(path="unread", normalize="none")):
        running = RunningStatistics(source)
        running.include(scored([1.0, 2.0]))
        assert (running.count, running.correction({RAW: 1.0})) == (0, 0.0)
    running = RunningStatistics(RUNNING)
    unscored = scored([9.0])
    del unscored[0].turns[-1].info[RAW]
    running.include([*scored([1.0, 3.0]), *unscored])
    assert (running.count, running.mean) == (2, 2.0)
    assert running.correction(unscored[0].turns[-1].info) == 0.0
