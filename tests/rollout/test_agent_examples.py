"""The agents of `examples/agents`, unmodified: what they call, the streams that their calls become, and their reward."""

import shlex
import sys
from pathlib import Path

import pytest

from posttrain.environments.check import check_environment
from posttrain.environments.make import make_env
from posttrain.environments.tools import calling
from posttrain.recipe.agent import AgentRecipe
from posttrain.recipe.rollout import RolloutRecipe
from posttrain.rollout.driver import EpisodeRequest, collect_episodes
from tests.rollout.test_agent_calls import RecordingEngine, agent_worker, assert_streams_are_what_was_sampled
from tests.rollout.test_driver import TOKENIZER

AGENTS = Path(__file__).parents[2] / "examples" / "agents"
SEED = 3
ANIMAL = make_env(str(AGENTS / "animal.py"))
"""The task, whose answer is one word."""
BANDIT = make_env("bandit", format={"prime": False})
"""The task whose answer has the form that `chat_loop.py` asks for."""


def play(file, environment, texts):
    engine = RecordingEngine(TOKENIZER, texts=texts)
    agent = AgentRecipe(command=f"{shlex.quote(sys.executable)} {shlex.quote(str(AGENTS / file))}", timeout=120)
    limits = RolloutRecipe(tokens_per_episode=8192, tokens_per_turn=200)
    with agent_worker(engine, environment, agent, limits) as worker:
        (episode,) = collect_episodes(worker, [EpisodeRequest(SEED, 0, 0, (0, "test"))])
    assert episode.failure is None, episode.failure
    assert engine.texts == []
    assert_streams_are_what_was_sampled(engine, episode.streams, episode.turns)
    return episode


def animal():
    environment = ANIMAL()
    environment.reset(SEED)
    return environment.expert()


def test_the_task_of_the_examples_is_sound():
    assert check_environment(ANIMAL.recipe, range(25)) == []
    early, late = (
        {
            word
            for seed in seeds
            for word in ANIMAL().reset(seed).messages[0]["content"].split(": ")[1].split("?")[0].split(" or ")
        }
        for seeds in (range(300), range(1_000_000, 1_000_300))
    )
    assert early & late == set()


def test_the_subagent_is_a_stream_and_the_answer_another():
    episode = play("subagent.py", ANIMAL, ["a guess", animal()])
    assert [turn.stream for turn in episode.turns] == [0, 1]
    assert (episode.total_reward, episode.info["streams"]) == (1.0, 2)
    assert "A colleague says: a guess" in TOKENIZER.decode(episode.streams[1].ids)


@pytest.mark.slow
def test_the_loop_over_the_openai_client_is_one_stream():
    episode = play("chat_loop.py", BANDIT, ["the dragon, I think", "<answer>dragon</answer>"])
    assert [turn.stream for turn in episode.turns] == [0, 0]
    assert episode.turns[-1].info["success"] is True
    assert (episode.info["calls"], episode.info["streams"]) == (2, 1)


@pytest.mark.slow
def test_the_agent_of_a_published_library_calls_tools():
    texts = [calling(("last_letter", {"word": "horse"})), calling(("final_answer", {"answer": animal()}))]
    episode = play("smolagents_tools.py", ANIMAL, texts)
    assert episode.total_reward == 1.0
    assert (episode.info["calls"], episode.info["malformed_calls"]) == (2, 0)
