"""`posttrain serve` as a process, and the real client of OpenAI."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch

from posttrain.data.rendering import Renderer
from posttrain.engines.local.engine import LocalEngine
from posttrain.engines.protocol import Completion, Request
from posttrain.episode import StopReason
from posttrain.errors import RunError
from posttrain.models.policy import Policy
from posttrain.recipe.model import ModelRecipe
from posttrain.recipe.rollout import SamplingRecipe
from posttrain.serving.policy import PolicyServer
from tests.conftest import CHATML
from tests.test_loopback import load

openai = pytest.importorskip("openai", reason="needs posttrain[remote]")
pytest.importorskip("fastapi", reason="needs posttrain[agents]")

MESSAGES = [{"role": "user", "content": "Say something."}]
TOOL = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}
CALL = {"id": "x", "type": "function", "function": {"name": "f", "arguments": "["}}
LONG = [{"role": "user", "content": "word " * 20_000}]


@pytest.fixture(scope="module")
def server(tiny_model, tmp_path_factory):
    """The address and the process id of a server that needs the key `secret`."""
    command = [sys.executable, "-m", "posttrain.cli.main", "serve", str(tiny_model), "--port", "0", "--key", "secret"]
    folder = tmp_path_factory.mktemp("serve")
    with (folder / "errors").open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env={**os.environ})
    assert process.stdout is not None
    words = process.stdout.readline().split()
    try:
        assert words, (folder / "errors").read_text()
        yield words[-1], process.pid
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(20) in (0, 130)
        process.stdout.close()
    assert (folder / "errors").read_text().replace("posttrain: interrupted", "").strip() == ""


@pytest.fixture(scope="module")
def url(server):
    return server[0]


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=url, api_key="secret", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def policy(tiny_model):
    return Policy(ModelRecipe(path=str(tiny_model)))


def greedy(policy, prompt, tokens):
    request = Request(tuple(prompt), SamplingRecipe(temperature=0), 0, tokens)

    async def sample():
        return await LocalEngine(policy).generate(request)

    return asyncio.run(sample())


def test_a_chat_is_the_engines_answer_to_the_rendered_prompt(client, policy, tiny_model):
    renderer = Renderer(policy.tokenizer, policy.end_tokens)
    prompt = renderer.prompt(MESSAGES)
    expected = greedy(policy, prompt, 12)
    asked = {"model": "m", "messages": MESSAGES, "temperature": 0, "max_tokens": 12, "logprobs": True}
    answer = client.chat.completions.create(**asked)
    (choice,) = answer.choices
    assert choice.message.content == renderer.answer_text(expected.ids)
    assert choice.finish_reason == "length"
    assert [one.logprob for one in choice.logprobs.content] == pytest.approx(expected.logprobs, abs=1e-5)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), 12)
    (model,) = client.models.list().data
    assert model.id == tiny_model.name

    asked |= {"stream": True, "stream_options": {"include_usage": True}}
    parts = list(client.chat.completions.create(**asked))
    deltas = [part.choices[0].delta.content for part in parts if part.choices and part.choices[0].delta.content]
    assert len(deltas) > 3, "the answer comes in pieces"
    assert "".join(deltas) == choice.message.content
    assert parts[-2].choices[0].finish_reason == "length"
    streamed, whole = parts[-2].choices[0].logprobs.content, choice.logprobs.content
    assert [one.token for one in streamed] == [one.token for one in whole]
    # The second request finds its prompt in the cache, so its forward pass is another one.
    assert [one.logprob for one in streamed] == pytest.approx([one.logprob for one in whole], abs=1e-5)
    assert parts[-1].usage == answer.usage


def test_seeds_and_several_answers(client):
    def sampled(**more):
        answer = client.chat.completions.create(model="m", messages=MESSAGES, max_tokens=8, n=3, **more)
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        return [choice.message.content for choice in answer.choices]

    assert sampled(seed=5) == sampled(seed=5)
    assert len(set(sampled(seed=5))) == 3
    assert sampled() != sampled()


def test_completions_of_text_and_tokens(client, policy):
    prompt = policy.tokenizer("one two")["input_ids"]
    expected = greedy(policy, prompt, 6)
    answer = client.completions.create(model="m", prompt=["one two", "one"], temperature=0, max_tokens=6, logprobs=1)
    first = answer.choices[0]
    assert len(answer.choices) == 2
    assert first.text == policy.tokenizer.decode(list(expected.ids))
    assert first.logprobs.token_logprobs == pytest.approx(expected.logprobs, abs=1e-5)
    assert first.logprobs.text_offset[0] == 0
    again = client.completions.create(model="m", prompt=prompt, temperature=0, max_tokens=6)
    assert (again.choices[0].text, again.choices[0].logprobs) == (first.text, None)
    pieces = client.completions.create(model="m", prompt=prompt, temperature=0, max_tokens=6, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == first.text


def test_an_echoed_prompt_is_scored_as_in_training(client, policy):
    prompts = [policy.tokenizer(text)["input_ids"] for text in ("one two three", "one")]
    answer = client.completions.create(model="m", prompt=prompts, max_tokens=1, temperature=0, logprobs=1, echo=True)
    for ids, choice in zip(prompts, answer.choices, strict=True):
        with torch.no_grad():
            exact = policy.model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        chosen = [exact[place, id].item() for place, id in enumerate(ids[1:])]
        values = choice.logprobs.token_logprobs
        assert values[0] is None
        assert values[1 : len(ids)] == pytest.approx(chosen, abs=1e-5)
        most = [max(top.values()) for top in choice.logprobs.top_logprobs[1 : len(ids)]]
        assert most == pytest.approx(exact[: len(ids) - 1].max(-1).values.tolist(), abs=1e-5)
        assert len(values) == len(ids) + 1
        assert choice.text.startswith(policy.tokenizer.decode(ids))
        assert choice.logprobs.text_offset[len(ids)] == len(policy.tokenizer.decode(ids))
    with pytest.raises(openai.BadRequestError, match="echo"):
        client.completions.create(model="m", prompt="one", max_tokens=1, echo=True, stream=True)


def test_stop_strings_are_left_out(client):
    def text(**more):
        return client.completions.create(model="m", prompt="one two", temperature=0, max_tokens=12, **more)

    whole = text().choices[0].text
    stop = whole[4:6]
    expected = whole[: whole.find(stop)]
    cut = text(stop=stop).choices[0]
    assert (cut.text, cut.finish_reason) == (expected, "stop")
    assert "".join(piece.choices[0].text for piece in text(stop=[stop, "never said"], stream=True)) == expected


@pytest.mark.parametrize("before", [" ", " \n", "<|endoftext|>"])
def test_what_the_template_writes_before_the_end_is_not_streamed(before, policy, tmp_path, monkeypatch):
    from starlette.testclient import TestClient

    template = tmp_path / "template.jinja"
    template.write_text(CHATML.replace("<|im_end|>", f"{before}<|im_end|>"))
    spaced = Policy(ModelRecipe(path=policy.recipe.path, chat_template=str(template)))
    ids = tuple(spaced.tokenizer(f"Up row{before}<|im_end|>")["input_ids"])

    async def generate(self, request, on_token=None):
        for token in ids:
            on_token and on_token(token)
            await asyncio.sleep(0)
        return Completion(ids, (0.0,) * len(ids), (0,) * len(ids), StopReason.END_TOKEN)

    monkeypatch.setattr(LocalEngine, "generate", generate)
    with TestClient(PolicyServer(LocalEngine(spaced), "m").app()) as http:
        answer = http.post("/v1/chat/completions", json={"messages": MESSAGES})
        assert answer.json()["choices"][0]["message"]["content"] == "Up row"
        for stop in ([], ["never said"]):
            lines = http.post("/v1/chat/completions", json={"messages": MESSAGES, "stream": True, "stop": stop}).text
            parts = [json.loads(line[6:])["choices"] for line in lines.splitlines() if line.startswith("data: {")]
            assert "".join(choice["delta"].get("content", "") for (choice,) in parts) == "Up row"


def test_tools_reach_the_template(client):
    def usage(**more):
        answer = client.chat.completions.create(model="m", messages=MESSAGES, max_tokens=4, seed=1, **more)
        assert answer.choices[0].message.role == "assistant"
        return answer.usage.prompt_tokens

    assert usage(tools=[TOOL]) > usage()
    assert usage(tools=[TOOL], tool_choice="none") == usage()
    parts = client.chat.completions.create(
        model="m", messages=MESSAGES, max_tokens=4, tools=[TOOL], seed=1, stream=True
    )
    assert [part.choices[0].finish_reason for part in parts][-1] == "length"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        *(({"temperature": -1, "stream": stream}, "temperature") for stream in (False, True)),
        *(({"messages": LONG, "stream": stream}, "fewer than the model's") for stream in (False, True)),
        ({"top_logprobs": 3, "logprobs": True}, "top_logprobs must be 0"),
        ({"presence_penalty": 1}, "presence_penalty is not supported"),
        ({"n": 2, "stream": True}, "n must be 1 in a stream"),
        ({"messages": []}, "at least one message"),
        ({"messages": [{"role": "user", "content": [{"type": "sound"}]}]}, "only text is supported"),
        ({"messages": [*MESSAGES, {"role": "assistant", "tool_calls": [CALL]}]}, "arguments of a tool call"),
        ({"extra_body": {"seed": -1}}, "seed"),
        ({"extra_body": {"stop": [1]}}, "stop"),
    ],
)
def test_what_is_not_supported_is_refused(client, fields, message):
    with pytest.raises(openai.BadRequestError, match=message):
        client.chat.completions.create(**{"model": "m", "messages": MESSAGES, **fields})


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": "\ud800"}]}, "lone surrogate"),
        ("completions", {"prompt": "\ud800"}, "lone surrogate"),
        ("chat/completions", {"messages": MESSAGES, "temperature": 1e-320}, "use 0 for greedy decoding"),
        ("chat/completions", {"messages": MESSAGES, "top_k": 10**30}, "top_k"),
        ("chat/completions", {"messages": MESSAGES, "stop": ["x"] * 65}, "has 65 texts; it can have 64"),
        ("chat/completions", {"messages": MESSAGES, "model": "x" * 5000}, "model: .*at most 1000 characters"),
        ("completions", {"prompt": [[1]] * 20_000, "n": 64}, "asks for 1280000 answers"),
        ("completions", {"prompt": "x " * 4_000_000}, "the prompt has more than 2048 tokens"),
        ("chat/completions", {"messages": [{"role": "user", "content": "x " * 4_000_000}]}, "more than 2048 tokens"),
        ("chat/completions", {"messages": MESSAGES * 10_000}, "the prompt has more than 2048 tokens"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_request_that_would_block_the_server_is_refused(url, path, fields, message):
    request = urllib.request.Request(
        f"{url}/{path}", json.dumps({"max_tokens": 2, **fields}).encode(), {"Authorization": "Bearer secret"}
    )
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=60)
    assert refused.value.code == 400
    assert re.search(message, json.loads(refused.value.read())["error"]["message"])


def test_other_keys_and_pages_of_browsers_are_refused(url):
    with pytest.raises(openai.AuthenticationError, match="wrong API key"):
        openai.OpenAI(base_url=url, api_key="other", max_retries=0).models.list()
    for headers in ({"Origin": "http://elsewhere.example"}, {"Host": "elsewhere.example"}):
        page = openai.OpenAI(base_url=url, api_key="secret", max_retries=0, default_headers=headers)
        with pytest.raises(openai.PermissionDeniedError):
            page.models.list()


def test_a_client_that_goes_away_frees_the_engine(client):
    # Sampled answers may end at once; the greedy one of this prompt does not.
    asked = {"model": "m", "prompt": "one", "max_tokens": 100_000, "temperature": 0}
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.2).completions.create(**asked)
    with client.completions.create(**asked, stream=True) as left:
        next(iter(left))
    assert client.completions.create(model="m", prompt="one", max_tokens=2).choices[0].text


def chats(url, clients, count):
    """Status -> number of `count` chats, each in a new connection."""
    address = url.split("/")[2]
    body = json.dumps({"messages": MESSAGES, "max_tokens": 12}).encode()
    lines = ["POST /v1/chat/completions HTTP/1.1", f"Host: {address}", "Authorization: Bearer secret"]
    head = "\r\n".join([*lines, f"Content-Length: {len(body)}", "Connection: close", "", ""])
    return asyncio.run(load(int(address.partition(":")[2]), clients, count, head.encode() + body))


def test_clients_with_a_connection_per_request_are_answered(url):
    assert chats(url, 64, 200) == {"200": 200}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_thousand_connections_are_answered_in_flat_memory(server):
    def resident():
        return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{server[1]}/status").read_text())[1])  # type: ignore[index]

    assert chats(server[0], 64, 2_000) == {"200": 2_000}
    before = resident()
    assert chats(server[0], 64, 3_000) == {"200": 3_000}
    assert chats(server[0], 200, 5_000) == {"200": 5_000}
    assert resident() < 1.1 * before


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), RunError("the engine is gone")])
@pytest.mark.parametrize("after", [0, 3])
def test_an_engine_that_fails_is_an_error_of_the_client(policy, capsys, error, after):
    """Also after the first events of a stream, when the status 200 is sent."""
    from starlette.testclient import TestClient

    class Failing(LocalEngine):
        async def generate(self, request, on_token=None):
            for token in range(after):
                if on_token is not None:
                    on_token(60 + token)
            raise error

    client = TestClient(PolicyServer(Failing(policy), "m").app())
    for path, fields in (("chat/completions", {"messages": MESSAGES}), ("completions", {"prompt": "one"})):
        whole = client.post(f"/v1/{path}", json=fields)
        assert (whole.status_code, whole.json()["error"]["code"]) == (500, "api_error")
        assert str(error) in whole.json()["error"]["message"]
        streamed = client.post(f"/v1/{path}", json={**fields, "stream": True})
        last = streamed.text.strip().split("data: ")[-1]
        assert json.loads(last)["error"]["code"] == "api_error"
        assert streamed.status_code == (500 if path == "completions" and not after else 200)
    assert "Traceback" not in capsys.readouterr().err
