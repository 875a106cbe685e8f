"""`baton top`: what happened between two scrapes, and a real router's own pages."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from typer.testing import CliRunner

from baton.cluster.cli import app
from baton.cluster.options.clients import EndpointOptions
from baton.cluster.supervision.processes import PACKAGES
from baton.cluster.tools.status import merged
from baton.cluster.tools.top import Page, Scrape, headline, page_text, parse, row, scrape
from baton.kv_transfer import TransferStats
from baton.router.text.tokenizer import ModelTokenizer, load_tokenizer
from baton.rpc import worker_pb2 as pb
from baton.worker.service_process.metrics import Metrics
from tests.fake_worker import FakeWorker
from tests.router.conftest import Cluster, make_cluster

TEXT = "w11 w12 w13 w14 w15 w16 w17"
TTFT = "vllm:time_to_first_token_seconds"


def page(kv_bytes: float = 0, tokens: float = 0, ttft: tuple[int, int, int] = (0, 0, 0)) -> Page:
    """`ttft`: how many took up to 0.1 s, up to 0.2 s, longer."""
    first, second, all_ = ttft[0], ttft[0] + ttft[1], sum(ttft)
    return parse(
        f"""# TYPE baton:kv_bytes counter
baton:kv_bytes_total{{direction="send"}} {kv_bytes}
baton:kv_bytes_total{{direction="receive"}} 0
# TYPE vllm:generation_tokens counter
vllm:generation_tokens_total {tokens}
# TYPE {TTFT} histogram
{TTFT}_bucket{{le="0.1"}} {first}
{TTFT}_bucket{{le="0.2"}} {second}
{TTFT}_bucket{{le="+Inf"}} {all_}
{TTFT}_sum 1
{TTFT}_count {all_}
# TYPE vllm:prefix_cache_queries counter
vllm:prefix_cache_queries_total {10 * tokens}
# TYPE vllm:prefix_cache_hits counter
vllm:prefix_cache_hits_total {4 * tokens}
# TYPE baton:prefix_fetched_tokens counter
baton:prefix_fetched_tokens_total{{tier="device"}} {2 * tokens}
baton:prefix_fetched_tokens_total{{tier="host"}} {tokens}
# TYPE baton:split_prompts counter
baton:split_prompts_total {tokens / 100}
# TYPE baton:offload_loaded_tokens counter
baton:offload_loaded_tokens_total{{tier="host"}} {2 * tokens}
"""
    )


def at(seconds: float, router: Page, worker: Page | None, incarnation: str = "a", **more: Any) -> Scrape:
    described = {
        "role": "decode", "index": 3, "incarnation": incarnation, "state": "ready", "address": "a:1",
        "description": {"device": "cuda", "tensor_parallel_size": 2},
        "status": {"blocks_free": 25, "blocks_total": 100, "requests_running": 7},
    }  # fmt: skip
    status = {"router": {"model": "m", "state": "serving"}, "workers": [described], **more}
    return Scrape(seconds, status, router, {"a:1": worker} if worker is not None else {})


def rows(before: Scrape | None, after: Scrape) -> list[dict[str, str]]:
    return [row(worker, before, after) for worker in merged(after.status)]


def test_rates_cover_the_time_between_two_scrapes() -> None:
    scrapes = (
        at(10, page(tokens=100, ttft=(1000, 0, 0)), page(kv_bytes=5e9, tokens=10)),
        at(14, page(tokens=900, ttft=(1090, 9, 1)), page(kv_bytes=25e9, tokens=50)),
    )
    first, rates, latencies = headline(*scrapes)
    assert "over 4.0 s" in first
    assert "output tokens/s 200.0" in rates
    assert "split prompts 8 " in rates
    assert "TTFT 55.6 / 200.0 ms" in latencies, "the thousand before do not count"
    assert "TTIT –" in latencies, "of which there is no histogram"
    [found] = rows(*scrapes)
    expected = {
        "worker": "decode 3", "pool": "decode", "device": "2 GPUs", "running": "7", "KV used": "75%",
        "KV GB/s": "5.00", "tokens/s": "10.0", "cached": "40%", "fetched/s": "30.0", "host/s": "20.0",
        "disk/s": "–",
    }  # fmt: skip
    assert expected.items() <= found.items()


def test_a_worker_has_the_rate_of_its_present_pool() -> None:
    prompts = "# TYPE vllm:prompt_tokens counter\nvllm:prompt_tokens_total "
    before, after = at(10, page(), parse(prompts + "10\n")), at(12, page(), parse(prompts + "50\n"))
    after.status["workers"][0]["status"]["pool"] = "pool_prefill"
    [found] = rows(before, after)
    assert [found[name] for name in ("worker", "pool", "tokens/s")] == ["decode 3", "prefill", "20.0"]


def test_the_first_frame_has_no_rates() -> None:
    scrape = at(10, page(tokens=100, ttft=(5, 0, 0)), page(kv_bytes=5))
    first, rates, latencies = headline(None, scrape)
    assert "no rates yet" in first
    assert "output tokens/s –" in rates
    assert "TTFT –" in latencies
    [found] = rows(None, scrape)
    assert (found["KV used"], found["KV GB/s"]) == ("75%", "–")


@pytest.mark.parametrize(
    ("before", "after", "incarnation"),
    [
        (page(kv_bytes=5e9), page(kv_bytes=9e9), "b"),  # another process, that has counted further
        (page(kv_bytes=5e9), page(kv_bytes=1e9), "a"),  # backwards
        (None, page(kv_bytes=9e9), "a"),  # was not within reach
        (page(kv_bytes=5e9), None, "a"),
    ],
)
def test_no_rate_across_a_restart(before: Page | None, after: Page | None, incarnation: str) -> None:
    [found] = rows(at(10, page(), before), at(12, page(), after, incarnation))
    assert found["KV GB/s"] == "–"


def test_a_restarted_router_has_no_latencies() -> None:
    found = headline(at(1, page(ttft=(9, 0, 0)), None), at(2, page(ttft=(1, 0, 0)), None))
    assert "TTFT –" in found[2]


def test_a_quantile_beyond_the_last_bucket_is_its_bound() -> None:
    found = headline(at(1, page(), None), at(2, page(ttft=(0, 0, 5)), None))
    assert "TTFT 200.0 / 200.0 ms" in found[2]


async def test_a_page_in_several_pieces_is_read_to_its_end() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"first,")
        await asked.wait()
        await response.write(b" second")
        return response

    asked = asyncio.Event()
    app = web.Application()
    app.router.add_get("/metrics", answer)
    async with (
        TestServer(app) as server,
        aiohttp.ClientSession() as http,
        http.get(server.make_url("/metrics")) as response,
    ):
        asyncio.get_running_loop().call_later(0.05, asked.set)
        assert await page_text(response) == "first, second"


def test_a_worker_known_only_to_the_supervisor_has_a_row() -> None:
    role = {"role": "prefill", "index": 0, "address": None, "phase": "waiting", "restarts": 4}
    cluster = {"roles": [role | {"crash_loop": True, "stage": "", "leaving": False}]}
    found = rows(None, at(1, page(), None, cluster=cluster))
    assert [(w["worker"], w["state"], w["restarts"]) for w in found] == [
        ("prefill 0", "waiting CRASH LOOP", "4"),
        ("decode 3", "ready", "–"),
    ]


# ------------------------------------------------------------ a real router


@pytest.fixture
def tokenizer(tmp_path: Path) -> ModelTokenizer:
    """Of a hundred words, which loads at once."""
    made = Tokenizer(WordLevel({f"w{i}": i for i in range(100)}, unk_token="w0"))
    made.pre_tokenizer = WhitespaceSplit()  # pyrefly: ignore[read-only]
    made.decoder = ByteLevel()  # pyrefly: ignore[read-only]
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 8192}')
    return load_tokenizer(str(tmp_path))


def sent(kv_bytes: int) -> TransferStats:
    return TransferStats(0, 0, 0, 1, 4, 64, 64, 64, kv_bytes, 0, 2, 0, 0, {}, {}, {}, {}, {})


@pytest.fixture
async def worker_page() -> AsyncIterator[tuple[Metrics, str]]:
    """The metrics page of a real worker, and where it is."""
    metrics = Metrics("decode", "fake")
    metrics.transfer_stats = sent(1_000)
    yield metrics, f"127.0.0.1:{await metrics.listen('127.0.0.1', 0, lambda: True)}"
    metrics.close()


async def join(cluster: Cluster, tmp_path: Path, metrics_address: str) -> None:
    """A decode worker with a metrics page."""
    worker = FakeWorker(pb.POOL_DECODE, cluster.lanes, cluster.output_ids, index=3)
    worker.metrics_address = metrics_address
    await worker.start()
    cluster.workers.append(worker)
    with (tmp_path / "workers").open("a") as file:
        file.write(f"{worker.address}\n")
    await cluster.until(lambda: bool(cluster.router.services.pool.ready(pb.POOL_DECODE)))
    await cluster.until(lambda: worker.attached)


async def test_a_real_router_and_its_workers(
    tokenizer: ModelTokenizer, tmp_path: Path, worker_page: tuple[Metrics, str]
) -> None:
    metrics, address = worker_page
    async with make_cluster(tokenizer, tmp_path, decode=0, text=TEXT) as cluster:
        await join(cluster, tmp_path, address)
        endpoint = EndpointOptions(url=cluster.url)
        before = await scrape(endpoint)
        await cluster.complete(max_tokens=5)
        metrics.transfer_stats = sent(10**12 + 1_000)
        after = await scrape(endpoint)
        await cluster.idle()
        printed = await asyncio.to_thread(
            CliRunner().invoke, app, ["top", "--once", "--interval", "0.1", "--url", cluster.url]
        )
    seconds = after.at - before.at
    _, rates, latencies = headline(before, after)
    assert f"output tokens/s {5 / seconds:,.1f} " in rates
    assert "TTFT –" not in latencies
    assert "handover –" not in latencies
    prefill, decode = rows(before, after)
    assert [prefill[name] for name in ("worker", "state", "KV GB/s")] == ["prefill 0", "ready", "–"]
    assert [decode[name] for name in ("worker", "KV used")] == ["decode 3", "0%"]
    assert decode["KV GB/s"] == f"{1000 / seconds:,.2f}"
    assert printed.exit_code == 0, printed.output
    assert printed.output.count("decode 3") == 1
    assert "TTFT – · TTIT – · handover –" in printed.output, "nothing happened meanwhile"


async def test_in_a_pipe_it_prints_frame_after_frame_until_ctrl_c(
    tokenizer: ModelTokenizer, tmp_path: Path
) -> None:
    async with make_cluster(tokenizer, tmp_path, text=TEXT) as cluster, asyncio.timeout(60):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "baton.cluster.cli", "top", "--interval", "0.1", "--url", cluster.url,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=dict(os.environ) | {"PYTHONPATH": PACKAGES, "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        assert process.stdout is not None
        frames = 0
        while frames < 2:
            frames += (await process.stdout.readline()).startswith(b"decode 0")
        process.send_signal(signal.SIGINT)
        _, errors = await process.communicate()
    assert (process.returncode, errors) == (0, b"")


def test_no_router() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    printed = CliRunner().invoke(app, ["top", "--once", "--url", f"http://127.0.0.1:{port}"])
    assert printed.exit_code == 2
    assert "no server answers" in printed.output
