"""What `/metrics` counts, and from when on."""

import asyncio
import json
import time
from collections.abc import AsyncIterator

from baton.system.metrics_page import samples

from .conftest import Cluster


async def metric(cluster: Cluster, name: str) -> float:
    return sum(sample.value for sample in samples(await cluster.metrics(), name))


async def test_counters_move_while_tokens_flow(cluster: Cluster) -> None:
    (decode,) = cluster.decodes
    decode.steps = asyncio.Semaphore(4)
    body = {"model": "fake", "prompt": "Hello", "stream": True}
    async with cluster.http.post(f"{cluster.url}/v1/completions", json=body) as response:
        seen = 0
        async for line in response.content:
            seen += line.startswith(b"data: ")
            if seen == 4:
                break
        counted = [await metric(cluster, f"vllm:{name}_tokens_total") for name in ("prompt", "generation")]
        assert counted[0] == 1
        assert 4 <= counted[1] < len(cluster.output_ids), "in the middle of the answer"
        decode.steps = None


async def test_preparation_and_the_first_token_are_counted_from_the_headers_on(cluster: Cluster) -> None:
    """So a client that sends its body slowly does not look like a fast router."""
    headers_sent, waited = time.monotonic(), 0.0

    async def body() -> AsyncIterator[bytes]:
        nonlocal waited
        yield b'{"model": "fake", '
        await cluster.until(lambda: cluster.router.services.admission.body_bytes > 0)
        received = time.monotonic()
        await asyncio.sleep(0.05)  # what is measured is at least that
        waited = time.monotonic() - received
        yield json.dumps({"prompt": "Hello"})[1:].encode()

    async with cluster.http.post(
        f"{cluster.url}/v1/completions", data=body(), headers={"Content-Type": "application/json"}
    ) as response:
        assert response.status == 200, await response.text()
    whole = time.monotonic() - headers_sent
    for name in ("baton:preparation_seconds_sum", "vllm:time_to_first_token_seconds_sum"):
        assert 0.05 <= waited <= await metric(cluster, name) <= whole
