"""Memory and communication of one of 8 GPUs in updates of published shapes, for `benchmarks/memory.py`, which runs it.

Everything is as on 8 GPUs but for numbers: FSDP2, sharded AdamW, packed rows, flash attention, the fused output projection, and
transformers' grouped products of experts.
"""

import gc
import json

import pytest
import torch

from posttrain.recipe.model import OptimizerRecipe
from posttrain.training.optimizer import Optimizer
from tests.cuda_fake import made
from tests.cuda_fake.checks_memory import measured, planned, policy_of

TOKENS = 8192
MODELS = ("Qwen3-4B", "Qwen3-8B", "Qwen3-14B", "Qwen3-32B", "Qwen3-30B-A3B")
CASES = [
    *((name, lora, True, 8) for name in MODELS for lora in (False, True)),
    *(("Qwen3-4B", lora, False, 8) for lora in (False, True)),
    *((name, lora, True, [2, 4]) for name in ("Qwen3-4B", "Qwen3-8B") for lora in (False, True)),
]


@pytest.mark.parametrize(("name", "lora", "recomputed", "processes"), CASES)
def test_update(device, thin_model, name, lora, recomputed, processes):
    """`recomputed`: with gradient checkpointing."""
    with made.processes(device, processes, 1):
        numbers = measured(device, thin_model, name, TOKENS, lora, recomputed)
    planned_bytes = sum(planned(name, TOKENS, lora, recomputed, processes=processes).values())
    row = {"model": name, "lora": lora, "recomputed": recomputed, "processes": processes, "planned": planned_bytes}
    print(json.dumps(row | numbers))


PROCESSES = 8


@pytest.mark.parametrize(
    ("tokens", "recomputed", "lora"),
    [
        *((thousands * 1024, recomputed, False) for recomputed in (False, True) for thousands in (4, 16)),
        *((thousands * 1024, True, lora) for lora in (False, True) for thousands in (32, 128)),
    ],
)
def test_row(device, thin_model, monkeypatch, tokens, recomputed, lora):
    """`tokens` of each process; `recomputed`: with gradient checkpointing."""
    sent = []
    exchange = torch.distributed.all_to_all_single

    def counted(received, rows, group):
        sent.append(rows.numel() * rows.element_size())
        exchange(received, rows, group=group)

    monkeypatch.setattr(torch.distributed, "all_to_all_single", counted)
    gc.collect()
    with made.processes(device, PROCESSES, PROCESSES):
        settings = {"gradient_checkpointing": recomputed, "lora": {"rank": 16} if lora else None}
        policy = policy_of("Qwen3-4B", 36, thin_model, 151_936, **settings)
        optimizer = Optimizer(policy.trainable(), OptimizerRecipe(), 1)
        row = made.stream(0, tokens * PROCESSES)
        gc.collect()
        device.reset()
        state = device.live
        with policy.training_mode("row"):
            scores = policy.score([row.ids], [row.sampled], 1.0, 512)
            held = device.live - state
            policy.set_last_backward(True)
            scores.logprobs.sum().backward()
        optimizer.collect()
        optimizer.step()
    # A process keeps its own part of what it sends.
    numbers = {"state": state, "held": held, "peak": device.peak, "sent": sum(sent) * (PROCESSES - 1) / PROCESSES}
    print(json.dumps({"tokens": tokens, "recomputed": recomputed, "lora": lora} | numbers))
