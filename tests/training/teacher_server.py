"""A server process that scores prompts with a real small model, by transformers alone, as vLLM and OpenAI do."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.training.small import fork_server


@contextmanager
def serving(model: Path, fails: int = 0, broken_task: str | None = None) -> Iterator[str]:
    """The base URL of a server in a separate process, until the block ends.

    `fails`: it answers so many scoring requests with status 503 first. `broken_task`: it refuses prompts with this text.
    """
    context = fork_server()
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(str(model), fails, broken_task, there), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{here.recv()}/v1"
    finally:
        process.terminate()
        process.join()


def _serve(directory: str, fails: int, broken_task: str | None, pipe: Any) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    remaining = [fails]

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def reply(self, status: int, body: dict[str, Any]) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            self.reply(
                200, {"object": "list", "data": [{"id": "tiny", "object": "model", "created": 0, "owned_by": "x"}]}
            )

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            ids = request["prompt"]
            if remaining[0] > 0:
                remaining[0] -= 1
                self.reply(503, {"error": {"message": "starting"}})
                return
            if broken_task is not None and broken_task in tokenizer.decode(ids):
                self.reply(400, {"error": {"message": "I refuse this prompt"}})
                return
            assert request["model"] == "tiny"
            with torch.no_grad():
                logprobs = torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), 1)
            choice: dict[str, Any] = {"index": 0, "text": "", "finish_reason": "length"}
            names = lambda token: tokenizer.decode([token])  # noqa: E731
            if "prompt_logprobs" in request:
                entries: list[Any] = [None]
                for place, token in enumerate(ids[1:]):
                    best = logprobs[place].topk(max(request["prompt_logprobs"], 1))
                    listed = [int(other) for other in best.indices] if request["prompt_logprobs"] else []
                    entries.append(
                        {
                            str(other): {"logprob": float(logprobs[place, other]), "decoded_token": names(other)}
                            for other in dict.fromkeys([token, *listed])
                        }
                    )
                choice["prompt_logprobs"] = entries
            else:
                assert (request["echo"], request["max_tokens"]) == (True, 0)
                named = (lambda token: f"token_id:{token}") if request.get("return_tokens_as_token_ids") else names
                tops: list[Any] = [None]
                for place in range(len(ids) - 1):
                    best = logprobs[place].topk(max(request["logprobs"], 1))
                    tops.append({named(int(i)): float(v) for i, v in zip(best.indices, best.values, strict=True)})
                choice["logprobs"] = {
                    "tokens": [named(token) for token in ids],
                    "token_logprobs": [None, *(float(logprobs[n, token]) for n, token in enumerate(ids[1:]))],
                    "top_logprobs": tops,
                    "text_offset": [0] * len(ids),
                }
            self.reply(
                200, {"id": "1", "object": "text_completion", "created": 0, "model": "tiny", "choices": [choice]}
            )

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    pipe.send(server.server_address[1])
    server.serve_forever()
