"""Remote models as players: a real HTTP server, well-behaved and not."""

import os
import re
from typing import ClassVar

import pytest
from pydantic import ValidationError

from posttrain.engines.openai import chat_client
from posttrain.environments.make import make_env
from posttrain.environments.protocol import Environment, EnvironmentFactory, Observation, Step
from posttrain.episode import Outcome, StopReason
from posttrain.errors import InputError, RunError
from posttrain.evaluation.summary import summarize
from posttrain.recipe.components import EnvironmentRecipe
from posttrain.recipe.engines import OpenAIEngineRecipe
from posttrain.recipe.rollout import RolloutRecipe, SamplingRecipe
from posttrain.rollout.driver import EpisodeRequest, collect_episodes
from posttrain.rollout.remote_worker import THOUGHTS, FailureLimit, RemoteRolloutWorker
from posttrain.rollout.store import read_episodes, write_episodes
from posttrain_memory.environment import Memory
from posttrain_memory.recipe import MemoryRecipe

from .chat_server import Reply, scripted, serving

GREEDY = SamplingRecipe(temperature=0.0)
MEMORY = {"worlds": {"notes": 4, "filler": (0, 0), "retrieval": 1, "update": 1, "clarification": 1, "filter": 1}}


class WordRecipe(EnvironmentRecipe):
    """Keys of `Words`."""

    thinking: bool = False


class Words(Environment):
    """Two turns; the answers are kept, and the last one succeeds if it is `right`."""

    Recipe = WordRecipe
    answers: ClassVar[list[str]] = []

    def reset(self, seed):
        self.turn = 0
        return Observation([{"role": "user", "content": f"task {seed}"}], f"start {seed}")

    def step(self, action):
        Words.answers.append(action)
        self.turn += 1
        info = {"success": action.endswith("right")} if self.turn == 2 else {}
        return Step([{"role": "user", "content": "go on"}], 1.0, self.turn == 2, False, info, "later")


@pytest.fixture(autouse=True)
def no_answers():
    Words.answers = []


def player(server, environment=None, count=1, sampling=GREEDY, rollout=None, **engine):
    recipe = OpenAIEngineRecipe.model_validate({"url": server.url, "model": "m", "retries": 2, **engine})
    limits = RolloutRecipe.model_validate(rollout or {})
    return RemoteRolloutWorker(
        client=chat_client("engine", recipe.url, recipe.timeout, recipe.retries, recipe.api_key_variable),
        engine=recipe,
        record=FailureLimit(limits.failures, count),
        environment=environment or make_env(Words, max_turns=2),
        rollout=limits,
        sampling=sampling,
    )


def play(server, seeds=(1,), **keys):
    places = [EpisodeRequest(seed, group, 0, (0, "evaluation", group, 0)) for group, seed in enumerate(seeds)]
    return collect_episodes(player(server, count=len(places), **keys), places)


def always(*replies):
    """Gives the replies in turn and repeats the last one."""
    left = list(replies)
    return lambda request: left.pop(0) if len(left) > 1 else left[0]


def exchange(*replies, **keys):
    """The episodes that the replies make, and the requests that the server got."""
    with serving(always(*replies)) as server:
        return play(server, **keys), server.asked


@pytest.mark.parametrize("keys", [{}, {"follow_up": True}, {"thinking": False}])
def test_the_scripted_solution_of_the_memory_succeeds_through_a_server(keys, tmp_path):
    recipe, seeds = MemoryRecipe.model_validate(MEMORY | keys), range(8)
    model = scripted(Memory, recipe, seeds)
    with serving(lambda request: Reply(model(request), tokens=11)) as server:
        episodes = play(server, seeds, environment=EnvironmentFactory(recipe), rollout={"tokens_per_turn": 99})
    assert [episode.seed for episode in episodes] == list(seeds)
    assert all(episode.success and episode.outcome is Outcome.TERMINATED for episode in episodes)
    assert {episode.version for episode in episodes} == {0}
    turns = [turn for episode in episodes for turn in episode.turns]
    assert len(turns) == len(server.asked) > 2 * len(seeds)
    assert {(turn.start, turn.stop, turn.stop_reason) for turn in turns} == {(0, 11, StopReason.END_TOKEN)}
    assert all(request["max_tokens"] == 99 and request["temperature"] == 0 for request in server.asked)
    assert not any({"seed", "stop", "top_p"} & set(request) for request in server.asked)
    found = summarize(episodes)
    assert (found.success.value, found.n, found.failed, found.tokens_per_answer) == (1.0, 8, 0, 11)
    again = read_episodes(write_episodes(tmp_path, 0, "final", episodes)).episodes
    assert again == episodes


def test_a_malformed_answer_is_rejected_and_not_failed():
    recipe = MemoryRecipe.model_validate(MEMORY | {"max_turns": 3})
    with serving(lambda request: Reply("I would rather talk about the weather.")) as server:
        episodes = play(server, range(4), environment=EnvironmentFactory(recipe))
    found = summarize(episodes)
    assert (found.success.value, found.failed, found.rejected_share, found.turns) == (0.0, 0, 1.0, 3.0)


def test_the_content_of_a_request(monkeypatch):
    monkeypatch.setitem(os.environ, "SOME_KEY", "abc")
    with serving(always(Reply("one"), Reply("right"))) as server:
        sampled = SamplingRecipe(temperature=0.7, top_p=0.9)
        keys = {"api_key_variable": "SOME_KEY", "extra_body": {"top_k": 5, "max_tokens": None}}
        (episode,) = play(server, sampling=sampled, **keys)
        again = play(server, sampling=sampled, **keys)
    first, second, *more = server.asked
    assert (first["path"], first["key"], first["model"]) == ("/v1/chat/completions", "Bearer abc", "m")
    assert (first["temperature"], first["top_p"], first["top_k"], first["max_completion_tokens"]) == (0.7, 0.9, 5, 64)
    assert "max_tokens" not in first
    assert second["messages"] == [
        {"role": "user", "content": "task 1"},
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": "go on"},
    ]
    assert first["seed"] != second["seed"]
    assert [request["seed"] for request in more] == [first["seed"], second["seed"]]
    assert episode.success
    assert [turn.state for turn in episode.turns] == ["start 1", "later"]
    assert len(again) == 1


def test_concurrent_requests_are_limited_by_the_recipe():
    with serving(lambda request: Reply("right", delay=0.05)) as server:
        episodes = play(server, range(6), max_concurrent=3)
    assert server.most == 3
    assert all(episode.success for episode in episodes)


@pytest.mark.parametrize("trouble", [Reply(status=429, body="{}"), Reply(status=503, body="busy")])
def test_temporary_errors_are_retried(trouble):
    (episode,), asked = exchange(trouble, trouble, Reply("right"))
    assert episode.success
    assert len(asked) == 4


@pytest.mark.parametrize(
    ("trouble", "said", "requests"),
    [
        (Reply(status=500, body='{"error": "down"}'), "status 500", 3),
        (Reply(status=401, body='{"error": "who"}'), "status 401", 1),
        (Reply(status=400, body='{"error": "no such field"}'), "it was sent temperature, max_tokens", 1),
        (Reply(body="{"), "cannot be reached or understood", 1),
        (Reply(body="[]"), "sent no chat completion", 1),
        (Reply(body='{"choices": []}'), "sent no chat completion", 1),
        (Reply(body="<html>"), "m at http", 1),
        (Reply(delay=1.0), r"did not respond within 0\.3 s", 3),
    ],
)
def test_a_server_error_fails_the_episode_and_is_not_an_answer(trouble, said, requests):
    with serving(
        lambda request: trouble if request["messages"][0]["content"] == "task 2" else Reply("right")
    ) as server:
        good, bad, other = play(server, (1, 2, 3), timeout=0.3)
    assert [good.success, other.success] == [True, True]
    assert (bad.outcome, bad.turns, bad.success) == (Outcome.FAILED, [], False)
    assert bad.failure is not None
    assert f"model m at {server.url}" in bad.failure
    assert re.search(said, bad.failure)
    assert sum(request["messages"][0]["content"] == "task 2" for request in server.asked) == requests
    assert summarize([good, bad, other]).failed == 1


def test_turns_before_a_failure_are_kept_and_the_episode_is_retried_if_configured():
    fault = Reply(status=400, body="{}")
    retried = {"failures": {"action": "retry", "retries": 1}}
    (episode,), _ = exchange(Reply("one"), fault, Reply("two"), Reply("right"), rollout=retried)
    assert [turn.answer for turn in episode.turns] == ["two", "right"]
    (first, *_), _ = exchange(Reply("one"), fault, Reply("two"), seeds=(1, 2, 3), max_concurrent=1)
    assert (first.outcome, [turn.answer for turn in first.turns]) == (Outcome.FAILED, ["one"])


def test_too_many_failures_end_the_evaluation_early():
    with serving(lambda request: Reply(status=401, body="{}")) as server:
        with pytest.raises(RunError, match=r"3 of 4 episodes failed, the first on environment seed 5: .*status 401"):
            play(server, (5, 6, 7, 8), max_concurrent=1)
        assert len(server.asked) == 3
        with pytest.raises(RunError, match=r"2 of 2 episodes failed.*there is nothing to report"):
            play(server, (5, 6), rollout={"failures": {"max_share": 1.0}})


def test_a_truncated_answer_is_reported_as_truncated():
    (episode,), _ = exchange(Reply("half a", "length", tokens=64), Reply("right", tokens=None))
    assert [turn.stop_reason for turn in episode.turns] == [StopReason.TURN_BUDGET, StopReason.END_TOKEN]
    assert [turn.stop for turn in episode.turns] == [64, 0]
    assert summarize([episode]).tokens_per_answer == 64  # what the server does not count is not averaged


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_separate_thoughts_are_restored_where_the_format_has_them(name):
    thought, thinking = {name: "hm"}, make_env(Words, max_turns=2, thinking=True)
    replies = [Reply("<answer>", message=thought), Reply(None, "length", message=thought)]
    (episode,), asked = exchange(*replies, environment=thinking)
    assert Words.answers == ["<think>hm</think><answer>", "<think>hm"]
    assert asked[1]["messages"][1]["content"] == "<think>hm</think><answer>"
    assert not any(THOUGHTS in turn.info for turn in episode.turns)
    exchange(Reply(" <think>own</think>", message=thought), environment=thinking)
    assert Words.answers[-1] == " <think>own</think>"
    (episode,), _ = exchange(Reply("right", message=thought))
    assert Words.answers[-1] == "right"
    assert [turn.info[THOUGHTS] for turn in episode.turns] == ["hm", "hm"]
    assert episode.success


def test_stop_strings_cut_locally():
    stops = {"stop_strings": ["</a>", "</b>"]}
    replies = [Reply("x</b> y</a>", message={"reasoning_content": "</a>"}), Reply("no end, right")]
    thinking = make_env(Words, max_turns=2, thinking=True)
    (episode,), asked = exchange(*replies, rollout=stops, environment=thinking)
    assert "stop" not in asked[0]
    assert [turn.answer for turn in episode.turns] == ["<think></a></think>x</b>", "no end, right"]
    assert [turn.stop_reason for turn in episode.turns] == [StopReason.STOP_STRING, StopReason.END_TOKEN]


def test_null_removes_a_field_of_the_request():
    whole, less = (
        exchange(Reply("right"), sampling=SamplingRecipe(temperature=0.7), extra_body=removed)[1][0]
        for removed in ({}, {"temperature": None, "seed": None})
    )
    assert set(whole) - set(less) == {"temperature", "seed"}
    with pytest.raises(ValidationError, match="null removes"):
        OpenAIEngineRecipe(url="http://a", model="m", extra_body={"messages": None})


def test_an_environment_with_primed_answers_is_refused_before_the_first_request():
    with (
        serving(always(Reply("x"))) as server,
        pytest.raises(InputError, match=r"<think>.*set environment\.opened_by=policy"),
    ):
        play(server, environment=EnvironmentFactory(MemoryRecipe.model_validate(MEMORY | {"opened_by": "environment"})))
    assert not server.asked


def test_a_server_gets_tools_and_its_calls_are_run():
    """The server parses the calls. Its answers go back to it as it sent them, with the ids of the results."""

    def model(request):
        count = len(request["messages"])
        if count == 1:
            call = {"type": "function", "function": {"name": "calculator", "arguments": '{"expression": "2*3"}'}}
            return Reply(None, "tool_calls", message={"tool_calls": [{"id": "a", **call}, {"id": "b", **call}]})
        if count == 4:
            broken = {"id": "c", "type": "function", "function": {"name": "calculator", "arguments": "{"}}
            return Reply("so", "tool_calls", message={"tool_calls": [broken]})
        return Reply("7")

    with serving(model) as server:
        (episode,) = play(server, environment=make_env("tool_use"))
    assert [turn.info["tool_calls"] for turn in episode.turns] == [2, 0, 0]
    assert [turn.info["malformed_calls"] for turn in episode.turns] == [0, 1, 0]
    assert [tool["function"]["name"] for tool in server.asked[0]["tools"]] == ["price", "calculator"]
    sent = server.asked[-1]["messages"]
    assert [message["role"] for message in sent] == ["user", "assistant", "tool", "tool", "assistant", "user"]
    assert [call["function"]["arguments"] for call in sent[1]["tool_calls"]] == ['{"expression": "2*3"}'] * 2
    assert [call["id"] for call in sent[1]["tool_calls"]] == [message["tool_call_id"] for message in sent[2:4]]
    assert sent[2]["content"] == "6"
    assert sent[5]["content"].startswith("No tool was called: a tool call is not valid JSON")
    assert "<tool_call>" in episode.turns[0].answer
