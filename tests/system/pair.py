"""A prefill and a decode worker behind a router, whose tokens a test compares."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from baton.bench.lab.harness.cluster import LocalCluster, leaks_when_idle
from baton.bench.lab.harness.streams import greedy_tokens

from .recovery import FLAGS


@asynccontextmanager
async def served(
    directory: Path, model: Path, count: int, *, prefill: Sequence[str] = (), decode: Sequence[str] = ()
) -> AsyncIterator[Callable[[list[int]], Awaitable[list[int]]]]:
    """Yields what asks for `count` greedy tokens behind a prompt. Each is handed over, and nothing leaks.
    `prefill`, `decode`: flags of these workers."""
    named = ["--model", str(model), "--served-model-name", "m"]
    with LocalCluster(
        directory,
        prefill=1,
        decode=1,
        worker_flags=[*FLAGS, *named],
        prefill_flags=prefill,
        decode_flags=decode,
        router_flags=["--advanced.no-overflow", *named],
    ) as cluster:

        async def ask(prompt: list[int]) -> list[int]:
            [tokens] = await greedy_tokens(cluster.url, [prompt], count)
            return tokens

        yield ask
        assert await asyncio.to_thread(leaks_when_idle, cluster.url) == {}
