"""Agents as processes: how they end, what rewards them, and runs that train with them."""

import shlex
import signal
import sys
import time
from pathlib import Path

import pytest

from posttrain.environments.make import make_env
from posttrain.episode import Outcome
from posttrain.errors import InputError, RunError
from posttrain.recipe.agent import AgentRecipe
from posttrain.recipe.compose import load_recipe
from posttrain.recipe.rollout import FailureRecipe, RolloutRecipe
from posttrain.rollout.driver import EpisodeRequest, collect_episodes
from tests.rollout.test_agent_calls import RecordingEngine, agent_worker
from tests.rollout.test_driver import TOKENIZER
from tests.training import small

AGENT = f"{shlex.quote(sys.executable)} -I -S {shlex.quote(str(Path(__file__).parent / 'scripted_agent.py'))}"
LETTERS = f"{Path(small.__file__).parent / 'letters.py'}"


def length(answer, row_id=None):
    """A reward function."""
    return {"score": len(answer), "letters": 3}


def play(kind, seeds=(3,), engine=None, failures=None, command=f"{AGENT} {{kind}}", **settings):
    agent = AgentRecipe(command=command.replace("{kind}", kind), **settings)
    rollout = RolloutRecipe(failures=failures or FailureRecipe())
    with agent_worker(engine or RecordingEngine(TOKENIZER), make_env(LETTERS, max_turns=1), agent, rollout) as worker:
        requests = [EpisodeRequest(seed, i, 0, (0, "test", i)) for i, seed in enumerate(seeds)]
        episodes = collect_episodes(worker, requests)
        started = time.monotonic()
        while kind == "late" and not episodes[0].info["late"] and time.monotonic() < started + 60:
            time.sleep(0.05)
    return episodes


@pytest.mark.parametrize(
    ("kind", "ending", "reason"),
    [
        ("crash", "crashed", "the agent exited with code 1: ValueError: the agent lost its way"),
        ("hang", "timed_out", "the agent ran longer than agent.timeout = 1 s"),
        ("silent", "never_called", "the agent exited without a call; it must use OPENAI_BASE_URL"),
        ("bad_report", "no_report", "the agent reported no finite reward"),
    ],
)
def test_an_agent_that_does_not_finish_fails_its_episode_alone(kind, ending, reason):
    (episode,) = play(kind, reward="report", timeout=1.0 if kind == "hang" else 60.0)
    assert episode.outcome is Outcome.FAILED
    assert episode.info["ending"] == ending
    assert episode.failure.startswith(reason)
    assert episode.total_reward == 0
    assert len(episode.turns) == (kind != "silent")


def test_a_command_that_does_not_exist():
    (episode,) = play("", command="no-such-agent {task}")
    assert episode.info["ending"] == "not_started"
    assert "no-such-agent" in episode.failure


def test_retries_start_another_agent():
    engine = RecordingEngine(TOKENIZER)
    (episode,) = play("crash", engine=engine, failures=FailureRecipe(action="retry", retries=2))
    assert len(engine.sampled) == 3
    assert len({request.seed for request, _ in engine.sampled}) == 3
    assert len(episode.turns) == 1


def test_a_call_after_the_end_is_refused_and_counted():
    (episode,) = play("late", reward="none")
    assert episode.outcome is Outcome.TERMINATED
    assert (episode.info["calls"], episode.info["late"]) == (1, 1)


def test_the_engine_may_fail_the_run():
    class Broken(RecordingEngine):
        async def generate(self, request):
            raise RunError("the engine failed")

    with pytest.raises(RunError, match="the engine failed"):
        play("hang", engine=Broken(TOKENIZER))


@pytest.mark.parametrize(
    ("kind", "settings", "reward", "info"),
    [
        ("report", {"reward": "report"}, 0.25, {"scores": {"speed": 2.0}, "success": False}),
        ("file", {"reward": "report", "report": "file"}, 2.0, {"success": False}),
        ("task {task}", {"reward": "report"}, 1.0, {"success": True}),
        ("answer", {"reward": "environment"}, 1.2, {"success": True}),
        ("answer", {"reward": f"{__file__}:length"}, 8.0, {"scores": {"letters": 3.0}, "success": True}),
        ("answer", {"reward": "none"}, 0.0, {}),
    ],
)
def test_what_rewards_an_agent(kind, settings, reward, info):
    (episode,) = play(kind, **settings)
    assert episode.failure is None
    assert episode.total_reward == pytest.approx(reward)
    assert episode.streams[-1].rewards[-1] == pytest.approx(reward)
    assert episode.turns[-1].info == {"call": 0, **info}
    assert episode.info["ending"] == "finished"


def test_agents_in_parallel_with_several_conversations():
    engine = RecordingEngine(TOKENIZER)
    episodes = play("conversation", seeds=range(6), engine=engine)
    assert [episode.info["streams"] for episode in episodes] == [2] * 6
    assert sum(episode.sampled_tokens for episode in episodes) == sum(len(c.ids) for _, c in engine.sampled)
    for episode in episodes:
        of_episode = RecordingEngine(TOKENIZER)
        prompts = [tuple(episode.streams[t.stream].ids[: t.start].tolist()) for t in episode.turns]
        of_episode.sampled = [(r, c) for r, c in engine.sampled if r.prompt_ids in prompts]
        assert [turn.stream for turn in episode.turns] == [0, 1, 1]
        assert [turn.info["call"] for turn in episode.turns] == [1, 0, 2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["environment.type=frozen_lake", "environment.max_turns=4"], "gives the environment one answer"),
        (["agent.reward=none"], "leaves the episodes without a reward"),
        (["rollout.async_rollouts=1"], "does not support `agent`"),
        (["agent.timeout=0"], "agent.timeout"),
    ],
)
def test_recipes_that_do_not_fit(words, message):
    with pytest.raises(InputError, match=message):
        load_recipe([], ["agent.command=x", *words], "rl")


def agent_run(tiny, folder, **changes):
    folder.mkdir(parents=True, exist_ok=True)
    values = small.recipe_values(tiny, folder, **small.two_steps(small.recipe_values(tiny, folder)))
    values["environment"] = {"type": LETTERS, "max_turns": 1}
    values["rollout"] = values["rollout"] | {"filter": {"type": "none"}}
    values["agent"] = {"command": f"{AGENT} conversation"}
    return values | {"checkpoint": {"every": 1, "keep_state": "always"}} | changes


def test_a_killed_run_resumes_to_the_same_bits(tiny_model, tmp_path):
    whole, killed = agent_run(tiny_model, tmp_path / "whole"), agent_run(tiny_model, tmp_path / "killed")
    assert small.run(whole) == 0, (tmp_path / "whole" / "log.txt").read_text()
    died = small.run(killed, die_at=("posttrain.rollout.agents.worker:read_report", 11))
    assert died == -signal.SIGKILL
    assert small.run(killed, resume=True) == 0, (tmp_path / "killed" / "log.txt").read_text()
    one, other = tmp_path / "whole" / "small", tmp_path / "killed" / "small"
    assert small.weights(one) == small.weights(other)
    assert small.episodes(one) == small.episodes(other)
    (line,) = [line for line in small.metrics(one) if line["kind"] == "train" and line["step"] == 2]
    assert line["agent/calls"] == 3 * line["agent/finished"] == 18
    assert line["agent/streams"] == 12
    assert line["policy/mismatch"] < 1e-4
