"""A prefill and a decode worker behind a router, whose tokens a test compares."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import openai

from baton.bench.lab.harness.cluster import LocalCluster, leaks_when_idle

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
        async with openai.AsyncOpenAI(base_url=cluster.url + "/v1", api_key="none", max_retries=0) as client:

            async def ask(prompt: list[int]) -> list[int]:
                answer = await client.completions.create(
                    model="m", prompt=prompt, max_tokens=count, temperature=0.0,
                    extra_body={"return_token_ids": True, "ignore_eos": True},
                )  # fmt: skip
                return getattr(answer.choices[0], "token_ids")  # noqa: B009

            yield ask
        assert await asyncio.to_thread(leaks_when_idle, cluster.url) == {}
