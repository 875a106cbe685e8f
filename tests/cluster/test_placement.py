"""What the Ray actor of a worker reserves, and which actors belong to a cluster."""

from dataclasses import replace
from typing import Any

import pytest

from baton.cluster.on_ray import actors, placement
from baton.cluster.supervision.blueprint import RoleSpec

WORKER = RoleSpec("decode", 0, (), {}, gpus=2, cpus=2)


def test_one_actor_reserves_all_gpus_of_a_worker() -> None:
    """Ray places an actor on one machine."""
    options = placement.options(WORKER)
    assert (options["num_gpus"], options["num_cpus"]) == (2, 2)


def test_a_pair_reserves_the_gpus_of_both_workers_on_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[Any, Any]] = []

    def make(bundles: Any, *, strategy: str, **_: Any) -> None:
        made.append((bundles, strategy))

    def find(name: str) -> None:
        raise ValueError(f"there is no group {name}")

    monkeypatch.setattr("ray.util.placement_group", make)
    monkeypatch.setattr("ray.util.get_placement_group", find)
    decode = replace(WORKER, placement="pair")
    placement.strategy(decode, [replace(decode, role="prefill"), decode], "front")
    assert made == [([{"CPU": 2, "GPU": 2}, {"CPU": 2, "GPU": 2}], "STRICT_PACK")]


def test_a_restarted_supervisor_knows_the_roles_of_the_start_and_those_added_later() -> None:
    start = [WORKER, replace(WORKER, index=1, gpus=1)]
    found = actors._all_roles(start, {"supervisor", "decode-0", "decode-1", "decode-3"})
    assert found == [*start, replace(start[1], index=3)]
