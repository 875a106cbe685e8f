"""Hundreds of connections whose clients read nothing: the figures that the router keeps to."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import psutil
import pytest

from baton.router.text.tokenizer import ModelTokenizer

from .conftest import Cluster, make_cluster
from .routers import AS_CLIENT
from .test_unread_answers import KEYS, ended_batches, get, open_unread

pytestmark = pytest.mark.long

MIB = 1 << 20
KERNEL_PAGE = 4096


def kernel_bytes() -> int:
    """Memory of the buffers of all TCP sockets of this machine, those of clients included."""
    lines = Path("/proc/net/sockstat").read_text().splitlines()
    words = next(line for line in lines if line.startswith("TCP:")).split()
    return KERNEL_PAGE * int(words[words.index("mem") + 1])


@contextmanager
def growth() -> Iterator[Callable[[], tuple[float, float]]]:
    """Gives how many MiB this process, and the kernel's buffers, have grown since it was opened."""
    process = psutil.Process()
    resident, kernel = process.memory_info().rss, kernel_bytes()

    def grown() -> tuple[float, float]:
        figures = (process.memory_info().rss - resident) / MIB, (kernel_bytes() - kernel) / MIB
        print("MiB of the process, of the kernel:", *figures)
        return figures

    yield grown


async def settled(get_figures: Callable[[], tuple[float, float]]) -> tuple[float, float]:
    """The figures when nothing more is sent."""
    before, figures = (-1.0, -1.0), get_figures()
    while before != figures:
        await asyncio.sleep(0.5)
        before, figures = figures, get_figures()
    return figures


async def batches(cluster: Cluster) -> bytes:
    return get("/v1/batches?limit=10000")


LONG = {
    "input": "Hi", "ignore_eos": True, "max_output_tokens": 5000, "top_logprobs": 20,
    "include": ["message.output_text.logprobs"],
}  # fmt: skip
"""A response of megabytes."""


async def a_stored_response(cluster: Cluster) -> bytes:
    status, made = await cluster.post("/v1/responses", AS_CLIENT, **LONG)
    assert status == 200, made
    return get(f"/v1/responses/{made['id']}")


async def a_background_stream(cluster: Cluster) -> bytes:
    body = {**LONG, "background": True, "stream": True}
    async with cluster.http.post(cluster.url + "/v1/responses", json=body, headers=AS_CLIENT) as response:
        text = await response.text()
        assert response.status == 200, text
    id = text.partition('"id":"resp_')[2].partition('"')[0]
    return get(f"/v1/responses/resp_{id}?stream=true")


async def the_api(cluster: Cluster) -> bytes:
    return get("/openapi.json")


async def a_file(cluster: Cluster) -> bytes:
    form = aiohttp.FormData({"purpose": "batch"})
    form.add_field("file", b"x" * (9 << 20), filename="in.jsonl")
    async with cluster.http.post(cluster.url + "/v1/files", data=form, headers=AS_CLIENT) as response:
        made = await response.json()
        assert response.status == 200, made
    return get(f"/v1/files/{made['id']}/content")


@pytest.mark.parametrize("asked", [batches, a_stored_response, a_background_stream, the_api, a_file])
async def test_200_answers_that_a_key_does_not_read_take_64_mib(
    tokenizer: ModelTokenizer,
    tmp_path: Path,
    asked: Callable[[Cluster], Awaitable[bytes]],
):
    """In this process and in the buffers of the kernel, those of the clients included."""
    kept = tmp_path / "kept"
    ended_batches(kept, 1000)
    async with make_cluster(tokenizer, tmp_path, api_keys=KEYS, batch_dir=str(kept)) as cluster:
        sent = await asked(cluster)
        async with cluster.http.get(cluster.url + sent.split()[1].decode(), headers=AS_CLIENT) as response:
            assert response.status == 200
            print("bytes of an answer:", len(await response.read()))
        await cluster.http.close()
        with growth() as grown:
            unread = [await open_unread(cluster.url, 5 * sent) for _ in range(200)]
            process, kernel = await settled(grown)
            for sock in unread:
                sock.close()
    assert process + kernel < 64
