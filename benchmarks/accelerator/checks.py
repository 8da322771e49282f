"""What a device has to pass, in the order in which it is checked."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from accelerator.rows import Row


@dataclass(frozen=True)
class Check:
    """A criterion for the rows of one part."""

    criterion: str
    passes: Callable[[Sequence[Row]], bool]


def _below(limit: float) -> Callable[[Sequence[Row]], bool]:
    return lambda rows: all(row.value < limit for row in rows if row.unit == "relative")


def _share(least: float) -> Callable[[Sequence[Row]], bool]:
    return lambda rows: all(row.share is not None and row.share >= least for row in rows)


def _runs_evenly(rows: Sequence[Row]) -> bool:
    grown = [row.value for row in rows if row.unit == "times"]
    return rows[0].value < 0.05 and all(times < 1.02 for times in grown)


CHECKS = {
    "device": Check("torch is built for CUDA and finds the GPU", lambda rows: all(row.value == 1 for row in rows)),
    "parity": Check("distances below 0.02, gradients included", _below(0.02)),
    "agree-0.5B": Check("losses within 1%, before and after a restore", _below(0.01)),
    "sft-0.5B": Check("MFU of at least 30%", _share(0.3)),
    "sft-4B": Check("MFU of at least 30%", _share(0.3)),
    "sft-4B-compiled": Check("MFU of at least 40%", _share(0.4)),
    "sft-4B-liger": Check("MFU of at least 40%", _share(0.4)),
    "run-vllm": Check("mismatch below 0.05 nats in every step, memory flat from the second on", _runs_evenly),
    "run-killed": Check("losses within 1% of a run that was not killed", _below(0.01)),
    "server-killed-4B": Check(
        "mismatch below 0.05 nats, and every killed server was restarted",
        lambda rows: _runs_evenly(rows) and rows[-1].value >= 1,
    ),
    "gpus-2": Check("losses of two GPUs within 1% of those of one", _below(0.01)),
    "ray-8": Check("three steps of the published placement", lambda rows: bool(rows)),
    "ray-gspo-8": Check("three steps, weights sent in under 3 s", lambda rows: rows[1].value < 3),
    "offload-4B": Check("updates without an error", lambda rows: bool(rows)),
    "decode-4B": Check("a rate for every number in flight", lambda rows: bool(rows)),
}


def judged(part: str, rows: Sequence[Row]) -> list[Row]:
    """The rows with the verdict of the part's check in the first of them."""
    check = CHECKS.get(part)
    if check is None or not rows or rows[0].note.startswith("not run"):
        return list(rows)
    passed = all(row.value == row.value for row in rows) and check.passes(rows)
    verdict = "passed" if passed else "FAILED"
    return [replace(rows[0], check=f"{verdict}: {check.criterion}"), *rows[1:]]
