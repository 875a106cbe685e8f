"""A worker with a real Mooncake Store: KV outlives the worker, and nothing wrong is ever used."""

import asyncio
import functools
import random
import signal
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from baton.kv_transfer.shared_store.client import ClientProcess
from tests.cluster_helpers import (
    WorkerProcess,
    WorkerStream,
    assert_whole,
    attached,
    metrics,
    paired,
    request,
    sampling,
    start_worker,
    tiny_model,
)
from tests.engine.conftest import save_tiny
from tests.kv_transfer.conftest import until
from tests.mooncake import Mooncake, libraries, mooncake
from tests.within import WITHIN

from .test_replaced_engine import kill, next_engine
from .test_weights import replaced, saved

pytestmark = pytest.mark.all

ENGINE = {"load_format": "dummy", "num_blocks": 80, "block_size": 16, "enable_prefix_caching": True}

ROOMY = {"num_blocks": 400}
"""Of an engine, so that nothing is evicted before it is written."""


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mooncake]:
    monkeypatch.setenv("LD_LIBRARY_PATH", libraries(tmp_path / "lib"))
    with mooncake(tmp_path) as running:
        yield running


@contextmanager
def worker(model: Path, directory: Path, store: Mooncake | None, **given: Any) -> Iterator[WorkerProcess]:
    settings: dict[str, Any] = {"engine_module": "tests.worker.eager_engine"} | given
    engine = ENGINE | settings.pop("engine", {})
    url = None if store is None else store.url
    patient = {"engine_dead": WITHIN}  # on a busy machine a costly prompt takes long
    with start_worker(
        "prefill", model, directory, engine=engine, kv_store=url, deadlines=patient, **settings
    ) as started:
        started.wait_ready()
        if store is not None:
            until(lambda: " is open" in started.log.read_text(), "the store to be open")
        yield started


async def generate(stream: WorkerStream, prompt: list[int]) -> tuple[list[int], int]:
    """The tokens, and how many tokens of the prompt were cached."""
    decode_id = await stream.submit_decode(request(prompt, sampling(max_tokens=8, ignore_eos=True)))
    await stream.reserved(decode_id)
    tokens = [token for token, _ in await stream.tokens(decode_id)]
    return [token.token_id for token in tokens], tokens[0].cached_tokens


def keys(store: Mooncake) -> list[str]:
    """What the store has."""
    with urllib.request.urlopen(
        f"http://127.0.0.1:{store.metrics_port}/get_all_keys", timeout=WITHIN
    ) as found:
        return found.read().decode().split()


async def measured(stream: WorkerStream) -> None:
    """Until the worker knows how fast the store is: no prompt waits for it before."""
    await stream.until(lambda now: now.store_tokens_per_s)


async def test_a_restarted_worker_finds_its_kv_in_the_store(store: Mooncake, tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    asked = prompts(2, 460)
    with worker(model, tmp_path / "1", store) as first:
        async with attached(first) as stream:
            expected = [(await generate(stream, prompt))[0] for prompt in asked]
        await assert_whole(first)
        assert await asyncio.to_thread(first.stop) == 0, "it writes all before it ends"
    with worker(model, tmp_path / "2", store, engine={"block_size": 128}) as second:
        async with attached(second) as stream:
            await measured(stream)
            for prompt, tokens in zip(asked, expected, strict=True):
                found = await generate(stream, prompt)
                assert found == (tokens, 448), "in its own blocks, and half of the next one"
        await assert_whole(second)
        assert await asyncio.to_thread(second.stop) == 0


async def test_a_replaced_engine_shares_kv_with_its_peers_after_weights_were_replaced(
    store: Mooncake, tmp_path: Path
) -> None:
    """Its peers began with other weights: it finds their objects in the store, and its lanes reach them."""
    model, trained = tiny_model(tmp_path / "model"), saved(tmp_path / "trained", 7)
    asked, params = prompts(1, 460)[0], sampling(max_tokens=8, ignore_eos=True)
    with (
        worker(model, tmp_path / "1", store, replace_engine=True) as first,
        worker(model, tmp_path / "2", store) as peer,
    ):
        for each in (first, peer):
            await replaced(each, trained, "1")
        async with paired(peer, first) as pair, attached(first) as gone:
            expected, _ = await generate(pair.prefill, asked)
            await next_engine(first, kill(first))
            await generate(gone, [1] * 20)  # it waits for the next engine
            await measured(gone)
            assert await generate(gone, asked) == (expected, 448), "what the peer has written"
            handed_over = prompts(2, 100)[1]
            right, _ = await generate(pair.prefill, handed_over)
            assert (await pair.generate(handed_over, params)).tokens == right
        await assert_whole(first, peer)


def prompts(count: int, length: int = 400) -> list[list[int]]:
    return [random.Random(seed).choices(range(500), k=length) for seed in range(count)]


async def answers(stream: WorkerStream, count: int) -> list[list[int]]:
    return [(await generate(stream, prompt))[0] for prompt in prompts(count)]


@pytest.fixture
async def expected(tmp_path: Path, store: Mooncake) -> AsyncIterator[list[list[int]]]:
    """What a worker without a store answers."""
    with worker(tiny_model(tmp_path / "model"), tmp_path / "alone", None) as alone:
        async with attached(alone) as stream:
            yield await answers(stream, 12)


async def fill(store: Mooncake, tmp_path: Path, expected: list[list[int]]) -> None:
    """A worker computes the prompts, writes them to the store, and ends."""
    with worker(tmp_path / "model", tmp_path / "1", store, engine=ROOMY) as first:
        async with attached(first) as stream:
            assert await answers(stream, 12) == expected
        assert await asyncio.to_thread(first.stop) == 0


@pytest.mark.long
async def test_a_worker_with_another_secret_finds_nothing(
    store: Mooncake, tmp_path: Path, expected: list[list[int]]
) -> None:
    model = tmp_path / "model"
    await fill(store, tmp_path, expected)
    other = b"another secret of this cluster"
    with worker(model, tmp_path / "2", store, secret=other) as second:
        async with attached(second, other) as stream:
            assert await generate(stream, prompts(1)[0]) == (expected[0], 0)
    with worker(model, tmp_path / "3", store) as third:
        async with attached(third) as stream:
            await measured(stream)
            assert await generate(stream, prompts(1)[0]) == (expected[0], 384)


@pytest.mark.long
@pytest.mark.parametrize("victim", ["worker", "store process", "master", "store"])
async def test_whatever_is_killed_while_kv_is_written_tokens_are_right(
    store: Mooncake, tmp_path: Path, expected: list[list[int]], victim: str
) -> None:
    model = tmp_path / "model"
    with worker(model, tmp_path / "1", store, engine=ROOMY) as first:
        victims = {"worker": first.popen, "master": store.master, "store": store.store}
        async with attached(first) as stream:
            for number, prompt in enumerate(prompts(12)):
                if number == 6 and victim != "worker":
                    (first.child("store") if victim == "store process" else victims[victim]).kill()
                assert (await generate(stream, prompt))[0] == expected[number]
            assert await answers(stream, 12) == expected
        if victim == "worker":
            first.popen.kill()
        else:
            await assert_whole(first)
            if victim == "store process":
                # A write that the store refuses is tried again later. A worker that stops waits for none of
                # these. Mooncake keeps the key of an object whose writer was killed, and says that it has it.
                written = functools.partial(until, lambda: len(keys(store)) >= 12 * 6 - 1, "all by the next")
                await asyncio.to_thread(written)
            assert await asyncio.to_thread(first.stop) == 0
    with ExitStack() as stack:
        if victim in ("master", "store"):
            store.kill()
            store = stack.enter_context(mooncake(tmp_path, port=store.port))
        with worker(model, tmp_path / "2", store) as second:
            async with attached(second) as stream:
                await measured(stream)
                found = [await generate(stream, prompt) for prompt in prompts(12)]
        assert [tokens for tokens, _ in found] == expected
        if victim in ("worker", "store process"):
            assert sum(cached for _, cached in found) >= 2 * 384, "what was written is found"


@pytest.mark.long
@pytest.mark.parametrize("ranks", [(1, 2), (2, 1)], ids=str)
@pytest.mark.parametrize("kind", ["Llama", "Bamba"])
async def test_other_ranks_and_models_with_states_find_their_kv(
    store: Mooncake, tmp_path: Path, kind: str, ranks: tuple[int, int]
) -> None:
    model = tmp_path / "model"
    save_tiny(model, kind, max_position_embeddings=4096)
    kinds = {"load_format": "auto", "num_blocks": 200, "block_size": 64}
    settings: list[Any] = [{"engine": kinds | {"tensor_parallel_size": count}} for count in ranks]
    prompt = random.Random(1).choices(range(3, 199), k=700)
    with worker(model, tmp_path / "1", store, **settings[0]) as first:
        async with attached(first) as stream:
            expected, _ = await generate(stream, prompt)
        await assert_whole(first)
        assert await asyncio.to_thread(first.stop) == 0, "it writes all before it ends"
    with worker(model, tmp_path / "2", store, **settings[1]) as second:
        async with attached(second) as stream:
            await measured(stream)
            assert await generate(stream, prompt) == (expected, 640)
        await assert_whole(second)


@pytest.mark.long
async def test_a_store_that_comes_back_is_used_again(
    store: Mooncake, tmp_path: Path, expected: list[list[int]]
) -> None:
    model = tmp_path / "model"
    with worker(model, tmp_path / "1", store) as first:
        async with attached(first) as stream:
            assert await answers(stream, 6) == expected[:6]
            await assert_whole(first)
            store.kill()
            assert await answers(stream, 7) == expected[:7]
            opened = first.log.read_text().count(" is open")  # before there is a store that it may find
            with mooncake(tmp_path, port=store.port) as again:
                until(lambda: first.log.read_text().count(" is open") > opened, "the new store")
                await measured(stream)  # the engine knows that it is another store
                # It may find the master before the store has memory. Then the first writes fail.
                writes = functools.partial(until, lambda: len(keys(again)) >= 2 * 6, "all of two prompts")
                await asyncio.to_thread(writes)
                assert await asyncio.to_thread(first.stop) == 0
                with worker(model, tmp_path / "2", again) as second:
                    async with attached(second) as other:
                        await measured(other)
                        for number in (5, 6):
                            assert await generate(other, prompts(12)[number]) == (expected[number], 384)


@pytest.mark.long
async def test_a_stopped_master_holds_up_no_prompt(
    store: Mooncake, tmp_path: Path, expected: list[list[int]]
) -> None:
    limits = {"engine_module": "baton.cluster.engine_process"}
    with worker(tmp_path / "model", tmp_path / "1", store, **limits) as first:
        async with attached(first) as stream:
            await generate(stream, prompts(12)[0])
            store.master.send_signal(signal.SIGSTOP)
            assert await answers(stream, 12) == expected
            await assert_whole(first)
            store.master.send_signal(signal.SIGCONT)
            assert await answers(stream, 12) == expected
        await assert_whole(first)
        assert await asyncio.to_thread(first.stop) == 0


DAMAGE = """
import json, sys, urllib.request
from mooncake.store import MooncakeDistributedStore
master, metrics = sys.argv[1:]
store = MooncakeDistributedStore()
assert not store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", master)
keys = urllib.request.urlopen(f"http://{metrics}/get_all_keys").read().decode().split()
good = [store.get(key) for key in keys]
for number, (key, value) in enumerate(zip(keys, good)):
    other = good[number - 1]
    flipped = value[:99] + bytes([value[99] ^ 1]) + value[100:]
    bad = value[:-1], value + b"x", other, bytes(len(value)), flipped
    assert not store.remove(key, True)
    assert not store.put(key, bad[number % len(bad)])
print("damaged", len(keys))
"""


@pytest.mark.long
async def test_garbage_in_the_store_is_never_used_and_written_again(
    store: Mooncake, tmp_path: Path, expected: list[list[int]]
) -> None:
    model = tmp_path / "model"
    await fill(store, tmp_path, expected)
    command = [sys.executable, "-c", DAMAGE, f"127.0.0.1:{store.port}", f"127.0.0.1:{store.metrics_port}"]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True)
    assert b"damaged 72" in done.stdout, done.stderr.decode()
    with worker(model, tmp_path / "2", store, engine=ROOMY) as second:
        async with attached(second) as stream:
            await measured(stream)
            assert [await generate(stream, prompt) for prompt in prompts(12)] == [
                (tokens, 0) for tokens in expected
            ]
        await assert_whole(second)  # the metrics follow its report
        missed = (await asyncio.to_thread(metrics, second))['baton:store_chunks_total{result="missed"}']
        assert missed >= 12, "the first chunk of each was read"
        assert await asyncio.to_thread(second.stop) == 0
    with worker(model, tmp_path / "3", store, engine=ROOMY) as third:
        async with attached(third) as stream:
            await measured(stream)
            found = [await generate(stream, prompt) for prompt in prompts(12)]
        assert found == [(tokens, 384) for tokens in expected], "wrong objects kept the right ones out"


@pytest.mark.long
def test_the_client_loads_its_library_before_the_engine_is_ready(store: Mooncake) -> None:
    client = ClientProcess(store.url, "client of a test")
    try:
        maps = Path(f"/proc/{client._popen.pid}/maps")
        until(lambda: "mooncake/store" in maps.read_text(), "the library")
        client.open(1 << 20)
        assert client.reason() == ""
        assert client.call(0, "exists", ["baton-none"]) == [False]
    finally:
        client.close()


@pytest.mark.long
async def test_a_full_store_takes_what_it_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", libraries(tmp_path / "lib"))
    model = tiny_model(tmp_path / "model")
    with mooncake(tmp_path, segment=16 << 20) as small, worker(model, tmp_path / "1", small) as first:
        async with attached(first) as stream:
            before = [await generate(stream, prompt) for prompt in prompts(100)]
            again = [await generate(stream, prompt) for prompt in prompts(100)]
        assert [tokens for tokens, _ in before] == [tokens for tokens, _ in again]
        await assert_whole(first)
        assert await asyncio.to_thread(first.stop) == 0
