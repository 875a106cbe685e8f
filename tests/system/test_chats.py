"""The turns of a chat land on different workers: the same tokens as without a cache, little is computed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import aiohttp
import pytest

from bench.chaos.cluster import LocalCluster
from bench.chaos.streams import Case, new_session, read

from .recovery import FLAGS, Broken

TURNS = 10
ANSWER = 12
ROUTER_FLAGS = ("--routing-policy", "round-robin", "--no-overflow")
FETCHED, LOOKED_UP, FOUND = (
    "baton:prefix_fetched_tokens_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
)


def text(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(1000, 40_000), k=length)


@pytest.fixture
def reusing(
    tmp_path_factory: pytest.TempPathFactory, shallow_model: list[str]
) -> Iterator[Callable[[int], LocalCluster]]:
    """Makes a cluster with so many KV blocks for each worker."""
    made: list[LocalCluster] = []

    def make(blocks: int) -> LocalCluster:
        directory: Path = tmp_path_factory.mktemp("reusing")
        flags = [*FLAGS, *shallow_model, "--enable-prefix-caching", "--num-blocks", str(blocks)]
        made.append(LocalCluster(directory, worker_flags=flags, router_flags=ROUTER_FLAGS).__enter__())
        return made[-1]

    yield make
    for cluster in made:
        cluster.close()


async def answers(http: aiohttp.ClientSession, url: str, prompts: list[list[int]]) -> list[list[int]]:
    case = Case("", ANSWER, temperature=0.0, seed=1)
    streams = await asyncio.gather(*(read(http, url, case, prompt=prompt) for prompt in prompts))
    assert not [stream.error for stream in streams if stream.failed]
    return [stream.token_ids for stream in streams]


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_chats_say_the_same_with_every_cache_on_through_evictions_kills_and_drains(
    reusing: Callable[[int], LocalCluster], broken: Broken
) -> None:
    await asyncio.to_thread(broken.all_back)
    cluster = await asyncio.to_thread(reusing, 80)  # of 16 positions; four chats grow to 800 tokens each
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
                reused = sum([await asyncio.to_thread(worker.metric, FETCHED) for worker in prefills])
    assert reused > 0
    await Broken(cluster, {}).settled()


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_turns_on_different_prefill_workers_compute_little_of_what_is_known(
    reusing: Callable[[int], LocalCluster],
) -> None:
    cluster = await asyncio.to_thread(reusing, 1500)
    prefills, chat, known = cluster.of("prefill"), text(300, 0), 0
    async with new_session() as http:
        for turn in range(TURNS):
            [answer] = await answers(http, cluster.url, [chat])
            if turn:
                known += len(chat) - 300
            chat = [*chat, *answer, *text(300 - ANSWER, turn)]
    looked_up, found, fetched = [
        sum([await asyncio.to_thread(worker.metric, name) for worker in prefills])
        for name in (LOOKED_UP, FOUND, FETCHED)
    ]
    assert looked_up == known + TURNS * 300
    assert fetched > TURNS * 200, "the turns do not stay on one worker"
    assert found >= 0.95 * known
