"""Floods of one key's requests, where requests of several keys wait for a thread or a process."""

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.within import within

from .routers import Routers

CONNECTIONS = 200
LATER = 0.3
"""Seconds by which another key's first token may be later than without the flood."""
CALLS = 30
WORDS = "The quick brown fox jumps over the lazy dog. "
FLOODS = {
    "small bodies": ("/tokenize", {"prompt": WORDS * 350}),
    "large bodies": ("/tokenize", {"prompt": WORDS * 2_000}),
    "grammars": ("/v1/completions", {"prompt": "a", "structured_outputs": {"regex": "(a{1000}){1000}"}}),
}


@asynccontextmanager
async def flooding(url: str, body: dict[str, Any]) -> AsyncIterator[None]:
    """The flood lasts as long as the context, from its first answer on."""
    program = "-m", "tests.router.flood", url, "flooding-key", str(CONNECTIONS)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, *program, stdin=pipe, stdout=pipe)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps(body).encode())
        process.stdin.close()
        assert await within(process.stdout.readline())
        reading = asyncio.create_task(process.stdout.read())
        yield
        reading.cancel()
        assert process.returncode is None
    finally:
        process.kill()
        await process.wait()


async def first_tokens(router: Routers, *, needs_grammar: bool) -> list[float]:
    """Seconds until the first byte of the answer, of calls that follow each other. Each has another grammar,
    or none."""
    seconds = list[float]()
    body: dict[str, Any] = {"prompt": "Hello", "max_tokens": 2, "stream": True}
    for _ in range(CALLS):
        if needs_grammar:
            body["structured_outputs"] = {"regex": f"[a-z]*{os.urandom(8).hex()}"}
        began = time.monotonic()
        async with router.http.post(
            router.url + "/v1/completions", json=body, headers={"Authorization": "Bearer other-key"}
        ) as response:
            assert response.status == 200, await response.text()
            await response.content.readany()
            seconds.append(time.monotonic() - began)
            await response.read()
    return seconds


@pytest.mark.long
@pytest.mark.parametrize("flood", FLOODS)
async def test_a_flood_of_one_key_delays_no_other(start: Callable[..., Any], tmp_path: Path, flood: str):
    keys = tmp_path / "keys.toml"
    keys.write_text('[flooding]\nkey = "flooding-key"\n[other]\nkey = "other-key"\n')
    router = await start("--api-key-file", str(keys))
    path, body = FLOODS[flood]

    async def ask() -> list[float]:
        return await first_tokens(router, needs_grammar=flood == "grammars")

    await ask()
    alone = await ask()
    async with flooding(router.url + path, body):
        beside = await ask()
    assert ninth(beside) < ninth(alone) + LATER, (max(alone), max(beside))
    print(f"{flood}: first token after {max(alone):.3f} s at most alone, {max(beside):.3f} s beside it")


def ninth(seconds: list[float]) -> float:
    """Nine of ten calls take at most so long: the flood and the children also compete for two cores."""
    return sorted(seconds)[len(seconds) * 9 // 10 - 1]
