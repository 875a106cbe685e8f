"""When one process of a worker dies or hangs, all its processes end.

If the engine process died, routers learn the attempts of its last step, because one may be the cause.
"""

import asyncio
import signal
from collections.abc import Iterator
from dataclasses import dataclass

import psutil
import pytest

from baton.rpc import worker_pb2 as pb
from tests.cluster_helpers import (
    WorkerProcess,
    WorkerStream,
    attached,
    request,
    sampling,
    side_by_side,
)

# One prompt is one step. The step is so long that a signal arrives during it, not between two steps.
ENGINE = {"load_format": "dummy", "num_blocks": 5000, "max_num_batched_tokens": 3900}
PROMPT = [7] * 3900


@dataclass(frozen=True)
class Death:
    role: str
    kind: str
    """The process that dies: "service", "engine" or "transfer"."""
    how: signal.Signals
    log: str = ""
    """The log line without the name of the process. Empty: the worker cannot log the death."""
    failures: int = 0
    """The number of attempts that routers learn about."""


KILLED, HUNG = "(pid {pid}) was killed by SIGKILL", "gave no sign of life"
DEATHS = [
    Death("prefill", "engine", signal.SIGKILL, KILLED, failures=1),
    Death("prefill", "engine", signal.SIGSTOP, HUNG, failures=1),
    Death("decode", "transfer", signal.SIGTERM, "(pid {pid}) exited with 0"),
    Death("prefill", "transfer", signal.SIGSTOP, HUNG),
    Death("decode", "service", signal.SIGKILL),
]


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Death, WorkerProcess]]:
    """One worker for each death."""
    patience = {signal.SIGSTOP: {"engine_dead": 4.0}}
    settings = {
        death: {"role": death.role, "engine": ENGINE, "deadlines": patience.get(death.how, {})}
        for death in DEATHS
    }
    with side_by_side(tmp_path_factory.mktemp("deaths"), settings) as started:
        yield started


async def queued(stream: WorkerStream, role: str) -> list[bytes]:
    """Submits several prompts. Returns their ids when the engine computes the first one."""
    ids: list[bytes] = []
    for _ in range(12 if role == "prefill" else 6):  # a decode worker has room for fewer
        asked = request(PROMPT, sampling())
        if role == "prefill":
            ids.append(await stream.submit_prefill(asked, handover=True))
        else:
            ids.append(asked.request_id)
            await stream.send(decode=pb.SubmitDecode(decode_id=ids[-1], request=asked))
    while (await stream.stub.GetStatus(pb.StatusRequest())).tokens_waiting == 0:
        pass
    await asyncio.sleep(0.02)  # the status came between two steps; now a step runs
    return ids


def failures(stream: WorkerStream, ids: list[bytes]) -> list[pb.AttemptFailed]:
    queues = [stream.events[attempt_id] for attempt_id in ids]
    found = [queue.get_nowait().message for queue in queues for _ in range(queue.qsize())]
    return [message for message in found if isinstance(message, pb.AttemptFailed)]


@pytest.mark.parametrize("death", DEATHS, ids=lambda d: f"{d.role}-{d.kind}-{d.how.name}")
async def test_all_processes_end_and_routers_learn_the_attempts_of_the_crashed_step(
    workers: dict[Death, WorkerProcess], death: Death
) -> None:
    worker = workers[death].wait_ready()
    service, *others = worker.tree()
    victim = worker.child(death.kind) if death.kind != "service" else service
    async with attached(worker) as stream:
        ids = await queued(stream, death.role)
        victim.send_signal(death.how)
        code = await asyncio.to_thread(worker.popen.wait, 20)
        await asyncio.wait_for(stream.ended.wait(), 20)
        failed = failures(stream, ids)
    assert code == (-signal.SIGKILL if death.kind == "service" else 1)
    _, alive = psutil.wait_procs(others, timeout=5)
    assert alive == []
    assert list(worker.run_dir.iterdir()) == []
    if death.log:
        line = f"{death.role} 0 {death.kind} {death.log.format(pid=victim.pid)}"
        assert line in worker.log.read_text()
    assert [failure.code for failure in failed] == [pb.FAILURE_CODE_ENGINE] * death.failures
    for failure in failed:
        assert f"it was being computed when {death.role} 0 engine" in failure.message
