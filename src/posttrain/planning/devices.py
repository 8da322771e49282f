"""What devices can do at most, and which share of it each kind of work reaches.

Peaks of GPUs are the vendor's (dense, SXM modules); their shares are assumptions, each with its reason. Peaks and shares
of the processor are measurements of docs/performance.md.
"""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml

from posttrain.errors import InputError

GPU_PRODUCTS = 0.65
"""Assumed. Large bfloat16 products reach 60 to 75% of the vendor's dense peak; `benchmarks/gpu.py --parts limits`
measures it. With what is moved besides, Qwen3-32B trains at 42% of an H100's peak in this model with gradient
checkpointing and at 56% without, where Llama 3 405B is reported at 38 to 43% (arXiv 2407.21783, table 4)."""
GPU_READING = 0.7
"""Assumed: decoding reads weights and caches at 70% of the memory's bandwidth."""
GPU_MOVED = 8.0
"""Assumed, unfused PyTorch: of each number kept for the backward pass, a write and two reads, a write and a read of its
gradient, and three more for temporaries of norms, gates and rotary positions."""
GPU_LINKS = 0.8
"""Assumed: rings of large messages reach 80% of a link's bandwidth."""
GPU_LAUNCH = 20e-6
"""Assumed, seconds a layer and decoding step: about ten kernels of a CUDA graph."""
GPU_LAUNCH_EAGER = 100e-6
"""Assumed, seconds a layer and decoding step where each kernel is started from Python (`enforce_eager`)."""
HOP = 10e-6
"""Assumed, seconds: one all-reduce of a few bytes inside a node."""
SYNC = 0.35
"""Share of a device's network link at which an engine takes new weights. Reported for NCCL in buckets between trainers
and engines: 30.5 billion bfloat16 parameters in 4.4 s, 235 billion in 23.7 s, which are 14 and 20 GB/s, of 50 GB/s."""

CPU_PRODUCTS = 0.8
"""Measured: `mm` ran at about 800 of 992 GFLOP/s in a training step of SmolLM2-135M."""
CPU_MOVED = 32.0
"""Fitted to the same step, of which 65% were `mm`: the rest, at the bandwidth, per byte kept for the backward pass."""
CPU_LAUNCH = 0.15e-3
"""Measured, seconds a layer: of the 30 ms of a decoding step of 30 layers, 15% were neither products, nor sampling, nor
writes to the cache."""
CPU_DECODING = 0.6
"""Fitted to decoding steps: on one core they took 18.7 ms and 1.02 ms a sequence (of some 150 tokens), from 12 to 98
sequences; on two cores 30 ms at 30 sequences."""
CPU_READING = 0.8
"""Fitted to the same."""


@dataclass(frozen=True)
class Device:
    """Peaks of one device, and the shares of them that work reaches. Bandwidths are bytes/s in one direction."""

    name: str
    bfloat16: float
    """FLOP/s of dense products, at most."""
    float32: float
    """FLOP/s of dense products, at most."""
    reading: float
    """Bytes/s read from its memory, at most."""
    memory: float | None = None
    """Bytes of its memory; None is unknown."""
    link: float | None = None
    """Bytes/s to the other devices of its node; None where there is one device."""
    network: float | None = None
    """Bytes/s to other nodes, this device's share."""
    host: float | None = None
    """Bytes/s to the memory of its node's processors."""
    per_node: int = 8
    """Devices in a node."""
    products: float = GPU_PRODUCTS
    """Share of the peak in products of many rows: prompts, log-probabilities, training."""
    decoding: float = GPU_PRODUCTS
    """Share of the peak in products of a row per sequence."""
    decoding_reads: float = GPU_READING
    """Share of `reading` at which a decoding step reads weights and caches."""
    moved: float = GPU_MOVED
    """Times that each byte kept for the backward pass is moved, forward and backward together."""
    overlaps: bool = True
    """Whether a decoding step reads weights while it computes: then the longer of both counts, else their sum."""
    launch: float = GPU_LAUNCH
    """Seconds that a layer takes in a decoding step however little it computes."""
    links: float = GPU_LINKS
    """Share of `link` and `network` that collective operations reach."""

    def peak(self, width: int) -> float:
        """FLOP/s at numbers of `width` bytes."""
        return self.bfloat16 if width == 2 else self.float32

    def bandwidth(self, devices: int) -> float:
        """Bytes/s of a ring over `devices` devices, which is as fast as its slowest link."""
        found = self.link if devices <= self.per_node else self.network
        if found is None:
            raise InputError(f"{self.name} has no link to other devices, so {devices} cannot be planned")
        return found * self.links


H200 = Device("h200", 989e12, 67e12, 4.8e12, 141e9, 450e9, 50e9, 64e9)
"""NVIDIA H200 SXM data sheet; NVLink 900 GB/s both ways, a 400 Gbit/s adapter a GPU, PCIe 5 x16."""
DEVICES = {
    device.name: device
    for device in (
        H200,
        replace(H200, name="h100", reading=3.35e12, memory=80e9),
        Device("a100", 312e12, 19.5e12, 2.039e12, 80e9, 300e9, 25e9, 32e9),
        Device(
            "epyc-zen5-2",
            992e9,
            500e9,
            47e9,
            products=CPU_PRODUCTS,
            decoding=CPU_DECODING,
            decoding_reads=CPU_READING,
            moved=CPU_MOVED,
            overlaps=False,
            launch=CPU_LAUNCH,
            per_node=1,
        ),
    )
}
"""Name -> device. `a100` is the 80 GB SXM module with 200 Gbit/s a GPU; `epyc-zen5-2` the two cores of docs/performance.md
(float32 is oneDNN's 250 GFLOP/s a core, which training and engine use)."""
_NAMES = ", ".join(DEVICES)


def device_of(limits: str) -> Device:
    """The device that the option `--on` names: a key of `DEVICES`, or a YAML file with the fields of `Device`.

    A file may say `like: NAME`, whose numbers stand where it has none of its own; without it `bfloat16`, `float32` and
    `reading` are needed. `InputError` for what is neither, for unknown keys, and for numbers not above 0.
    """
    if limits in DEVICES:
        return DEVICES[limits]
    file = Path(limits).expanduser()
    if not file.is_file():
        raise InputError(f"--on: {limits} is no file, and no device known here; those are {_NAMES}")
    try:
        values: Any = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"--on: {limits} is not YAML; write a number after each key of a device") from error
    return _read(values, limits, file.stem)


def _read(values: Any, where: str, name: str) -> Device:
    if not isinstance(values, dict):
        raise InputError(f"--on: {where} holds no keys; say bfloat16, float32 and reading, or `like: NAME`")
    given = dict(values)
    base = given.pop("like", None)
    if base is not None and base not in DEVICES:
        raise InputError(f"--on: {where} says `like: {base}`; the devices known here are {_NAMES}")
    known = {field.name for field in fields(Device)} - {"name"}
    if unknown := sorted(set(given) - known):
        raise InputError(f"--on: {where} has an unknown key {unknown[0]}; a device has {', '.join(sorted(known))}")
    if base is None and (missing := [key for key in ("bfloat16", "float32", "reading") if key not in given]):
        raise InputError(f"--on: {where} lacks {missing[0]}; give it, or say `like: NAME`")
    for key, value in given.items():
        if key == "overlaps":
            if not isinstance(value, bool):
                raise InputError(f"--on: {key} in {where} is true or false, not {value!r}")
            continue
        given[key] = _number(key, value, where)
    return replace(DEVICES[base], name=name, **given) if base else Device(name, **given)


def _number(key: str, value: Any, where: str) -> float | int:
    try:
        # YAML takes 9e11 for text.
        number = float(value) if not isinstance(value, bool) else 0.0
    except (TypeError, ValueError):
        number = 0.0
    least = 0.0 if key == "launch" else 1e-12
    if not least <= number < 1e30:
        raise InputError(f"--on: {key} in {where} is a number above 0, not {value!r}")
    return int(number) if key == "per_node" else number
