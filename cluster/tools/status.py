"""`baton status`: prints the router's report on its workers, as a table or as JSON. With `--worker` it asks
the workers, as when no router runs."""

import asyncio
import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from baton.cluster.options.clients import EndpointOptions, JsonOptions, LocalOptions, StatusOptions
from baton.cluster.options.roles import SecretOptions
from baton.cluster.tools.http import fetch
from baton.cluster.tools.tables import UNKNOWN, Row, console, fitting, more, table
from baton.rpc.pools import POOLS, pool_of
from baton.system.words import counted

SHOWN_FAILURES = 5
GIB = 1 << 30


def run(
    endpoint: EndpointOptions,
    output: JsonOptions,
    options: StatusOptions,
    secret: SecretOptions,
    local: LocalOptions,
) -> int:
    """Prints the status. Returns exit code 1 if the router misses a worker of one of its pools, or if a
    worker that was asked does not answer. Raises ValueError."""
    if options.worker:
        from baton.cluster.tools.ask_workers import report_of
        from baton.cluster.tools.secret import secret_for

        report = asyncio.run(report_of(options.worker, secret_for(endpoint, secret, local), secret.tls()))
    else:
        report = asyncio.run(fetch(endpoint, "status"))
    if output.json:
        print(json.dumps(report, indent=2))
    else:
        show(report)
    return 0 if report["router"]["ready"] else 1


def ready(worker: dict[str, Any]) -> bool:
    return worker.get("state") == "ready"


ORDER = {pool: i for i, pool in enumerate(POOLS)}


TEXTS = frozenset(("worker", "pool", "state", "device", "address", "node", "incarnation", "last exit"))
COLUMNS = (
    "worker", "pool", "state", "running", "waiting", "KV used", "transfers", "restarts",
    "device", "address", "node", "incarnation", "last exit",
)  # fmt: skip
"""The most important ones first: a terminal may show only these."""


def show(report: dict[str, Any]) -> None:
    """Prints the table, with as many columns as have room, and names the others."""
    terminal, workers = console(), merged(report)
    rows = [row(worker) for worker in workers]
    present = [column for column in COLUMNS if any(cells[column] != UNKNOWN for cells in rows)] or COLUMNS
    shown, hidden = fitting(rows, columns_for(rows, present), terminal.width)
    terminal.print(table(rows, shown, TEXTS) if rows else "No workers.")
    if hidden:
        terminal.print(more(hidden))
    if line := about(report["router"]):
        terminal.print(line, markup=False)
    if paths := requests(report["router"]):
        terminal.print(paths)
    for tell in (trouble, transports):
        for line in filter(None, map(tell, workers)):
            terminal.print(line, markup=False)
    for role in (report.get("cluster") or {}).get("roles", ()):
        if role["role"] == "store":
            cells = f"{role['phase']}, {counted(role['restarts'], 'restart')} {role['last_exit']}".rstrip()
            terminal.print(f"store at {role['address'] or UNKNOWN}: {cells}", markup=False)
    for tell in (store, memory, standby):
        for line in filter(None, map(tell, workers)):
            terminal.print(line, markup=False)
    for role, pool in ((report.get("cluster") or {}).get("pools") or {}).items():
        bounds = f"{pool['least']} to {pool['most']}"
        size = counted(pool["size"], "worker" if pool["group"] == 1 else "group")
        size += f" of {pool['group']} workers" if pool["group"] > 1 else ""
        terminal.print(f"{role}: {size} ({bounds}), {pool['needed']} needed: {pool['why']}")


def columns_for(rows: Sequence[Row], columns: Sequence[str]) -> Sequence[str]:
    """`columns`, with the address beside the name if the names do not tell the workers apart."""
    if len({cells["worker"] for cells in rows}) == len(rows):
        return columns
    return "worker", "address", *(column for column in columns[1:] if column != "address")


_PAUSED = {
    "new": "The cluster is paused: new requests wait, those that run go on.",
    "steps": "The cluster is paused: new requests wait, and no step is computed. POST /resume lets it go on.",
}
"""By the pause that the router shows."""


def about(router: dict[str, Any]) -> str:
    """The router itself, and its last failures; "" if it does not say so."""
    if "version" not in router:
        return ""
    minutes = router["uptime_seconds"] / 60
    up = f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.0f} h"
    minute = router["last_minute"]
    lines = [
        f"Router: Baton {router['version']}, up {up}; last minute: "
        f"{counted(minute['requests'], 'request')} ended, {counted(minute['errors'], 'error')}"
    ]
    if paused := _PAUSED.get(router.get("pause", "none")):
        lines.append(paused)
    for failure in router["failures"][-SHOWN_FAILURES:]:
        when = datetime.fromtimestamp(failure["at"]).strftime("%H:%M:%S")
        place = f" at {failure['worker']}" if failure["worker"] else ""
        lines.append(
            f"{when} request {failure['request_id'] or UNKNOWN}: {failure['code']}{place}: "
            f"{failure['message'][:200]}. Remedy: {failure['remedy']}"
        )
    return "\n".join(lines)


def requests(router: dict[str, Any]) -> str:
    """How the prompts of the router went through the workers; "" if it does not say so."""
    if "handovers" not in router:
        return ""
    split, alone = router["split_prompts"], {why: n for why, n in router["overflow"].items() if n}
    text = f"Requests: {router['handovers']} with a handover"
    text += f" ({counted(split, 'prompt')} split)" if split else ""
    text += f", {sum(alone.values())} on one worker"
    words = router.get("overflow_why", {})
    return "\n".join([text, *(f"  {n} {words.get(reason, '')} ({reason})" for reason, n in alone.items())])


def merged(report: dict[str, Any]) -> list[dict[str, Any]]:
    """One entry per worker, with the data of the router and of the supervisor, if each knows the worker.

    The address identifies a worker. An index does not: workers started by hand may share one, and a worker
    that the router has not reached yet has none.
    """
    workers = [dict(worker) for worker in report["workers"]]
    for role in (report.get("cluster") or {}).get("roles", ()):
        if role["role"] not in ORDER:
            continue
        name = {"role": role["role"], "index": role["index"]}
        for worker in workers:
            if role["address"] is None:  # the worker is still starting
                same = (worker.get("role"), worker.get("index")) == (role["role"], role["index"])
            else:
                same = worker.get("address") == role["address"]
            if same:
                worker |= name | {"supervised": role}
                break
        else:
            workers.append(name | {"address": role["address"], "supervised": role})
    return sorted(workers, key=_order)


def _order(worker: dict[str, Any]) -> tuple[int, int, str]:
    return (
        ORDER.get(worker.get("role", ""), len(ORDER)),
        worker.get("index") or 0,
        worker.get("address") or "",
    )


def name_of(worker: dict[str, Any]) -> str:
    """The name of a worker: the pool that it was started for, and its index. A flip does not change it.

    It is "?" for a worker that the router has not reached yet.
    """
    role = worker.get("role")
    return f"{role} {worker.get('index')}" if role in ORDER else "?"


def device_of(worker: dict[str, Any]) -> str:
    """What a worker computes on, such as "2 GPUs" or "CPU, 3 ranks"; "" if that is not known."""
    description = worker.get("description") or {}
    device = description.get("device")
    if not device:
        return ""
    ranks = description["tensor_parallel_size"]
    if device.startswith("cuda"):
        return counted(ranks, "GPU")
    return "CPU" if ranks == 1 else f"CPU, {counted(ranks, 'rank')}"


def place_of(worker: dict[str, Any]) -> str:
    name, address = name_of(worker), worker.get("address")
    return ("worker" if name == "?" else name) + (f" at {address}" if address else "")


def trouble(worker: dict[str, Any]) -> str:
    """Why a worker gets no requests, and the remedy; "" if it does."""
    role = worker.get("supervised") or {}
    phase, stage = role.get("phase", "ready"), role.get("stage")
    if phase == "waiting":
        often = "it keeps crashing: see its log" if role.get("crash_loop") else "it starts again soon"
        return f"{place_of(worker)} has ended ({role.get('last_exit') or 'no reason known'}); {often}"
    if phase != "ready":
        return f"{place_of(worker)} is {phase}: {stage}" if stage and stage != phase else ""
    if ready(worker) or not worker.get("reason"):
        return ""
    return (
        f"{place_of(worker)} is {worker['state']}: {worker['reason']}. {worker.get('remedy') or ''}".rstrip()
    )


def transports(worker: dict[str, Any]) -> str:
    """How other workers get KV from a worker; "" if none does."""
    readers: dict[str, list[str]] = {}
    for reader, transport in sorted(((worker.get("status") or {}).get("kv_transports") or {}).items()):
        readers.setdefault(transport, []).append(reader)
    texts = (f"{transport} ({', '.join(names)})" for transport, names in sorted(readers.items()))
    return f"KV from {name_of(worker)}: {'; '.join(texts)}" if readers else ""


def store(worker: dict[str, Any]) -> str:
    """How a worker reads from the shared store; "" if it has none."""
    load = worker.get("status") or {}
    if not load.get("store"):
        return ""
    speed = load.get("store_tokens_per_s")
    reads = f"{speed:,.0f} tokens/s" if speed else "no speed known yet"
    return f"store of {name_of(worker)}: {load['store']}, {reads}"


def memory(worker: dict[str, Any]) -> str:
    """How a worker divides the memory that KV shares with states or window blocks; "" if it shares none."""
    load = worker.get("status") or {}
    names = {"KV": "kv_memory_bytes", "states": "state_memory_bytes", "windows": "window_memory_bytes"}
    shares = {kind: int(load.get(name) or 0) for kind, name in names.items()}
    if not (shares["states"] or shares["windows"]):
        return ""
    sizes = ", ".join(f"{kind} {size / GIB:.2f} GiB" for kind, size in shares.items() if size)
    return f"memory of {name_of(worker)}: {sizes}, moved as needed"


def standby(worker: dict[str, Any]) -> str:
    """The engine process that would replace the one of a worker; "" if none starts before it is needed."""
    load = worker.get("status") or {}
    tells = {
        "starting": "starting",
        "ready": f"ready, with {int(load.get('standby_memory_bytes') or 0) / GIB:.2f} GiB",
        "ended": "none; all that were started have ended, the log says why",
    }
    state = tells.get(load.get("standby") or "", "")
    return f"standby of {name_of(worker)}: {state}" if state else ""


def row(worker: dict[str, Any]) -> dict[str, str]:
    """One row of the table, by column. A dash stands for an unknown value.

    - transfers: of KV that ended well since the start of the worker, sent and received
    """
    load, role = worker.get("status") or {}, worker.get("supervised") or {}
    total, name = load.get("blocks_total"), name_of(worker)
    named = name != "?"
    cells = {
        "worker": name if named else worker.get("address"),
        "pool": pool_of(worker) if named else None,
        "state": state(worker, role),
        "running": load.get("requests_running"),
        "waiting": load.get("requests_waiting"),
        "KV used": f"{(total - load['blocks_free']) / total:.0%}" if total else None,
        "transfers": load.get("kv_transfers"),
        "restarts": role.get("restarts"),
        "device": device_of(worker),
        "address": worker.get("address") if named else None,
        "node": role.get("node"),
        "incarnation": worker.get("incarnation") if named else None,
        "last exit": role.get("last_exit"),
    }
    return {column: UNKNOWN if cell in (None, "") else str(cell) for column, cell in cells.items()}


def state(worker: dict[str, Any], role: dict[str, Any]) -> str | None:
    """The state of a worker for the table: the router's, or the supervisor's if the worker is not ready."""
    if role.get("leaving"):
        return "leaving"
    if role.get("crash_loop"):
        return "CRASH LOOP"
    phase = role.get("phase", "ready")
    return worker.get("state") if phase == "ready" else phase
