"""When one process of a worker dies or hangs, all its processes end.

If the engine process died, routers learn the attempts of its last step, because one may be the cause.
"""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from baton.kv_transfer import Heartbeat
from baton.rpc import worker_pb2 as pb
from tests.cluster_helpers import (
    WorkerProcess,
    WorkerStream,
    attached,
    request,
    sampling,
    side_by_side,
)
from tests.within import WITHIN, within

# One prompt is one step. All of them take so long that the signal comes before they are over.
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


@pytest.fixture
def worker(death: Death, tmp_path: Path) -> Iterator[WorkerProcess]:
    """Of one test, which may run again."""
    deadlines = {"engine_dead": 4.0} if death.how is signal.SIGSTOP else {}
    settings = {"role": death.role, "engine": ENGINE, "deadlines": deadlines}
    with side_by_side(tmp_path, {death: settings}) as started:
        yield started[death].wait_ready()


async def queued(stream: WorkerStream, role: str, count: int) -> list[bytes]:
    """Submits so many prompts. Returns their ids when the engine computes the first one."""
    ids: list[bytes] = []
    for _ in range(count):
        asked = request(PROMPT, sampling())
        if role == "prefill":
            ids.append(await stream.submit_prefill(asked, handover=True))
        else:
            ids.append(asked.request_id)
            await stream.send(decode=pb.SubmitDecode(decode_id=ids[-1], request=asked))
    while (await stream.stub.GetStatus(pb.StatusRequest())).tokens_waiting == 0:
        pass
    return ids


def stop_in_step(engine: psutil.Process) -> None:
    """Stops an engine process that has prompts, in a step: its heartbeat has the attempts of the step."""
    fds = Path(f"/proc/{engine.pid}/fd")
    path = next(fd for fd in fds.iterdir() if "baton-heartbeat" in os.readlink(fd))
    heartbeat = Heartbeat(os.open(path, os.O_RDWR))
    end = time.monotonic() + WITHIN
    while True:
        engine.suspend()
        while engine.status() != psutil.STATUS_STOPPED:
            pass
        if heartbeat.step:
            break
        assert time.monotonic() < end, "it has no step"
        engine.resume()
        time.sleep(0.01)
    heartbeat.close()


def failures(stream: WorkerStream, ids: list[bytes]) -> list[pb.AttemptFailed]:
    queues = [stream.events[attempt_id] for attempt_id in ids]
    found = [queue.get_nowait().message for queue in queues for _ in range(queue.qsize())]
    return [message for message in found if isinstance(message, pb.AttemptFailed)]


@pytest.mark.all
@pytest.mark.parametrize("death", DEATHS, ids=lambda d: f"{d.role}-{d.kind}-{d.how.name}")
async def test_all_processes_end_and_routers_learn_the_attempts_of_the_crashed_step(
    worker: WorkerProcess, death: Death
) -> None:
    service, *others = worker.tree()
    victim = worker.child(death.kind) if death.kind != "service" else service
    async with attached(worker) as stream:
        # Enough that the engine process still has some when it stops in a step.
        ids = await queued(stream, death.role, 12 if death.failures else 3)
        if death.failures:
            stop_in_step(victim)
        victim.send_signal(death.how)
        code = await asyncio.to_thread(worker.popen.wait, WITHIN)
        await within(stream.ended.wait())
        failed = failures(stream, ids)
    assert code == (-signal.SIGKILL if death.kind == "service" else 1)
    _, alive = psutil.wait_procs(others, timeout=WITHIN)
    assert alive == []
    assert list(worker.run_dir.iterdir()) == []
    if death.log:
        line = f"{death.role} 0 {death.kind} {death.log.format(pid=victim.pid)}"
        assert line in worker.log.read_text()
    assert [failure.code for failure in failed] == [pb.FAILURE_CODE_ENGINE] * death.failures
    for failure in failed:
        assert f"it was being computed when {death.role} 0 engine" in failure.message
