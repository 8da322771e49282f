"""Model FLOPs utilisation of training: how much of what the machine multiplies at most goes into real tokens."""

from functools import cache
from typing import Any

import torch
from harness.data import PROMPT_SHARE
from harness.flops import forward_flops, rows_of, training_flops
from harness.limits import measure_products

from learners.job import Side, Stage
from posttrain.planning.memory import ModelSizes
from posttrain.planning.model_sizes import model_sizes

STREAMS = {"sft": 1, "reward": 2, "dpo": 2}
"""Answers of a row, each with the prompt before it."""


def useful_flops(stage: Stage, sizes: ModelSizes, rows: float, tokens: float) -> float:
    """Operations that a stage requires for `rows` rows of `tokens` tokens together, without padding and recomputing.

    Prompts count once for each answer, as tokens do; attention is that of rows of the mean length; logits are those of
    the answers, of a reward model none. DPO's reference is a forward pass more.
    """
    streams = rows * STREAMS[stage]
    length = tokens / streams
    work = rows_of(streams, length, 0.0 if stage == "reward" else (1 - PROMPT_SHARE) * length)
    return training_flops(sizes, work) + (forward_flops(sizes, work) if stage == "dpo" else 0.0)


class Utilisation:
    """The peaks of the machine, measured once for each precision, and shares of them."""

    def __init__(self, model: str, threads: int) -> None:
        torch.set_num_threads(threads)
        found = model_sizes(model)
        assert found is not None
        self.sizes = found
        self._peak = cache(lambda dtype: measure_products(dtype, side=2048))

    def of(self, stage: Stage, side: Side, outcome: dict[str, Any]) -> float:
        """The share of the peak in the precision that the side multiplies in, in the steps of `outcome`."""
        halved = side.precision == "mixed" and outcome["dtype"] != "float32"
        peak = self._peak(torch.bfloat16 if halved else torch.float32)
        return useful_flops(stage, self.sizes, outcome["rows"], outcome["tokens"]) / outcome["seconds"] / peak
