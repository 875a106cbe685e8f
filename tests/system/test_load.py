"""`baton bench` against the router: agents and traces as a user measures them, at the smallest size."""

import asyncio
import json
import sys
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import Any

import pytest

from baton.kv_names import CHUNK_TOKENS

from .serve import Serve

pytestmark = pytest.mark.all

SHORT = ("--advanced.processes", "1", "--quiet", "--warmup", "0")
MEASURED = (0, 3)  # 3: on a busy machine the client may not keep up


async def measured(
    server: Serve, directory: Path, *args: str | Path
) -> tuple[Any, dict[str, float], list[Any]]:
    """The parameters, the rows and the requests of a run."""
    files = [directory / "r.json", directory / "r.jsonl"]
    outputs = ("--json", files[0], "--advanced.jsonl", files[1])
    command = [
        sys.executable,
        "-m",
        "baton.cluster.cli",
        "bench",
        *args,
        "--url",
        server.url,
        *SHORT,
        *outputs,
    ]
    process = await asyncio.create_subprocess_exec(*map(str, command), stdout=PIPE, stderr=PIPE)
    out, err = await process.communicate()
    assert process.returncode in MEASURED, (out, err)
    report = json.loads(files[0].read_text())
    rows = {row["name"]: row["value"] for row in report["results"]}
    return report["parameters"], rows, [json.loads(line) for line in files[1].read_text().splitlines()]


async def test_agents_find_what_was_said_before_in_the_cache(server: Serve, tmp_path: Path) -> None:
    parameters, rows, requests = await measured(
        server, tmp_path, "agents", "--concurrency", "1", "--sessions", "2", "--turns", "2",
        "--prefix-len", "70", "--context-len", "40", "--input-len", "10", "--output-len", "4",
        "--think-time", "0",
    )  # fmt: skip
    assert parameters["prompts"] == "ids"
    assert rows["requests.ok"] == rows["requests.sent"] == 4
    assert rows["requests.refused"] == rows["input.off"] == rows["output.short"] == 0
    # One at a time: beside others, the worker without the cache may be faster.
    later = [request for request in requests if request["turn"]]
    assert [request["prompt_tokens"] for request in later] == [134, 134]
    assert all(request["cached_tokens"] >= CHUNK_TOKENS for request in later)
    assert rows["ttft.first.p50"] > 0 < rows["ttft.later.p50"]


async def test_equal_hash_ids_of_a_trace_are_cached(server: Serve, tmp_path: Path) -> None:
    """Also by another run with the same seed."""
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    form = '{"timestamp": %d, "input_length": %d, "output_length": 3, "hash_ids": %s}\n'
    first.write_text(form % (0, 150, [0, 1, 2]))
    second.write_text(form % (0, 182, [0, 1, 2, 3]) + form % (9000, 64, [8]))
    more = ("--advanced.block-size", str(CHUNK_TOKENS), "--advanced.first", "5", "--seed", "7")
    await measured(server, tmp_path, "replay", first, *more)
    parameters, rows, [request] = await measured(server, tmp_path, "replay", second, *more)
    assert parameters["prompts"] == "ids"
    assert rows["requests.ok"] == 1
    assert (request["asked_input"], request["prompt_tokens"]) == (182, 182)
    assert request["session"]
    assert request["cached_tokens"] >= 2 * CHUNK_TOKENS
