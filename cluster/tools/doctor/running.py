"""Checks a running cluster through its router: states and KV of workers, a real request, and a handover."""

import asyncio
import random
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from http import HTTPStatus
from typing import Any

import aiohttp

from baton.cluster.options.clients import DoctorOptions, EndpointOptions
from baton.cluster.tools.doctor.finding import Finding, bad, good, note, warning
from baton.cluster.tools.http import answer, checked, error_message, session
from baton.cluster.tools.status import device_of, name_of, place_of, pool_of, ready

ADMIN = (
    "Give the URL of clients as --url, and that of the router's --admin-port, which `baton serve` prints, as "
    "--admin-url."
)
TIMEOUT = aiohttp.ClientTimeout(total=120)
NEARLY_FULL = 0.95
TOKENS = 3  # of an answer
LENGTHS = 128, 512, 2048, 8192  # of prompts, in words
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
LONGEST_REPORT = 1.0  # seconds until a router knows what a worker counts


async def running(doctor: DoctorOptions, endpoint: EndpointOptions) -> AsyncIterator[Finding]:
    flag, admin, before = "--url", endpoint, list[dict[str, Any]]()
    if doctor.admin_url is not None:  # the admin port needs no key, so do not send it
        flag, admin = "--admin-url", replace(endpoint, url=doctor.admin_url, api_key=[])
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
                yield await handover(client, to_admin, card)
    except ValueError as error:
        yield bad("router", str(error), "Start the router, or correct --url, --admin-url and --api-key.")


def workers(found: list[dict[str, Any]], *, complete: bool) -> Iterator[Finding]:
    """Judges the workers in the router's /status. Pure. `complete`: each pool of the cluster has a worker."""
    yield from _pools(found, complete)
    for worker in found:
        if not ready(worker):
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
        serving = [worker for worker in found if pool_of(worker) == pool and ready(worker)]
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
    usage, took = await _complete(client, card, "The doctor says:")
    tokens = usage["completion_tokens"]
    if tokens != TOKENS:
        return bad(
            "a request", f"{tokens} of {TOKENS} tokens", "Look at the router's log for its x-request-id."
        )
    return good("a request", f"{TOKENS} tokens in {took * 1e3:.0f} ms")


async def handover(
    client: aiohttp.ClientSession, admin: aiohttp.ClientSession, card: dict[str, Any]
) -> Finding:
    """Sends prompts of growing length, until KV has moved between workers.

    A router computes a short prompt on the worker that decodes, if its tokens come earlier so. Other requests
    may move KV meanwhile, which proves the same."""
    before, tokens = await _transfers(admin), 0
    longest = (card.get("max_model_len") or LENGTHS[-1]) // 2
    for length in dict.fromkeys(min(length, longest) for length in LENGTHS):
        # Random words of a token each: no cache has such a prompt.
        usage, took = await _complete(client, card, " ".join(random.choices(WORDS, k=length)))
        tokens = usage["prompt_tokens"]
        if await _transfers(admin) > before:
            told = f"KV came from another worker for a prompt of {tokens} tokens, {TOKENS} tokens in"
            return good("a handover", f"{told} {took * 1e3:.0f} ms")
    await asyncio.sleep(LONGEST_REPORT)  # of many workers a router shows the last reports
    if await _transfers(admin) > before:
        return good("a handover", "KV came from another worker")
    return warning(
        "a handover", f"none: the router had each prompt of up to {tokens} tokens computed on one worker",
        "It does so where tokens come earlier. `baton serve --no-overflow` hands over each prompt; the logs "
        "of the workers name a KV transfer that fails.",
    )  # fmt: skip


async def _complete(
    client: aiohttp.ClientSession, card: dict[str, Any], prompt: str
) -> tuple[dict[str, int], float]:
    """The usage of the answer to a prompt, and its seconds."""
    body = {"model": card["id"], "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
    began = time.perf_counter()
    found = await answer(client.post("v1/completions", json=body | {"ignore_eos": True}))
    return found["usage"], time.perf_counter() - began


async def _transfers(admin: aiohttp.ClientSession) -> int:
    """KV transfers of all workers that ended well."""
    found = (await answer(admin.get("status")))["workers"]
    return sum((worker.get("status") or {}).get("kv_transfers", 0) for worker in found)
