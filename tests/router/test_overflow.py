"""Decode workers prefill prompts themselves if the second token then comes earlier."""

import asyncio
import math
import re
from pathlib import Path

import pytest

from baton.kv_names import prompt_hints
from baton.router.policy import regime
from baton.router.policy.prefill_loads import PrefillLoads
from baton.router.policy.settings import PlanSettings
from baton.router.text.tokenizer import ModelTokenizer
from baton.rpc import worker_pb2 as pb

from .conftest import Cluster, make_cluster
from .test_recovery import answered_whole, both_have_it, busy, decodes, prefills


async def offering(cluster: Cluster, tokens: int = 64) -> None:
    """Decode workers report spare speed, and prefill workers report a low speed."""
    for worker in cluster.workers:
        if worker.first_pool == pb.POOL_DECODE:
            worker.status.long_chunk_tokens, worker.status.long_chunk_seconds = tokens, 0.015
            worker.status.step_seconds, worker.status.gap_target_seconds = 0.010, 0.050
            worker.status.prefill_tokens_per_s = 1e4
        else:
            worker.status.prefill_tokens_per_s = 1.0
        worker.report()
    connections = cluster.pool.connections
    await cluster.until(
        lambda: all(
            c.status.prefill_tokens_per_s == 1.0 or c.status.long_chunk_tokens == tokens for c in connections
        )
    )


async def counted(cluster: Cluster, reason: str) -> float:
    lines = (await cluster.metrics()).splitlines()
    return sum(float(x.split()[-1]) for x in lines if x.startswith("baton:overflow_total") and reason in x)


async def test_overflow_uses_no_prefill_worker(cluster: Cluster) -> None:
    await offering(cluster)
    await answered_whole(cluster)
    [submit] = decodes(cluster.decodes[0])
    assert not submit.HasField("source")
    assert not prefills(cluster.prefills[0])
    assert await counted(cluster, "short") == 1


async def test_a_long_prompt_overflows_if_prefill_is_slow(cluster: Cluster) -> None:
    await offering(cluster)
    await cluster.complete(prompt="a long story " * 300)
    assert await counted(cluster, "saturated") == 1


async def test_a_nearly_cached_prompt_goes_to_the_decode_worker_that_has_it(
    tokenizer: ModelTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = list(range(3, 1003))
    async with make_cluster(tokenizer, tmp_path, decode=3, wait=False) as cluster:
        for worker in cluster.decodes:
            worker.cache = set()
        await cluster.until(lambda: len(cluster.pool.ready(pb.POOL_DECODE)) == 3 and cluster.pool.complete)
        await cluster.until(lambda: all(worker.attached for worker in cluster.workers))
        await offering(cluster, tokens=100)
        holder = cluster.decodes[1]
        index = cluster.pool.desk.loads.index
        sent: list[int] = []
        monkeypatch.setattr(
            PrefillLoads,
            "sent",
            lambda loads, row, work, now, real=PrefillLoads.sent: (
                sent.append(work.tokens),
                real(loads, row, work, now),
            ),
        )
        holder.change_cache(prompt_hints(prompt, b"", b""))
        await cluster.until(lambda: len(index) == 1000 // 64)
        for turn in range(1, 5):
            await cluster.complete(prompt=prompt)
            assert len(decodes(holder)) == turn
            assert not decodes(holder)[-1].HasField("source")
            assert sent == [1000 - 15 * 64] * turn, "the uncached part"
        assert await counted(cluster, "cached") == 4
        holder.change_cache([], prompt_hints(prompt, b"", b""))
        await cluster.until(lambda: not len(index))
        await cluster.complete(prompt=prompt)
        assert await counted(cluster, "cached") == 4


async def test_a_short_answer_stays_on_the_prefill_worker(cluster: Cluster) -> None:
    """It delays no prompts there. The handover would wait for a step."""
    [prefill], [decode] = cluster.prefills, cluster.decodes
    decode.status.step_seconds, decode.status.gap_target_seconds = 0.040, 0.050
    decode.status.requests_running = decode.status.requests_decoding = 1
    decode.report()
    connection = cluster.pool.ready(pb.POOL_DECODE)[0]
    await cluster.until(lambda: connection.status.step_seconds > 0)
    await cluster.complete(prompt="Hello", max_tokens=3)
    [submit] = decodes(prefill)
    assert not submit.HasField("source")
    assert submit.request.first_token_within > 0
    assert not decodes(decode)
    assert await counted(cluster, "no_handover") == 1
    why = (await cluster.get("/status"))["router"]["overflow_why"]
    assert re.fullmatch(
        r"on a prefill worker, though a decode worker had room: .*--advanced\.no-overflow.*; costs of the "
        r"last one: handover [\d.]+ s, decode worker [\d.]+ s, prefill worker [\d.]+ s",
        why["no_handover"],
    )


async def test_a_full_prefill_worker_hands_over(cluster: Cluster) -> None:
    [prefill], [decode] = cluster.prefills, cluster.decodes
    decode.status.step_seconds = 0.010
    prefill.status.blocks_free = 0
    for worker in cluster.workers:
        worker.report()
    connections = cluster.pool.connections
    await cluster.until(
        lambda: sum(c.status.step_seconds > 0 or c.status.blocks_free == 0 for c in connections) == 2
    )
    await answered_whole(cluster)
    assert (len(prefills(prefill)), len(decodes(decode))) == (1, 1)


async def test_a_prefill_worker_with_room_decodes_while_decode_workers_have_none(pair: Cluster) -> None:
    """Of one prompt, `sticky` chooses the same worker each time. The request does not wait for its room."""
    [one, other], [decode, _] = pair.prefills, pair.decodes
    await pair.full(*pair.decodes, other)
    await answered_whole(pair)
    assert (len(decodes(one)), decodes(other)) == (1, [])
    await pair.rooms({one: 0, other: 100})
    await answered_whole(pair)
    assert (len(decodes(one)), len(decodes(other))) == (1, 1)
    assert await counted(pair, "no_room") == 2
    await pair.full(other)
    waits = asyncio.create_task(answered_whole(pair))
    await pair.until(lambda: len(pair.router.services.admission.queue) == 1)
    await pair.rooms({decode: 100})
    await waits
    assert sum(len(prefills(worker)) for worker in pair.prefills) == len(decodes(decode)) == 1


async def test_decode_workers_serve_alone_without_prefill_workers(cluster: Cluster) -> None:
    await offering(cluster)
    await cluster.prefills[0].kill()
    await cluster.until(lambda: not cluster.pool.complete)
    await answered_whole(cluster)
    assert await counted(cluster, "no_prefill") == 1


async def test_a_cluster_of_decode_workers_is_ready_without_prefill_workers(
    tokenizer: ModelTokenizer, tmp_path: Path
) -> None:
    async with make_cluster(tokenizer, tmp_path, prefill=0, decode_only=True) as cluster:
        await cluster.get("/ready")
        assert 'pool="prefill"' not in await cluster.metrics(), "an alert reads 0 workers as a lost pool"
        await answered_whole(cluster)
        await cluster.workers[0].kill()
        await cluster.until(lambda: not cluster.pool.complete)


async def test_without_prefill_workers_decode_workers_set_the_window(cluster: Cluster) -> None:
    """Without a window one key could put all its prompts before those of other keys."""
    await offering(cluster)
    await cluster.prefills[0].kill()
    await cluster.until(lambda: not cluster.pool.complete)
    cluster.pool.desk.renew_window()
    assert cluster.pool.desk.window().tokens == 2 * 64
    cluster.pool.desk.settings = PlanSettings(overflow=False)
    assert cluster.pool.desk.window().tokens == math.inf, "without overflow requests park instead"


async def test_the_window_follows_its_pool(pair: Cluster) -> None:
    """It is renewed as often as workers report."""
    before = pair.pool.desk.window().tokens
    pair.prefills[0].status.health = pb.WorkerStatus.HEALTH_DRAINING
    pair.prefills[0].report()
    await pair.until(lambda: pair.pool.desk.window().tokens == before / 2)


async def test_after_the_last_prefill_worker_is_lost_decode_prefills_its_reservation(
    cluster: Cluster,
) -> None:
    prefill, decode = cluster.prefills[0], cluster.decodes[0]
    prefill.steps = asyncio.Semaphore(0)
    request = asyncio.create_task(answered_whole(cluster))
    await cluster.until(lambda: bool(decodes(decode)) and bool(prefills(prefill)))
    await offering(cluster)
    await prefill.kill()
    await request
    assert [d.HasField("source") for d in decodes(decode)] == [True, False]
    assert decodes(decode)[0].decode_id in decode.cancelled


async def test_a_reservation_on_a_retired_worker_moves_when_the_last_prefill_worker_is_lost(
    pair: Cluster,
) -> None:
    request = await both_have_it(pair)
    leaving, other = busy(pair.decodes)
    leaving.status.health = pb.WorkerStatus.HEALTH_DRAINING
    leaving.report()
    await pair.until(lambda: len(pair.pool.ready(pb.POOL_DECODE)) == 1)
    for worker in pair.prefills:
        await worker.kill()
    await request
    assert not decodes(other)[0].HasField("source")
    assert decodes(leaving)[0].decode_id in leaving.cancelled


@pytest.mark.parametrize("tokens", [0, 1, 7])
async def test_an_overflowed_request_survives_a_lost_decode_worker(pair: Cluster, tokens: int) -> None:
    await offering(pair)
    for worker in pair.decodes:
        worker.steps = asyncio.Semaphore(tokens)
    request = asyncio.create_task(answered_whole(pair))
    await pair.until(
        lambda: any(d.steps is not None and d.submitted and d.steps._value == 0 for d in pair.decodes)
    )
    killed, other = busy(pair.decodes)
    other.steps = None
    await killed.kill()
    await request
    [again] = decodes(other)
    assert not again.HasField("source")
    assert len(again.request.output_ids) <= tokens


async def test_refused_and_handed_back_requests_go_on_elsewhere(pair: Cluster) -> None:
    await offering(pair)
    await pair.full(*pair.prefills)
    for worker in pair.decodes:
        worker.no_room = 1
    request = asyncio.create_task(answered_whole(pair))
    await pair.until(lambda: pair.router.services.admission.waiting_for_decode == 1)
    pair.decodes[0].report()
    await request
    for worker in pair.decodes:
        worker.fail = (1, pb.FAILURE_CODE_HANDED_BACK)
    await answered_whole(pair)


async def test_no_overflow_turns_it_off(tokenizer: ModelTokenizer, tmp_path: Path) -> None:
    async with make_cluster(tokenizer, tmp_path, overflow=False) as cluster:
        await offering(cluster)
        await answered_whole(cluster)
        assert decodes(cluster.decodes[0])[0].HasField("source")


async def test_spare_speed_of_decode_workers_widens_the_window(cluster: Cluster) -> None:
    before = cluster.pool.desk.window().tokens
    await offering(cluster)
    cluster.pool.desk.renew_window()
    assert cluster.pool.desk.window().tokens == pytest.approx(before * (1 + 64 / 0.015 / 1.0))


async def test_the_regime_is_decided_with_the_window(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        regime,
        "apart",
        lambda prefills, decodes, demand, stands: (
            len(prefills) == len(decodes) == 1 and demand is None and not stands
        ),
    )
    cluster.pool.desk.renew_window()
    assert cluster.pool.desk.apart
