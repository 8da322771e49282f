"""Memory of one of 8 GPUs in updates of published shapes, for `benchmarks/memory.py`, which runs it.

Everything is as on 8 GPUs but for numbers: FSDP2, sharded AdamW, packed rows, flash attention, the fused output projection, and
transformers' grouped products of experts.
"""

import json

import pytest

from tests.cuda_fake import made
from tests.cuda_fake.checks_memory import measured, planned

TOKENS = 8192
CASES = [
    *(
        (name, lora, True)
        for name in ("Qwen3-4B", "Qwen3-8B", "Qwen3-14B", "Qwen3-32B", "Qwen3-30B-A3B")
        for lora in (False, True)
    ),
    *(("Qwen3-4B", lora, False) for lora in (False, True)),
]


@pytest.mark.parametrize(("name", "lora", "recomputed"), CASES)
def test_update(device, thin_model, name, lora, recomputed):
    """`recomputed`: with gradient checkpointing."""
    with made.processes(device, 8, 1):
        numbers = measured(device, thin_model, name, TOKENS, lora, recomputed)
    planned_bytes = sum(planned(name, TOKENS, lora, recomputed).values())
    print(json.dumps({"model": name, "lora": lora, "recomputed": recomputed, "planned": planned_bytes, **numbers}))
