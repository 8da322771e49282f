"""Small samples, policies and learners for the checks."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from posttrain.distributed import world
from posttrain.episode import Stream
from posttrain.models.forward import ForwardPath
from posttrain.models.gate import use_path
from posttrain.models.layers import use_fused_layers
from posttrain.models.policy import Policy
from posttrain.recipe.hardware import HardwareRecipe
from posttrain.recipe.model import LearnerRecipe, ModelRecipe, OptimizerRecipe
from posttrain.training.objectives import token_forward
from posttrain.training.optimizer import Optimizer
from posttrain.training.updater import PreferenceSide, Sample, Updater

LENGTH, PROMPT = 24, 8


def recipe(path: Path, **settings: Any) -> ModelRecipe:
    return ModelRecipe(path=str(path), **({"dtype": "bfloat16", "device": "cuda"} | settings))


def stream(number: int, length: int = LENGTH, prompt: int = PROMPT) -> Stream:
    """Random ids, of which those after the prompt were sampled; two streams with the same `number // 2` share their prompt."""
    shared, own = np.random.default_rng(number // 2), np.random.default_rng(1000 + number)
    ids = np.concatenate([shared.integers(3, 300, prompt), own.integers(3, 300, length - prompt)])
    sampled = np.arange(length) >= prompt
    logprobs = np.where(sampled, -1.0, 0.0).astype(np.float32)
    turn = np.where(sampled, 0, -1).astype(np.int32)
    return Stream(ids, sampled, logprobs, np.zeros(length, np.float32), turn, turn)


def samples(count: int = 4, pairs: bool = False) -> list[Sample]:
    """Samples with all that any objective asks for."""
    ones = np.ones(LENGTH - PROMPT, np.float32)
    made = []
    for number in range(count):
        numbers = dict.fromkeys(("advantages", "values", "returns"), ones * (0.5 if number % 2 else -0.5))
        numbers |= {"ref_logprobs": -ones, "old_logprobs": -ones, "bonus": ones > 0}
        numbers |= {"entropies": np.arange(len(ones), dtype=np.float32)}
        side = PreferenceSide(number // 2, number % 2 == 0, 0.5) if pairs else None
        name, group = f"sample {number}", number // 2
        made.append(Sample(stream(number), name, episode=number, group=group, side=side, **numbers))
    return made


def arrays(rows: Sequence[Sample]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Token ids and masks of samples."""
    return [row.stream.ids for row in rows], [row.stream.sampled for row in rows]


def updater(model: Any, forward: Any, tokens_per_batch: int = 4096, **settings: Any) -> Updater[Any]:
    optimizer = Optimizer(model.trainable(), OptimizerRecipe(), 100)
    return Updater(model, optimizer, LearnerRecipe(tokens_per_batch=tokens_per_batch), forward, **settings)


def policy_updater(policy: Policy, tokens_per_batch: int = 4096, head: Any = None) -> Updater[Any]:
    return updater(policy, token_forward(policy, LearnerRecipe(), head=head), tokens_per_batch)


def updated(learner: Updater[Any], batch: Sequence[Sample], objective: Any) -> None:
    """One update, which must not be skipped."""
    totals = learner.update(batch, objective)
    assert totals["optimizer/skipped"] == (0.0, 1.0)
    assert totals["optimizer/gradient_norm"][0] > 0
    assert all(isinstance(number, float) for pair in totals.values() for number in pair)


def deeper(source: Path, target: Path, layers: int) -> Path:
    """The model at `source` with another number of layers, whose weights are drawn again."""
    config = AutoConfig.from_pretrained(source)
    config.num_hidden_layers = layers
    config.layer_types = None
    AutoModelForCausalLM.from_config(config).save_pretrained(target)
    AutoTokenizer.from_pretrained(source).save_pretrained(target)
    return target


class ShapedPolicy(Policy):
    """A policy of any shape, whose weights are made on the fake device. The tokenizer is that of the recipe's model."""

    def __init__(self, recipe: ModelRecipe, config: Any) -> None:
        self._config = config
        super().__init__(recipe)

    def load(self) -> torch.nn.Module:
        with torch.device("cuda"):
            model = AutoModelForCausalLM.from_config(self._config, dtype=torch.bfloat16, attn_implementation="sdpa")
        use_path(model, ForwardPath())
        use_fused_layers(model)
        return model.eval()


def _resized(device: Any, change: Any, tensor: torch.Tensor) -> None:
    change(tensor)
    device.resized(tensor.untyped_storage())


@contextmanager
def processes(device: Any, count: int | list[int], together: int) -> Iterator[None]:
    """Make this process the first of the learner processes `hardware.processes: count` inside the block, of which
    `together` compute a row together. Collective calls allocate their results and move nothing; FSDP has the streams of
    a CPU, which do not wait."""
    import pytest
    from torch.distributed.fsdp import _fully_shard as fsdp
    from torch.testing._internal.distributed.fake_pg import FakeStore

    with pytest.MonkeyPatch.context() as patch:
        for module in (fsdp._fsdp_collectives, fsdp._fsdp_param_group, fsdp._fsdp_state):
            patch.setattr(module, "_get_device_handle", lambda kind: torch.cpu)
        for name in ("alloc_storage", "free_storage"):
            patch.setattr(fsdp._fsdp_param, name, partial(_resized, device, getattr(fsdp._fsdp_param, name)))
        # Reductions between replicas need an event.
        patch.setattr(torch.cpu.Stream, "record_event", lambda stream: torch.cpu.Event())
        patch.setattr(fsdp._fully_shard, "_get_device_from_mesh", lambda mesh: torch.device("cuda", 0))
        hardware = HardwareRecipe(processes=count, sequence_parallel=together, gradient_sync="per_forward")
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=hardware.learners)
        patch.setitem(world._state, "world", world.World(hardware, 0, hardware.learners))
        patch.setitem(world._state, "mesh", None)
        patch.setitem(world._state, "sequence", torch.distributed.new_group(list(range(together))))
        try:
            yield
        finally:
            torch.distributed.destroy_process_group()
