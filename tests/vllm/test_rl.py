"""`posttrain rl` with vLLM as its engine: two steps that change the weights, under the interpreter that trains."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from posttrain.rollout.store import episodes_file, read_episodes
from tests.vllm.interpreter import needs_vllm
from tests.vllm.trained import trained

pytestmark = [needs_vllm, pytest.mark.slow, pytest.mark.timeout(900)]


def test_two_steps_of_rl_with_servers(tmp_path):
    run, lines = trained(tmp_path, "environment.max_turns=2", "steps=2", "rollout.tokens_per_turn=8", seconds=800)
    steps = [line for line in lines if line["kind"] == "train"]
    assert len(steps) == 2
    for step in steps:
        assert step["tokens/sampled"] > 0
        assert step["tokens/reused"] > 0, "turns and groups share prompts"
        assert 0 < step["policy/mismatch"] < 1e-4
        assert step["optimizer/gradient_norm"] > 0
    assert (run / "logs" / "vllm-0.log").stat().st_size > 0


def test_temperature_with_top_p_stores_the_distribution_that_was_sampled_from(tmp_path):
    """The sampling of the agent recipes: vLLM's log-probabilities are those of the nucleus, computed here from the logits."""
    sampling = ["rollout.sampling.temperature=0.7", "rollout.sampling.top_p=0.95"]
    run, lines = trained(tmp_path, "steps=1", "rollout.tokens_per_turn=8", *sampling, seconds=800)
    (step,) = [line for line in lines if line["kind"] == "train"]
    assert 0 < step["policy/mismatch"] < -np.log(0.95)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    streams = [
        stream
        for episode in read_episodes(episodes_file(run / "episodes", 1, "train")).episodes
        for stream in episode.streams
    ]
    truncated = 0
    for stream in streams:
        with torch.no_grad():
            logits = model(torch.from_numpy(stream.ids)[None]).logits[0, :-1].float()
        probabilities, order = (logits / 0.7).softmax(-1).sort(descending=True, stable=True)
        kept = probabilities.cumsum(-1) - probabilities < 0.95
        nucleus = probabilities.where(kept, 0.0)
        expected = torch.zeros_like(nucleus).scatter(-1, order, nucleus / nucleus.sum(-1, keepdim=True)).log()
        targets = torch.from_numpy(stream.ids[1:])[:, None]
        found, sampled = stream.rollout_logprobs[1:], stream.sampled[1:]
        assert np.abs(expected.gather(-1, targets)[:, 0].numpy() - found)[sampled].max() < 1e-4
        truncated += int((~kept.all(-1)).numpy()[sampled].sum())
    assert truncated > 0
