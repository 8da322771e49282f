"""Clients of OpenAI-compatible servers, against servers that drip, redirect, repeat keys and send nonsense."""

import base64
import gzip
import json
import socketserver
import time
from contextlib import contextmanager, suppress
from urllib.parse import quote

import pytest

from posttrain.engines.openai import ChatRequestError, chat_client, complete, require_reachable
from posttrain.engines.scoring import ScoringServers
from posttrain.errors import InputError
from posttrain.recipe.teacher import TeacherRecipe
from posttrain.redaction import without_secrets
from tests.listening import listening

pytest.importorskip("openai")


KEY = "sk-posttrain-1234567890abcdef"


@contextmanager
def server(respond):
    """A server on loopback that reads each request and calls `respond(send)`; yields its port. It answers one request a
    connection. A response must say so (`body` does), or a client may send its next request to a connection that is
    about to close."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self):
            length = 0
            while (line := self.rfile.readline()) not in (b"\r\n", b""):
                if line.lower().startswith(b"content-length:"):
                    length = int(line.split(b":")[1])
            self.rfile.read(length)

            def send(data):
                self.wfile.write(data)
                self.wfile.flush()

            with suppress(OSError):  # the client may hang up
                respond(send)

    class Server(socketserver.ThreadingTCPServer):
        allow_reuse_address = daemon_threads = True

    with listening(Server(("127.0.0.1", 0), Handler)) as running:
        yield running.server_address[1]


def ask(port, seconds=2.0, key_variable=None):
    client = chat_client("engine", f"http://127.0.0.1:{port}/v1", seconds, 0, key_variable)
    return complete("the model", client, "m", [{"role": "user", "content": "hello"}])


def body(text, status="200 OK", more=""):
    data = text.encode()
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nConnection: close\r\n{more}Content-Length: {len(data)}"
    )
    return head.encode() + b"\r\n\r\n" + data


def drip_body(send):
    send(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{")
    for _ in range(90):
        send(b" ")
        time.sleep(0.1)


def drip_headers(send):
    send(b"HTTP/1.1 200 OK\r\nX-Slow: ")
    for _ in range(90):
        send(b"a")
        time.sleep(0.1)


@pytest.mark.parametrize("respond", [drip_body, drip_headers])
def test_a_server_that_drips_holds_a_request_no_longer_than_its_time_out(respond):
    with server(respond) as port:
        started = time.monotonic()
        with pytest.raises(ChatRequestError, match="did not respond within 1 s"):
            ask(port, seconds=1.0)
        assert time.monotonic() - started < 4


INVALID = ("http://[::1", "http://x:99999999/", "http://\x7f/", "file:///etc/passwd")


def test_redirects_to_another_origin_are_not_followed_and_to_an_invalid_address_are_failed_requests():
    asked = []

    def other(send):
        asked.append(1)
        send(body("{}"))

    with server(other) as target:
        local = [f"http://127.0.0.1:{target}/v1/chat/completions"]
        failures = dict.fromkeys(local, f"redirects to http://127.0.0.1:{target}")
        failures |= dict.fromkeys(INVALID, "cannot be reached or understood")
        portless = ("http:", "http:/v1", "http://:80/v1", "//127.0.0.1/v1")
        failures |= dict.fromkeys(portless, r"redirects to http://127\.0\.0\.1, which is not followed")
        for location, message in failures.items():
            answer = body("", "307 Temporary Redirect", f"Location: {location}\r\n")
            with (
                server(lambda send, answer=answer: send(answer)) as port,
                pytest.raises(ChatRequestError, match=message),
            ):
                ask(port)
    assert not asked


def test_a_response_has_a_size_limit(monkeypatch):
    def endless(send):
        send(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n")
        for _ in range(1_000):
            send(b" " * 65_536)

    with server(endless) as port:
        client = chat_client("engine", f"http://127.0.0.1:{port}/v1", 30.0, 2, None, response_mib=1)
        with pytest.raises(ChatRequestError, match="sends a response of more than 1 MiB"):
            complete("the model", client, "m", [{"role": "user", "content": "hello"}])


def test_compressed_responses_are_neither_requested_nor_read():
    packed = gzip.compress(b" " * 10_000_000)
    head = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Encoding: gzip\r\n"
    head += f"Content-Length: {len(packed)}\r\n\r\n"
    with server(lambda send: send(head.encode() + packed)) as port:
        client = chat_client("engine", f"http://127.0.0.1:{port}/v1", 30.0, 0, None)
        assert client._client.headers["accept-encoding"] == "identity"
        with pytest.raises(ChatRequestError, match="sends a response that is compressed"):
            complete("the model", client, "m", [{"role": "user", "content": "hello"}])


def test_redirects_within_the_origin_are_followed_and_do_not_extend_the_time_out():
    completion = {"choices": [{"message": {"role": "assistant", "content": "here"}, "finish_reason": "stop"}]}
    answers = iter(
        [body("", "307 Temporary Redirect", "Location: /v2/chat/completions\r\n"), body(json.dumps(completion))]
    )
    with server(lambda send: send(next(answers))) as port:
        assert ask(port).text == "here"

    def slow(send):
        time.sleep(0.3)
        send(body("", "307 Temporary Redirect", "Location: /v1/chat/completions\r\n"))

    with server(slow) as port:
        started = time.monotonic()
        with pytest.raises(ChatRequestError, match="did not respond within 1 s"):
            ask(port, seconds=1.0)
        assert time.monotonic() - started < 4


def test_a_key_that_the_server_repeats_is_in_no_message(monkeypatch):
    monkeypatch.setenv("TEST_API_KEY", KEY)
    for sent in (body(f'{{"error": {{"message": "bad key {KEY}"}}}}', "401 Unauthorized"), body(f'"{KEY}"')):
        with server(lambda send, sent=sent: send(sent)) as port, pytest.raises(ChatRequestError) as failure:
            ask(port, key_variable="TEST_API_KEY")
        assert KEY not in str(failure.value)
        assert "[API key]" in str(failure.value)


def test_keys_and_the_values_of_named_secrets_are_replaced_and_words_are_not():
    assert without_secrets("Incorrect key sk-abcdefghijklmnopqrst given") == "Incorrect key [API key] given"
    assert without_secrets("Authorization: Bearer abcdefghijk") == "Authorization: [API key]"
    token = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.dozjgNryP4J3jVmN"
    keys = ["AKIAIOSFODNN7EXAMPLE", "github_pat_11ABCDEFG0abcdefgh", "glpat-abcdefghij0123456789", token]
    assert {without_secrets(f"got {key}.") for key in keys} == {"got [API key]."}
    assert without_secrets("no answer from http://me:pass@host/v1") == "no answer from http://[API key]@host/v1"
    assert without_secrets(f"the key is-{token}") == "the key [API key]"
    plain = "the task-oriented model of the disk-based bearer was risky; skip-gram"
    assert without_secrets(plain) == plain

    assert without_secrets("http://h/v1?api_key=abcd1234efgh&x=1") == "http://h/v1?api_key=[API key]&x=1"
    assert without_secrets("x-api-key: 9f8e7d6c5b4a3928") == "x-api-key: [API key]"
    assert without_secrets('{"access_token": "9f8e7d6c5b4a3928"}') == '{"access_token": "[API key]"}'
    assert without_secrets("WANDB_API_KEY=0123456789abcdef failed") == "WANDB_API_KEY=[API key] failed"
    assert without_secrets("Basic dXNlcjpwYXNzd29yZA==") == "[API key]"
    plain = "Basic authentication failed: the password is wrong, set api_key_variable, api_key=short"
    assert without_secrets(plain) == plain


@pytest.mark.parametrize("key", ["plain-0123456789", 'sk"post/0123+456789=='])
def test_a_key_that_is_sent_is_replaced_in_every_form(key, monkeypatch):
    monkeypatch.setenv("TEST_API_KEY", key)
    chat_client("judge", f"http://127.0.0.1:{len(key)}/v1", 1.0, 0, "TEST_API_KEY")
    in_json, encoded = json.dumps(key), base64.b64encode(key.encode()).decode()
    for form in (key, in_json, json.dumps(in_json), quote(key), quote(key, safe=""), encoded, key.encode().hex()):
        said = without_secrets(f"the key {form} was sent")
        assert "[API key]" in said
        assert form.strip('"') not in said


def test_the_search_for_keys_is_linear():
    started = time.process_time()
    for part in ("-eyJ", "Bearer ", "://a:", "eyJaaaaaaaa.", "sk-", "Basic ", "api_key="):
        without_secrets(part * (400_000 // len(part)))
    assert time.process_time() - started < 5


@pytest.mark.parametrize(
    "text",
    [
        '{"choices": {}}',
        '{"choices": {"0": 1}}',
        "[]",
        "null",
        "3",
        '{"choices": [null]}',
        '{"choices": [{"message": {"content": {"a": 1}}}]}',
        "{",
        "[" * 100_000,
        '{"choices": ' + "[" * 100_000,
        '{"choices": [{"message": {"content": "a", "tool_calls": 5}}]}',
        '{"choices": [{"message": {"content": "a", "tool_calls": true}}]}',
    ],
)
def test_a_malformed_reply_is_a_failed_request(text):
    with server(lambda send: send(body(text))) as port, pytest.raises(ChatRequestError, match=r"the model m at http"):
        ask(port)


@pytest.mark.parametrize("text", ["null", "[]", "{", "[" * 100_000])
def test_a_server_with_a_malformed_list_of_models_is_reachable(text):
    with server(lambda send: send(body(text))) as port:
        require_reachable("engine", chat_client("engine", f"http://127.0.0.1:{port}/v1", 5.0, 0, None))


def test_lone_surrogates_of_an_answer_can_be_written_to_a_file(tmp_path):
    text = '{"choices": [{"message": {"content": "a\\ud800b"}, "finish_reason": "stop"}]}'
    with server(lambda send: send(body(text))) as port:
        answer = ask(port).text
    (tmp_path / "answer").write_text(answer)
    assert answer == "a?b"


IDS = [3, 4]
TOKEN = {"logprob": -1.0, "decoded_token": "a"}
ECHO = {"tokens": ["a", "b"], "token_logprobs": [None, -1.0], "top_logprobs": None}
HUGE = -(10**400)


def score(choice, protocol):
    text = json.dumps({"choices": [choice]})
    with server(lambda send: send(body(text))) as port:
        recipe = TeacherRecipe(urls=[f"http://127.0.0.1:{port}/v1"], model="m", protocol=protocol, retries=0)
        return ScoringServers(recipe).score([IDS], 0)[0]


ENTRIES = [None, 3, [], {}, {"4": None}, {"4": {"logprob": HUGE}}, {"4": {"logprob": float("-inf")}}]
ENTRIES += [{"4": {**TOKEN, "decoded_token": 5}}, {"9" * 5000: TOKEN}, {"4": {**TOKEN, "logprob": "x"}}]
CHANGES = [{"tokens": 5}, {"tokens": ["a"]}, {"tokens": ["a", [1]]}, {"token_logprobs": [None, HUGE]}]
CHANGES += [{"top_logprobs": [None, 5]}, {"top_logprobs": [None, {"token_id:x": -1.0}]}]


def test_malformed_log_probabilities_are_a_failed_request():
    assert score({"prompt_logprobs": [None, {"4": TOKEN}]}, "prompt_logprobs").logprobs[1:] == [-1.0]
    assert score({"logprobs": ECHO}, "echo").texts == ["a", "b"]
    failures = [score({"prompt_logprobs": [None, entry]}, "prompt_logprobs") for entry in ENTRIES]
    failures += [score({"logprobs": {**ECHO, **changed}}, "echo") for changed in CHANGES]
    for failure in failures:
        assert isinstance(failure, ChatRequestError)
        assert "sent no log-probabilities of the prompt" in str(failure)


@pytest.mark.parametrize("text", ["{}", "null", '{"data": 5}', '{"data": [null]}', '{"data": [{"id": 5}]}'])
def test_a_malformed_list_of_models_is_one_sentence(text):
    with server(lambda send: send(body(text))) as port:
        recipe = TeacherRecipe(urls=[f"http://127.0.0.1:{port}/v1"], protocol="echo", retries=0)
        with pytest.raises(InputError, match=r"lists no model; set teacher\.model|cannot be reached or understood"):
            ScoringServers(recipe).check_tokenizer("token{}".format, 1_000)
