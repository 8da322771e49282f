"""Who computes where: how many devices a learner has, how its state is divided, and where the engines are."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Placement:
    """Who computes on how many devices. As it stands: everything on one, the engine in the learner's process."""

    devices: int = 1
    """Of the learner."""
    shard: int = 1
    """Devices over which weights, gradients and optimizer state are divided (FSDP, ZeRO 3); more than that are copies."""
    expert_parallel: int = 1
    """Devices over which the experts of a layer are divided while it computes: their tokens move instead of them."""
    engines: int = 0
    """Engines with weights of their own; 0: the engine uses the learner's."""
    tensor: int = 1
    """Devices of one engine, which divide each matrix and the heads of the cache among them."""
    colocated: bool = True
    """Whether the engines are on the learner's devices and take turns with it."""
    offloaded: bool = False
    """Whether optimizer state and masters are in the memory of the processors, where AdamW computes."""
    async_rollouts: int = 0
    """Steps by which engines apart may run ahead: the weights that an answer began with are at most so many steps old
    when it is learned from. 0: engines and learner wait for each other."""

    def __post_init__(self) -> None:
        if self.devices % self.shard or self.shard % self.expert_parallel:
            raise ValueError("`devices` is a multiple of `shard`, and `shard` of `expert_parallel`")
        if self.engines == 0 and self.devices > 1 and not self.colocated:
            raise ValueError("engines apart are at least one")
        if self.engines and self.colocated and self.engines * self.tensor > self.devices:
            raise ValueError("colocated engines take no more devices than the learner has")
        if self.async_rollouts and (self.colocated or not self.engines):
            raise ValueError("only engines apart can sample ahead of the learner")

    @property
    def all_devices(self) -> int:
        """Learner and engines together."""
        return self.devices + (0 if self.colocated else self.engines * self.tensor)


ALONE = Placement()
"""One device for everything."""
