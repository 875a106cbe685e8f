"""The pools of workers, by the names that users see."""

from collections.abc import Iterable, Mapping
from typing import Any

from baton.rpc import worker_pb2 as pb

POOLS: Mapping[str, pb.Pool] = {
    "prefill": pb.POOL_PREFILL,
    "decode": pb.POOL_DECODE,
    "encode": pb.POOL_ENCODE,
}
POOL_NAMES = {pool: name for name, pool in POOLS.items()}


def pool_of(worker: Mapping[str, Any]) -> str:
    """The pool in which a worker of `/status` serves now. Before its first report, that is the pool of its
    name."""
    pool = (worker.get("status") or {}).get("pool", "").removeprefix("pool_")
    return pool if pool in POOLS else worker.get("role", "")


def in_turns(workers: Iterable[Mapping[str, Any]]) -> list[str]:
    """The addresses of workers, in an order in which pools change evenly: of each part of the order, each
    pool has about the same share."""
    pools, places = dict[str, list[str]](), dict[str, float]()
    for worker in workers:
        pools.setdefault(pool_of(worker), []).append(worker["address"])
    for some in pools.values():
        places |= {address: (i + 0.5) / len(some) for i, address in enumerate(some)}
    return sorted(places, key=lambda address: places[address])
