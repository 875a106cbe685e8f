"""Checks a running cluster through its router: states and KV of the workers, and a real request."""

import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from http import HTTPStatus
from typing import Any

import aiohttp

from baton.cluster.options.clients import DoctorOptions, EndpointOptions
from baton.cluster.tools.doctor.finding import Finding, bad, good, note, warning
from baton.cluster.tools.http import checked, error_message, session
from baton.cluster.tools.status import device_of, name_of, place_of, pool_of

ADMIN = (
    "Give the URL of clients as --url, and that of the router's --admin-port, which `baton serve` prints, as "
    "--admin-url."
)
TIMEOUT = aiohttp.ClientTimeout(total=120)
NEARLY_FULL = 0.95


async def running(doctor: DoctorOptions, endpoint: EndpointOptions) -> AsyncIterator[Finding]:
    flag, admin = "--url", endpoint
    if doctor.admin_url is not None:  # the admin port needs no key, so do not send it
        flag, admin = "--admin-url", replace(endpoint, url=doctor.admin_url, api_key=[])
    try:
        async with session(admin, TIMEOUT, flag) as client, client.get("status") as response:
            if response.status == HTTPStatus.NOT_FOUND:
                yield warning("status", f"{flag} {admin.url}: {await error_message(response)}", ADMIN)
            else:
                report = await (await checked(response)).json()
                for finding in workers(report["workers"], complete=report["router"]["ready"]):
                    yield finding
                if "processes" in report and doctor.admin_url is None:
                    yield warning("a request", f"not sent, --url {admin.url} is an admin port", ADMIN)
                    return
        async with session(endpoint, TIMEOUT) as client:
            yield await request(client)
    except ValueError as error:
        yield bad("router", str(error), "Start the router, or correct --url, --admin-url and --api-key.")


def workers(found: list[dict[str, Any]], *, complete: bool) -> Iterator[Finding]:
    """Judges the workers in the router's /status. Pure. `complete`: each pool of the cluster has a worker."""
    yield from _pools(found, complete)
    for worker in found:
        if worker.get("state") != "ready":
            why = f"{worker.get('state')}: {worker.get('reason') or 'no reason known'}"
            remedy = worker.get("remedy") or "Look at the worker's log."
            # A worker that cannot be reached may come back. A refused worker stays refused.
            level = bad if worker.get("state") == "refused" else warning
            yield level(place_of(worker), why, remedy)
    if kinds := _kv(found):
        yield good("KV cache", kinds)
    for worker in found:
        load = worker.get("status") or {}
        total = load.get("blocks_total")
        if total and 1 - load["blocks_free"] / total > NEARLY_FULL and pool_of(worker) == "decode":
            yield warning(
                name_of(worker), f"{1 - load['blocks_free'] / total:.0%} of its KV blocks in use",
                "Add decode workers, or raise --gpu-memory-utilization.",
            )  # fmt: skip


def _kv(found: list[dict[str, Any]]) -> str:
    """The dtype of each worker's KV cache. The router refuses workers whose KV cannot be converted."""
    kinds: defaultdict[str, list[str]] = defaultdict(list)
    for worker in found:
        described = worker.get("description") or {}
        if dtype := described.get("dtype"):
            size = described.get("kv_token_bytes")
            kinds[dtype + (f", {size:,} bytes a token" if size else "")].append(name_of(worker))
    return "; ".join(f"{kind}: {', '.join(names)}" for kind, names in kinds.items())


def _pools(found: list[dict[str, Any]], complete: bool) -> Iterator[Finding]:
    for pool in ("prefill", "decode"):
        ready = [w for w in found if pool_of(w) == pool and w.get("state") == "ready"]
        if ready:
            devices = " or ".join(sorted(set(filter(None, map(device_of, ready)))))
            yield good(f"{pool} workers", f"{len(ready)} ready" + (f", each on {devices}" if devices else ""))
        elif complete:
            yield note(f"{pool} workers", "none: decode workers compute all prompts")
        else:
            yield bad(
                f"{pool} workers", "none is ready",
                f"Start `baton {pool}`, look at its log, or move a worker with `baton flip WORKER {pool}`.",
            )  # fmt: skip


async def request(client: aiohttp.ClientSession) -> Finding:
    """Sends a request for three tokens, which includes a handover from prefill to decode."""
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
