"""The machines of a cluster: described in words, or as a running Ray cluster tells them."""

import re
from dataclasses import dataclass
from typing import Any

from posttrain.errors import InputError
from posttrain.recipe.cost_devices import DEVICES, Device

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
