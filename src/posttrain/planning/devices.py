"""Peak performance of devices, and the fraction of it that each kind of work reaches.

GPU peaks are the vendor's (dense, SXM modules). GPU fractions are assumptions, each with its reason. CPU peaks and
fractions were measured; see docs/results/speed.md.
"""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml

from posttrain.errors import InputError

GPU_PRODUCTS = 0.65
"""Assumed. Large bfloat16 products reach 60 to 75% of the vendor's dense peak; `benchmarks/gpu.py --parts limits`
measures it. Including memory traffic, Qwen3-32B trains at 42% of an H100's peak in this model with gradient
checkpointing and at 56% without, where Llama 3 405B is reported at 38 to 43% (arXiv 2407.21783, table 4)."""
GPU_READING = 0.7
"""Assumed: decoding reads weights and caches at 70% of the memory bandwidth."""
GPU_MOVED = 8.0
"""Assumed, unfused PyTorch: memory transfers per saved activation. One write and two reads, one write and one read of its
gradient, and three for temporaries of norms, gates and rotary embeddings."""
GPU_LINKS = 0.8
"""Assumed: rings of large messages reach 80% of a link's bandwidth."""
GPU_LAUNCH = 20e-6
"""Assumed seconds per layer and decoding step: about ten kernels in a CUDA graph."""
GPU_LAUNCH_EAGER = 100e-6
"""Assumed seconds per layer and decoding step if Python launches each kernel (`enforce_eager`)."""
HOST_COPIES = 3
"""Copies of every weight that goes from a learner to a vLLM engine on one machine: down to CPU memory, into a file in shared
memory, and up to the engine."""
HOST_COPIES_RAY = 5
"""Copies on a Ray cluster: down to CPU memory, into the object store, out of it, into a file, and up to the engine."""
HOST_COPY = 4e9
"""Assumed bytes/s of each of them."""
GPU_LAUNCH_LOCAL = 220e-6
"""Seconds per layer and decoding step of the local engine, beyond reading: fitted to 32 sequences on an H100 (188
microseconds at 0.5B, 225 at 4B). Its passes are CUDA graphs, but kernels are unfused, and sampling is not in the graph."""
HOP = 10e-6
"""Assumed, seconds: one all-reduce of a few bytes inside a node."""
SYNC = 0.35
"""Fraction of a device's network bandwidth reached by weight synchronization. Reported for NCCL in buckets between trainers
and engines: 30.5 billion bfloat16 parameters in 4.4 s, 235 billion in 23.7 s, which are 14 and 20 GB/s, of 50 GB/s."""

CPU_PRODUCTS = 0.8
"""Measured: `mm` ran at about 800 of 992 GFLOP/s in a training step of SmolLM2-135M."""
CPU_MOVED = 32.0
"""Fitted to the same step: the 35% outside `mm`, as memory transfers per saved byte."""
CPU_LAUNCH = 0.15e-3
"""Measured seconds per layer: 15% of a 30 ms decoding step with 30 layers, outside products, sampling and cache writes."""
CPU_DECODING = 0.6
"""Fitted to decoding steps: on one core they took 18.7 ms plus 1.02 ms per sequence (of about 150 tokens), for 12 to
98 sequences; on two cores 30 ms for 30 sequences."""
CPU_READING = 0.8
"""Fitted to the same decoding steps."""


@dataclass(frozen=True)
class Device:
    """Peak performance of one device and the fractions reached. Bandwidths are bytes/s in one direction."""

    name: str
    bfloat16: float
    """Peak FLOP/s of dense products."""
    float32: float
    """Peak FLOP/s of dense products."""
    reading: float
    """Peak memory bandwidth in bytes/s."""
    memory: float | None = None
    """Bytes of memory. None: unknown."""
    link: float | None = None
    """Bytes/s to the other devices of its node. None for a single device."""
    network: float | None = None
    """Bytes/s to other nodes, per device."""
    host: float | None = None
    """Bytes/s to host memory."""
    per_node: int = 8
    """Devices per node."""
    products: float = GPU_PRODUCTS
    """Fraction of the peak for products of many rows: prefill, log-probabilities, training."""
    decoding: float = GPU_PRODUCTS
    """Fraction of the peak for products of one row per sequence."""
    decoding_reads: float = GPU_READING
    """Fraction of `reading` at which a decoding step reads weights and caches."""
    moved: float = GPU_MOVED
    """Memory transfers per saved activation byte, forward and backward."""
    overlaps: bool = True
    """Whether reading weights overlaps with computation in a decoding step. If not, the times add up."""
    launch: float = GPU_LAUNCH
    """Minimum seconds per layer in a decoding step."""
    links: float = GPU_LINKS
    """Fraction of `link` and `network` reached by collective operations."""

    @property
    def is_gpu(self) -> bool:
        """Whether the device is a GPU, which reads weights while it computes."""
        return self.overlaps

    def peak(self, width: int) -> float:
        """Peak FLOP/s for numbers of `width` bytes."""
        return self.bfloat16 if width == 2 else self.float32

    def bandwidth(self, devices: int) -> float:
        """Bytes/s of a ring over `devices` devices, limited by its slowest link.

        Raises `InputError` if the device has no such link.
        """
        link = self.link if devices <= self.per_node else self.network
        if link is None:
            raise InputError(f"{self.name} has no link to other devices, so {devices} cannot be planned")
        return link * self.links


H200 = Device("h200", 989e12, 67e12, 4.8e12, 141e9, 450e9, 50e9, 64e9)
"""NVIDIA H200 SXM data sheet; NVLink 900 GB/s both ways, one 400 Gbit/s adapter per GPU, PCIe 5 x16."""
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
"""Name -> device. `a100` is the 80 GB SXM module with 200 Gbit/s per GPU; `epyc-zen5-2` the two cores of docs/results/speed.md
(float32 is oneDNN's 250 GFLOP/s per core, which training and engine use)."""
_NAMES = ", ".join(DEVICES)


def device_of(limits: str) -> Device:
    """The device for the option `--on`: a key of `DEVICES`, or a YAML file with the fields of `Device`.

    With `like: NAME` in the file, missing fields default to those of device NAME. Without it, `bfloat16`, `float32` and
    `reading` are required. Raises `InputError` for unknown devices, unknown keys, and values not above 0.
    """
    if limits in DEVICES:
        return DEVICES[limits]
    file = Path(limits).expanduser()
    if not file.is_file():
        raise InputError(f"--on: {limits} is neither a file nor a known device; known devices are {_NAMES}")
    try:
        values: Any = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(
            f"--on: {limits} is not valid YAML; write one `key: number` line per field of a device"
        ) from error
    return _read(values, limits, file.stem)


def _read(values: Any, where: str, name: str) -> Device:
    if not isinstance(values, dict):
        raise InputError(f"--on: {where} has no keys; give bfloat16, float32 and reading, or `like: NAME`")
    given = dict(values)
    base = given.pop("like", None)
    if base is not None and base not in DEVICES:
        raise InputError(f"--on: {where} has `like: {base}`; known devices are {_NAMES}")
    known = {field.name for field in fields(Device)} - {"name"}
    if unknown := sorted(set(given) - known):
        raise InputError(f"--on: {where} has an unknown key {unknown[0]}; the keys are {', '.join(sorted(known))}")
    if base is None and (missing := [key for key in ("bfloat16", "float32", "reading") if key not in given]):
        raise InputError(f"--on: {where} has no {missing[0]}; add it, or `like: NAME`")
    for key, value in given.items():
        if key == "overlaps":
            if not isinstance(value, bool):
                raise InputError(f"--on: {key} in {where} must be true or false, not {value!r}")
            continue
        given[key] = _number(key, value, where)
    return replace(DEVICES[base], name=name, **given) if base else Device(name, **given)


def _number(key: str, value: Any, where: str) -> float | int:
    try:
        # YAML parses 9e11 as text.
        number = float(value) if not isinstance(value, bool) else 0.0
    except (TypeError, ValueError):
        number = 0.0
    least = 0.0 if key == "launch" else 1e-12
    if not least <= number < 1e30:
        raise InputError(f"--on: {key} in {where} must be a number above 0, not {value!r}")
    return int(number) if key == "per_node" else number
