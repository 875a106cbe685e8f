"""Processes of a real cluster are killed and hung under many streams; no client reads another token."""

import asyncio
import json
from collections.abc import Callable

import pytest

from baton.bench.lab.harness.cluster import Worker, status
from baton.bench.lab.harness.streams import Case, expected, new_session, read

from .recovery import LONGEST, MIXED, SHORT, Broken, each_has, wait_exit

pytestmark = pytest.mark.all


@pytest.mark.parametrize(
    ("prefill", "decode", "asked", "code"),
    [
        (lambda worker: worker.kill("transfer"), lambda worker: worker.kill("engine"), MIXED, 1),
        (Worker.terminate, Worker.terminate, MIXED + SHORT[4:], 0),
    ],
    ids=["killed", "told to stop"],
)
async def test_streams_go_on_elsewhere(
    broken: Broken, prefill: Callable[[Worker], None], decode: Callable[[Worker], None],
    asked: list[Case], code: int,
) -> None:  # fmt: skip
    """A prefill worker ends while four long prompts stream, then a decode worker under all streams. The
    supervisor starts each again. A worker that is told to stop has 1 s to drain, less than its streams need.

    `tests/worker/test_deaths.py` ends each kind of process, and lets it hang. The tests below and
    `test_continuation.py` kill service and engine processes under streams.
    """
    await asyncio.to_thread(broken.all_back)
    struck: list[tuple[Worker, int]] = []

    def strike(role: str, how: Callable[[Worker], None]) -> None:
        victim = broken.busiest(role)
        struck.append((victim, len(victim.exits) + 1))
        how(victim)
        if code:  # a worker that drains may need the end of streams
            wait_exit(victim, struck[-1][1])

    await broken.ride(
        asked,
        (broken.transferring, lambda: strike("prefill", prefill)),
        (each_has(3 if code else 2), lambda: strike("decode", decode)),
        felt=broken.retries if code else None,
    )
    ends = [await asyncio.to_thread(wait_exit, worker, count) for worker, count in struck]
    assert ends == [f"exited with {code}"] * 2, "the whole worker ends with any of its processes"
    await broken.settled()
    accepted = "vllm:spec_decode_num_accepted_tokens_total"
    assert sum(worker.metric(accepted) for worker in broken.cluster.of("decode")), "drafts were among them"


async def test_decode_killed_before_its_ack_costs_no_second_prefill(broken: Broken) -> None:
    """Another decode worker takes the KV that is still held."""
    await asyncio.to_thread(broken.all_back)
    case, victim = LONGEST, broken.cluster.workers[0]
    before = broken.tokens_prefilled()
    broken.right |= await expected(broken.cluster.url, [case])
    cost = broken.tokens_prefilled() - before
    assert cost > 100

    def hang() -> None:
        nonlocal victim
        victim = broken.busiest("decode")
        victim.hang("engine")  # it will never acknowledge

    retries = broken.retries()
    await broken.ride([case], (broken.transferring, hang), (each_has(1), lambda: victim.kill("service")))
    assert broken.tokens_prefilled() - before == 2 * cost
    assert broken.retries() - retries == 1
    await broken.settled()


@pytest.mark.long
async def test_three_attempts_without_a_token_are_the_end_of_that_request_alone(broken: Broken) -> None:
    """The worker that prefills it dies in the step. What the other workers decode meanwhile goes on.

    After two crashed steps it shares none: a kill may then hit a step of the others, or fall between two.
    Without long tests, `tests/router/test_lost_workers.py` counts the attempts.
    """
    await asyncio.to_thread(broken.all_back)
    doomed = Case("A very long story. " * 300, 4, 0.0, 1)
    others = asyncio.create_task(broken.ride(SHORT[:3]))
    async with new_session() as http:
        reading = asyncio.create_task(read(http, broken.cluster.url, doomed))
        killed: set[tuple[str, int]] = set()
        while not reading.done():
            worker = await asyncio.to_thread(broken.busiest, "prefill")
            life = (worker.name, len(worker.lives))
            if worker.ready and life not in killed and await asyncio.to_thread(waits_for, worker, broken):
                killed.add(life)
                worker.kill("engine")
            await asyncio.sleep(0.05)
        stream = await reading
    await others
    assert len(killed) >= 3
    error = stream.error if stream.status == 200 else json.dumps(json.loads(stream.error)["error"])
    assert "times without a new token" in error
    assert "cmpl-" in error or "req" in error
    assert not stream.token_ids
    await broken.settled()


def waits_for(worker: Worker, broken: Broken) -> bool:
    """Whether the worker has much to compute."""
    return any(
        w["index"] == worker.index and w["status"]["tokens_waiting"] > 500
        for w in status(broken.cluster.url)["workers"]
        if w["role"] == worker.role
    )
