"""Repeated failures: requests run alone, workers get no requests, and retries are limited."""

import asyncio
import time

import pytest

from baton.router.admission import parked
from baton.router.policy.prefill import PrefillRequest
from baton.router.workers import breaker
from baton.rpc import worker_pb2 as pb

from .conftest import Cluster
from .test_recovery import answered_whole, decodes, prefills


async def test_a_request_in_two_crashed_steps_runs_alone(cluster: Cluster) -> None:
    decode = cluster.decodes[0]
    decode.fail = (2, pb.FAILURE_CODE_ENGINE)
    await answered_whole(cluster)
    assert [d.request.alone for d in decodes(decode)] == [False, False, True]
    assert [d.request.retried for d in decodes(decode)] == [False, True, True]


async def test_a_worker_that_fails_repeatedly_gets_no_requests_and_then_a_probe(
    pair: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(breaker, "TOGETHER_S", 0.0)
    bad, other = pair.decodes
    other.status.blocks_free = 256
    other.report()  # the failing worker now has more free blocks
    await pair.until(lambda: pair.connection(other).status.blocks_free == 256)
    bad.fail = (4, pb.FAILURE_CODE_ENGINE)
    for _ in range(6):
        await answered_whole(pair)
    assert len(decodes(bad)) == 3
    connection = pair.connection(bad)

    async def tried_again() -> int:
        """Ends the time without requests. Returns how many of six requests the worker then gets."""
        before = len(decodes(bad))
        connection.breaker._open_until = 0.0
        pair.pool.breaker_changed(connection)
        for _ in range(6):
            await answered_whole(pair)
        return len(decodes(bad)) - before

    assert await tried_again() == 1, "only the probe, which fails"
    assert await tried_again() > 1, "the probe succeeds, and more requests follow"


async def test_if_all_breakers_are_open_all_workers_get_requests(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(breaker, "TOGETHER_S", 0.0)
    cluster.decodes[0].fail_after = 2
    await answered_whole(cluster)
    [connection] = cluster.pool.ready(pb.POOL_DECODE)
    assert connection.breaker.open_for(0.0) > 0


async def test_a_worker_serves_again_although_the_timer_of_its_breaker_fires_early(
    pair: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """uvloop fires timers up to a millisecond early. The worker has no request whose end could help."""
    monkeypatch.setattr(breaker, "TOGETHER_S", 0.0)
    monkeypatch.setattr(breaker, "OPEN_S", 0.2)
    loop = asyncio.get_running_loop()
    call_later = loop.call_later
    monkeypatch.setattr(
        loop, "call_later", lambda delay, *call, **context: call_later(delay / 2, *call, **context)
    )
    pool, [failing, other] = pair.pool, pair.decodes
    connection = pair.connection(failing)

    def serves() -> bool:
        request = PrefillRequest(0, 10, avoid={other.address})
        chosen = pool.desk.choose_decode(request, 11)
        return chosen is not None and chosen[0] == connection.row

    for _ in range(3):
        connection.attempt_failed()
    assert not serves()
    await pair.until(serves)
    assert connection.breaker.open_for(time.monotonic()) == 0


async def test_a_lost_stream_that_opens_the_breaker_starts_nothing_there(
    pair: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(breaker, "FAILURES", 1)
    pool, [lost, _] = pair.pool, pair.decodes
    connection = pair.connection(lost)
    dispatched: list[bool] = []
    monkeypatch.setattr(pool, "on_capacity", lambda: dispatched.append(connection.ready))
    await lost.kill()
    await pair.until(lambda: not connection.attached and bool(dispatched))
    assert connection.breaker.open_for(0.0) > 0
    assert not any(dispatched)


async def test_retries_wait_for_the_budget(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parked, "FLOOR", 1)
    monkeypatch.setattr(parked, "WINDOW_S", 0.5)
    retries = cluster.router.services.parked.without_budget
    cluster.prefills[0].fail = (2, pb.FAILURE_CODE_DROPPED)
    request = asyncio.create_task(answered_whole(cluster))
    await cluster.until(lambda: len(retries) == 1)
    await request
    assert len(retries) == 0
    assert len(prefills(cluster.prefills[0])) == 3


async def test_a_client_that_leaves_removes_its_parked_request(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parked, "FLOOR", 1)
    decode, retries = cluster.decodes[0], cluster.router.services.parked.without_budget
    decode.fail_after = 2
    request = asyncio.create_task(cluster.complete())
    await cluster.until(lambda: len(retries) == 1)
    request.cancel()
    await cluster.until(lambda: len(retries) == 0)
