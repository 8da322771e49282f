"""Chat clients: a model in this process, token for token as in a rollout, and one behind a server."""

import itertools
from contextlib import contextmanager

import numpy as np
import pytest
from plugins.memory.tests.agent.scripts import code, reply, vault
from plugins.memory.tests.agent.servers import serving, turns

from posttrain.engines.protocol import Completion, EngineCounters
from posttrain.environments.protocol import EnvironmentFactory
from posttrain.episode import StopReason
from posttrain.errors import InputError, RunError
from posttrain.recipe.model import ModelRecipe
from posttrain.recipe.rollout import RolloutRecipe, SamplingRecipe
from posttrain.rollout.driver import EpisodeRequest, RolloutWorker, collect_episodes
from posttrain_memory.agent.clients import STOPS, ContextFull, LocalChatClient, RemoteChatClient
from posttrain_memory.agent.session import Event, MemoryAgent
from posttrain_memory.environment import Memory, assignment
from posttrain_memory.recipe import AgentRecipe, MemoryRecipe
from posttrain_memory.vault.storage import MemoryStorage
from posttrain_memory.vault.vault import Vault

GREEDY = SamplingRecipe(temperature=0.0)
SMALL = {"notes": 5, "filler": (0, 1), "retrieval": 1, "update": 1, "clarification": 1, "filter": 0}


class Parrot:
    """A scripted engine."""

    capacity = 1

    def __init__(self, renderer, script):
        self._renderer, self._script = renderer, list(script)
        self.counters = EngineCounters()
        self.asked = []

    async def generate(self, request):
        self.asked.append(request)
        ids = tuple(self._renderer.answer(self._script.pop(0)))
        return Completion(ids, (0.0,) * len(ids), (0,) * len(ids), StopReason.END_TOKEN)

    @contextmanager
    def episode(self, group=0):
        yield


@pytest.fixture
def chat_client(tiny_model):
    def made(**keys):
        return LocalChatClient(ModelRecipe(path=str(tiny_model)), GREEDY, **keys)

    return made


def in_chat(chat_client, recipe, seed, shared_interpreter):
    """The agent of a chat about the vault and the question of a task; the events."""
    settings = AgentRecipe(**{name: getattr(recipe, name) for name in AgentRecipe.model_fields})
    given = assignment(recipe, seed)
    agent = MemoryAgent(Vault(MemoryStorage(given.files)), chat_client, shared_interpreter, settings)
    return list(agent.ask(given.task.question))


def play_with(engine, renderer, recipe, rollout):
    environment = EnvironmentFactory(recipe)
    return RolloutWorker(engine=engine, renderer=renderer, environment=environment, rollout=rollout, sampling=GREEDY)


@pytest.mark.parametrize(
    "keys",
    [{}, {"thinking": False, "prompt": "brief"}, {"opened_by": "environment"}, {"opened_by": "template"}],
    ids=str,
)
@pytest.mark.parametrize("seed", range(3))
def test_a_chat_has_the_tokens_of_a_rollout(chat_client, shared_interpreter, keys, seed):
    recipe = MemoryRecipe.model_validate({"worlds": SMALL, **keys})
    one = chat_client(tokens_per_turn=5_000)
    one.tokens_per_episode = 50_000
    environment = Memory(recipe)
    environment.reset(seed)
    script = ["nonsense", *_messages(environment)]
    rollout = RolloutRecipe(tokens_per_turn=5_000, tokens_per_episode=50_000, stop_strings=list(STOPS))
    playing = Parrot(one.renderer, script)
    player = play_with(playing, one.renderer, recipe, rollout)
    (episode,) = collect_episodes(player, [EpisodeRequest(seed, 0, 0, (0,))])
    one.engine = Parrot(one.renderer, script)
    events = in_chat(one, recipe, seed, shared_interpreter)
    assert events[0].kind == "not understood"
    assert events[-1].kind == "reply"
    assert len(episode.turns) == len(script) > 2
    (played,), (chatted,) = episode.streams, one.conversation.streams()
    assert np.array_equal(played.ids, chatted.ids)
    assert np.array_equal(played.sampled, chatted.sampled)
    assert [request.prompt_ids for request in playing.asked] == [request.prompt_ids for request in one.engine.asked]
    assert {request.stop_strings for request in one.engine.asked} == {STOPS}


def _messages(environment):
    """The rest of the scripted solution of the task in place, without the primer."""
    written = []
    while True:
        written.append(environment.expert())
        if environment.step(written[-1]).terminated:
            return [text.removeprefix(environment.primer) for text in written]


def test_a_chat_and_a_rollout_give_the_same_answers(chat_client, shared_interpreter):
    recipe = MemoryRecipe.model_validate({"worlds": SMALL, "prompt": "brief", "max_turns": 3})
    one = chat_client(tokens_per_turn=10)
    rollout = RolloutRecipe(tokens_per_turn=10, tokens_per_episode=one.tokens_per_episode, stop_strings=list(STOPS))
    player = play_with(one.engine, one.renderer, recipe, rollout)
    (episode,) = collect_episodes(player, [EpisodeRequest(1, 0, 0, (0,))])
    events = in_chat(one, recipe, 1, shared_interpreter)
    assert events[-1].kind == "no reply"
    assert len(episode.turns) == 3
    (played,), (chatted,) = episode.streams, one.conversation.streams()
    assert np.array_equal(played.ids, chatted.ids)


def test_tokens_are_only_appended_from_question_to_question(chat_client, shared_interpreter):
    one = chat_client()
    one.tokens_per_episode = 50_000
    one.engine = Parrot(one.renderer, [code('a = read_file("user.md")'), reply("Bern."), reply("Yes.")])
    agent = MemoryAgent(vault(), one, shared_interpreter)
    assert [list(agent.ask(words))[-1].text for words in ("Where?", "Sure?")] == ["Bern.", "Yes."]
    prompts = [request.prompt_ids for request in one.engine.asked]
    assert all(later[: len(earlier)] == earlier for earlier, later in itertools.pairwise(prompts))
    agent.new()
    assert len({request.seed for request in one.engine.asked}) == 3


def test_a_context_is_limited_to_that_of_the_model(chat_client, shared_interpreter):
    assert chat_client().tokens_per_episode == 2048
    one = chat_client(tokens_per_turn=4, tokens_per_episode=1_500)
    agent = MemoryAgent(vault(), one, shared_interpreter, AgentRecipe(prompt="brief", max_turns=50))
    last = list(agent.ask("Where does Ada live?"))[-1]
    assert last.kind == "no reply"
    assert "may read 1500" in last.text
    assert "\n" not in last.text
    small = MemoryAgent(vault(), chat_client(tokens_per_episode=100), shared_interpreter)
    with pytest.raises(RunError, match="ask a shorter question") as raised:
        list(small.ask("Where?"))
    assert not isinstance(raised.value, ContextFull)


def test_an_interrupt_leaves_the_engine_usable(chat_client):
    one = chat_client(tokens_per_turn=30)
    prompt = [{"role": "user", "content": "hello"}]
    one.begin(prompt, "")
    expected = one.answer()
    one.begin(prompt, "")
    step, steps = one.engine._step, []

    def interrupted():
        steps.append(step())
        if len(steps) == 3:
            raise KeyboardInterrupt

    one.engine._step = interrupted
    with pytest.raises(KeyboardInterrupt):
        one.answer()
    one.engine._step = step
    one.begin(prompt, "")
    assert one.answer() == expected


def test_random_answers_have_a_name(tiny_model):
    def said(seed):
        one = LocalChatClient(ModelRecipe(path=str(tiny_model)), SamplingRecipe(), tokens_per_turn=12, seed=seed)
        one.begin([{"role": "user", "content": "hello"}], "")
        return one.answer()

    assert said(0) == said(0) != said(1)


# -- remote -----------------------------------------------------------------------------------------------------------


def remote(server, **keys):
    return RemoteChatClient(server.url, "small", retries=0, **keys)


def test_a_server_gets_the_conversation_and_its_answers_count(shared_interpreter):
    script = code('text = read_file("entities/ada.md")'), reply("In Bern.")
    with serving(turns(*script)) as server:
        agent = MemoryAgent(vault(), remote(server, temperature=0.5, tokens_per_turn=77), shared_interpreter)
        assert list(agent.ask("Where does Ada live?"))[-1] == Event("reply", "In Bern.")
        assert list(agent.ask("Sure?"))[-1] == Event("reply", "In Bern.")
    first, second, *_, last = server.asked
    assert (first["model"], first["temperature"], first["max_tokens"]) == ("small", 0.5, 77)
    assert first["stop"] == ["<result>"]
    assert [message["role"] for message in first["messages"]] == ["system", "user"]
    assert second["messages"][2] == {"role": "assistant", "content": script[0]}
    assert "city: Bern" in second["messages"][3]["content"]
    assert [m["role"] for m in last["messages"]] == ["system", "user"] + ["assistant", "user"] * 3


@pytest.mark.parametrize("thinking", [True, False])
def test_thoughts_that_the_server_separates_are_restored(shared_interpreter, thinking):
    with serving(lambda _: {"content": "<reply>Hi.</reply>", "reasoning_content": "say hi"}) as server:
        chat_client = remote(server, thinking=thinking)
        agent = MemoryAgent(vault(), chat_client, shared_interpreter, AgentRecipe(thinking=thinking))
        events = list(agent.ask("Hello?"))
    assert events[-1] == Event("reply", "Hi.")
    assert len(events) == 1 + thinking
    assert "temperature" not in server.asked[0]  # the server's default


@pytest.mark.parametrize("fault", [500, 404, {"content": 3}])
def test_a_server_error_is_one_sentence(shared_interpreter, fault):
    with serving(lambda _: fault) as server:
        agent = MemoryAgent(vault(), remote(server), shared_interpreter)
        with pytest.raises(RunError, match="small at http") as raised:
            list(agent.ask("Hello?"))
    assert "\n" not in str(raised.value)


def test_a_server_that_does_not_exist_and_one_that_cannot_continue_an_answer(shared_interpreter):
    with serving(lambda _: "") as server:
        agent = MemoryAgent(vault(), remote(server), shared_interpreter, AgentRecipe(opened_by="environment"))
        with pytest.raises(InputError, match="opened_by"):
            list(agent.ask("Hello?"))
    assert not server.asked
    agent = MemoryAgent(vault(), remote(server), shared_interpreter)
    with pytest.raises(RunError, match="check that the server is running"):
        list(agent.ask("Hello?"))
    assert agent.vault.files()
