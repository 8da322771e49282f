"""What a device has to pass, in the order in which it is checked."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from accelerator.rows import PLAN, WEIGHTS, Row

FAILED = "FAILED"


@dataclass(frozen=True)
class Check:
    """A criterion for the rows of one part, which are all numbers."""

    criterion: str
    passes: Callable[[Sequence[Row]], bool]


def _below(limit: float) -> Callable[[Sequence[Row]], bool]:
    return lambda rows: all(row.value < limit for row in rows if row.unit == "relative")


def _agrees(rows: Sequence[Row]) -> bool:
    return _below(0.02)(rows) and all(row.value < 0.05 for row in rows if row.unit == "nats")


def _trains(least: float) -> Check:
    """The check of supervised training: share of the peak FLOP/s, and peak memory against the plan."""

    def passes(rows: Sequence[Row]) -> bool:
        shares = [row.share or 0.0 for row in rows if row.unit == "tokens/s"]
        plans = [row.value for row in rows if row.unit == PLAN]
        return bool(shares and plans) and min(shares) >= least and all(0.9 <= plan <= 1.1 for plan in plans)

    return Check(f"MFU of at least {least:.0%}, peak memory within 10% of the plan", passes)


def _matches(rows: Sequence[Row]) -> bool:
    return rows[0].unit == "nats" and rows[0].value < 0.05 and bool(_of_case(rows, WEIGHTS))


def _runs_evenly(rows: Sequence[Row]) -> bool:
    grown = [row.value for row in rows if row.unit == "times"]
    return _matches(rows) and bool(grown) and all(times < 1.02 for times in grown)


def _of_case(rows: Sequence[Row], text: str) -> list[Row]:
    return [row for row in rows if text in row.case]


def _decodes(rows: Sequence[Row]) -> bool:
    shares = [row.share or 0.0 for row in _of_case(rows, "32 in flight, engine")]
    return bool(shares) and min(shares) >= 0.6


NUMBERS = Check("numbers without an error", lambda rows: bool(rows))
MATCHES = Check("mismatch below 0.05 nats in every step, time of sending weights", _matches)
CHECKS = {
    "device": Check("torch is built for CUDA and finds the GPU", lambda rows: all(row.value == 1 for row in rows)),
    "limits": NUMBERS,
    "parity": Check("distances below 0.02, gradients included; engine within 0.05 nats", _agrees),
    "attention": Check("distance below 0.02 with and without the mask", _below(0.02)),
    **dict.fromkeys(
        ("ragged-4B", "rl-1.7B", "rl-4B", "rl-4B-lora", "profile-4B", "profile-0.5B", "optimizers"),
        NUMBERS,
    ),
    **dict.fromkeys(
        ("lora-4B", "lora-8B", "qlora-8B"),
        Check(
            "peak memory within 10% of the plan",
            lambda rows: all(0.9 <= row.value <= 1.1 for row in rows if row.unit == PLAN),
        ),
    ),
    "agree-0.5B": Check("losses within 1%, before and after a restore", _below(0.01)),
    "sft-0.5B": _trains(0.3),
    "sft-4B": _trains(0.3),
    "sft-4B-liger": _trains(0.4),
    "decode-4B": Check("at least 60% of the bound at 32 in flight", _decodes),
    "run-vllm": Check(f"{MATCHES.criterion}, memory flat from the second on", _runs_evenly),
    "server-killed-4B": Check(
        "as run-vllm, and every killed server was restarted", lambda rows: _runs_evenly(rows) and rows[-1].value >= 1
    ),
    "offload-4B": NUMBERS,
    "offload-8B": Check("three updates with everything in CPU memory", lambda rows: bool(rows)),
    "gpus-2": Check("losses of two GPUs within 1% of those of one", _below(0.01)),
    "ray-8": Check("three steps of ppo_8gpu.yaml", lambda rows: rows[-1].value == 3),
    "ray-gspo-8": Check(
        "three steps of gspo_8gpu_published.yaml, weights sent in under 3 s",
        lambda rows: rows[-1].value == 3 and all(row.value < 3 for row in _of_case(rows, WEIGHTS)),
    ),
    "run-killed": Check(
        "losses within 1% of a run that was not killed, and the same ones with deterministic kernels",
        lambda rows: len(rows) == 2 and rows[0].value < 0.01 and rows[1].value == 0,
    ),
    "log-probabilities": NUMBERS,
    "decode-0.5B": NUMBERS,
    "rl-0.5B": NUMBERS,
    "sft-1.5B": NUMBERS,
}
"""Parts of TRL have no check: their failures are not failures of posttrain."""
ON_TINY = {"run-vllm": MATCHES}
ON_TINY |= dict.fromkeys(("device", "sft-0.5B", "sft-4B", "sft-4B-liger", "decode-4B"), NUMBERS)
"""Replaces criteria that only a GPU or a model of full size can meet."""


def judged(part: str, rows: Sequence[Row], tiny: bool = False) -> list[Row]:
    """The rows with the verdict of the part's check in the first of them."""
    check = (ON_TINY if tiny and part in ON_TINY else CHECKS).get(part)
    if check is None or not rows or rows[0].note.startswith("not run"):
        return list(rows)
    passed = all(row.value == row.value for row in rows) and check.passes(rows)
    return [replace(rows[0], check=f"{'passed' if passed else FAILED}: {check.criterion}"), *rows[1:]]
