"""Checkpoints that threads of several processes write, and the 8-bit state of an optimizer that they divide."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from posttrain.distributed.sharding import ShardedModel, compute_dtype, local_shard, shard_like
from posttrain.distributed.tensors import read_tensors, write_tensors
from posttrain.distributed.world import current_world
from posttrain.recipe.model import OptimizerRecipe
from posttrain.training.adamw import dequantized
from posttrain.training.optimizer import Optimizer
from tests.training import preferences, small

from . import together
from .test_parity import models  # noqa: F401


def values(tiny, folder, **changes):
    """Four updates, saved after each."""
    folder.mkdir(parents=True, exist_ok=True)
    optimizer = {"learning_rate": 3e-3, "type": "adamw_8bit"}
    given = {"steps": 4, "rows_per_update": 5, "optimizer": optimizer, "evaluation": {"every": 0}} | changes
    made = preferences.recipe_values("sft", tiny, folder, **given)
    made["checkpoint"] = made["checkpoint"] | {"asynchronous": True}
    return made


@pytest.mark.slow
def test_processes_resume_to_the_same_bits_and_others_go_on(models, tmp_path):  # noqa: F811
    jobs = [{"values": values(models, tmp_path / name, **steps)} for name, steps in (("2", {}), ("2_2", {"steps": 2}))]
    together.succeed(2, jobs, tmp_path)
    shutil.copytree(tmp_path / "2_2", tmp_path / "2_1")
    dies = (0, "posttrain.training.checkpoint:Checkpoints._seal", 2)
    killed = together.run(2, [{"values": values(models, tmp_path / "killed"), "die": dies}], tmp_path)
    assert killed[0][0] == -1
    again = [{"values": values(models, tmp_path / name), "resume": True} for name in ("2_2", "killed")]
    together.succeed(2, again, tmp_path)
    whole = small.weights(tmp_path / "2" / "small")
    assert small.weights(tmp_path / "2_2" / "small") == whole
    assert small.weights(tmp_path / "killed" / "small") == whole
    together.succeed(1, [{"values": values(models, tmp_path / "2_1"), "resume": True}], tmp_path)
    start, two, regrouped = (
        torch.cat([tensor.flatten() for _, tensor in sorted(load_file(folder / "model.safetensors").items())])
        for folder in (models, tmp_path / "2" / "small" / "model", tmp_path / "2_1" / "small" / "model")
    )
    assert 0 < (regrouped - two).norm() / (two - start).norm() < 0.05


SHAPES = {"aligned": (96, 256), "crossed": (150, 200), "narrow": (40, 128), "bias": (128,), "rows": (3, 4096)}
"""Of parameters: those whose shards start at blocks of 256 numbers, others, one whose shards are too small for 8-bit numbers, one
that is too small itself, and one with fewer rows than processes."""


def updated(folder, start, dtype, kind):
    """An optimizer after three updates, or one that was read from the checkpoint `start`."""
    world, draws = current_world(), torch.Generator().manual_seed(0)
    values = {key: torch.randn(shape, generator=draws).to(dtype) for key, shape in SHAPES.items()}
    model = torch.nn.ParameterDict(values)
    sharded = ShardedModel(model, [], torch.device("cpu")) if world.sharded else None
    optimizer = Optimizer(list(model.items()), OptimizerRecipe(type=kind, learning_rate=1e-3), 10)
    if start is not None:
        state = json.loads((folder / start / "state.json").read_text())
        weights = rounded(optimizer)
        read_tensors(folder / start / kind, optimizer.tensors(state) | weights)
        for each in optimizer.trained:
            local_shard(each.parameter).detach().copy_(local_shard(weights[f"weight {each.name}"]))
        optimizer.load_state_dict(state)
    for _ in range(0 if start else 3):
        gradients = {key: torch.randn(shape, generator=draws).to(dtype) for key, shape in SHAPES.items()}

        def loss(gradients=gradients):
            return sum((model[key] * gradients[key]).sum() for key in SHAPES) / world.size

        (loss() if sharded is None else sharded(loss)).backward()
        optimizer.collect()
        optimizer.step()
    return optimizer


def rounded(optimizer):
    """The weights as files of a model have them."""
    kinds = {each.name: compute_dtype(each.parameter) for each in optimizer.trained}
    shards = {each.name: local_shard(each.parameter).detach().to(kinds[each.name]) for each in optimizer.trained}
    return {f"weight {each.name}": shard_like(shards[each.name], each.parameter) for each in optimizer.trained}


def moments(folder, name, start=None):
    """8-bit moments, and masters of bfloat16 weights, after three updates, or those read from the checkpoint `start`, whole; and
    a checkpoint of them."""
    world, found = current_world(), {}
    optimizer = updated(folder, start, torch.bfloat16, "adamw")
    write_tensors(folder / name / "adamw", optimizer.tensors() | rounded(optimizer))
    for each in optimizer.trained:
        found[f"{each.name} master"] = torch.cat(world.gather([each.master.flatten()])[: world.shards])
    optimizer = updated(folder, start, torch.float32, "adamw_8bit")
    write_tensors(folder / name / "adamw_8bit", optimizer.tensors() | rounded(optimizer))
    for each in optimizer.trained:
        for kind, moment in enumerate(("state1", "state2")):
            values = each.moments[moment].flatten()
            if values.dtype == torch.uint8:
                values = dequantized(values, each.moments[moment.replace("state", "absmax")], kind)
            found[f"{each.name} {moment}"] = torch.cat(world.gather([values])[: world.shards])
        assert local_shard(each.parameter).numel() == values.numel()
    if world.is_rank0:
        (folder / name / "state.json").write_text(json.dumps(optimizer.state_dict()))
        torch.save(found, folder / f"{name}.pt")


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        (2, 1),
        (1, 2),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [(2, 4), (4, 2), (4, [2, 2]), ([2, 2], 4), ([2, 2], 1)]
        ),
    ],
)
def test_8_bit_moments_are_read_by_other_numbers_of_processes(saved, resumed, tmp_path):
    for processes, name, start in (
        (saved, "saved", None),
        (resumed, "resumed", "saved"),
        (resumed, "again", "resumed"),
    ):
        count = int(np.prod(processes))
        job = {"call": moments, "arguments": (tmp_path, name, start), "hardware": {"processes": processes}}
        together.succeed(count, [job], tmp_path)
    before, after, again = (torch.load(tmp_path / f"{name}.pt") for name in ("saved", "resumed", "again"))
    assert all(torch.equal(after[name], again[name]) for name in after)
    rounded = set()
    for name, old in before.items():
        assert old.abs().max() > 0
        assert old.shape == after[name].shape
        if name.endswith("master"):
            bits = old.view(
                torch.int32
            )  # shards store the next smaller number of those that FSDP rounds down from halfway
            assert torch.equal(after[name].view(torch.int32), bits - ((bits & 0x1FFFF) == 0x8000).int())
            assert (old != old.bfloat16()).float().mean() > 0.9
            continue
        # Half of the largest step between 8-bit numbers, of which the largest is 1.
        assert (after[name] - old).abs().max() <= 0.0075 * old.abs().max(), name
        rounded |= set() if torch.equal(after[name], old) else {name.split()[0]}
    assert rounded <= {"crossed", "narrow"}
    shards = [count if isinstance(count, int) else count[1] for count in (saved, resumed)]
    assert ("crossed" in rounded) == (shards[0] != shards[1])
