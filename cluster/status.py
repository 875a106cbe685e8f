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


COLUMNS = (
    "worker", "state", "incarnation", "address", "running", "waiting", "KV used", "transfers", "restarts",
    "last exit", "node",
)  # fmt: skip


def show(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    # In a pipe nothing is cut off.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 240)
    table = Table(*COLUMNS, header_style="bold", box=None, pad_edge=False)
    for worker in merged(report):
        table.add_row(*row(worker))
    console.print(table)
    for role, pool in ((report.get("cluster") or {}).get("pools") or {}).items():
        bounds = f"{pool['least']} to {pool['most']}"
        console.print(f"{role}: {pool['size']} workers ({bounds}), {pool['needed']} needed: {pool['why']}")


def merged(report: dict[str, Any]) -> list[dict[str, Any]]:
    """What the router knows of each worker, with what its supervisor does; also those that only one knows."""
    seen = {(w.get("role"), w.get("index")): w for w in report["workers"]}
    supervised = [r for r in (report.get("cluster") or {}).get("roles", ()) if r["role"] != "router"]
    for role in supervised:
        key = (role["role"], role["index"])
        seen[key] = {"role": key[0], "index": key[1], "address": role["address"]} | seen.get(key, {})
        seen[key]["supervised"] = role
    return sorted(seen.values(), key=lambda w: (w.get("role") != "prefill", w.get("index") or 0))


def row(worker: dict[str, Any]) -> list[str]:
    """One line of the table; what nobody knows yet is a dash."""
    load, role = worker.get("status") or {}, worker.get("supervised") or {}
    total = load.get("blocks_total")
    used = f"{(total - load['blocks_free']) / total:.0%}" if total else "–"
    return [
        f"{worker.get('role') or '?'} {worker.get('index', '')}".strip(),
        state(worker, role),
        str(worker.get("incarnation") or "–"),
        str(worker.get("address") or "–"),
        *(str(load.get(key, "–")) for key in ("requests_running", "requests_waiting")),
        used,
        str(load.get("transfers_open", "–")),
        str(role.get("restarts", "–")),
        str(role.get("last_exit") or "–"),
        str(role.get("node") or "–"),
    ]


def state(worker: dict[str, Any], role: dict[str, Any]) -> str:
    """The router's word, where it has one; a crash loop is told in any case."""
    if role.get("leaving"):
        words = ["leaving"]
    elif role.get("phase", "ready") == "ready":
        words = [worker.get("state"), worker.get("reason")]
    else:
        words = [role["phase"], f"({role['stage']})" if role["phase"] == "starting" else None]
    if role.get("crash_loop"):
        words.append("CRASH LOOP")
    return " ".join(filter(None, words)) or "–"
