"""A server that scores prompts with a real small model, by transformers alone, as vLLM and OpenAI do."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.listening import listening
from tests.rollout import chat_server


class _Handler(chat_server._Handler):
    def do_GET(self) -> None:
        data = json.dumps(
            {"object": "list", "data": [{"id": "tiny", "object": "model", "created": 0, "owned_by": "x"}]}
        )
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data.encode())


@contextmanager
def serving(directory: Path, fails: int = 0, broken_task: str | None = None) -> Iterator[str]:
    """The base URL of the server of a model, until the block ends.

    `fails`: it answers so many scoring requests with status 503 first. `broken_task`: it refuses prompts with this text.
    """
    model, tokenizer = AutoModelForCausalLM.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    remaining = [fails]

    def reply(request: dict[str, Any]) -> chat_server.Reply:
        remaining[0] -= 1
        if remaining[0] >= 0:
            return chat_server.Reply(status=503, body='{"error": {"message": "starting"}}')
        if broken_task is not None and broken_task in tokenizer.decode(request["prompt"]):
            return chat_server.Reply(status=400, body='{"error": {"message": "I refuse this prompt"}}')
        assert request["model"] == "tiny"
        answer = {"id": "1", "object": "text_completion", "created": 0, "model": "tiny"}
        return chat_server.Reply(body=json.dumps(answer | {"choices": [_scored(model, tokenizer, request)]}))

    server = chat_server.ChatServer(reply)
    server.RequestHandlerClass = _Handler
    with listening(server):
        yield server.url


def _scored(model: Any, tokenizer: Any, request: dict[str, Any]) -> dict[str, Any]:
    """The choice with the log-probabilities of the prompt's tokens, and of the likeliest tokens in their places."""
    ids = request["prompt"]
    with torch.no_grad():
        logprobs = torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), 1)
    choice: dict[str, Any] = {"index": 0, "text": "", "finish_reason": "length"}

    def name(token: int) -> str:
        return f"token_id:{token}" if request.get("return_tokens_as_token_ids") else tokenizer.decode([token])

    def best(place: int, count: int) -> list[int]:
        return logprobs[place].topk(max(count, 1)).indices.tolist()

    if "prompt_logprobs" in request:
        entries: list[Any] = [None]
        for place, token in enumerate(ids[1:]):
            listed = best(place, request["prompt_logprobs"]) if request["prompt_logprobs"] else []
            entries.append(
                {
                    str(other): {"logprob": float(logprobs[place, other]), "decoded_token": name(other)}
                    for other in dict.fromkeys([token, *listed])
                }
            )
        return choice | {"prompt_logprobs": entries}
    assert (request["echo"], request["max_tokens"]) == (True, 0)
    places = range(len(ids) - 1)
    tops = [{name(one): float(logprobs[place, one]) for one in best(place, request["logprobs"])} for place in places]
    found = {"tokens": [name(token) for token in ids], "top_logprobs": [None, *tops], "text_offset": [0] * len(ids)}
    return choice | {"logprobs": found | {"token_logprobs": [None, *(float(logprobs[n, ids[n + 1]]) for n in places)]}}
