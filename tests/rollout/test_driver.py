"""The episode driver: turns, budgets, failures and their policies."""

import asyncio
import gc
import logging
import time
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import ClassVar

import pytest

from posttrain.data.rendering import Renderer
from posttrain.engines.protocol import Completion, EngineCounters
from posttrain.environments.make import make_env
from posttrain.environments.protocol import Environment, Observation, Step
from posttrain.episode import Outcome, StopReason
from posttrain.errors import InputError
from posttrain.recipe.components import EnvironmentRecipe
from posttrain.recipe.rollout import FailureRecipe, RolloutRecipe, SamplingRecipe
from posttrain.rollout.driver import EpisodeRequest, RolloutWorker, collect_episodes

from ..conftest import make_tokenizer

TOKENIZER = make_tokenizer()
RENDERER = Renderer(TOKENIZER, frozenset({TOKENIZER.eos_token_id}))


class EchoEngine:
    """Answers with the number of its call; replaces the model in tests of the driver."""

    def __init__(self):
        self.counters = EngineCounters()
        self.capacity = 2
        self.requests = []

    async def generate(self, request):
        self.requests.append(request)
        ids = tuple(RENDERER.answer(f"answer {len(self.requests)}"))[-request.max_tokens :]
        return Completion(ids, tuple(-0.5 for _ in ids), tuple(7 for _ in ids), StopReason.END_TOKEN)

    def episode(self, group=0):
        return nullcontext()

    def load_weights(self, version):
        raise AssertionError("not asked for")

    def sleep(self):
        raise AssertionError("not asked for")


class Counting(Environment):
    """Rewards each of three turns with 1. Seed 13 fails at its second turn, once or always; seed 14 has reward NaN."""

    Recipe = EnvironmentRecipe
    failures_left: ClassVar[int] = 0

    def reset(self, seed):
        self.seed, self.turn = seed, 0
        return Observation([{"role": "user", "content": f"task {seed}"}])

    def step(self, action):
        self.turn += 1
        if self.seed == 13 and self.turn == 2 and Counting.failures_left > 0:
            Counting.failures_left -= 1
            raise ValueError("the dice fell off the table")
        if self.seed == 15:
            time.sleep(0.5)
        reward = float("nan") if self.seed == 14 else 1.0
        over = self.turn == 3
        return Step([{"role": "user", "content": f"turn {self.turn}"}], reward, over, False, {"success": over})


@pytest.fixture(autouse=True)
def no_failures():
    Counting.failures_left = 0


def play(seeds, engine=None, environment=Counting, **rollout):
    player = RolloutWorker(
        engine=engine or EchoEngine(),
        renderer=RENDERER,
        environment=make_env(environment, max_turns=3),
        rollout=RolloutRecipe(**rollout),
        sampling=SamplingRecipe(),
        version=4,
    )
    return collect_episodes(player, [EpisodeRequest(seed, i, 0, (0, "test", i)) for i, seed in enumerate(seeds)])


def test_an_episode_has_its_turns_rewards_and_streams():
    engine = EchoEngine()
    (episode,) = play([1], engine)
    assert (episode.outcome, episode.success, episode.total_reward) == (Outcome.TERMINATED, True, 3.0)
    assert episode.version == 4
    assert [turn.answer for turn in episode.turns] == ["answer 1", "answer 2", "answer 3"]
    (stream,) = episode.streams
    assert stream.rewards[[turn.stop - 1 for turn in episode.turns]].tolist() == [1.0, 1.0, 1.0]
    assert stream.rewards.sum() == 3.0
    assert len(stream) == episode.turns[-1].stop
    assert (stream.rollout_logprobs != 0).tolist() == stream.sampled.tolist()
    # Each turn continues the tokens of the one before, with another seed.
    assert [request.prompt_ids for request in engine.requests] == [tuple(stream.ids[: t.start]) for t in episode.turns]
    assert len({request.seed for request in engine.requests}) == 3


def test_a_failing_environment_fails_only_its_episode():
    """So do a reward that is not a number, which is never zero, and a call that takes too long."""
    Counting.failures_left = 99
    episodes = [*play([1, 13, 2, 14]), *play([15], environment_timeout=0.05)]
    failed = [episode.failure for episode in episodes if episode.outcome is Outcome.FAILED and not episode.success]
    assert failed == [
        f"tests.rollout.test_driver:Counting {said}"
        for said in (
            "raised ValueError: the dice fell off the table",
            "gave the reward nan for seed 14",
            "took longer than 0.05 s",
        )
    ]
    assert [episode.outcome for episode in episodes].count(Outcome.TERMINATED) == 2


def test_retry_plays_again_with_other_random_numbers():
    Counting.failures_left = 1
    engine = EchoEngine()
    (episode,) = play([13], engine, failures=FailureRecipe(action="retry", retries=1))
    assert episode.outcome is Outcome.TERMINATED
    assert engine.requests[0].prompt_ids == engine.requests[2].prompt_ids
    assert engine.requests[0].seed != engine.requests[2].seed


def test_a_full_context_truncates_the_episode():
    prompt = len(RENDERER.prompt([{"role": "user", "content": "task 1"}]))
    (episode,) = play([1], tokens_per_episode=max(16, prompt + 12))
    assert episode.outcome is Outcome.TRUNCATED
    assert len(episode.streams[0]) <= max(16, prompt + 12)


def test_a_prompt_without_room_for_an_answer_is_an_error():
    with pytest.raises(InputError, match=r"environment seed 10+ .* rollout.tokens_per_episode"):
        play([10**40], tokens_per_episode=16)


class Forgetting(Counting):
    """Begins a new conversation after its first turn."""

    def step(self, action):
        step = super().step(action)
        return replace(step, new_conversation=self.turn == 1)


def test_a_new_conversation_is_a_stream_without_earlier_tokens():
    engine = EchoEngine()
    (episode,) = play([1], engine, Forgetting)
    one, other = episode.streams
    assert [turn.stream for turn in episode.turns] == [0, 1, 1]
    assert other.ids.tolist()[: len(engine.requests[1].prompt_ids)] == list(engine.requests[1].prompt_ids)
    assert list(engine.requests[1].prompt_ids) == RENDERER.prompt([{"role": "user", "content": "turn 1"}], "")
    assert list(engine.requests[2].prompt_ids) == other.ids.tolist()[: len(engine.requests[2].prompt_ids)]
    assert (one.rewards.sum(), other.rewards.sum()) == (1, 2)
    assert episode.total_reward == 3


class InterruptedEngine(EchoEngine):
    """Lets the other episodes run before it answers, and is interrupted by a signal in its fourth answer."""

    async def generate(self, request):
        await asyncio.sleep(0)
        if len(self.requests) == 3:
            raise KeyboardInterrupt("SIGTERM")
        return await super().generate(request)


def test_an_interrupt_inside_an_episode_ends_all_and_leaves_no_task_behind(caplog):
    opened, closed = [], []

    @contextmanager
    def episode(group):
        opened.append(group)
        try:
            yield
        finally:
            closed.append(group)

    engine = InterruptedEngine()
    engine.episode = episode
    with caplog.at_level(logging.ERROR, logger="asyncio"), pytest.raises(KeyboardInterrupt, match="SIGTERM"):
        play([1, 2, 3], engine)
    gc.collect()
    assert not caplog.records
    assert sorted(closed) == sorted(opened)
