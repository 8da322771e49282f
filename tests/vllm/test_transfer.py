"""Weights reach a vLLM server by a broadcast of the learner's process group, which between CPUs is gloo's."""

import pytest

from posttrain.engines.vllm.engine import open_vllm
from posttrain.models.policy import Policy
from posttrain.recipe.engines import VllmEngineRecipe
from posttrain.recipe.model import ModelRecipe
from tests.vllm.asking import SMALL, answers, local_answers, move, request
from tests.vllm.interpreter import needs_vllm, vllm_python
from tests.vllm.models import save_model

pytestmark = [needs_vllm, pytest.mark.slow, pytest.mark.timeout(900)]


def test_broadcast_weights_take_effect_and_a_killed_server_gets_files(tmp_path):
    policy = Policy(ModelRecipe(path=str(save_model(tmp_path / "tiny"))))
    keys = {"python": vllm_python(), "weight_transfer": "nccl"}
    engine = open_vllm(policy, VllmEngineRecipe.model_validate(SMALL | keys), max_context=256, logs=tmp_path / "logs")
    asked = [request(number) for number in range(3)]
    try:
        for seed in (1, 2):
            move(policy, seed=seed)
            engine.load_weights(policy.version)
            assert [one.ids for one in answers(engine, asked)] == [one.ids for one in local_answers(policy, asked)]
        engine._replicas[0].replica._kill()
        assert [one.ids for one in answers(engine, asked)] == [one.ids for one in local_answers(policy, asked)]
        assert engine.restarts == 1
        move(policy, seed=3)
        engine.load_weights(policy.version)
        assert [one.ids for one in answers(engine, asked)] == [one.ids for one in local_answers(policy, asked)]
    finally:
        engine.close()
