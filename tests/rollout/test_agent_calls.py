"""Calls of agents: the wire format with its published client, and the streams that calls become."""

import asyncio
import contextlib
import json
import random
import socket
import threading
import urllib.error
import urllib.request
from contextlib import contextmanager

import openai
import pytest

from posttrain.data.messages import messages_of
from posttrain.data.rendering import Renderer
from posttrain.engines.local.engine import LocalEngine
from posttrain.engines.protocol import Completion, EngineCounters
from posttrain.episode import StopReason
from posttrain.recipe.rollout import RolloutRecipe, SamplingRecipe
from posttrain.rollout.agents.endpoint import AgentEndpoint
from posttrain.rollout.agents.session import AgentSession
from posttrain.rollout.agents.worker import AgentWorker
from posttrain.rollout.driver import EpisodeRequest
from posttrain.serving.formats import ChatCall, read_chat

from ..conftest import make_tokenizer

QUESTION = [{"role": "user", "content": "Which arm?"}]
TOOL = {
    "name": "look",
    "description": "Look at an arm.",
    "parameters": {"type": "object", "properties": {"arm": {"type": "string"}}},
}
CALL = '<tool_call>{"name": "look", "arguments": {"arm": "dragon"}}</tool_call>'


class RecordingEngine:
    """Records what it samples. `inner` samples, or else it answers with the next of `texts`, or with a number."""

    def __init__(self, tokenizer, inner=None, texts=()):
        self.tokenizer, self.inner, self.texts = tokenizer, inner, list(texts)
        self.counters, self.capacity = EngineCounters(), 4
        self.sampled = []
        self.hold = None

    def episode(self, group=0):
        return contextlib.nullcontext()

    async def generate(self, request):
        if self.hold is not None:
            await self.hold.wait()
        if self.inner is not None:
            completion = await self.inner.generate(request)
        else:
            text = self.texts.pop(0) if self.texts else f"answer {len(self.sampled)}"
            ids = (*self.tokenizer(text)["input_ids"], self.tokenizer.eos_token_id)
            completion = Completion(
                ids, tuple(-0.1 * (i + 1) for i in range(len(ids))), (3,) * len(ids), StopReason.END_TOKEN
            )
        self.sampled.append((request, completion))
        return completion


def session_of(engine, tokenizer, limit=2048, tokens_per_turn=24, seed=5):
    renderer, rollout = (
        Renderer(tokenizer, frozenset({tokenizer.eos_token_id})),
        RolloutRecipe(tokens_per_turn=tokens_per_turn, tokens_per_episode=limit),
    )
    request = EpisodeRequest(seed, 0, 0, (0, "test", seed))
    return AgentSession(engine, renderer, rollout, SamplingRecipe(), request, 0, lockstep=True)


def called(loop, function, *arguments):
    """The result of a function, called inside an event loop of another thread."""

    async def call():
        return function(*arguments)

    return asyncio.run_coroutine_threadsafe(call(), loop).result()


@contextmanager
def served(engine, tokenizer, limit=2048):
    """A session behind a real endpoint, and its client. The engine runs in an event loop of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    session = called(loop, session_of, engine, tokenizer, limit)
    try:
        with AgentEndpoint() as endpoint:
            yield session, openai.OpenAI(base_url=f"{endpoint.url}/v1", api_key=endpoint.open(session), max_retries=0)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def finish(session):
    return called(session.loop, session.finish)


@contextmanager
def agent_worker(engine, environment, agent, rollout=None):
    """A worker whose agents call a real endpoint."""
    with AgentEndpoint() as endpoint:
        yield AgentWorker(
            engine=engine,
            renderer=Renderer(engine.tokenizer, frozenset({engine.tokenizer.eos_token_id})),
            environment=environment,
            rollout=rollout or RolloutRecipe(),
            sampling=SamplingRecipe(),
            agent=agent,
            endpoint=endpoint,
        )


def assert_streams_are_what_was_sampled(engine, streams, turns):
    """Every turn's context and tokens, log-probabilities and versions are those of one request of the engine."""
    left = [(list(r.prompt_ids), list(c.ids), list(c.logprobs), list(c.versions)) for r, c in engine.sampled]
    assert sum(stream.sampled.sum() for stream in streams) == sum(len(ids) for _, ids, _, _ in left)
    for number, turn in enumerate(turns):
        stream, span = streams[turn.stream], slice(turn.start, turn.stop)
        assert stream.sampled[span].all()
        assert set(stream.turn[span].tolist()) == {number}
        found = (
            stream.ids[: turn.start].tolist(),
            stream.ids[span].tolist(),
            stream.rollout_logprobs[span].tolist(),
            stream.versions[span].tolist(),
        )
        place = next(i for i, one in enumerate(left) if one[:2] == found[:2] and one[3] == found[3])
        assert found[2] == pytest.approx(left.pop(place)[2], abs=1e-6)
    assert left == []
    assert [int(stream.turn.max()) for stream in streams] == sorted(int(stream.turn.max()) for stream in streams)
    assert turns[-1].stop == len(streams[-1])


@pytest.fixture
def tokenizer():
    return make_tokenizer()


def ask(client, messages, **settings):
    """The first choice of a chat completion."""
    return client.chat.completions.create(model="m", messages=messages, **settings).choices[0]


def said(text):
    return {"role": "assistant", "content": text}


def test_a_sampled_conversation_is_one_stream_of_the_engines_tokens(tiny_policy):
    engine = RecordingEngine(tiny_policy.tokenizer, LocalEngine(tiny_policy, slots=4))
    with served(engine, tiny_policy.tokenizer) as (session, client):
        messages = list(QUESTION)
        for turn in range(4):
            choice = ask(client, messages)
            assert choice.finish_reason == ("stop" if engine.sampled[-1][1].stop_reason == "end_token" else "length")
            messages += [choice.message.model_dump(), {"role": "user", "content": f"again {turn}"}]
        streams, turns, conversation = finish(session)
    assert len(streams) == 1
    assert_streams_are_what_was_sampled(engine, streams, turns)
    assert conversation == [*messages[:1], *conversation[1:]]
    assert [m["content"] for m in conversation if m["role"] == "assistant"] == [t.answer for t in turns]


def test_ids_are_joined_even_where_the_text_encodes_to_others(tokenizer):
    """A sampled answer whose ids are not those that its text encodes to."""
    engine = RecordingEngine(tokenizer)
    ids = [*(tokenizer(letter)["input_ids"][0] for letter in "phoenix"), tokenizer.eos_token_id]
    assert tokenizer("phoenix")["input_ids"] != ids[:-1]

    async def spelled(request):
        completion = Completion(tuple(ids), (-0.5,) * len(ids), (0,) * len(ids), StopReason.END_TOKEN)
        engine.sampled.append((request, completion))
        return completion

    engine.generate = spelled
    with served(engine, tokenizer) as (session, client):
        first = ask(client, QUESTION).message.content
        ask(client, [*QUESTION, said(first), *QUESTION])
        streams, turns, _ = finish(session)
    assert len(streams) == 1
    assert streams[0].ids[turns[0].start : turns[0].stop].tolist() == ids
    assert_streams_are_what_was_sampled(engine, streams, turns)


def test_another_conversation_is_another_stream_and_the_last_call_ends_the_episode(tokenizer):
    engine = RecordingEngine(tokenizer, texts=["one", "sub", "two", "fork"])
    with served(engine, tokenizer) as (session, client):
        first = [*QUESTION, said(ask(client, QUESTION).message.content)]
        for messages in ("a subagent",), (*first, "go on"), (*first, "another way"):
            ask(client, [*messages[:-1], {"role": "user", "content": messages[-1]}])
        streams, turns, _ = finish(session)
    assert [turn.info["call"] for turn in turns] == [1, 0, 2, 3]
    assert [turn.stream for turn in turns] == [0, 1, 1, 2]
    # The fork repeats the first answer as context; it is trained once, where it was sampled.
    assert streams[2].ids[: turns[1].stop].tolist() == streams[1].ids[: turns[1].stop].tolist()
    assert not streams[2].sampled[: turns[3].start].any()
    assert_streams_are_what_was_sampled(engine, streams, turns)


def test_a_changed_answer_starts_a_stream(tokenizer):
    with served(RecordingEngine(tokenizer, texts=["one", "two"]), tokenizer) as (session, client):
        for messages in (QUESTION, [*QUESTION, said("One!"), *QUESTION]):
            ask(client, messages)
        streams, turns, _ = finish(session)
    assert len(streams) == 2
    assert not streams[1].sampled[: turns[1].start].any()


def test_tools_stop_strings_and_streaming_of_openai(tokenizer):
    engine = RecordingEngine(tokenizer, texts=[f"I look. {CALL}", "done", "<tool_call>{oops</tool_call>"])
    tools = [{"type": "function", "function": TOOL}]
    with served(engine, tokenizer) as (session, client):
        chunks = list(
            client.chat.completions.create(
                model="m",
                messages=QUESTION,
                tools=tools,
                stream=True,
                stream_options={"include_usage": True},
                stop=["XX"],
            )
        )
        deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
        assert "".join(delta.content or "" for delta in deltas) == "I look."
        (call,) = [call for delta in deltas for call in delta.tool_calls or []]
        assert (call.function.name, json.loads(call.function.arguments)) == ("look", {"arm": "dragon"})
        assert chunks[-2].choices[0].finish_reason == "tool_calls"
        assert chunks[-1].usage.completion_tokens == len(engine.sampled[0][1].ids)
        assert engine.sampled[0][0].stop_strings == ("XX",)
        made = {"id": call.id, "type": "function", "function": {"name": "look", "arguments": call.function.arguments}}
        messages = [
            *QUESTION,
            said("I look.") | {"tool_calls": [made]},
            {"role": "tool", "tool_call_id": call.id, "content": "gold"},
        ]
        reply = ask(client, messages, tools=tools)
        assert (reply.message.content, reply.finish_reason, reply.message.tool_calls) == ("done", "stop", None)
        assert ask(client, [*QUESTION, *QUESTION], tools=tools).message.content == "<tool_call>{oops</tool_call>"
        streams, turns, _ = finish(session)
    assert len(streams) == 2
    assert session.info["malformed_calls"] == 1
    shown = tokenizer.decode(streams[0].ids)
    assert '"description": "Look at an arm."' in shown
    assert "<tool_response>\ngold\n</tool_response>" in shown
    assert_streams_are_what_was_sampled(engine, streams, turns)


def test_a_retry_gets_the_answer_that_was_lost(tokenizer):
    """The client repeats a request whose answer it did not receive: the answer is sent again and not sampled again."""
    engine = RecordingEngine(tokenizer, texts=["one", "two"])
    with served(engine, tokenizer) as (session, client):
        texts = [
            ask(client, QUESTION, extra_headers=headers).message.content
            for headers in ({}, {"x-stainless-retry-count": "1"}, {})
        ]
        _streams, turns, _ = finish(session)
        # The endpoint still knows the session, which must not hold its texts for the rest of the run.
        assert not [text for text in ("Which arm?", "'one'", "'two'") if text in repr(vars(session))]
    assert texts == ["one", "one", "two"]
    assert session.info["retried"] == 1
    assert len(turns) == 2


def test_a_client_that_gives_up_leaves_no_turn(tokenizer):
    engine = RecordingEngine(tokenizer, texts=["one"])
    with served(engine, tokenizer) as (session, client):
        engine.hold = called(session.loop, asyncio.Event)
        with pytest.raises(openai.APITimeoutError):
            ask(client.with_options(timeout=0.2), QUESTION)
        for _ in range(100):
            if session.info["abandoned"]:
                break
            threading.Event().wait(0.05)
        streams, turns, _ = finish(session)
    assert (session.info["abandoned"], streams, turns) == (1, [], [])


def refusal(client, body=None, path="chat/completions", **headers):
    """Status and error of a refused request."""
    data = json.dumps(body).encode() if isinstance(body, dict) else body
    request = urllib.request.Request(
        f"{client.base_url}{path}", data, {"Authorization": f"Bearer {client.api_key}"} | headers
    )
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=10)
    return caught.value.code, json.load(caught.value)["error"]


def test_refusals(tokenizer):
    engine = RecordingEngine(tokenizer, texts=["one"])
    good = {"model": "m", "messages": QUESTION}
    image = {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}
    with served(engine, tokenizer, limit=32) as (session, client):
        assert refusal(client.with_options(api_key="sk-wrong"), good)[0] == 401
        assert refusal(client, b"{")[1]["message"] == "the request is not valid JSON (JSONDecodeError)"
        assert refusal(client, good | {"n": 2})[1]["message"] == "n must be 1; send several requests"
        for body in (b"[" * 100_000, {"messages": []}, good | {"max_tokens": 0}):
            assert refusal(client, body)[0] == 400
        assert "image" in refusal(client, image)[1]["message"]
        long = {"messages": [{"role": "user", "content": "arm " * 50}]}
        assert refusal(client, long)[1]["code"] == "context_length_exceeded"
        finish(session)
        status, error = refusal(client, good)
    assert (status, error["message"]) == (403, "the episode of this key has ended")
    assert session.info["late"] == 1
    assert session.info["refused"] == 1
    assert engine.sampled == []


@pytest.mark.parametrize(
    ("length", "body", "limit", "status"),
    [
        ("Content-Length: 9", b"{", {"_BODY_SECONDS": 0.1}, 408),
        ("Transfer-Encoding: chunked", b"", {"MAX_BODY": 1}, 413),
    ],
)
def test_a_body_that_never_ends_is_refused_and_its_connection_closed(
    tokenizer, monkeypatch, length, body, limit, status
):
    for name, value in limit.items():
        monkeypatch.setattr(f"posttrain.serving.server.{name}", value)
    with served(RecordingEngine(tokenizer), tokenizer) as (_, client):
        address = f"{client.base_url.host}:{client.base_url.port}"
        key = f"Authorization: Bearer {client.api_key}"
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {address}\r\n{key}\r\n{length}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", client.base_url.port), timeout=20) as connection:
            connection.sendall(head.encode() + body)
            answer = b""
            with contextlib.suppress(OSError):
                while status == 413:
                    connection.sendall(b"9\r\n123456789\r\n")
            with contextlib.suppress(ConnectionResetError):
                while part := connection.recv(1 << 16):
                    answer += part
        assert status == 413 or b" 408 " in answer


def test_another_host_name_is_refused(tokenizer):
    with served(RecordingEngine(tokenizer), tokenizer) as (_, client):
        assert refusal(client, path="models", Host="evil.test")[0] == 403
        assert [model.id for model in client.models.list()] == ["policy"]


def test_random_agents_record_every_token(tiny_policy):
    """Agents that continue, fork, edit and forget conversations at random, through the session itself."""

    async def play(seed):
        draw = random.Random(seed)
        engine = RecordingEngine(tiny_policy.tokenizer, LocalEngine(tiny_policy, slots=4))
        session = session_of(engine, tiny_policy.tokenizer, tokens_per_turn=6, seed=seed)
        conversations = [[{"role": "user", "content": "start"}]]
        for number in range(20):
            messages = list(draw.choice(conversations))
            if draw.random() < 0.2:
                messages = messages[: draw.randrange(len(messages)) + 1]
            if messages[-1]["role"] == "assistant":
                messages.append({"role": "user", "content": f"message {number}"})
            if draw.random() < 0.1:
                messages[0] = {"role": "user", "content": f"compacted {number}"}
            tools = [{"type": "function", "function": TOOL}] if draw.random() < 0.3 else []
            answer = await session.complete(ChatCall(messages, tools))
            conversations.append([*messages, said(answer.text)])
        return engine, *session.finish()

    for seed in range(5):
        engine, streams, turns, _ = asyncio.run(play(seed))
        assert 1 < len(streams) < len(turns)
        assert_streams_are_what_was_sampled(engine, streams, turns)


def test_messages_of_requests_are_read_as_those_of_rows():
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": '{"a": null}'}},
        {"role": "function", "name": "add", "content": "3"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "x", "name": "add", "arguments": {"a": 1}}]},
        {"role": "tool", "content": None, "tool_call_id": "x"},
    ]
    call = read_chat({"messages": messages})
    assert call.messages == messages_of(messages, "messages")
    assert call.messages[0] == {"role": "system", "content": "ab"}
    assert call.messages[5] == {"role": "tool", "content": "", "tool_call_id": "x", "name": "add"}
    assert call.digest
