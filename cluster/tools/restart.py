"""`baton restart` of a cluster of this machine."""

import asyncio
import signal
from typing import Any

from baton.cluster.options.clients import EndpointOptions, LocalOptions
from baton.cluster.supervision import announcement
from baton.cluster.tools.http import fetch
from baton.cluster.tools.status import name_of

POLL_S = 0.5


def run(endpoint: EndpointOptions, local: LocalOptions) -> int:
    """Has `baton serve` restart its workers, and waits for the last one. Prints each. Returns the exit code.

    Raises ValueError if no cluster of this user is found, or if the router tells no status.
    """
    asyncio.run(_restart(endpoint, local))
    return 0


async def _restart(endpoint: EndpointOptions, local: LocalOptions) -> None:
    left = incarnations(await fetch(endpoint, "status"))
    if not announcement.send(endpoint.url, local.run_dir, signal.SIGUSR1):
        raise ValueError(
            f"--url {endpoint.url}: no `baton serve` of this user runs there on this machine; correct --url, "
            "give --run-dir if that was given to it, or --ray-address for a cluster on Ray"
        )
    print("Restarting the workers, one after the other …", flush=True)
    while left:
        await asyncio.sleep(POLL_S)
        report = await fetch(endpoint, "status")
        roles = (report.get("cluster") or {}).get("roles", ())
        serving = {name_of(role) for role in roles if role["phase"] == "ready"}
        found = incarnations(report)
        for name, incarnation in list(left.items()):
            gone = name not in {name_of(role) for role in roles}  # its pool has shrunk
            if gone or (name in serving and found.get(name, incarnation) != incarnation):
                print(f"{name}: {'left its pool' if gone else 'restarted'}", flush=True)
                del left[name]


def incarnations(report: dict[str, Any]) -> dict[str, str]:
    """Of the workers that a router reaches, by name."""
    known = (worker for worker in report["workers"] if worker.get("incarnation"))
    return {name_of(worker): worker["incarnation"] for worker in known}
