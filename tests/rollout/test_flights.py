"""Episodes in flight: cancellation from outside, and wake-ups that must not be lost."""

import asyncio

import pytest

from posttrain.errors import RunError
from posttrain.rollout import in_flight as flights
from posttrain.rollout.in_flight import InFlight


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
    monkeypatch.setattr(flights, "POLL_SECONDS", 0.01)
    flown = InFlight()

    def watch():
        raise RunError("the engine does not take the weights")

    flown.poll = watch
    with pytest.raises(RunError, match="does not take the weights"):
        asyncio.run(asyncio.wait_for(flown.run(for_ever), 20))
