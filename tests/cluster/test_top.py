"""`baton top`: what happened between two scrapes, and a real router's own pages."""

import asyncio
import contextlib
import io
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from rich.console import Console
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from typer.testing import CliRunner

from baton.cluster.cli import app
from baton.cluster.options.clients import EndpointOptions
from baton.cluster.tools.status import merged
from baton.cluster.tools.top import Page, Scrape, frame, headline, page_text, parse, row, scrape
from baton.router.text.tokenizer import ModelTokenizer, load_tokenizer
from baton.system.python_path import PACKAGES
from tests.router.conftest import make_cluster
from tests.within import WITHIN, eventually

TEXT = "w11 w12 w13 w14 w15 w16 w17"
TTFT = "vllm:time_to_first_token_seconds"


def page(tokens: float = 0, ttft: tuple[int, int, int] = (0, 0, 0)) -> Page:
    """A page of a router. `ttft`: how many took up to 0.1 s, up to 0.2 s, longer."""
    first, second, all_ = ttft[0], ttft[0] + ttft[1], sum(ttft)
    return parse(
        f"""# TYPE vllm:generation_tokens counter
vllm:generation_tokens_total {tokens}
# TYPE {TTFT} histogram
{TTFT}_bucket{{le="0.1"}} {first}
{TTFT}_bucket{{le="0.2"}} {second}
{TTFT}_bucket{{le="+Inf"}} {all_}
{TTFT}_sum 1
{TTFT}_count {all_}
# TYPE baton:split_prompts counter
baton:split_prompts_total {tokens / 100}
# TYPE baton:overflow counter
baton:overflow_total{{reason="short"}} {tokens / 50}
baton:overflow_total{{reason="cached"}} {tokens / 50}
"""
    )


def counted(tokens: int = 0, kv_bytes: float = 0) -> dict[str, Any]:
    """The status of a worker that has counted so much."""
    return {
        "kv_bytes": kv_bytes, "generation_tokens": tokens, "computed_prompt_tokens": 5 * tokens,
        "prefix_cache_queries": 10 * tokens, "prefix_cache_hits": 4 * tokens,
        "prefix_fetched_tokens": 3 * tokens, "host_loaded_tokens": 2 * tokens, "disk_loaded_tokens": 0,
        "handovers": tokens, "handovers_hidden": 0.75 * tokens,
    }  # fmt: skip


def at(seconds: float, router: Page, counts: dict[str, Any], incarnation: str = "a", **more: Any) -> Scrape:
    described = {
        "role": "decode", "index": 3, "incarnation": incarnation, "state": "ready", "address": "a:1",
        "description": {"device": "cuda", "tensor_parallel_size": 2},
        "status": {"blocks_free": 25, "blocks_total": 100, "requests_running": 7} | counts,
    }  # fmt: skip
    return Scrape(
        seconds, {"router": {"model": "m", "state": "serving"}, "workers": [described], **more}, router
    )


def rows(before: Scrape | None, after: Scrape) -> list[dict[str, str]]:
    return [row(worker, before, after) for worker in merged(after.status)]


def drawn(before: Scrape | None, after: Scrape, width: int = 80) -> str:
    console = Console(width=width, file=io.StringIO(), highlight=False)
    console.print(frame(before, after, width))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_rates_cover_the_time_between_two_scrapes() -> None:
    scrapes = (
        at(10, page(tokens=100, ttft=(1000, 0, 0)), counted(10, kv_bytes=5e6)),
        at(14, page(tokens=900, ttft=(1090, 9, 1)), counted(50, kv_bytes=25e6)),
    )
    first, rates, paths, latencies = headline(*scrapes)
    assert "over 4.0 s" in first
    assert "output tokens/s 200.0" in rates
    assert "split prompts 8 · on one worker 32 " in paths
    assert "TTFT 55.6 / 200.0 ms" in latencies, "the thousand before do not count"
    assert "ITL –" in latencies, "of which there is no histogram"
    [found] = rows(*scrapes)
    expected = {
        "worker": "decode 3", "pool": "decode", "device": "2 GPUs", "running": "7", "KV used": "75%",
        "KV MB/s": "5.0", "output/s": "10.0", "cached": "40%", "fetched/s": "30.0", "host/s": "20.0",
        "hidden": "75%", "drafts": "–",
    }  # fmt: skip
    assert expected.items() <= found.items()


def test_a_worker_has_the_rates_of_both_kinds_of_work() -> None:
    """One of the prefill pool may decode a long answer."""
    more = {"pool": "pool_prefill", "computed_prompt_tokens": 9}
    before, after = at(10, page(), counted(2) | more), at(12, page(), counted(10) | more)
    [found] = rows(before, after)
    names = ("worker", "pool", "prompt/s", "output/s")
    assert [found[name] for name in names] == ["decode 3", "prefill", "0.0", "4.0"]


def test_the_first_frame_has_no_rates() -> None:
    scrape = at(10, page(tokens=100, ttft=(5, 0, 0)), counted(kv_bytes=5))
    first, rates, _, latencies = headline(None, scrape)
    assert "no rates yet" in first
    assert "output tokens/s –" in rates
    assert "TTFT –" in latencies
    [found] = rows(None, scrape)
    assert (found["KV used"], found["KV MB/s"]) == ("75%", "–")


@pytest.mark.parametrize(
    ("before", "after", "incarnation"),
    [
        (counted(kv_bytes=5e9), counted(kv_bytes=9e9), "b"),  # another process, that has counted further
        (counted(kv_bytes=5e9), counted(kv_bytes=1e9), "a"),  # backwards
        (counted(kv_bytes=5e9), {}, "a"),  # of an older version, or unknown yet
    ],
)
def test_no_rate_across_a_restart(before: dict[str, Any], after: dict[str, Any], incarnation: str) -> None:
    [found] = rows(at(10, page(), before), at(12, page(), after, incarnation))
    assert found["KV MB/s"] == "–"


def test_a_restarted_router_has_no_latencies() -> None:
    found = headline(at(1, page(ttft=(9, 0, 0)), {}), at(2, page(ttft=(1, 0, 0)), {}))
    assert "TTFT –" in found[-1]


def test_a_quantile_beyond_the_last_bucket_is_its_bound() -> None:
    found = headline(at(1, page(), {}), at(2, page(ttft=(0, 0, 5)), {}))
    assert "TTFT 200.0 / 200.0 ms" in found[-1]


def test_a_frame_fits_into_the_terminal() -> None:
    """Columns of what no worker has used stay away, and those without room are named."""
    before, after = at(10, page(), counted(0)), at(12, page(tokens=900), counted(10**9, kv_bytes=1e12))
    for width in (60, 80, 160):
        found = drawn(before, after, width)
        assert max(map(len, found.splitlines())) <= width
        assert "…" not in found
        assert ("More columns in a pipe" in found) == ("2 GPUs" not in found)
        assert "host/s" in found, "as a column, or by its name"
        assert "disk/s" not in found
    assert "host/s" not in drawn(None, before, 200)


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
    found = rows(None, at(1, page(), {}, cluster=cluster))
    assert [(w["worker"], w["state"], w["restarts"]) for w in found] == [
        ("prefill 0", "CRASH LOOP", "4"),
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


async def test_a_real_router_and_its_workers(tokenizer: ModelTokenizer, tmp_path: Path) -> None:
    """The counts of workers come from the router, as pages of workers are out of reach on Kubernetes. Tokens
    count when they come, not when their request ends."""
    async with make_cluster(tokenizer, tmp_path, text=TEXT) as cluster:
        endpoint, [decode] = EndpointOptions(url=cluster.url), cluster.decodes
        before = await scrape(endpoint)
        decode.steps = asyncio.Semaphore(3)
        running = asyncio.create_task(cluster.complete(max_tokens=6))
        decode.status.kv_bytes, decode.status.generation_tokens = 1_000_000_000, 3
        async with asyncio.timeout(WITHIN):
            while True:
                during = await scrape(endpoint)
                if during.router["vllm:generation_tokens_total", ""] == 3:
                    break
        for _ in range(3):
            decode.steps.release()
        await running
        after = await scrape(endpoint)
        await cluster.idle()
        printed = await asyncio.to_thread(
            CliRunner().invoke, app, ["top", "--advanced.interval", "0.1", "--url", cluster.url]
        )
    assert during.router["vllm:prompt_tokens_total", ""] == 1, "its first token has come"
    seconds = after.at - before.at
    _, rates, paths, latencies = headline(before, after)
    assert f"output tokens/s {6 / seconds:,.1f} " in rates
    assert "handovers 1 " in paths
    assert "TTFT –" not in latencies
    assert "handover –" not in latencies
    prefill, shown = rows(before, after)
    assert [prefill[name] for name in ("worker", "state", "KV MB/s")] == ["prefill 0", "ready", "0.0"]
    assert [shown[name] for name in ("worker", "KV used")] == ["decode 0", "0%"]
    assert shown["KV MB/s"] == f"{1000 / seconds:,.1f}"
    assert printed.exit_code == 0, printed.output
    assert printed.output.count("decode 0") == 1
    assert "TTFT – · ITL – · handover –" in printed.output, "nothing happened meanwhile"


@pytest.mark.all
async def test_in_a_terminal_it_draws_frame_after_frame_until_ctrl_c(
    tokenizer: ModelTokenizer, tmp_path: Path
) -> None:
    terminal, its_end = os.openpty()
    async with make_cluster(tokenizer, tmp_path, text=TEXT) as cluster, asyncio.timeout(WITHIN):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "baton.cluster.cli", "top", "--advanced.interval", "0.1",
            "--url", cluster.url,
            stdout=its_end, stderr=subprocess.PIPE,
            env=dict(os.environ) | {"PYTHONPATH": PACKAGES, "TERM": "xterm"},
        )  # fmt: skip
        os.close(its_end)
        drawn = b""

        async def read() -> None:
            """To the end: a process that draws waits for a terminal that is full."""
            nonlocal drawn
            with contextlib.suppress(OSError):  # the other end is closed
                while True:
                    drawn += await asyncio.to_thread(os.read, terminal, 4096)

        reading = asyncio.create_task(read())
        await eventually(lambda: drawn.count(b"decode 0") >= 3)
        process.send_signal(signal.SIGINT)
        _, errors = await process.communicate()
        await reading
    os.close(terminal)
    assert (process.returncode, errors) == (0, b"")


def test_no_router() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    printed = CliRunner().invoke(app, ["top", "--url", f"http://127.0.0.1:{port}"])
    assert printed.exit_code == 2
    assert "no server answers" in printed.output
