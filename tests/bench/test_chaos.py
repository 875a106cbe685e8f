"""`bench.chaos` on GPUs: the flags of its processes, and its requests. tests/system/test_chaos.py runs it."""

from __future__ import annotations

import asyncio
import random
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from baton.bench.lab import chaos, driver
from baton.bench.lab.harness import cluster, streams
from baton.bench.lab.harness.streams import Case
from baton.bench.lab.shapes import write_shape
from tests.bench.test_smoke import check_flags

DENSE, MOE, SMALL = "llama-3.1-8b", "qwen3-30b-a3b", "llama-3.1-8b-two-layers"


def started(tmp_path: Path, patch: pytest.MonkeyPatch, gpus: int, *flags: str) -> dict[str, Any]:
    """What `LocalCluster` gets on a machine with so many GPUs."""
    given: dict[str, Any] = {}
    patch.setattr(driver, "gpus", lambda: ["H200"] * gpus)
    patch.setattr(driver, "visible_gpus", lambda: range(gpus))
    patch.setattr(cluster, "LocalCluster", lambda directory, **more: nullcontext(given.update(more)))
    run = chaos.BENCH.run(chaos.BENCH.arguments(flags))
    run.directory = tmp_path
    with chaos.start(run):
        return given


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("flags", "shape", "expected"),
    [
        ("--batch-invariant", DENSE, {"batch_invariant": True}),
        (f"--model-shape {MOE} --quantization fp8", MOE, {"quantization": "fp8"}),
        (f"--model-shape {SMALL} --dtype float32", SMALL, {"dtype": "float32"}),
    ],
)
def test_workers_on_a_gpu_serve_a_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, shape: str, expected: dict[str, Any]
) -> None:
    given = started(tmp_path, monkeypatch, 1, *flags.split())
    own = {"dtype": "bfloat16", "load_format": "dummy", "quantization": "auto", "batch_invariant": False}
    for role, device in zip(("prefill", "prefill", "decode", "decode"), given["devices"], strict=True):
        taken = check_flags(role, *given["worker_flags"], "--device", device)
        assert taken | own | expected == taken
        assert (taken["device"], Path(taken["model"]).name) == ("cuda:0", shape)
        assert taken["num_blocks"] * 128 >= taken["max_model_len"], "the pool holds the longest request"
    assert check_flags("router", *given["router_flags"])["model"] == str(tmp_path / shape)


def test_workers_of_a_role_have_different_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = started(tmp_path, monkeypatch, 2, "--model-shape", "one-small-layer")
    assert given["devices"] == ["cuda:0", "cuda:1"] * 2


async def test_requests_at_a_rate_begin_however_long_answers_take(monkeypatch: pytest.MonkeyPatch) -> None:
    case, begun, may_end = Case("", 1, 0.0, 1), asyncio.Event(), asyncio.Event()
    reading = 0

    async def read(*_: object) -> streams.Stream:
        nonlocal reading
        reading += 1
        if reading == 5:
            begun.set()
        await may_end.wait()
        return streams.Stream(case)

    monkeypatch.setattr(streams, "read", read)
    load = streams.Load("", [case], random.Random(1))
    async with load.at(1000.0):
        await begun.wait()
        assert not load.streams
        may_end.set()
    assert len(load.streams) == reading, "all answers are read to the end"


def test_at_a_rate_no_worker_preempts_and_each_has_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = started(tmp_path, monkeypatch, 4, "--rate", "16", "--seconds", "120")
    assert check_flags("decode", *given["worker_flags"])["num_blocks"] == chaos.BLOCKS_AT_RATE
    assert check_flags("router", *given["router_flags"])["max_wait"] == 600
    assert len(set(given["devices"])) == 4


def ids_of(asked: list[Case], shape: str, tmp_path: Path) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(write_shape(shape, tmp_path, tokenizer=True) / "tokenizer.json"))
    return [tokenizer.encode(case.prompt).ids for case in asked]


def test_prompts_for_a_shape_differ_and_fit_and_some_begin_alike(tmp_path: Path) -> None:
    flags = ["--device", "cpu", "--model-shape", "one-small-layer", "--short"]
    asked = chaos.cases_for(chaos.BENCH.arguments(flags))
    prompts = ids_of(asked, "one-small-layer", tmp_path)
    lengths = [len(prompt) for prompt in prompts]
    assert len(set(lengths)) == len(asked) >= 24
    assert min(lengths) == 200
    assert max(lengths) + max(case.max_tokens for case in asked) < 2048
    beginnings = {tuple(prompt[:64]) for prompt in prompts}
    assert len(beginnings) == (len(asked) + 1) // 2, "pairs, which the prefix cache serves"
    assert len({tuple(prompt[-64:]) for prompt in prompts}) == len(asked)
    assert [case.temperature for case in asked[:2]] == [0.0, 0.8]
