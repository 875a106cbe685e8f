"""Ray options that decide on which machine the actor of each role runs.

They name resources and labels only. If no machine has the resources free, the actor stays pending, and Ray's
own autoscaler (KubeRay's, for example) adds a machine.
"""

from collections.abc import Sequence
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from baton.cluster.supervision.blueprint import RoleSpec

_MEMBERS = ("prefill", "decode")  # the roles of a pair, in the order of its bundles


def options(spec: RoleSpec) -> dict[str, Any]:
    """The resource and restart options for the actor of a role."""
    return {
        # The actor reserves what its role uses, so that Ray gives each GPU to one worker only. A TP group is
        # one actor, so all of its GPUs are on one machine.
        "num_cpus": spec.cpus,
        "num_gpus": spec.gpus,
        "max_restarts": -1,  # always replace a lost actor
        "max_task_retries": 0,  # the supervisor must see that the role was lost, and calls again itself
    }


def strategy(spec: RoleSpec, roles: Sequence[RoleSpec], front_node: str) -> dict[str, Any]:
    """The scheduling options for the actor of a role. `front_node` is the id of the node for routers."""
    if spec.role == "router":
        # The node of `baton serve`, because its URL names that machine. `soft`: another node if it is lost.
        return {"scheduling_strategy": NodeAffinitySchedulingStrategy(front_node, soft=True)}
    if spec.placement == "pair":
        pair = PlacementGroupSchedulingStrategy(_pair(spec.index, roles), _MEMBERS.index(spec.role))
        return {"scheduling_strategy": pair}
    # DEFAULT fills a machine to half before it uses the next one. SPREAD uses the emptiest machine.
    return {
        "scheduling_strategy": "SPREAD" if spec.placement == "spread" else "DEFAULT",
        "label_selector": dict(spec.labels) or None,
    }


def _pair(index: int, roles: Sequence[RoleSpec]) -> PlacementGroup:
    """The placement group of prefill `index` and decode `index`. The first call for a pair creates it."""
    try:
        return ray.util.get_placement_group(_pair_name(index))
    except ValueError:  # the group does not exist yet
        pair = [next(s for s in roles if (s.role, s.index) == (role, index)) for role in _MEMBERS]
        return ray.util.placement_group(
            [{"CPU": s.cpus} | ({"GPU": s.gpus} if s.gpus else {}) for s in pair],
            strategy="STRICT_PACK",  # both on one machine
            name=_pair_name(index),
            lifetime="detached",  # the same as the actors in it
            bundle_label_selector=[dict(s.labels) for s in pair],
        )


def _pair_name(index: int) -> str:
    return f"baton-pair-{index}"


def remove_pairs(roles: Sequence[RoleSpec]) -> None:
    """Removes the placement groups of all pairs. Call it after their actors have ended for good."""
    for index in {spec.index for spec in roles if spec.placement == "pair"}:
        try:
            ray.util.remove_placement_group(ray.util.get_placement_group(_pair_name(index)))
        except ValueError:
            continue  # the group was never created
