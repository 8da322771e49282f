"""The memory per process that `--dry-run` shows."""

import pytest
from pydantic import ValidationError

from posttrain.planning.memory import ModelSizes, memory_estimate, process_memory
from posttrain.recipe.compose import load_recipe
from posttrain.recipe.supervised import SftRecipe

SIZES = ModelSizes(
    parameters=1000, layers=2, hidden=8, intermediate=16, heads=2, key_value_heads=1, head_size=4, vocabulary=32
)


def rows(dtype="float32", lora=None, **hardware):
    values = {"data": {"train": "x.jsonl"}, "model": {"dtype": dtype, "lora": lora}, "hardware": hardware}
    recipe = SftRecipe.model_validate(values)
    return {what: count for what, (count, _) in process_memory(recipe, SIZES).items()}, recipe


def test_state_is_divided_and_whole_gradients_are_not():
    found, recipe = rows(processes=4)
    alone = {what: count for what, (count, _) in memory_estimate(recipe, SIZES).items()}
    for what in ("weights", "gradients", "AdamW state"):
        assert found[what] == alone[what] / 4
    assert found["whole gradients"] == 4000
    assert found["activations, roughly"] == alone["activations, roughly"]
    assert "whole gradients" not in rows(processes=4, gradient_sync="per_forward")[0]
    # Offloaded gradients are accumulated in CPU memory, for any number of processes.
    assert "whole gradients" not in rows(processes=4, offload="all")[0]


def test_replicas_do_not_divide_the_state_of_the_model():
    found, _ = rows("bfloat16", processes=[2, 4])
    assert found == rows("bfloat16", processes=4)[0]
    assert rows("bfloat16", processes=[1, 4])[0] == found
    with pytest.raises(ValidationError, match=r"hardware\.processes"):
        rows(processes=[4, 1])
    with pytest.raises(ValidationError, match="make the former a multiple"):
        rows(processes=[3, 3], sequence_parallel=2)


def test_processes_that_compute_rows_together_divide_their_activations():
    found, recipe = rows(processes=4, sequence_parallel=2)
    alone = memory_estimate(rows()[1], SIZES)["activations, roughly"][0]
    # Outputs of attention, two heads of four numbers in each of two layers, are kept twice.
    more = 4 * 2 * 2 * 4 * recipe.learner.tokens_per_batch
    assert found["activations, roughly"] == (alone + more) / 2


def test_in_bfloat16_the_shares_are_the_masters():
    found, _ = rows("bfloat16", processes=2)
    assert found["weights"] == found["gradients"] == 4 * 1000 / 2
    assert "float32 masters and their gradients" not in found
    held = found["activations, roughly"]
    kept = rows("bfloat16", processes=2, reshard_after_forward=False)[0]["gathered temporarily"]
    assert kept == SIZES.gathered_bytes(2, held, held, found["logits"], True, False, True)


def test_adapters_and_offload():
    found, _ = rows("bfloat16", lora={"rank": 1}, processes=2)
    adapters = found["gradients"] * 2 // 4
    assert 0 < adapters < 1000
    assert found["weights"] == (2 * 1000 + 4 * adapters) / 2
    away, _ = rows("bfloat16", processes=2, offload="all")
    assert [away[what] for what in ("weights", "gradients", "AdamW state")] == [0, 0, 0]


def test_a_sharded_reference_model_stays_on_the_gpus_unless_everything_is_offloaded():
    def reference(*hardware):
        keys = ["kl.coefficient=0.1", "model.dtype=bfloat16", *(f"hardware.{key}" for key in hardware)]
        return process_memory(load_recipe([], keys, "rl"), SIZES)["reference model"][0]

    for offload in ("none", "rollouts", "optimizer"):
        assert reference("processes=2", f"offload={offload}") == 1000, offload
    assert reference("processes=2", "offload=all") == reference("offload=all") == 0
    assert reference("offload=rollouts") == reference("offload=optimizer") == 0
