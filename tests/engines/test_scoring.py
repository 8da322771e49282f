"""Log-probabilities of a server that sends nonsense."""

import json

import pytest

pytest.importorskip("openai")

from posttrain.engines.openai import ChatRequestError
from posttrain.engines.scoring import ScoringServers
from posttrain.errors import InputError
from posttrain.recipe.teacher import TeacherRecipe

from .test_openai_client import body, server

IDS = [3, 4]
TOKEN = {"logprob": -1.0, "decoded_token": "a"}
ECHO = {"tokens": ["a", "b"], "token_logprobs": [None, -1.0], "top_logprobs": None}
HUGE = -(10**400)


def score(choice, protocol):
    text = json.dumps({"choices": [choice]})
    with server(lambda send: send(body(text))) as port:
        recipe = TeacherRecipe(urls=[f"http://127.0.0.1:{port}/v1"], model="m", protocol=protocol, retries=0)
        return ScoringServers(recipe).score([IDS], 0)[0]


@pytest.mark.parametrize(
    "entry",
    [
        None,
        3,
        [],
        {},
        {"4": None},
        {"4": {"logprob": HUGE}},
        {"4": {"logprob": float("-inf")}},
        {"4": {**TOKEN, "decoded_token": 5}},
        {"9" * 5000: TOKEN},
        {"4": {**TOKEN, "logprob": "x"}},
    ],
)
def test_malformed_log_probabilities_of_a_prompt_are_a_failed_request(entry):
    assert score({"prompt_logprobs": [None, {"4": TOKEN}]}, "prompt_logprobs").logprobs[1:] == [-1.0]
    failure = score({"prompt_logprobs": [None, entry]}, "prompt_logprobs")
    assert isinstance(failure, ChatRequestError)
    assert "sent no log-probabilities of the prompt" in str(failure)


@pytest.mark.parametrize(
    "changed",
    [
        {"tokens": 5},
        {"tokens": ["a"]},
        {"tokens": ["a", [1]]},
        {"token_logprobs": [None, HUGE]},
        {"top_logprobs": [None, 5]},
        {"top_logprobs": [None, {"token_id:x": -1.0}]},
    ],
)
def test_malformed_log_probabilities_of_an_echo_are_a_failed_request(changed):
    assert score({"logprobs": ECHO}, "echo").texts == ["a", "b"]
    assert isinstance(score({"logprobs": {**ECHO, **changed}}, "echo"), ChatRequestError)


@pytest.mark.parametrize("text", ["{}", "null", '{"data": 5}', '{"data": [null]}', '{"data": [{"id": 5}]}'])
def test_a_malformed_list_of_models_is_one_sentence(text):
    with server(lambda send: send(body(text))) as port:
        recipe = TeacherRecipe(urls=[f"http://127.0.0.1:{port}/v1"], protocol="echo", retries=0)
        with pytest.raises(InputError, match=r"lists no model; set teacher\.model|cannot be reached or understood"):
            ScoringServers(recipe).check_tokenizer("token{}".format, 1_000)
