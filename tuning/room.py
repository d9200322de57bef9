"""What a trial holds of the cluster, and whether everything fits before anything starts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from dpdist.base.errors import ClusterError
from dpdist.sections.recipe import ResourcesRecipe

# Every Ray cluster has this resource, once, on its head node. A trial whose training has workers of
# its own holds a sliver of it and no CPU: a trial that held the CPU its workers wait for would wait
# for ever.
SLOT = "node:__internal_head__"
_SLIVER = 0.001


@dataclass(frozen=True)
class Node:
    """Resources of one live node."""

    cpus: float
    gpus: float


def live_nodes() -> list[Node]:
    """The nodes of the connected cluster."""
    import ray

    return [
        Node(node["Resources"].get("CPU", 0.0), node["Resources"].get("GPU", 0.0))
        for node in ray.nodes()
        if node["Alive"]
    ]


def trial_resources(resources: ResourcesRecipe) -> Any:
    """What Ray Tune reserves for one trial: its only worker, or a slot beside Ray Train's."""
    from ray import tune

    if resources.most > 1:
        return tune.PlacementGroupFactory([{SLOT: _SLIVER}])
    bundle = {"CPU": resources.cpus_per_worker}
    if resources.gpus_per_worker:
        bundle["GPU"] = resources.gpus_per_worker
    return tune.PlacementGroupFactory([bundle])


def trials_at_once(resources: ResourcesRecipe, wanted: int | None, nodes: list[Node]) -> int:
    """How many trials run at the same time: as many as fit, or as many as wanted.

    Raises ClusterError, before anything waits for ever, when not even one fits or not as many as
    wanted.
    """
    places = sum(_workers_on(node, resources) for node in nodes)
    fitting = places // resources.most
    have = (
        f"{len(nodes)} nodes with {sum(node.cpus for node in nodes):g} CPUs and "
        f"{sum(node.gpus for node in nodes):g} GPUs"
    )
    need = (
        f"{resources.most} workers of {resources.cpus_per_worker:g} CPUs and "
        f"{resources.gpus_per_worker:g} GPUs"
    )
    if fitting < 1:
        raise ClusterError(
            f"resources: one trial needs {need}; there are {have}, room for {places} such workers. "
            "Start the nodes first (a search does not wait for a cluster to grow)"
        )
    if wanted is not None and wanted > fitting:
        raise ClusterError(
            f"tune.concurrent: {wanted} trials at once, each of {need}, do not fit: there are "
            f"{have}, room for {fitting}"
        )
    # A slot is a thousandth of a resource that exists once.
    return min(wanted or fitting, math.floor(0.9 / _SLIVER))


def _workers_on(node: Node, resources: ResourcesRecipe) -> int:
    tiny = 1e-9
    places = math.floor(node.cpus / resources.cpus_per_worker + tiny)
    if resources.gpus_per_worker:
        gpus = resources.gpus_per_worker
        if gpus < 1:  # a worker's share lies on one GPU
            per_node = math.floor(node.gpus + tiny) * math.floor(1 / gpus + tiny)
        else:
            per_node = math.floor(node.gpus / gpus + tiny)
        places = min(places, per_node)
    return places
