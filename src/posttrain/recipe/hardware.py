"""Hardware of a run: the number of learner processes and, on a Ray cluster, the placement of all other workers."""

import math
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from posttrain.recipe.base import BaseConfig, Connects
from posttrain.recipe.metrics import Metric
from posttrain.recipe.needs import needs, unless

Count = Annotated[int, Field(ge=1)]


class EnginePlacement(BaseConfig):
    """Engines on a cluster, each in its own process."""

    count: int | None = Field(None, ge=0)
    """Number of engines, each with its own copy of the weights; all episodes of a group run on one engine. 0: every learner process samples with the weights in training. Null: as many as fit on the learners' devices if colocated, else 1."""
    devices: int = Field(1, ge=1)
    """GPUs per engine, on clusters with GPUs."""
    colocated: bool = True
    """true: engines and learners take turns on the same GPUs. false: engines have their own GPUs."""


class RewardPlacement(BaseConfig):
    """Copies of the reward model at `reward.path`, each in its own process."""

    count: int = Field(0, ge=0)
    """Number of copies, each with one GPU on clusters with GPUs; each scores a share of the episodes. 0: the reward model runs in the learner process."""


class EnvironmentPlacement(BaseConfig):
    """Processes that run environments."""

    count: int | None = Field(None, ge=0)
    """Number of processes; an episode stays in one of them. 0: environments run in the learner process. Null: one per four free cores of the cluster, at least 1 and at most 16."""


class DedicatedPlacement(BaseConfig):
    """Processes for one model alone, each with one GPU on clusters with GPUs. They work at the same time as the learners."""

    critic: int = Field(0, ge=0)
    """Processes of a critic with `critic.backbone: separate`; they divide its state (FSDP2). 0: it runs in the learners' processes."""
    reference: int = Field(0, ge=0)
    """Copies of the reference model of the KL penalty; each scores a share of the episodes. 0: it runs in the learners' processes."""


ON_RAY = needs("ray", remedy="set `hardware.ray: auto`", refused=True)


class HardwareRecipe(BaseConfig):
    """Processes, devices, and what runs where."""

    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("memory/process", "largest resident memory of the process so far, in bytes"),
        Metric(
            "speed/gpu_utilization", "share of the step's last second in which the GPU computed; needs nvidia-ml-py"
        ),
        Metric("memory/gpu", "largest memory that torch allocated on the GPU so far, in bytes"),
    )

    processes: Count | tuple[Count, Annotated[int, Field(ge=2)]] = 1
    """Learner processes, each with one GPU or an equal share of the CPU threads. They split the micro-batches of each update, the groups of each step, and the model state (FSDP2). `[R, S]`: R replicas of S processes each, which split the model state among themselves (HSDP): weights are gathered from S processes only, such as those of one machine, and each holds R times as much. Under `torchrun` this must be the number of processes it started."""
    sequence_parallel: int = Field(1, ge=1)
    """Processes that compute each row together; it divides `processes` and the model's attention heads. A process computes an equal share of the tokens of the row, and of the heads in attention (Ulysses), so `learner.tokens_per_batch` can be this many times as large in the same memory of activations. It does not change the gradient. For decoders whose only layers that mix tokens are attention."""
    gradient_sync: Literal["auto", "per_update", "per_forward"] = "auto"
    """When processes reduce their gradients. `auto`: per update, unless the memory plan fits into a GPU only per forward pass. `per_update`: once per update; least communication, but every process holds a full float32 gradient. `per_forward`: after every micro-batch; each process holds only its shard. With `offload: all`, always after every micro-batch: gradients are accumulated in CPU memory."""
    reshard_after_forward: bool = True
    """Free the gathered weights of a layer after its forward pass and gather them again for the backward pass: less memory, 50% more communication."""
    offload: Annotated[
        Literal["none", "rollouts", "optimizer", "all"],
        unless("stage", "sft", "reward", only=lambda value: value == "rollouts"),
    ] = "none"
    """What is kept in CPU memory instead of a GPU's. `rollouts`: float32 masters and moments, but only while episodes are sampled, and the reference model between its passes; for `rl` and `distill`. `optimizer`: float32 masters, their gradients and the moments, with AdamW on the CPU, and the reference model between its passes; during rollouts the GPU then holds only the weights of the policy. `all`: also weights, one layer of which is on the GPU at a time. With several processes, each GPU keeps its share of the reference model and, with `rollouts`, of the masters, which are its weights. Settings other than `none` are an error on a CPU."""
    deterministic: bool = False
    """Use only kernels on a GPU that add in a fixed order: a resumed run of one process then computes the same bits, more slowly. vLLM samples each answer independently of the others (VLLM_BATCH_INVARIANT, from the H100 on); answers of the local engine may depend on those sampled at the same time. No effect on a CPU, where resumed runs always compute the same bits."""
    ray: Literal["auto"] | Connects | None = None
    """Ray cluster to run on. `auto` connects to the cluster on this machine, or starts one; otherwise an address (`host:port` or `ray://host:port`). Null: run without Ray."""
    engines: Annotated[EnginePlacement, ON_RAY] = EnginePlacement()
    rewards: Annotated[RewardPlacement, ON_RAY] = RewardPlacement()
    environments: Annotated[EnvironmentPlacement, ON_RAY] = EnvironmentPlacement()
    dedicated: Annotated[DedicatedPlacement, ON_RAY] = DedicatedPlacement()

    @property
    def learners(self) -> int:
        """Number of learner processes."""
        return self.processes if isinstance(self.processes, int) else math.prod(self.processes)

    @property
    def replicas(self) -> int:
        """Groups of learner processes that each hold the whole model state."""
        return 1 if isinstance(self.processes, int) else self.processes[0]

    def _check(self) -> None:
        for key, count in (("processes", self.learners), ("dedicated.critic", self.dedicated.critic)):
            if count % self.sequence_parallel:
                groups = f"groups of `hardware.sequence_parallel` = {self.sequence_parallel}"
                raise ValueError(
                    f"`hardware.{key}` = {count} processes do not form {groups}; make the former a multiple"
                )

    @property
    def reduces_per_forward(self) -> bool:
        """Whether gradients are reduced after every micro-batch."""
        return self.offload == "all" or self.gradient_sync == "per_forward"
