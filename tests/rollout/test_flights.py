"""Episodes in flight: what ends them from outside, and what nobody may miss."""

import asyncio

import pytest

from posttrain.errors import RunError
from posttrain.rollout import in_flight as flights
from posttrain.rollout.driver import EpisodeRequest
from posttrain.rollout.in_flight import InFlight

PLACE = EpisodeRequest(0, 0, 0, ("x",))


async def for_ever():
    await asyncio.sleep(60)


def test_a_stop_before_episodes_begin_is_not_missed():
    flown = InFlight()
    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(asyncio.wait_for(flown.run(PLACE, for_ever), 0.01))
    flown.stop()  # between two event loops
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(flown.run(PLACE, for_ever))


def test_what_looking_for_new_weights_raises_ends_the_episodes(monkeypatch):
    monkeypatch.setattr(flights, "POLL_SECONDS", 0.01)
    flown = InFlight()

    def watch():
        raise RunError("the engine does not take the weights")

    flown.poll = watch
    with pytest.raises(RunError, match="does not take the weights"):
        asyncio.run(asyncio.wait_for(flown.run(PLACE, for_ever), 20))
