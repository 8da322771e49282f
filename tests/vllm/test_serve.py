"""`posttrain serve --engine vllm` as a process, and the real client of OpenAI."""

import signal
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from posttrain.data.rendering import Renderer
from posttrain.engines.protocol import Request
from posttrain.models.policy import Policy
from posttrain.recipe.model import ModelRecipe
from tests.vllm.asking import GREEDY, SMALL, local_answers
from tests.vllm.interpreter import needs_vllm, vllm_python
from tests.vllm.models import save_model

pytestmark = [needs_vllm, pytest.mark.slow, pytest.mark.timeout(900)]

openai = pytest.importorskip("openai", reason="needs posttrain[remote]")
pytest.importorskip("fastapi", reason="needs posttrain[agents]")

MESSAGES = [{"role": "user", "content": "Say something."}]


def test_a_chat_with_vllm_is_the_answer_of_the_served_weights(tmp_path):
    model = save_model(tmp_path / "tiny", "qwen2")
    keys = SMALL | {"python": vllm_python(), "max_model_len": 200}
    given = [f"{key}={value}" for key, value in keys.items() if key != "type"]
    command = [sys.executable, "-m", "posttrain.cli.main", "serve", str(model), *given]
    command += ["--engine", "vllm", "--port", "0"]
    with (tmp_path / "errors").open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    address = process.stdout.readline().split()
    try:
        assert address, (tmp_path / "errors").read_text()
        with openai.OpenAI(base_url=address[-1], api_key="any", max_retries=0, timeout=300) as client:
            compare(client, model)
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(60) in (0, 130)
        process.stdout.close()


def compare(client, model):
    policy = Policy(ModelRecipe(path=str(model)))
    renderer = Renderer(policy.tokenizer, policy.end_tokens)
    prompt = tuple(renderer.prompt(MESSAGES))
    (expected,) = local_answers(policy, [Request(prompt, GREEDY, 0, 12)])

    def chat(**more):
        return client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=12, logprobs=True, **more)

    (choice,) = chat(temperature=0).choices
    assert choice.message.content == renderer.answer_text(expected.ids)
    assert [one.logprob for one in choice.logprobs.content] == pytest.approx(expected.logprobs, abs=1e-4)
    parts = list(chat(temperature=0, stream=True))
    assert "".join(part.choices[0].delta.content or "" for part in parts) == choice.message.content

    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(model)(torch.tensor([prompt])).logits[0, -1].float()
    at_07 = (logits / 0.7).log_softmax(-1)
    checked = 0
    for seed in range(8):
        sampling = {"max_tokens": 1, "temperature": 0.7, "seed": seed, "logprobs": 1}
        answer = client.completions.create(model="tiny", prompt=list(prompt), **sampling)
        text, logprobs = answer.choices[0].text, answer.choices[0].logprobs.token_logprobs
        if not logprobs:  # the end token, which is not shown
            continue
        checked += 1
        candidates = [float(at_07[id]) for id in range(len(at_07)) if renderer.answer_text([id]) == text]
        assert min(abs(one - logprobs[0]) for one in candidates) < 1e-4
    assert checked > 3
    with pytest.raises(openai.BadRequestError, match="fewer than the model's 200"):
        client.completions.create(model="tiny", prompt=[5] * 200)
