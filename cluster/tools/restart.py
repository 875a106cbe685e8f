"""`baton restart` of a cluster of this machine, and of engine processes anywhere."""

import asyncio
import signal
from typing import Any

from grpc import RpcError

from baton.cluster.options.clients import EndpointOptions, LocalOptions
from baton.cluster.options.roles import SecretOptions
from baton.cluster.supervision import announcement
from baton.cluster.tools.flip import chosen, refusal
from baton.cluster.tools.http import fetch
from baton.cluster.tools.secret import secret_for
from baton.cluster.tools.status import name_of, ready
from baton.rpc import worker_pb2 as pb
from baton.rpc.channel import connect
from baton.rpc.stubs import WorkerStub
from baton.rpc.tls import TlsFiles

POLL_S = 0.5
ENGINE_START = 660.0
"""Seconds for an engine process to start: a worker ends one that is silent for 600 s."""


def run(endpoint: EndpointOptions, local: LocalOptions) -> int:
    """Has `baton serve` restart its workers, and waits for the last one. Prints each. Returns the exit code.

    Raises ValueError if no cluster of this user is found, or if the router tells no status.
    """
    asyncio.run(_restart(endpoint, local))
    return 0


async def _restart(endpoint: EndpointOptions, local: LocalOptions) -> None:
    waiting = incarnations(await fetch(endpoint, "status"))
    if not announcement.send(endpoint.url, local.run_dir, signal.SIGUSR1):
        raise ValueError(
            f"--url {endpoint.url}: no `baton serve` of this user runs there on this machine; correct --url, "
            "give --advanced.run-dir if that was given to it, or --ray-address for a cluster on Ray"
        )
    print("Restarting the workers, one after the other …", flush=True)
    while waiting:
        await asyncio.sleep(POLL_S)
        report = await fetch(endpoint, "status")
        roles = (report.get("cluster") or {}).get("roles", ())
        serving = {name_of(role) for role in roles if role["phase"] == "ready"}
        current = incarnations(report)
        for name, incarnation in list(waiting.items()):
            gone = name not in {name_of(role) for role in roles}  # its pool has shrunk
            if gone or (name in serving and current.get(name, incarnation) != incarnation):
                print(f"{name}: {'left its pool' if gone else 'restarted'}", flush=True)
                del waiting[name]


def restart_engines(
    worker: str | None, endpoint: EndpointOptions, secret: SecretOptions, local: LocalOptions
) -> int:
    """Restarts the engine process of one worker, or of all, one after the other. Prints each. Returns 0.

    Raises ValueError for an unknown worker, a refused secret, and a worker that cannot be reached or refuses.
    """
    key = secret_for(endpoint, secret, local)
    asyncio.run(_restart_engines(worker, endpoint, key, secret.tls()))
    return 0


async def _restart_engines(
    worker_name: str | None, endpoint: EndpointOptions, secret: bytes, tls: TlsFiles | None
) -> None:
    workers = (await fetch(endpoint, "status"))["workers"]
    if not workers:
        raise ValueError("the router knows no worker")
    for worker in workers if worker_name is None else [chosen(worker_name, workers)]:
        name, address = name_of(worker), worker["address"]
        try:
            async with connect(address, secret, tls) as channel:
                restarted = await WorkerStub(channel).RestartEngine(
                    pb.RestartEngineRequest(), timeout=ENGINE_START
                )
        except RpcError as error:
            text = f"{name} at {address}: {refusal(error, 'restart its engine process')}"
            raise ValueError(text) from error
        print(f"{name}: another engine process goes on after {restarted.seconds:.1f} s", flush=True)
        while True:  # until the router sends requests there again
            report = await fetch(endpoint, "status")
            if any(each["address"] == address and ready(each) for each in report["workers"]):
                break
            await asyncio.sleep(POLL_S)


def incarnations(report: dict[str, Any]) -> dict[str, str]:
    """Of the workers that a router reaches, by name."""
    workers = (worker for worker in report["workers"] if worker.get("incarnation"))
    return {name_of(worker): worker["incarnation"] for worker in workers}
