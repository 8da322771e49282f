"""`posttrain rl` with vLLM as its engine: two steps that change the weights, under the interpreter that trains."""

import pytest

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
