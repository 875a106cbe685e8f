"""Where Ray puts the actor of each role: what it asks for, and beside or away from whom.

Ray is asked for resources and labels only. What no machine has free stays pending, and that is what Ray's own
autoscaler (KubeRay's, for example) adds machines for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from cluster.plan import RoleSpec

_MEMBERS = ("prefill", "decode")  # of a pair, in the order of its bundles


def options(spec: RoleSpec) -> dict[str, Any]:
    """For the actor of a role."""
    return {
        # What the role uses, not the actor: Ray then gives one GPU to one worker only. A TP group is one
        # actor, so all of its GPUs are on one machine.
        "num_cpus": spec.cpus,
        "num_gpus": spec.gpus,
        "max_restarts": -1,  # an actor only holds a role; a lost one is always worth replacing
        "max_task_retries": 0,  # the supervisor asks again itself: it must see that the role was lost
    }


def strategy(spec: RoleSpec, roles: Sequence[RoleSpec], front_node: str) -> dict[str, Any]:
    """Further options, for a Ray of several machines."""
    if spec.role == "router":
        # Where it was asked for, so that the URL it prints works there; elsewhere if that machine is gone.
        return {"scheduling_strategy": NodeAffinitySchedulingStrategy(front_node, soft=True)}
    if spec.placement == "pair":
        pair = PlacementGroupSchedulingStrategy(_pair(spec.index, roles), _MEMBERS.index(spec.role))
        return {"scheduling_strategy": pair}
    # DEFAULT fills a machine to half before it takes the next one; SPREAD takes the emptiest.
    return {
        "scheduling_strategy": "SPREAD" if spec.placement == "spread" else "DEFAULT",
        "label_selector": dict(spec.labels) or None,
    }


def _pair(index: int, roles: Sequence[RoleSpec]) -> PlacementGroup:
    """The place of prefill `index` and decode `index`, on one machine; made by whoever comes first."""
    try:
        return ray.util.get_placement_group(_pair_name(index))
    except ValueError:  # there is none yet
        pair = [next(s for s in roles if (s.role, s.index) == (role, index)) for role in _MEMBERS]
        return ray.util.placement_group(
            [{"CPU": s.cpus} | ({"GPU": s.gpus} if s.gpus else {}) for s in pair],
            strategy="STRICT_PACK",  # one machine, or none
            name=_pair_name(index),
            lifetime="detached",  # as the actors in it
            bundle_label_selector=[dict(s.labels) for s in pair],
        )


def _pair_name(index: int) -> str:
    return f"baton-pair-{index}"


def remove_pairs(roles: Sequence[RoleSpec]) -> None:
    """When their actors are gone for good."""
    for index in {spec.index for spec in roles if spec.placement == "pair"}:
        try:
            ray.util.remove_placement_group(ray.util.get_placement_group(_pair_name(index)))
        except ValueError:
            continue  # never made
