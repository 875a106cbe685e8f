"""Every way an attempt can end on a pair of workers. Afterwards all pools are whole. Tiny model."""

import asyncio
import os
import time

import pytest

from baton.rpc import worker_pb2 as pb
from tests.cluster_helpers import Pair, assert_whole, metrics, paired, request, sampling
from tests.within import WITHIN

from .conftest import BLOCKS, ENDLESS, Workers, passed_on, paused, prompt, retarget, status

CONTEXT = 4096


async def test_a_first_token_that_ends_the_request_ends_the_transfer(pair: Pair) -> None:
    likely = (await pair.generate(prompt(50), sampling(max_tokens=2))).tokens[0]
    req = request(prompt(50), sampling(max_tokens=5, stop_token_ids=[likely]))
    prefill_id, decode_id = await pair.reserve(req)
    token, _ = await pair.prefill.token(prefill_id)
    assert (token.token_id, token.finish_reason) == (likely, pb.FINISH_REASON_STOP)
    failure = await pair.decode.failure(decode_id)
    assert failure.code == pb.FAILURE_CODE_FINISHED


async def test_a_prefill_reports_its_start_when_the_prompts_ahead_are_computed(pair: Pair) -> None:
    """The shorter prompt comes first, so it is ahead whether or not one step saw both."""
    first, second = [
        await pair.prefill.submit_prefill(request(prompt(n), ENDLESS), handover=True, report_start=True)
        for n in (200, 1000)
    ]
    _, first_at = await pair.prefill.token(first)
    _, second_at = await pair.prefill.token(second)
    started = pair.prefill.started
    assert list(started) == [first, second]
    assert started[first] < started[second] < second_at
    assert started[first] < first_at
    for prefill_id in (first, second):
        await pair.prefill.cancel(prefill_id)
    third = await pair.prefill.submit_prefill(request(prompt(9), ENDLESS), handover=True)
    await pair.prefill.token(third)
    await pair.prefill.cancel(third)
    assert third not in started, "no router waits for it"


async def test_a_prefill_under_an_id_that_ended_is_refused(workers: Workers, pair: Pair) -> None:
    prefill_id = await pair.prefill.submit_prefill(request(prompt(10), ENDLESS), handover=True)
    await pair.prefill.token(prefill_id)
    await pair.prefill.cancel(prefill_id)
    await assert_whole(*workers)  # the id is in use until then
    again = pb.SubmitPrefill(prefill_id=prefill_id, request=request(prompt(20), ENDLESS), handover=True)
    await pair.prefill.send(prefill=again)
    message = (await pair.prefill.next(prefill_id)).message
    if isinstance(message, pb.TokenEvent):  # computed before the transfer process reported the id as reused
        message = (await pair.prefill.next(prefill_id)).message
    assert isinstance(message, pb.AttemptFailed)
    assert message.code == pb.FAILURE_CODE_INVALID
    assert "used before" in message.message


# ---------------------------------------------------------------- cancel


async def test_cancel_stops_a_prefill_between_its_chunks(workers: Workers) -> None:
    """A cancelled prefill of 62 chunks does not count as prefilled. A cancel that is too late is retried."""

    def prefilled() -> float:
        return metrics(workers[0])["vllm:prompt_tokens_total"]

    async with paired(*workers) as pair:
        for _ in range(8):
            before = prefilled()
            prefill_id, decode_id = await pair.reserve(request(prompt(3900), sampling(max_tokens=100)))
            await pair.prefill.cancel(prefill_id)
            await pair.decode.cancel(decode_id)
            await assert_whole(*workers)
            if prefilled() == before:
                return
    raise AssertionError("every prefill was computed to its end")


async def test_cancel_of_the_prefill_alone_fails_the_kv(workers: Workers, pair: Pair) -> None:
    async with paused(pair.prefill):
        prefill_id, decode_id = await pair.reserve(request(prompt(200), ENDLESS))
        await pair.prefill.cancel(prefill_id)
    failure = await pair.decode.failure(decode_id)
    assert (failure.code, failure.message) == (pb.FAILURE_CODE_KV_FAILED, "cancelled")
    assert failure.prefill_id == prefill_id
    await assert_whole(workers[0])
    assert (await status(pair.decode)).reservations == 1, "the reservation is kept"
    await pair.decode.cancel(decode_id)


async def test_cancel_of_the_decode_alone_leaves_the_prefill_held(workers: Workers, pair: Pair) -> None:
    async with paused(pair.prefill):
        prefill_id, decode_id = await pair.reserve(request(prompt(200), ENDLESS))
        await pair.decode.cancel(decode_id)
        await assert_whole(workers[1])
    await pair.prefill.token(prefill_id)
    end = time.monotonic() + WITHIN
    while not (await status(pair.prefill)).held_prefills:  # a status may be older than the token
        assert time.monotonic() < end, "the prefill ended with the decode"
    await pair.prefill.cancel(prefill_id)


async def test_after_a_storm_of_cancels_as_many_requests_decode_in_one_step(
    workers: Workers, pair: Pair
) -> None:
    """Each ends at another moment: before its blocks, before its KV, with its first token, while decoding."""

    async def ended(number: int) -> None:
        prefill_id, decode_id = await pair.submit(request(prompt(20 + 3 * number), ENDLESS))
        if moment := number % 4:
            await pair.decode.reserved(decode_id)
        if moment > 1:
            await pair.prefill.token(prefill_id)
        if moment > 2:
            await pair.decode.token(decode_id)
        await pair.decode.cancel(decode_id)
        await pair.prefill.cancel(prefill_id)

    for wave in range(2):
        await asyncio.gather(*(ended(16 * wave + number) for number in range(16)))
    await assert_whole(*workers)

    asked = [await pair.reserve(request(prompt(20), ENDLESS)) for _ in range(16)]
    decodes = {decode_id for _, decode_id in asked}
    pair.decode.steps.clear()
    while not any(decodes == {token.attempt_id for token in step.tokens} for step in pair.decode.steps):
        await pair.decode.token(asked[-1][1])
    for _, decode_id in asked:
        await pair.decode.cancel(decode_id)


async def test_cancel_of_an_unknown_attempt_is_ignored(pair: Pair) -> None:
    await pair.prefill.cancel(os.urandom(16))
    await pair.decode.cancel(os.urandom(16))
    await pair.generate(prompt(10), sampling(max_tokens=2, ignore_eos=True))


@pytest.mark.all
async def test_a_router_cannot_cancel_an_attempt_of_another_router(workers: Workers) -> None:
    async with paired(*workers) as pair, paired(*workers) as other:
        _, decode_id = await pair.reserve(request(prompt(10), sampling(max_tokens=60, ignore_eos=True)))
        await other.decode.cancel(decode_id)
        assert len(await pair.decode.tokens(decode_id)) == 60


async def test_the_end_of_a_stream_cancels_all_that_was_submitted_on_it(workers: Workers) -> None:
    async with paired(*workers) as other:
        others = await other.reserve(request(prompt(10), ENDLESS))
        async with paired(*workers) as pair:
            running = [await pair.submit(request(prompt(n), ENDLESS)) for n in (10, 50, 100)]
            for _, decode_id in running:
                await pair.decode.reserved(decode_id)
                await pair.decode.token(decode_id)
            await pair.submit(request(prompt(1500), ENDLESS))
        for _ in range(other.decode.events[others[1]].qsize() + 20):
            await other.decode.token(others[1])  # the requests of another router go on
        await other.prefill.cancel(others[0])
        await other.decode.cancel(others[1])
        await assert_whole(*workers)


# ---------------------------------------------------------------- failures


async def test_a_retarget_takes_the_kv_from_another_prefill(workers: Workers, pair: Pair) -> None:
    params = sampling(max_tokens=8, ignore_eos=True, temperature=1.0, seed=3)
    whole = await pair.generate(prompt(100), params)
    # The prefill is lost after the router has emitted two tokens.
    emitted = whole.tokens[:2]
    prefill_id = await pair.prefill.submit_prefill(request(prompt(100), params), handover=True)
    await pair.prefill.token(prefill_id)
    await pair.prefill.cancel(prefill_id)
    await assert_whole(workers[0])  # the held prefill is released
    decode_id = await pair.decode.reserve(request(prompt(100), params), pair.source(prefill_id))
    assert (await pair.decode.failure(decode_id)).code == pb.FAILURE_CODE_KV_FAILED
    again = await pair.prefill.submit_prefill(request(prompt(100), params, emitted), handover=True)
    await retarget(pair, decode_id, again, emitted)
    tokens = [token for token, _ in await pair.decode.tokens(decode_id)]
    assert [t.output_index for t in tokens] == list(range(2, 8))
    assert [*emitted, *(t.token_id for t in tokens)] == whole.tokens


async def test_a_retarget_replaces_a_fetch_under_way(workers: Workers, pair: Pair) -> None:
    params = sampling(max_tokens=4, ignore_eos=True)
    req = request(prompt(200), params)
    async with paused(pair.prefill):
        slow, decode_id = await pair.reserve(req)
        other = await pair.prefill.submit_prefill(req, handover=True)
        await retarget(pair, decode_id, other, [])
        await passed_on(pair.decode)
    assert len(await pair.decode.tokens(decode_id)) == 4
    await pair.prefill.cancel(slow)


async def test_a_retarget_with_fewer_output_tokens_is_refused(pair: Pair) -> None:
    params = sampling(max_tokens=8)
    prefill_id = await pair.prefill.submit_prefill(request(prompt(9), params, [1, 2]), handover=True)
    decode_id = await pair.decode.submit_decode(
        request(prompt(9), params, [1, 2]), pair.source(os.urandom(16))
    )
    await pair.decode.reserved(decode_id)
    await retarget(pair, decode_id, prefill_id, [1])
    assert (await pair.decode.failure(decode_id)).code == pb.FAILURE_CODE_INVALID
    await pair.prefill.cancel(prefill_id)


async def test_without_room_a_request_is_refused_and_counted(pair: Pair) -> None:
    nowhere = pair.source(os.urandom(16))
    big = request(prompt(BLOCKS // 2 * 16), sampling(max_tokens=2))
    first = await pair.decode.reserve(big, nowhere)
    before = (await status(pair.decode)).no_room
    second = await pair.decode.submit_decode(big, nowhere)
    assert (await pair.decode.failure(second)).code == pb.FAILURE_CODE_NO_ROOM
    assert (await status(pair.decode)).no_room == before + 1, "the status counts refusals"
    await pair.decode.cancel(first)


async def test_a_reservation_without_kv_is_handed_back_at_the_deadline(pair: Pair) -> None:
    late = request(prompt(10), sampling(), timeout_ms=300)
    decode_id = await pair.decode.submit_decode(late, pair.source(os.urandom(16)))
    message = (await pair.decode.next(decode_id)).message
    if isinstance(message, pb.Reserved):  # a slow machine may be later than the deadline
        message = (await pair.decode.next(decode_id)).message
    assert isinstance(message, pb.AttemptFailed)
    assert message.code == pb.FAILURE_CODE_HANDED_BACK


@pytest.mark.all
async def test_an_unfetched_prefill_is_dropped_when_a_fetched_one_needs_its_blocks(pair: Pair) -> None:
    forgotten = await pair.prefill.submit_prefill(request(prompt(3000), sampling()), handover=True)
    await pair.prefill.token(forgotten)
    answer = await pair.generate(prompt(3001), sampling(max_tokens=2, ignore_eos=True))
    assert len(answer.tokens) == 2
    assert (await pair.prefill.failure(forgotten)).code == pb.FAILURE_CODE_DROPPED


async def test_an_invalid_request_is_refused_and_its_stream_goes_on(pair: Pair) -> None:
    source = pair.source(os.urandom(16))
    for req, reason in (
        (request([512], sampling()), "has token 512, which is not in the vocabulary of 512"),
        (request([1], sampling(temperature=-1.0)), "temperature must be between 0 and 1000000"),
        (request([1], sampling(top_p=0.0)), "top_p must be above 0"),
        (request(prompt(CONTEXT), sampling()), "more than the context of 4096"),
    ):
        for failure in (
            await pair.prefill.failure(await pair.prefill.submit_prefill(req, handover=True)),
            await pair.decode.failure(await pair.decode.submit_decode(req, source)),
        ):
            assert failure.code == pb.FAILURE_CODE_INVALID
            assert reason in failure.message
    held = await pair.prefill.submit_prefill(request(prompt(10), sampling()), handover=True)
    await pair.prefill.send(retarget=pb.Retarget(decode_id=held, source=source))  # no decode: ignored
    await pair.prefill.send(cancel=pb.Cancel(attempt_id=held))
    longer = await pair.prefill.submit_prefill(request([1], sampling(max_tokens=2)), handover=False)
    assert "set handover" in (await pair.prefill.failure(longer)).message
    await pair.generate(prompt(10), sampling(max_tokens=2, ignore_eos=True))


async def test_an_attempt_id_in_use_is_refused(workers: Workers, pair: Pair) -> None:
    async with paused(pair.prefill):
        prefill_id, decode_id = await pair.reserve(
            request(prompt(10), sampling(max_tokens=3, ignore_eos=True))
        )
        again = request(prompt(20), sampling())
        await pair.decode.send(
            decode=pb.SubmitDecode(decode_id=decode_id, request=again, source=pair.source(prefill_id))
        )
        failure = await pair.decode.failure(decode_id)
    assert (failure.code, failure.message) == (pb.FAILURE_CODE_INVALID, "this id is in use")
    assert len(await pair.decode.tokens(decode_id)) == 3, "the attempt that has the id goes on"


async def test_metrics_count_a_handover(workers: Workers) -> None:
    before = [metrics(worker) for worker in workers]
    async with paired(*workers) as pair:
        reports = [await status(pair.prefill), await status(pair.decode)]
        started = time.monotonic()
        await pair.generate(prompt(100), sampling(max_tokens=5, ignore_eos=True))
        took = time.monotonic() - started
        await assert_whole(*workers)  # the prefill worker has counted its transfer
        later = await status(pair.prefill), await status(pair.decode)
    names = "computed_prompt_tokens", "generation_tokens", "kv_transfers", "handovers"
    counted = [
        [getattr(new, name) - getattr(old, name) for name in names]
        for new, old in zip(later, reports, strict=True)
    ]
    assert counted == [[100, 1, 1, 0], [0, 4, 1, 1]], "for `baton status` and `baton top`"
    assert 0 <= later[1].handovers_hidden - reports[1].handovers_hidden <= 1
    after = [metrics(worker) for worker in workers]
    prefill, decode = ({k: v - b.get(k, 0) for k, v in a.items()} for a, b in zip(after, before, strict=True))
    assert (prefill["vllm:prompt_tokens_total"], decode["vllm:prompt_tokens_total"]) == (100, 0)
    assert prefill["vllm:generation_tokens_total"] == 1
    assert decode["vllm:generation_tokens_total"] == 4
    assert decode['vllm:request_success_total{finished_reason="length"}'] == 1
    kv_bytes = 100 * 2 * 2 * 2 * 16 * 4  # tokens, layers, K and V, heads, head_dim, float32
    assert [new.kv_bytes - old.kv_bytes for new, old in zip(later, reports, strict=True)] == [kv_bytes] * 2
    assert prefill['baton:kv_bytes_total{direction="send"}'] == kv_bytes
    assert decode['baton:kv_bytes_total{direction="receive"}'] == kv_bytes
    for name in (
        "kv_hidden_share",
        "kv_exposed_seconds",
        "kv_transfer_seconds",
        "kv_injection_seconds",
        "kv_fetch_seconds",
        "handover_seconds",
    ):
        assert decode[f"baton:{name}_count"] == 1
    received = decode['baton:kv_frames_total{direction="receive"}']
    assert prefill['baton:kv_frames_total{direction="send"}'] == received > 0
    assert prefill['baton:kv_transfers_total{reason="acked"}'] == 1
    assert decode['baton:kv_transfers_total{reason="injected"}'] == 1
    injection = decode["baton:kv_injection_seconds_sum"]
    assert 0 < injection < decode["baton:kv_fetch_seconds_sum"] < took
    for each in (prefill, decode):
        assert each['baton:deadlines_expired_total{deadline="progress"}'] == 0
        assert each['baton:kv_checksum_failures_total{kind="payload"}'] == 0
    stages = [
        prefill["vllm:request_queue_time_seconds_sum"],
        prefill["vllm:request_prefill_time_seconds_sum"],
    ]
    stages.append(decode["vllm:request_decode_time_seconds_sum"])
    assert all(0 < seconds < took for seconds in stages)
    assert sum(stages) <= took, "the stages do not overlap"
    assert after[0]["vllm:kv_cache_usage_perc"] == 0
    free = after[0]['baton:kv_arena_slots_free{direction="send"}']
    assert free == after[0]["baton:kv_arena_slots"]
