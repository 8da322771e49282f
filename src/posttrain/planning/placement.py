"""Device layout of a run: learner devices, sharding, and engine locations."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Placement:
    """Device layout of a run. The default is one device, with the engine in the learner's process."""

    devices: int = 1
    """Number of learner devices."""
    shard: int = 1
    """Devices per shard group of weights, gradients and optimizer state (FSDP, ZeRO stage 3). A learner with more devices
    holds `devices / shard` replicas."""
    expert_parallel: int = 1
    """Expert-parallel size. Tokens are sent to the experts; expert weights stay in place."""
    engines: int = 0
    """Engines with their own copy of the weights. 0: one engine that uses the learner's weights."""
    tensor: int = 1
    """Tensor-parallel size of one engine. Matrices and KV-cache heads are divided."""
    colocated: bool = True
    """Whether the engines share the learner's devices. Sampling and learning then alternate."""

    def __post_init__(self) -> None:
        if self.devices % self.shard or self.shard % self.expert_parallel:
            raise ValueError("`devices` must be a multiple of `shard`, and `shard` a multiple of `expert_parallel`")
        if self.engines == 0 and self.devices > 1 and not self.colocated:
            raise ValueError("a learner on several devices without colocation needs `engines` of at least 1")
        if self.engines and self.colocated and self.engines * self.tensor > self.devices:
            raise ValueError("colocated engines cannot use more devices than the learner has")


ALONE = Placement()
"""Placement on a single device."""
