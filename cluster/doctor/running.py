"""A running cluster, seen through its router: who is there, whether they agree, whether it answers."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp

from cluster.doctor.finding import Finding, bad, good, warning
from cluster.http import checked, session
from cluster.options import EndpointOptions

TIMEOUT = aiohttp.ClientTimeout(total=120)
MUST_AGREE = ("model_fingerprint", "layout_fingerprint", "dtype")
NEARLY_FULL = 0.95


async def running(endpoint: EndpointOptions) -> AsyncIterator[Finding]:
    try:
        async with session(endpoint, TIMEOUT) as client:
            async with client.get("status") as response:
                report = await (await checked(response)).json()
            for finding in workers(report["workers"]):
                yield finding
            yield await request(client)
    except ValueError as error:
        yield bad("router", str(error), "Start it, or correct --url and --api-key.")


def workers(found: list[dict[str, Any]]) -> Iterator[Finding]:
    """What the router's /status says of its workers. Pure."""
    for role in ("prefill", "decode"):
        ready = [w for w in found if w.get("role") == role and w.get("state") == "ready"]
        if ready:
            yield good(f"{role} workers", f"{len(ready)} ready")
        else:
            yield bad(f"{role} workers", "none is ready", f"Start `baton {role}`, and look at its log.")
    for worker in found:
        if worker.get("state") != "ready":
            name = f"{worker.get('role') or 'worker'} {worker.get('index', worker.get('address'))}"
            why = f"{worker.get('state')}: {worker.get('reason') or 'no reason known'}"
            yield warning(name, why, "Look at its log; `baton status` shows its restarts and last exit.")
    for field in MUST_AGREE:
        values: defaultdict[str, list[str]] = defaultdict(list)
        for worker in found:
            if value := (worker.get("description") or {}).get(field):
                values[value].append(f"{worker['role']} {worker['index']}")
        if len(values) > 1:
            told = "; ".join(f"{value[:16]}: {', '.join(names)}" for value, names in values.items())
            yield bad(field, told, "Give every worker the same --model, --revision and --dtype.")
        elif values:
            yield good(field, f"the same at all: {next(iter(values))[:16]}")
    for worker in found:
        load = worker.get("status") or {}
        total = load.get("blocks_total")
        if total and 1 - load["blocks_free"] / total > NEARLY_FULL and worker["role"] == "decode":
            yield warning(
                f"decode {worker['index']}", f"{1 - load['blocks_free'] / total:.0%} of its KV blocks in use",
                "Add decode workers, or raise --gpu-memory-utilization.",
            )  # fmt: skip


async def request(client: aiohttp.ClientSession) -> Finding:
    """A real one: three tokens, so that a handover is part of it."""
    async with client.get("v1/models") as response:
        models = (await (await checked(response)).json())["data"]
    body = {"model": models[0]["id"], "prompt": "The doctor says:", "max_tokens": 3, "temperature": 0}
    began = time.perf_counter()
    async with client.post("v1/completions", json=body | {"ignore_eos": True}) as response:
        answer = await (await checked(response)).json()
    took = time.perf_counter() - began
    tokens = answer["usage"]["completion_tokens"]
    if tokens != 3:
        return bad("a request", f"{tokens} of 3 tokens", "Look at the router's log for its x-request-id.")
    return good("a request", f"3 tokens in {took * 1e3:.0f} ms")
