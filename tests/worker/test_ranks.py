"""Workers with two ranks: their tokens, handovers, their end, and what happens when a rank dies or hangs."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from baton.engine import Engine, EngineConfig, EngineRequest, SamplingParams, build_engine
from baton.router.workers.checks import step_model
from baton.rpc import worker_pb2 as pb
from tests.cluster_helpers import (
    ENGINE,
    Answer,
    WorkerProcess,
    assert_whole,
    attached,
    paired,
    request,
    sampling,
    side_by_side,
    start_worker,
    tiny_model,
)
from tests.device import DEVICE

from .group_failures import Failure, assert_nothing_left, prompt_of, tokens_despite
from .test_weights import described, first_token, replaced, replacement, saved

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="needs two devices")

TWO_RANKS = {
    "load_format": "dummy", "num_blocks": 2000, "max_num_batched_tokens": 3900, "tensor_parallel_size": 2,
}  # fmt: skip
SHORT_STEPS = TWO_RANKS | {"max_num_batched_tokens": 64, "enable_prefix_caching": True}
ONE_RANK = SHORT_STEPS | {"tensor_parallel_size": 1, "block_size": 32}


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, WorkerProcess]]:
    engines = {"serves": SHORT_STEPS, "loses a rank": TWO_RANKS, "one rank": ONE_RANK}
    settings: dict[str, dict[str, Any]] = {
        name: {"role": "decode", "engine": engine} for name, engine in engines.items()
    }
    settings["loses a rank"]["kv_connector"] = "tcp"
    with side_by_side(tmp_path_factory.mktemp("ranks"), settings) as started:
        yield {name: worker.wait_ready() for name, worker in started.items()}


@pytest.fixture(scope="module")
def engine(workers: dict[str, WorkerProcess]) -> Engine:
    model = workers["serves"].run_dir.parent.parent / "model"
    return build_engine(EngineConfig(str(model), load_format="dummy", **ENGINE))


def alone(engine: Engine, length: int) -> list[int]:
    """The tokens of an engine with one rank."""
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    engine.add(EngineRequest(os.urandom(16), prompt_of(length), sampling=params))
    tokens: list[int] = []
    while engine.loop.has_work:
        tokens += [output.token for output in engine.loop.step().outputs]
    return tokens


@pytest.mark.all
@pytest.mark.parametrize(
    ("source", "target"),
    [("serves", "loses a rank"), ("serves", "one rank"), ("one rank", "serves")],
)
async def test_kv_goes_from_any_number_of_ranks_to_any_other(
    workers: dict[str, WorkerProcess], engine: Engine, source: str, target: str
) -> None:
    """Prompts of one or more steps, and at last one of which the source has a part cached."""
    pair = workers[source], workers[target]
    async with paired(*pair) as both:

        async def answer(length: int) -> Answer:
            return await both.generate(prompt_of(length), sampling(ignore_eos=True))

        lengths = (1, 60, 129, 300)
        answers = await asyncio.gather(*map(answer, lengths))
        assert [a.tokens for a in answers] == [alone(engine, length) for length in lengths]
        cached = await answer(320)
        assert cached.first.cached_tokens > 0
        assert cached.tokens == alone(engine, 320)
        status = await both.prefill.stub.GetStatus(pb.StatusRequest())
        transport = "shared_memory" if target != "loses a rank" else "tcp: --kv-connector tcp at the receiver"
        assert transport in status.kv_transports.values()
        assert status.kv_sent.keys() == status.kv_transports.keys()
        assert sum(status.kv_sent.values()) > 0
        assert step_model(status.step_model) is not None, "routers know what its steps cost"
    await assert_whole(*pair)


async def test_the_worker_fails_when_a_rank_dies(workers: dict[str, WorkerProcess], engine: Engine) -> None:
    """It has not copied all KV of a handover then. Another worker, with another number of ranks, takes it.

    `test_group_failures.py` has the other ranks and states.
    """
    victim = workers["loses a rank"]
    pid = victim.child("rank 1").pid
    failure = Failure("decode", 1, "committed", signal.SIGKILL)
    tokens = await tokens_despite(failure, workers["serves"], victim, workers["one rank"], length=320)
    assert tokens == alone(engine, 320)
    assert f"decode 0 rank 1 (pid {pid}) was killed by SIGKILL" in victim.log.read_text()


async def test_a_worker_with_two_ranks_serves_the_tokens_of_one(
    workers: dict[str, WorkerProcess], engine: Engine
) -> None:
    worker = workers["serves"]
    asked = request(prompt_of(310), sampling(ignore_eos=True))
    async with attached(worker) as stream:
        assert (await stream.stub.Describe(pb.DescribeRequest())).tensor_parallel_size == 2
        decode_id = await stream.reserve(asked)
        assert [token.token_id for token, _ in await stream.tokens(decode_id)] == alone(engine, 310)
    others = worker.tree()[1:]
    assert len(others) == 3, "engine, rank 1 and transfer"
    assert worker.stop() == 0
    assert_nothing_left(worker, others)


@pytest.mark.long
async def test_all_ranks_of_a_worker_get_new_weights(tmp_path: Path) -> None:
    path = saved(tmp_path / "trained", 1)
    with start_worker("prefill", tiny_model(tmp_path / "model"), tmp_path, engine=SHORT_STEPS) as worker:
        worker.wait_ready()
        async with replacement(worker) as new:
            with pytest.raises(grpc.aio.AioRpcError, match="no such file or directory"):
                await new.stage(tmp_path / "nowhere", "a")
        before = await first_token(worker)
        await replaced(worker, path, "b")
        after = await first_token(worker)
        assert after != before
        engine = build_engine(EngineConfig(str(path), dtype="float32", num_blocks=100))
        asked = SamplingParams(temperature=0.0, max_tokens=1, logprobs=0)
        engine.add(EngineRequest(b"x" * 16, list(range(100)), sampling=asked))
        outputs = [output for _ in range(9) if engine.loop.has_work for output in engine.loop.step().outputs]
        assert outputs[0].token == after[0]
        assert (await described(worker)).weights.version == "b"
        await assert_whole(worker)
