"""Who runs where: the worker processes that a recipe asks for, each on a node and on its devices."""

import math
import re
from dataclasses import dataclass, replace
from typing import Any

from posttrain.errors import InputError
from posttrain.planning.devices import DEVICES, Device
from posttrain.recipe.hardware import HardwareRecipe
from posttrain.recipe.stages import DpoRecipe, Recipe, RewardRecipe, RlRecipe, SftRecipe

CORES_PER_DEVICE = 12
"""Assumed of a described node: servers with eight GPUs have 96 cores or more."""
_SEEN = {"H200": "h200", "H100": "h100", "A100": "a100"}
"""What Ray calls a GPU -> the device of the cost model."""


@dataclass(frozen=True)
class Node:
    """One machine."""

    name: str
    cpus: float
    """Processor cores."""
    devices: int
    """GPUs; 0 computes on the processors."""


def described(nodes: int, devices: int, device: Device | None) -> list[Node]:
    """`nodes` machines with `devices` GPUs each; of a processor, or with no GPUs, machines that compute on their cores."""
    if nodes < 1 or devices < 0:
        raise InputError("--nodes is at least 1 and --devices at least 0")
    if device is not None and device.link is None and device.per_node == 1:
        devices = 0
    cores = float(CORES_PER_DEVICE * devices) if devices else _cores_of(device)
    return [Node(f"node {number}", cores, devices) for number in range(nodes)]


def _cores_of(device: Device | None) -> float:
    """The number that a processor's name ends with, for those known here; 2 without one."""
    found = re.search(r"-(\d+)$", device.name) if device is not None else None
    return float(found[1]) if found else 2.0


def living(states: list[dict[str, Any]]) -> tuple[list[Node], Device | None]:
    """The nodes of a Ray cluster that are alive, from `ray.nodes()`, the head first; and the device of the cost model that
    all of their GPUs are, None where they are not known or differ."""
    nodes, kinds = [], set()
    for state in sorted(states, key=lambda s: "node:__internal_head__" not in s["Resources"]):
        if not state["Alive"]:
            continue
        resources = state["Resources"]
        nodes.append(Node(state["NodeManagerAddress"], resources.get("CPU", 0.0), int(resources.get("GPU", 0))))
        kinds |= {name.removeprefix("accelerator_type:") for name in resources if name.startswith("accelerator_type:")}
    known = {_SEEN[seen] for kind in kinds for seen in _SEEN if seen in kind}
    return nodes, DEVICES[known.pop()] if len(known) == 1 else None


PlacedRecipe = RlRecipe | SftRecipe | RewardRecipe | DpoRecipe

LEARNER, ENGINE, REWARD, ENVIRONMENTS = "learner", "engine", "reward model", "environments"
CRITIC, REFERENCE = "critic", "reference model"
MOST_ENVIRONMENTS = 16
"""Processes for environments that are started unasked."""


@dataclass(frozen=True)
class Worker:
    """One process."""

    role: str
    number: int
    """From 0, among those of the role."""
    cpus: float
    gpus: int
    """GPUs that it needs; those of a colocated engine are the learners'."""
    colocated: bool = False
    node: int = -1
    """Index of its machine, once placed."""
    devices: tuple[int, ...] = ()
    """Of that machine, once placed."""

    @property
    def name(self) -> str:
        """As messages call it."""
        return f"{self.role} {self.number}"


def placed_recipe(recipe: Recipe) -> PlacedRecipe:
    """The recipe, if its stage can be placed on a cluster; else `InputError`."""
    if not isinstance(recipe, PlacedRecipe):
        raise InputError(
            f"stage {recipe.stage} runs in one process; a cluster is for the stages rl, sft, reward and dpo"
        )
    return recipe


def engine_count(recipe: PlacedRecipe, devices: bool) -> int:
    """Engines of the recipe in processes of their own; `devices`: whether the cluster has GPUs."""
    if isinstance(recipe, DpoRecipe | RewardRecipe) or recipe.environment is None:
        return 0
    wanted = recipe.hardware.engines
    if wanted.count is not None:
        return wanted.count
    return max(1, recipe.hardware.processes // wanted.devices) if devices and wanted.colocated else 1


def reward_count(recipe: PlacedRecipe) -> int:
    """Copies of the reward model in processes of their own. Credit of units asks the learner's own."""
    if not isinstance(recipe, RlRecipe) or recipe.reward is None:
        return 0
    return recipe.hardware.rewards.count


def workers_of(recipe: PlacedRecipe, nodes: list[Node]) -> list[Worker]:
    """The processes that the recipe asks for on these machines, not yet placed."""
    hardware: HardwareRecipe = recipe.hardware
    gpus = any(node.devices for node in nodes)
    own = 1 if gpus else 0
    workers = [Worker(LEARNER, i, hardware.cpus, own) for i in range(hardware.processes)]
    for role, count in ((CRITIC, hardware.dedicated.critic), (REFERENCE, hardware.dedicated.reference)):
        workers += [Worker(role, i, hardware.cpus, own) for i in range(count)]
    engines = hardware.engines
    together = gpus and engines.colocated
    needed = 0 if together else engines.devices * own
    count = engine_count(recipe, gpus)
    workers += [Worker(ENGINE, i, engines.cpus, needed, together) for i in range(count)]
    rewards = hardware.rewards
    workers += [Worker(REWARD, i, rewards.cpus, rewards.devices * own) for i in range(reward_count(recipe))]
    if isinstance(recipe, DpoRecipe | RewardRecipe) or recipe.environment is None:
        return workers
    wanted = hardware.environments.count
    if wanted is None:
        spare = sum(node.cpus for node in nodes) - sum(worker.cpus for worker in workers)
        wanted = max(1, min(MOST_ENVIRONMENTS, int(spare // 4)))
    return workers + [Worker(ENVIRONMENTS, i, hardware.environments.cpus, 0) for i in range(wanted)]


def place(recipe: PlacedRecipe, nodes: list[Node]) -> tuple[list[Worker], float]:
    """The processes, each on the first machine with room for it, and the share of the cores asked for that all get.

    `InputError` where the GPUs are not enough.
    """
    workers = workers_of(recipe, nodes)
    _enough_devices(recipe, workers, nodes)
    asked, there = sum(worker.cpus for worker in workers), sum(node.cpus for node in nodes)
    share = min(1.0, there / asked)
    while True:
        found = _packed(recipe, [replace(w, cpus=_floor(w.cpus * share)) for w in workers], nodes)
        if found is not None:
            return found, share
        share *= 0.9
        if share < 0.01:
            raise InputError(
                f"the devices of the cluster lie so that {counted(workers)} cannot be placed: those of one engine are on one "
                "machine; change hardware.engines.devices or hardware.processes"
            )


def _floor(cpus: float) -> float:
    """Ray counts cores in ten-thousandths; two digits are enough."""
    return max(0.01, math.floor(cpus * 100) / 100)


def counted(workers: list[Worker]) -> str:
    """Such as `2 x learner, 1 x engine`."""
    counts = {role: sum(worker.role == role for worker in workers) for role in dict.fromkeys(w.role for w in workers)}
    return ", ".join(f"{count} x {role}" for role, count in counts.items())


def _enough_devices(recipe: PlacedRecipe, workers: list[Worker], nodes: list[Node]) -> None:
    needed, there = sum(worker.gpus for worker in workers), sum(node.devices for node in nodes)
    if needed > there:
        raise InputError(
            f"hardware: {counted(workers)} take {needed} GPUs and the cluster has {there}; lower hardware.processes or "
            "hardware.engines.count, or set hardware.engines.colocated: true"
        )
    engines = recipe.hardware.engines
    together = sum(worker.colocated for worker in workers) * engines.devices
    if together > recipe.hardware.processes:
        raise InputError(
            f"hardware.engines: colocated engines take {together} GPUs, more than those of hardware.processes = "
            f"{recipe.hardware.processes} learners; lower the count, or set hardware.engines.colocated: false"
        )


def _packed(recipe: PlacedRecipe, workers: list[Worker], nodes: list[Node]) -> list[Worker] | None:
    """The workers on machines; None where one finds no room."""
    cores, devices = [node.cpus for node in nodes], [list(range(node.devices)) for node in nodes]
    learners: list[Worker] = []
    placed = []
    for worker in workers:
        if worker.colocated:
            size = recipe.hardware.engines.devices
            hosts = learners[worker.number * size : (worker.number + 1) * size]
            if len({host.node for host in hosts}) != 1 or cores[hosts[0].node] < worker.cpus - 1e-9:
                return None
            node, own = hosts[0].node, tuple(device for host in hosts for device in host.devices)
        else:
            fits = [i for i in range(len(nodes)) if len(devices[i]) >= worker.gpus and cores[i] >= worker.cpus - 1e-9]
            if not fits:
                return None
            node, own = fits[0], tuple(devices[fits[0]][: worker.gpus])
            devices[node] = devices[node][worker.gpus :]
        cores[node] -= worker.cpus
        placed.append(replace(worker, node=node, devices=own))
        if worker.role == LEARNER:
            learners.append(placed[-1])
    return placed
