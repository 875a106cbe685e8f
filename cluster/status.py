"""`baton status`: the router's own view of its workers, as a table or as it came."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import aiohttp

from cluster.http import checked, session
from cluster.options import EndpointOptions, StatusOptions

TIMEOUT = aiohttp.ClientTimeout(total=10)


def run(endpoint: EndpointOptions, output: StatusOptions) -> int:
    """Prints the status; exit code 1 when a role has no ready worker."""
    report = asyncio.run(fetch(endpoint))
    if output.json:
        print(json.dumps(report, indent=2))
    else:
        show(report)
    return 0 if {w.get("role") for w in report["workers"] if ready(w)} >= {"prefill", "decode"} else 1


async def fetch(endpoint: EndpointOptions) -> dict[str, Any]:
    async with session(endpoint, TIMEOUT) as client, client.get("status") as response:
        return await (await checked(response)).json()


def ready(worker: dict[str, Any]) -> bool:
    return worker.get("state") == "ready"


COLUMNS = ("worker", "state", "incarnation", "address", "running", "waiting", "KV used", "transfers")


def show(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(*COLUMNS, header_style="bold", box=None, pad_edge=False)
    for worker in sorted(report["workers"], key=lambda w: (w.get("role") != "prefill", w.get("index") or 0)):
        table.add_row(*row(worker))
    # In a pipe nothing is cut off.
    Console(highlight=False, width=None if sys.stdout.isatty() else 200).print(table)


def row(worker: dict[str, Any]) -> list[str]:
    """One line of the table; what the router does not know yet is a dash."""
    load = worker.get("status") or {}
    total = load.get("blocks_total")
    used = f"{(total - load['blocks_free']) / total:.0%}" if total else "–"
    return [
        f"{worker.get('role') or '?'} {worker.get('index', '')}".strip(),
        " ".join(filter(None, (worker.get("state"), worker.get("reason")))) or "–",
        str(worker.get("incarnation") or "–"),
        str(worker.get("address") or "–"),
        *(str(load.get(key, "–")) for key in ("requests_running", "requests_waiting")),
        used,
        str(load.get("transfers_open", "–")),
    ]
