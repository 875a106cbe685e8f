"""The turns of a chat land on different workers: the same tokens as without a cache, little is computed."""

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import aiohttp
import pytest

from baton.bench.lab.harness.cluster import LocalCluster
from baton.bench.lab.harness.streams import Case, Stream, new_session, read
from tests.shallow import VOCABULARY

from .recovery import FLAGS, Broken

pytestmark = pytest.mark.all

TURNS = 10
ANSWER = 12
ANYWHERE = (
    "--advanced.routing-policy",
    "round-robin",
    "--advanced.no-split-prompts",
)  # a part of a prompt is not fetched
HANDED_OVER = (*ANYWHERE, "--advanced.no-overflow")
FETCHED = "baton:prefix_fetched_tokens_total"
LOADED = "baton:offload_loaded_tokens_total"
Make = Callable[..., LocalCluster]
HOST, BOTH = ("--host-cache-size", "64MiB"), ("--host-cache-size", "4MiB", "--disk-cache-size", "64MiB")


def text(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(100, VOCABULARY), k=length)


@pytest.fixture
def reusing(tmp_path_factory: pytest.TempPathFactory, shallow_model: list[str]) -> Iterator[Make]:
    """Makes a cluster with so many KV blocks for each worker, tiers below them, and these flags of its
    router."""

    def make(
        blocks: int, router_flags: tuple[str, ...], worker_flags: tuple[str, ...] = HOST
    ) -> LocalCluster:
        directory: Path = tmp_path_factory.mktemp("reusing")
        flags = [*FLAGS, *shallow_model, "--enable-prefix-caching", "--advanced.num-blocks", str(blocks)]
        flags += [*worker_flags, "--disk-cache-dir", str(directory)]
        named = [*router_flags, *shallow_model]
        return made.enter_context(LocalCluster(directory, worker_flags=flags, router_flags=named))

    with contextlib.ExitStack() as made:
        yield make


async def streams(http: aiohttp.ClientSession, url: str, prompts: list[list[int]]) -> list[Stream]:
    case = Case("", ANSWER, temperature=0.0, seed=1, options='{"stream_options": {"include_usage": true}}')
    read_all = await asyncio.gather(*(read(http, url, case, prompt=prompt) for prompt in prompts))
    assert not [stream.error for stream in read_all if stream.failed]
    return read_all


async def answers(http: aiohttp.ClientSession, url: str, prompts: list[list[int]]) -> list[list[int]]:
    return [stream.token_ids for stream in await streams(http, url, prompts)]


async def total(cluster: LocalCluster, metric: str) -> float:
    """The sum over all workers."""
    return sum([await asyncio.to_thread(worker.metric, metric) for worker in cluster.workers])


@pytest.mark.long
@pytest.mark.parametrize(
    ("router_flags", "tiers", "blocks"),
    [
        (HANDED_OVER, HOST, 80),
        (HANDED_OVER, (*BOTH, "--advanced.block-size", "128"), 12),
        (ANYWHERE, BOTH, 80),
    ],
    ids=["handed over, host", "handed over, disk, large blocks", "anywhere, disk"],
)
async def test_chats_say_the_same_with_every_cache_on_through_evictions_kills_and_drains(
    reusing: Make, broken: Broken, router_flags: tuple[str, ...], tiers: tuple[str, ...], blocks: int
) -> None:
    await asyncio.to_thread(broken.all_back)
    # Blocks of 16 positions, or of 128; four chats grow to 800 tokens each.
    cluster = await asyncio.to_thread(reusing, blocks, router_flags, tiers)
    prefills, decodes = cluster.of("prefill"), cluster.of("decode")
    events: dict[int, Callable[[], None]] = {
        3: lambda: decodes[0].kill("engine"),
        5: prefills[1].terminate,
        7: lambda: prefills[0].kill("transfer"),
        8: decodes[1].terminate,
    }
    chats = [text(250 + 20 * number, number) for number in range(4)]
    reused = 0.0
    async with new_session() as http:
        for turn in range(TURNS):
            right = await answers(http, broken.cluster.url, chats)
            asked = asyncio.create_task(answers(http, cluster.url, chats))
            if turn in events:
                await asyncio.sleep(0.1)
                await asyncio.to_thread(events[turn])
            assert await asked == right, f"turn {turn}"
            chats = [[*chat, *more, *text(45, turn)] for chat, more in zip(chats, right, strict=True)]
            if turn == 2:
                reused = await total(cluster, FETCHED)
    assert reused > 0 or router_flags == ANYWHERE, "there, turns may stay where their KV is"
    await Broken(cluster, {}).settled()


@pytest.mark.long
async def test_hits_recover_after_a_restart_of_a_prefill_worker(reusing: Make) -> None:
    """From the other worker of its pool, from decode workers, and from the memory of their hosts: pools are
    smaller than the chats."""
    flags = (*HOST, "--drain-timeout", "10")
    cluster = await asyncio.to_thread(
        reusing, 160, ("--advanced.no-overflow", "--advanced.no-split-prompts"), flags
    )
    leaving = cluster.of("prefill")[0]
    chats = [text(400, number) for number in range(6)]
    shares: list[float] = []
    async with new_session() as http:
        for turn in range(6):
            if turn == 3:
                leaving.terminate()
                await asyncio.to_thread(leaving.wait_life, 2)
            known = [len(chat) - 60 for chat in chats]
            found = await streams(http, cluster.url, chats)
            shares.append(sum(stream.cached_tokens for stream in found) / sum(known))
            chats = [
                [*chat, *stream.token_ids, *text(60 - ANSWER, turn)]
                for chat, stream in zip(chats, found, strict=True)
            ]
    assert shares[0] == 0
    assert min(shares[1:]) > 0.75, f"half of the chats have the worker that restarts: {shares}"
    assert await total(cluster, FETCHED) > 0
    assert await total(cluster, LOADED) > 0
