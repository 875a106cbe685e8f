"""When an engine dies, the routers learn which attempts it was computing: only these may be why."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from rpc import worker_pb2 as pb
from tests.cluster_helpers import (
    WorkerProcess,
    WorkerStream,
    attached,
    request,
    sampling,
    start_worker,
    tiny_model,
)

# One prompt is one step, so long that a signal hits a step and not the moment between two.
ENGINE = {"load_format": "dummy", "num_blocks": 5000, "max_num_batched_tokens": 3900}
PROMPT = [7] * 3900


@pytest.fixture
def prefill(tmp_path: Path) -> Iterator[WorkerProcess]:
    worker = start_worker(
        "prefill", tiny_model(tmp_path / "model"), tmp_path, engine=ENGINE, deadlines={"engine": 2.0}
    )
    yield worker.wait_ready()
    worker.popen.kill()
    worker.popen.wait()


async def queued(stream: WorkerStream) -> list[bytes]:
    """More prefills than it can finish soon; the first is being computed."""
    ids = [await stream.submit_prefill(request(PROMPT, sampling()), handover=True) for _ in range(12)]
    while (await stream.stub.GetStatus(pb.StatusRequest())).tokens_waiting == 0:
        pass
    await asyncio.sleep(0.02)  # it answers between two steps
    return ids


def failures(stream: WorkerStream, ids: list[bytes]) -> list[pb.AttemptFailed]:
    """Of those without a token."""
    queues = [stream.events[attempt_id] for attempt_id in ids]
    found = [queue.get_nowait().message for queue in queues if queue.qsize()]
    return [message for message in found if isinstance(message, pb.AttemptFailed)]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_an_engine_that_dies_or_hangs_is_about_what_it_computed(
    prefill: WorkerProcess, how: signal.Signals
) -> None:
    engine = prefill.child("engine")
    async with attached(prefill) as stream:
        ids = await queued(stream)
        engine.send_signal(how)
        await asyncio.wait_for(stream.ended.wait(), 20)
        [failure] = failures(stream, ids)
        assert failure.code == pb.FAILURE_CODE_ENGINE
        assert "it was being computed when prefill 0 engine" in failure.message


@pytest.mark.parametrize("kind", ["service", "transfer"])
async def test_other_deaths_are_about_nobody(prefill: WorkerProcess, kind: str) -> None:
    async with attached(prefill) as stream:
        ids = await queued(stream)
        os.kill(prefill.popen.pid if kind == "service" else prefill.child(kind).pid, signal.SIGKILL)
        await asyncio.wait_for(stream.ended.wait(), 20)
        assert failures(stream, ids) == []
