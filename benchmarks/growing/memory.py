"""Whether the memory of a long run stays flat: tiny steps of sampling, scoring and updating in one process."""

from pathlib import Path

import numpy as np
import torch

from growing.engine import answer_all, made_up_prompt
from growing.series import Series
from posttrain.engines.local.engine import LocalEngine
from posttrain.models.policy import Policy
from posttrain.recipe.engines import LocalEngineRecipe

FLAT = 0.02
"""Largest exponent that counts as flat: 5% more memory after ten times as many steps."""
LENGTHS = 251
"""Lengths of prompts: many, since a kernel is compiled and kept for every new shape. A prime, ..."""
STRIDE = 100
"""... so that steps of this stride meet each of them before any comes again."""


def resident_bytes() -> int:
    """Bytes of memory that the process holds now."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status names no VmRSS")


def over_steps(policy: Policy, steps: int) -> Series:
    """Resident bytes after each tenth of `steps` steps, the first tenth being the warm-up that fills every cache.

    A step samples 4 answers to a prompt of one of `LENGTHS` lengths, scores and updates, and forgets what was cached.
    """
    kind = str(policy.model.dtype).removeprefix("torch.")
    series = Series("engine and learner", "steps", f"resident MB, {kind}", 0.0, FLAT)
    engine = LocalEngine(policy, LocalEngineRecipe(slots=4))
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=1e-5, foreach=True)
    for step in range(1, steps + 1):
        length = 16 + step * STRIDE % LENGTHS
        prompt = made_up_prompt(policy, length, "memory", step)
        _, answers = answer_all(engine, [prompt] * 4, 4)
        streams = [np.array(prompt + answer, dtype=np.int64) for answer in answers]
        sampled = [np.arange(len(stream)) >= length for stream in streams]
        with policy.training_mode():
            scores = policy.score(streams, sampled, 1.0, 64)
        scores.logprobs.mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        engine.load_weights(step)
        if step % max(1, steps // 10) == 0:
            series.add(step, resident_bytes() / 1e6)
    return series
