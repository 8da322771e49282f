"""Memory of one of 8 GPUs in updates of published shapes, for `benchmarks/memory.py`, which runs it.

Everything is as on 8 GPUs but for numbers: FSDP2, sharded AdamW, packed rows, flash attention, the fused output projection, and
transformers' grouped products of experts.
"""

import json

import pytest

from tests.cuda_fake import made
from tests.cuda_fake.checks_memory import measured, planned

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
