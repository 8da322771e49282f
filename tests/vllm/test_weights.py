"""Weights of real vLLM servers: those of experts, merged adapters included, and weights that arrive by a broadcast."""

import pytest

from posttrain.engines.vllm.engine import open_vllm
from posttrain.models.policy import Policy
from posttrain.recipe.engines import VllmEngineRecipe
from posttrain.recipe.model import ModelRecipe
from tests.models.families import save_family
from tests.vllm.asking import SMALL, agreed, distance, move, request
from tests.vllm.interpreter import needs_vllm, vllm_python
from tests.vllm.models import save_model

pytestmark = [needs_vllm, pytest.mark.slow, pytest.mark.timeout(900)]
SIZES = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 64}
SIZES |= {"max_position_embeddings": 512}


@pytest.mark.parametrize(
    ("family", "sizes", "lora"),
    [("mixtral", {}, None), ("qwen3_moe", {"head_dim": 32, "moe_intermediate_size": 64}, {"rank": 4})],
)
def test_the_server_samples_with_the_experts_of_the_policy(family, sizes, lora, tmp_path):
    path = save_family(tmp_path / family, family, **(SIZES | sizes))
    policy = Policy(ModelRecipe(path=str(path), lora=lora))
    recipe = VllmEngineRecipe.model_validate(SMALL | {"python": vllm_python(), "adapters": "merged"})
    engine = open_vllm(policy, recipe, max_context=256, logs=tmp_path)
    asked, seen = [request(number) for number in range(4)], []
    try:
        for seed in range(2):
            if seed:
                move(policy, seed)
            engine.load_weights(policy.version)
            found = agreed(engine, policy, asked)
            assert max(distance(policy, *pair) for pair in zip(asked, found, strict=True)) < 1e-3
            seen.append([one.ids for one in found])
    finally:
        engine.close()
    assert seen[0] != seen[1]


def test_broadcast_weights_take_effect_and_a_killed_server_gets_files(tmp_path):
    policy = Policy(ModelRecipe(path=str(save_model(tmp_path / "tiny"))))
    keys = {"python": vllm_python(), "weight_transfer": "nccl"}
    engine = open_vllm(policy, VllmEngineRecipe.model_validate(SMALL | keys), max_context=256, logs=tmp_path / "logs")
    asked = [request(number) for number in range(3)]
    try:
        for step in ("broadcast", "broadcast", "killed", "broadcast"):
            if step == "killed":
                engine._replicas[0].replica._kill()
            else:
                move(policy, seed=policy.version + 1)
                engine.load_weights(policy.version)
            agreed(engine, policy, asked)
        assert engine.restarts == 1
    finally:
        engine.close()
