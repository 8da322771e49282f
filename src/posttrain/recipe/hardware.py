"""What a run computes on: how many processes learn, and, on a Ray cluster, who else computes where."""

from typing import Literal

from pydantic import Field, model_validator

from posttrain.recipe.base import BaseConfig


class EnginePlacement(BaseConfig):
    """The engines of a cluster, each a process of its own."""

    count: int | None = Field(None, ge=0)
    """Engines, each with weights of its own; the episodes of a group stay on one. 0: every learner process samples with its own weights. Null: as many as the learners' devices hold where they are colocated, else one."""
    devices: int = Field(1, ge=1)
    """GPUs of one engine, where the cluster has GPUs."""
    colocated: bool = True
    """Whether the engines take turns with the learners on the learners' GPUs; otherwise they have GPUs of their own."""
    cpus: float = Field(1.0, gt=0)
    """Processor cores of one engine."""


class RewardPlacement(BaseConfig):
    """The copies of the reward model at `reward.path`, each a process of its own."""

    count: int = Field(0, ge=0)
    """Copies; episodes are divided among them. 0: the learner's process holds the reward model."""
    devices: int = Field(1, ge=0, le=1)
    """GPUs of one copy, where the cluster has GPUs."""
    cpus: float = Field(1.0, gt=0)
    """Processor cores of one copy."""


class EnvironmentPlacement(BaseConfig):
    """The processes that environments run in."""

    count: int | None = Field(None, ge=0)
    """Processes; an episode stays in one. 0: environments run in the learner's process. Null: one for every four cores of the cluster that nobody else asks for, at least one and at most 16."""
    cpus: float = Field(0.5, gt=0)
    """Processor cores of one process."""


class DedicatedPlacement(BaseConfig):
    """Models that learn or judge on GPUs of their own, as other systems place them. Such placements are planned and not
    run: `posttrain cluster plan` shows what they would take, and a run refuses them."""

    critic: int = Field(0, ge=0)
    """GPUs of the critic alone; 0: it shares those of the learners."""
    reference: int = Field(0, ge=0)
    """GPUs of the reference model alone; 0: it shares those of the learners."""


class HardwareRecipe(BaseConfig):
    """Processes, devices, and who computes where."""

    processes: int = Field(1, ge=1)
    """Learner processes, each with one GPU or with its share of the processor's threads; they divide each update's forward passes, a step's groups and the model's state. Under `torchrun` as many as that started."""
    gradient_sync: Literal["per_update", "per_forward"] = "per_update"
    """When the processes add up their gradients: `per_update` keeps a whole float32 gradient in every process until then, `per_forward`, after every forward pass, keeps a share of it."""
    reshard_after_forward: bool = True
    """Whether a layer's whole weights are freed after its forward pass and gathered again for its backward pass: less memory, half as much again to send."""
    offload: bool = False
    """Keep weights, gradients and optimizer state in the processors' memory, where AdamW computes; a GPU then holds what it computes with."""
    ray: str | None = None
    """The Ray cluster that the run is placed on: `auto` connects to one that runs on this machine and starts one where none does, anything else is the address of one (`host:port` or `ray://host:port`). Null: no Ray."""
    cpus: float = Field(1.0, gt=0)
    """Processor cores of one learner process on a Ray cluster. Where a cluster has fewer than everybody asks for, all get the same share of what they ask for."""
    engines: EnginePlacement = EnginePlacement()
    rewards: RewardPlacement = RewardPlacement()
    environments: EnvironmentPlacement = EnvironmentPlacement()
    dedicated: DedicatedPlacement = DedicatedPlacement()
    max_restarts: int = Field(8, ge=0)
    """Times that a worker of a Ray cluster may die, or hang, and be started again in one run; once more stops the run."""
    hang_timeout: float = Field(600.0, gt=0)
    """Seconds without any progress of a worker that others wait for, after which it counts as hung and is named."""
    on_hang: Literal["replace", "stop"] = "replace"
    """`replace`: a hung worker is killed and started again, as one that died. `stop`: the run stops and says who hangs."""

    @model_validator(mode="after")
    def _placed_on_ray(self):
        keys = ("cpus", "engines", "rewards", "environments", "dedicated", "max_restarts", "hang_timeout", "on_hang")
        given = [key for key in keys if getattr(self, key) != type(self).model_fields[key].default]
        if self.ray is None and given:
            raise ValueError(
                f"`hardware.{given[0]}` places work on a Ray cluster and has no effect without one; add `hardware.ray: auto`"
            )
        return self
