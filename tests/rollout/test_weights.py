"""Weights on their way to another thread, the bound on their age, and episodes in flight that are cancelled."""

import asyncio
import threading

import pytest
import torch

from posttrain.engines.protocol import EngineCounters
from posttrain.errors import RunError
from posttrain.rollout import in_flight
from posttrain.rollout.in_flight import InFlight
from posttrain.rollout.weight_sync import PublishedWeights, SamplingStopped, WeightSnapshot, WeightSync


class Policy:
    def __init__(self):
        self.version, self.parameter = 0, torch.nn.Parameter(torch.zeros(1))

    def trainable(self):
        return [("w", self.parameter)]


class Engine:
    """Counts forward passes on request, and stores the order of the weights that it received."""

    before_forward = None

    def __init__(self, policy):
        self.policy, self.counters, self.loaded = policy, EngineCounters(), []

    def load_weights(self, version, source=None):
        assert source is self.policy
        assert float(source.parameter.detach()) == version / 2
        self.loaded.append((self.counters.forwards, version))

    def step(self):
        if self.before_forward is not None:
            self.before_forward()
        self.counters.forwards += 1


def weights(step):
    return WeightSnapshot(step, 2 * step, {"w": torch.full((1,), float(step))})


def conductor(rule, ahead, published):
    policy = Policy()
    engine = Engine(policy)
    return WeightSync(rule, ahead, policy, engine, published, InFlight()), engine


def test_finish_uses_the_weights_of_the_requested_step():
    published = PublishedWeights(3)
    for step in range(4):
        published.publish(weights(step))
    made, engine = conductor("finish", 2, published)
    made.begin_batch(4)
    engine.step()
    published.publish(weights(4))
    engine.step()
    assert engine.loaded == [(0, 2)]  # after step 4 - 1 - 2


def test_continue_takes_the_newest_between_two_passes():
    published = PublishedWeights(1)
    published.publish(weights(2))
    made, engine = conductor("continue", 2, published)
    made.begin_batch(4)
    engine.step()
    engine.step()
    published.publish(weights(3))
    engine.step()
    engine.step()
    assert engine.loaded == [(0, 4), (2, 6)]


def test_a_batch_waits_for_the_oldest_allowed_weights():
    published, waited = PublishedWeights(2), threading.Event()
    published.publish(weights(0))
    made, _ = conductor("continue", 1, published)

    def wait():
        made.wait_for(4)
        waited.set()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    published.publish(weights(1))
    assert not waited.wait(0.1)
    published.publish(weights(2))
    assert waited.wait(10)


def test_waiting_workers_are_stopped():
    published, found = PublishedWeights(1), []

    def wait():
        try:
            published.after(5)
        except SamplingStopped:
            found.append("stopped")

    thread = threading.Thread(target=wait)
    thread.start()
    published.stop()
    thread.join(10)
    assert found == ["stopped"]


async def for_ever():
    await asyncio.sleep(60)


def test_a_stop_before_the_first_episode_is_handled():
    flown = InFlight()
    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(asyncio.wait_for(flown.run(for_ever), 0.01))
    flown.stop()  # between two event loops
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(flown.run(for_ever))


def test_an_error_while_fetching_weights_ends_the_episodes(monkeypatch):
    monkeypatch.setattr(in_flight, "POLL_SECONDS", 0.01)
    flown = InFlight()

    def watch():
        raise RunError("the engine does not take the weights")

    flown.poll = watch
    with pytest.raises(RunError, match="does not take the weights"):
        asyncio.run(asyncio.wait_for(flown.run(for_ever), 20))
