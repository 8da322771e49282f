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
    offloaded: bool = False
    """Whether optimizer state and float32 master weights are in host memory. AdamW then runs on the CPU."""
    async_rollouts: int = 0
    """Maximum number of steps by which separate engines run ahead of the learner. Also the maximum age, in steps, of the
    weights with which an answer started. 0: synchronous."""

    def __post_init__(self) -> None:
        if self.devices % self.shard or self.shard % self.expert_parallel:
            raise ValueError("`devices` must be a multiple of `shard`, and `shard` a multiple of `expert_parallel`")
        if self.engines == 0 and self.devices > 1 and not self.colocated:
            raise ValueError("a learner on several devices without colocation needs `engines` of at least 1")
        if self.engines and self.colocated and self.engines * self.tensor > self.devices:
            raise ValueError("colocated engines cannot use more devices than the learner has")
        if self.async_rollouts and (self.colocated or not self.engines):
            raise ValueError(
                "`async_rollouts` needs separate engines: set `colocated` to False and `engines` to at least 1"
            )

    @property
    def all_devices(self) -> int:
        """Number of devices of the learner and the engines."""
        return self.devices + (0 if self.colocated else self.engines * self.tensor)


ALONE = Placement()
"""Placement on a single device."""
