"""`baton status`: prints the router's report on its workers, as a table or as JSON."""

import asyncio
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from baton.cluster.options.clients import EndpointOptions, StatusOptions
from baton.cluster.tools.http import fetch


def run(endpoint: EndpointOptions, output: StatusOptions) -> int:
    """Prints the status. Returns exit code 1 if the router misses a worker of one of its pools."""
    report = asyncio.run(fetch(endpoint, "status"))
    if output.json:
        print(json.dumps(report, indent=2))
    else:
        show(report)
    return 0 if report["router"]["ready"] else 1


def ready(worker: dict[str, Any]) -> bool:
    return worker.get("state") == "ready"


ORDER = {"prefill": 0, "decode": 1}


def console() -> Console:
    """Standard output. Without a terminal a table must not be cut to the default width of 80."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 240)


def table(rows: Iterable[Mapping[str, str]], columns: Sequence[str], numbers_from: int = 99) -> Table:
    """The columns of these names. Those from number `numbers_from` on have their text on the right."""
    drawn = Table(header_style="bold", box=None, pad_edge=False)
    for number, column in enumerate(columns):
        drawn.add_column(column, justify="right" if number >= numbers_from else "left")
    for cells in rows:
        drawn.add_row(*(escape(cells[column]) for column in columns))
    return drawn


def show(report: dict[str, Any]) -> None:
    out, workers = console(), merged(report)
    out.print(table(map(row, workers), tuple(row({}))))
    for tell in (trouble, transports):
        for told in filter(None, map(tell, workers)):
            out.print(told)
    for role in (report.get("cluster") or {}).get("roles", ()):
        if role["role"] == "store":
            cells = f"{role['phase']}, {role['restarts']} restarts {role['last_exit']}".rstrip()
            out.print(f"store at {role['address'] or '–'}: {cells}")
    for told in filter(None, map(store, workers)):
        out.print(told)
    for role, pool in ((report.get("cluster") or {}).get("pools") or {}).items():
        bounds = f"{pool['least']} to {pool['most']}"
        out.print(f"{role}: {pool['size']} workers ({bounds}), {pool['needed']} needed: {pool['why']}")


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
    return ORDER.get(worker.get("role", ""), 2), worker.get("index") or 0, worker.get("address") or ""


def name_of(worker: dict[str, Any]) -> str:
    """The name of a worker: the pool that it was started for, and its index. A flip does not change it.

    It is "?" for a worker that the router has not reached yet.
    """
    role = worker.get("role")
    return f"{role} {worker.get('index')}" if role in ORDER else "?"


def pool_of(worker: dict[str, Any]) -> str:
    """The pool in which a worker serves now. Before its first report, that is the pool of its name."""
    pool = (worker.get("status") or {}).get("pool", "").removeprefix("pool_")
    return pool if pool in ORDER else worker.get("role", "")


def device_of(worker: dict[str, Any]) -> str:
    """What a worker computes on, such as "2 GPUs" or "CPU, 3 ranks"; "" if that is not known."""
    description = worker.get("description") or {}
    device = description.get("device")
    ranks = description.get("tensor_parallel_size") or 1  # workers of older versions do not say it
    if not device:
        return ""
    if device.startswith("cuda"):
        return f"{ranks} GPU{'s' if ranks > 1 else ''}"
    return "CPU" if ranks == 1 else f"CPU, {ranks} ranks"


def place_of(worker: dict[str, Any]) -> str:
    name = name_of(worker)
    return f"{'worker' if name == '?' else name} at {worker.get('address')}"


def trouble(worker: dict[str, Any]) -> str:
    """Why the router does not use a worker, and the remedy; "" if it does, or if the worker is starting."""
    starts = (worker.get("supervised") or {}).get("phase", "ready") != "ready"
    if ready(worker) or starts or not worker.get("reason"):
        return ""
    return (
        f"{place_of(worker)} is {worker['state']}: {worker['reason']}. {worker.get('remedy') or ''}".rstrip()
    )


def transports(worker: dict[str, Any]) -> str:
    """How other workers get KV from a worker; "" if none does."""
    readers: dict[str, list[str]] = {}
    for reader, transport in sorted(((worker.get("status") or {}).get("kv_transports") or {}).items()):
        readers.setdefault(transport, []).append(reader)
    told = (f"{transport} ({', '.join(names)})" for transport, names in sorted(readers.items()))
    return f"KV from {name_of(worker)}: {'; '.join(told)}" if readers else ""


def store(worker: dict[str, Any]) -> str:
    """How a worker reads from the shared store; "" if it has none."""
    load = worker.get("status") or {}
    if not load.get("store"):
        return ""
    speed = load.get("store_tokens_per_s")
    reads = f"{speed:,.0f} tokens/s" if speed else "no speed known yet"
    return f"store of {name_of(worker)}: {load['store']}, {reads}"


def row(worker: dict[str, Any]) -> dict[str, str]:
    """One row of the table, by column. A dash stands for an unknown value."""
    load, role = worker.get("status") or {}, worker.get("supervised") or {}
    total, known = load.get("blocks_total"), name_of(worker) != "?"
    cells = {
        "worker": name_of(worker),
        "pool": pool_of(worker) if known else None,
        "state": state(worker, role),
        "incarnation": worker.get("incarnation") if known else None,
        "address": worker.get("address"),
        "device": device_of(worker),
        "running": load.get("requests_running"),
        "waiting": load.get("requests_waiting"),
        "KV used": f"{(total - load['blocks_free']) / total:.0%}" if total else None,
        "transfers": load.get("transfers_open"),
        "restarts": role.get("restarts"),
        "last exit": role.get("last_exit"),
        "node": role.get("node"),
    }
    return {name: "–" if cell in (None, "") else str(cell) for name, cell in cells.items()}


def state(worker: dict[str, Any], role: dict[str, Any]) -> str:
    """The state of a worker for the table: the router's, or the supervisor's if the worker is not ready."""
    if role.get("leaving"):
        words = ["leaving"]
    elif role.get("phase", "ready") == "ready":
        words = [worker.get("state")]
    else:
        words = [role["phase"], f"({role['stage']})" if role["phase"] == "starting" else None]
    if role.get("crash_loop"):
        words.append("CRASH LOOP")
    return " ".join(filter(None, words)) or "–"
