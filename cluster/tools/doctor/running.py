"""Checks a running cluster through its router: states and KV of workers, a real request, and a handover for
each pair of workers."""

import asyncio
import itertools
import os
import random
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import replace
from http import HTTPStatus
from operator import itemgetter
from typing import Any

import aiohttp

from baton.cluster.options.clients import DoctorOptions, EndpointOptions
from baton.cluster.tools.doctor.finding import Finding, bad, good, note, warning
from baton.cluster.tools.http import answer, checked, error_message, session
from baton.cluster.tools.status import device_of, name_of, place_of, ready
from baton.rpc.pools import pool_of
from baton.system.words import counted

ADMIN = (
    "Give the URL of clients as --url, and that of the router's --admin-port, which `baton serve` prints, as "
    "--advanced.admin-url."
)
TIMEOUT = aiohttp.ClientTimeout(total=120)
NEARLY_FULL = 0.95
SLOWER, LATE = 4, 1.0
"""How many times slower than usual a link is suspicious, and how many seconds KV may be behind."""
TOKENS = 3  # of an answer
LENGTH = 128  # of a prompt that is handed over, in words
JOINED = "decode has the KV"
"""As the timeline of a request says it."""
MOST_PAIRS, PAIRS_AT_ONCE = 64, 8
WORDS = (
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "it",
    "you",
    "that",
    "he",
    "was",
    "for",
    "on",
    "are",
    "with",
    "as",
)


async def running(doctor: DoctorOptions, endpoint: EndpointOptions) -> AsyncIterator[Finding]:
    flag, admin, before = "--url", endpoint, list[dict[str, Any]]()
    if doctor.admin_url is not None:  # the admin port needs no key, so do not send it
        flag, admin = "--advanced.admin-url", replace(endpoint, url=doctor.admin_url, api_key=[])
    try:
        async with session(admin, TIMEOUT, flag) as client, client.get("status") as response:
            if response.status == HTTPStatus.NOT_FOUND:
                yield warning("status", f"{flag} {admin.url}: {await error_message(response)}", ADMIN)
            else:
                report = await (await checked(response)).json()
                before = report["workers"]
                for finding in workers(before, complete=report["router"]["ready"]):
                    yield finding
                if "processes" in report and doctor.admin_url is None:
                    yield warning("a request", f"not sent, --url {admin.url} is an admin port", ADMIN)
                    return
        async with session(endpoint, TIMEOUT) as client:
            card = (await answer(client.get("v1/models")))["data"][0]
            yield await request(client, card)
        if {pool_of(each) for each in before if ready(each)} >= {"prefill", "decode"}:
            async with session(endpoint, TIMEOUT) as client, session(admin, TIMEOUT, flag) as to_admin:
                async for finding in handovers(client, to_admin, card, before):
                    yield finding
    except ValueError as error:
        yield bad(
            "router", str(error), "Start the router, or correct --url, --advanced.admin-url and --api-key."
        )


def workers(rows: list[dict[str, Any]], *, complete: bool) -> Iterator[Finding]:
    """Judges the workers in the router's /status. Pure. `complete`: each pool of the cluster has a worker."""
    yield from _pools(rows, complete)
    for worker in rows:
        if not ready(worker):
            why = f"{worker.get('state')}: {worker.get('reason') or 'no reason known'}"
            remedy = worker.get("remedy") or "Look at the worker's log."
            # A worker that cannot be reached may come back. A refused worker stays refused.
            level = bad if worker.get("state") == "refused" else warning
            yield level(place_of(worker), why, remedy)
    if kinds := _kv(rows):
        yield good("KV cache", kinds)
    yield from _links(rows)
    for worker in rows:
        load = worker.get("status") or {}
        total = load.get("blocks_total")
        if total and 1 - load["blocks_free"] / total > NEARLY_FULL and pool_of(worker) == "decode":
            yield warning(
                name_of(worker), f"{1 - load['blocks_free'] / total:.0%} of its KV blocks in use",
                "Add decode workers, or raise --gpu-memory-utilization.",
            )  # fmt: skip


def _links(rows: list[dict[str, Any]]) -> Iterator[Finding]:
    """What the links for KV carry, as their transfers showed. Those are named that are much slower than the
    others, or have much to carry."""
    names = {row.get("incarnation"): name_of(row) for row in rows}
    links = [
        (link["bytes_per_s"] / 1e9, link, f"{names.get(link['incarnation'], '?')} → {name_of(row)}")
        for row in rows
        for link in (row.get("status") or {}).get("kv_links") or ()
    ]
    if not links:
        return
    links.sort(key=itemgetter(0))
    usual = links[len(links) // 2][0]
    for rate, link, name in links:
        behind = link["bytes_waiting"] / 1e9 / rate
        text = f"{rate:.2f} GB/s, {link['used']:.0%} used"
        if rate < usual / SLOWER:
            remedy = f"Others carry {usual:.2f} GB/s: look at the speed of the NICs, at routes and the MTU."
            yield warning(f"KV link {name}", text, remedy)
        elif behind > LATE:
            remedy = "The load hands over more than it carries. Use a faster network, or more of them."
            yield warning(f"KV link {name}", f"{text}, {behind:.1f} s behind", remedy)
    rates = " to ".join(dict.fromkeys(f"{links[end][0]:.2f}" for end in (0, -1)))
    most = max(link["used"] for _, link, _ in links)
    yield good("KV links", f"{counted(len(links), 'link')}, {rates} GB/s, up to {most:.0%} used")


def _kv(workers: list[dict[str, Any]]) -> str:
    """The dtype of each worker's KV cache. The router refuses workers whose KV cannot be converted."""
    kinds: defaultdict[str, list[str]] = defaultdict(list)
    for worker in workers:
        described = worker.get("description") or {}
        if dtype := described.get("dtype"):
            size = described.get("kv_token_bytes")
            kinds[dtype + (f", {size:,} bytes a token" if size else "")].append(name_of(worker))
    return "; ".join(f"{kind}: {', '.join(names)}" for kind, names in kinds.items())


def _pools(workers: list[dict[str, Any]], complete: bool) -> Iterator[Finding]:
    for pool in ("prefill", "decode"):
        serving = [worker for worker in workers if pool_of(worker) == pool and ready(worker)]
        if serving:
            devices = " or ".join(sorted(set(filter(None, map(device_of, serving)))))
            yield good(
                f"{pool} workers", f"{len(serving)} ready" + (f", each on {devices}" if devices else "")
            )
        elif complete:
            yield note(f"{pool} workers", "none: decode workers compute all prompts")
        else:
            yield bad(
                f"{pool} workers", "none is ready",
                f"Start `baton {pool}`, look at its log, or move a worker with `baton flip WORKER {pool}`.",
            )  # fmt: skip


async def request(client: aiohttp.ClientSession, card: dict[str, Any]) -> Finding:
    """Sends a request for three tokens of the model with this card."""
    usage, seconds = await _complete(client, card, "The doctor says:")
    tokens = usage["completion_tokens"]
    if tokens != TOKENS:
        return bad(
            "a request", f"{tokens} of {TOKENS} tokens", "Look at the router's log for its x-request-id."
        )
    return good("a request", f"{TOKENS} tokens in {seconds * 1e3:.0f} ms")


async def handovers(
    client: aiohttp.ClientSession,
    admin: aiohttp.ClientSession,
    card: dict[str, Any],
    rows: list[dict[str, Any]],
) -> AsyncIterator[Finding]:
    """Has each prefill worker hand KV over to each decode worker.

    A header names both, and the timeline of the request proves that the router followed it."""
    serving = {pool: [w for w in rows if pool_of(w) == pool and ready(w)] for pool in ("prefill", "decode")}
    pairs = list(itertools.product(*serving.values()))
    if len(pairs) > MOST_PAIRS:
        most = max(map(len, serving.values()))
        pairs = [tuple(some[i % len(some)] for some in serving.values()) for i in range(most)]
        yield note("handovers", f"{most} pairs are tried, in which each worker is; there are more")
    together = asyncio.Semaphore(PAIRS_AT_ONCE)

    async def tried(prefill: dict[str, Any], decode: dict[str, Any]) -> Finding | float:
        async with together:
            return await handover(client, admin, card, prefill, decode)

    results = await asyncio.gather(*(tried(*pair) for pair in pairs))
    seconds = [each for each in results if isinstance(each, float)]
    for each in results:
        if isinstance(each, Finding):
            yield each
    if seconds:
        text = f"KV came over for {len(seconds)} of {counted(len(pairs), 'pair')} of workers"
        yield good("handovers", f"{text}, {max(seconds) * 1e3:.0f} ms for the slowest")


async def handover(
    client: aiohttp.ClientSession,
    admin: aiohttp.ClientSession,
    card: dict[str, Any],
    prefill: dict[str, Any],
    decode: dict[str, Any],
) -> Finding | float:
    """Returns the seconds of a request that one worker hands over to another, or what is wrong."""
    check, name = f"KV from {place_of(prefill)} to {place_of(decode)}", f"doctor-{os.urandom(8).hex()}"
    headers = {"x-handover": f"{prefill['address']} {decode['address']}", "x-request-id": name}
    length = min(LENGTH, (card.get("max_model_len") or LENGTH) // 2)
    # Random words of a token each: no cache has such a prompt.
    prompt, why = " ".join(random.choices(WORDS, k=length)), ""
    began = time.perf_counter()
    try:
        await _complete(client, card, prompt, headers)
    except ValueError as error:
        why = str(error)
    seconds = time.perf_counter() - began
    async with admin.get(f"status/requests/{name}") as response:
        timeline = await response.json() if response.status == HTTPStatus.OK else None
    if timeline is None:
        why = why or "not proved: another router has the timeline of the request"
        return warning(check, why, "Give the URL of one router.")
    if any(each["what"] == JOINED and each["worker"] == place_of(decode) for each in timeline["events"]):
        return seconds
    failures = (await answer(admin.get("status")))["router"].get("failures", ())
    why = next((each["message"] for each in failures if each["request_id"] == name), why)
    kv = (prefill.get("description") or {}).get("kv_address") or "--kv-port"
    return bad(
        check, f"the KV did not arrive{f' ({why})' if why else ''}",
        f"Let {name_of(decode)} connect to {kv}, the port for KV of {name_of(prefill)}: look at firewalls, "
        "network policies and --advanced.kv-host. The logs of both workers have more.",
    )  # fmt: skip


async def _complete(
    client: aiohttp.ClientSession, card: dict[str, Any], prompt: str, headers: Mapping[str, str] | None = None
) -> tuple[dict[str, int], float]:
    """The usage of the answer to a prompt, and its seconds."""
    body = {"model": card["id"], "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
    began = time.perf_counter()
    reply = await answer(client.post("v1/completions", json=body | {"ignore_eos": True}, headers=headers))
    return reply["usage"], time.perf_counter() - began
