"""The faults: one sequence for each role. Each fault is followed until its worker is back."""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.bench.lab.harness import processes
from baton.bench.lab.harness.cluster import LocalCluster, Worker
from baton.bench.lab.harness.streams import Happened


@dataclass(frozen=True, slots=True)
class Fault:
    """`happens` may block. `lethal`: the worker ends, and the bench waits for its next process."""

    name: str  # "kill.engine"
    happens: Callable[[LocalCluster, Worker], None]
    lethal: bool = True


def _killer(kind: str) -> Fault:
    return Fault(f"kill.{kind}", lambda cluster, worker: worker.kill(kind))


def _break_lanes(cluster: LocalCluster, worker: Worker) -> None:
    """Cuts all lanes of one decode worker. The sessions end in both transfer processes."""
    transfer = worker.processes().get("transfer")
    for prefill in cluster.of("prefill"):
        port = int(prefill.lives[-1]["kv_address"].rpartition(":")[2])
        if transfer is not None:
            processes.break_connections(transfer, port)


def _flip(cluster: LocalCluster, worker: Worker) -> None:
    """Moves a worker to the other pool, and back after a while. Another worker stays in the pool."""
    home, other_pool = ("prefill", "decode") if worker.role == "prefill" else ("decode", "prefill")
    worker.set_pool(other_pool)
    time.sleep(FLIPPED_S)
    worker.set_pool(home)


KILLS = tuple(_killer(kind) for kind in processes.KINDS)
STALL = Fault("stall.engine", lambda cluster, worker: worker.hang("engine"))
BREAK = Fault("break.lanes", _break_lanes, lethal=False)
FLIP = Fault("flip", _flip, lethal=False)
FLIPPED_S = 1.0


def draw(role: str, kills: int, stalls: int, breaks: int, flips: int, rng: random.Random) -> list[Fault]:
    """Faults in random order. All kinds of processes get the same share. A router is one process."""
    kinds = KILLS if role != "router" else [_killer("service")]
    faults = [kinds[i % len(kinds)] for i in range(kills)] + [STALL] * stalls + [FLIP] * flips
    faults += [BREAK] * (breaks if role == "decode" else 0)
    rng.shuffle(faults)
    return faults


async def torment(
    cluster: LocalCluster, role: str, faults: Sequence[Fault], quiet: tuple[float, float], rng: random.Random
) -> list[Happened]:
    """Causes one fault after another at random workers of a role, with a random pause (seconds) before each.

    Another worker of the role is always there. The bench shows that nothing is lost, not how long requests
    wait without any worker.
    """
    happened = []
    for fault in faults:
        await asyncio.sleep(rng.uniform(*quiet))
        worker = rng.choice(cluster.of(role))
        lives = len(worker.lives)
        at = back = time.monotonic()
        await asyncio.to_thread(fault.happens, cluster, worker)
        if fault.lethal:
            await asyncio.to_thread(worker.wait_life, lives + 1)
            if role == "router":
                await asyncio.to_thread(cluster.wait_serving, 1)
            else:
                await asyncio.to_thread(cluster.wait_attached, worker)
            back = time.monotonic()
        happened.append(Happened(role, fault.name, at, back))
    return happened
