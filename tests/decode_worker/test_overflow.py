"""A decode worker prefills requests without a source, with the same tokens. Tiny model."""

import pytest

from baton.rpc import worker_pb2 as pb
from tests.cluster_helpers import (
    Pair,
    WorkerProcess,
    assert_whole,
    attached,
    metrics,
    request,
    sampling,
)
from tests.within import within

from .conftest import BLOCKS, ENDLESS, Workers, paused, prompt, retarget, status

PARAMS = [
    sampling(max_tokens=9, ignore_eos=True),
    sampling(max_tokens=9, ignore_eos=True, temperature=1.0, seed=5, logprobs=2, presence_penalty=1.0),
]


@pytest.fixture
def pair(caching_pair: Pair) -> Pair:
    return caching_pair


@pytest.mark.cases(1)
@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "sampled"])
@pytest.mark.parametrize("length", [1, 16, 33, 500])
async def test_a_local_prefill_gives_the_tokens_of_a_handover(
    pair: Pair, length: int, params: pb.SamplingParams
) -> None:
    right = await pair.generate(prompt(length), params)
    for output_ids in ([], right.tokens[:3]):  # a new request, and one that continues after a failure
        decode_id = await pair.decode.reserve(request(prompt(length), params, output_ids))
        tokens = [token for token, _ in await pair.decode.tokens(decode_id)]
        assert [*output_ids, *(t.token_id for t in tokens)] == right.tokens
        assert [t.output_index for t in tokens] == list(range(len(output_ids), 9))
        expected = [t.logprobs.logprob for t in right.decoded][len(output_ids) :]
        assert [t.logprobs.logprob for t in tokens] == pytest.approx(expected, abs=1e-4)


@pytest.mark.all
async def test_a_local_prefill_beside_a_running_request_changes_no_tokens(pair: Pair) -> None:
    params = sampling(max_tokens=120, ignore_eos=True)
    right = (await pair.generate(prompt(40), params)).tokens
    _, running = await pair.reserve(request(prompt(40), params))
    first, _ = await pair.decode.token(running)
    here = await pair.decode.submit_decode(request(prompt(300), sampling(max_tokens=4, ignore_eos=True)))
    rest = [token.token_id for token, _ in await pair.decode.tokens(running)]
    assert [first.token_id, *rest] == right
    await pair.decode.reserved(here)
    assert len(await pair.decode.tokens(here)) == 4


async def test_decoded_tokens_are_cached_for_the_next_turn(caching_workers: Workers) -> None:
    async with attached(caching_workers[1]) as decode:
        turn = await decode.reserve(request(prompt(64), sampling(max_tokens=40, ignore_eos=True)))
        answer = [token.token_id for token, _ in await decode.tokens(turn)]
        longer = [*prompt(64), *answer, 1, 2, 3]
        turn = await decode.reserve(request(longer, sampling(max_tokens=2, ignore_eos=True)))
        first, _ = await decode.token(turn)
        assert first.cached_tokens == 96  # 103 are known, in blocks of 16


async def test_fetched_kv_is_cached_and_reported(pair: Pair) -> None:
    """A prefill worker computes the first turn. The decode worker computes the end of the second turn."""
    turn = prompt(200)
    answer = (await pair.generate(turn, sampling(max_tokens=60, ignore_eos=True))).tokens
    second = [*turn, *answer, 1, 2, 3]
    computed = [*turn, *answer[:-1]]
    reported: set[int] = set()
    cached = await pair.decode.hints(computed)
    while not reported.issuperset(cached):
        reported.update((await within(pair.decode.caches.get())).added)
    params = sampling(max_tokens=5, ignore_eos=True)
    here = await pair.decode.reserve(request(second, params))
    tokens = [token for token, _ in await pair.decode.tokens(here)]
    assert tokens[0].cached_tokens == 256  # 259 are known, in blocks of 16
    assert [token.token_id for token in tokens] == (await pair.generate(second, params)).tokens


async def test_a_cancel_and_the_end_of_the_stream_stop_local_prefills(caching_workers: Workers) -> None:
    async with attached(caching_workers[1]) as decode:
        ids = [await decode.submit_decode(request(prompt(2000 + i), ENDLESS)) for i in range(2)]
        for decode_id in ids:
            await decode.reserved(decode_id)
        await decode.cancel(ids[0])
    await assert_whole(*caching_workers)


async def test_a_retarget_of_a_local_prefill_changes_nothing(pair: Pair) -> None:
    params = sampling(max_tokens=5, ignore_eos=True)
    right = (await pair.generate(prompt(200), params)).tokens
    decode_id = await pair.decode.reserve(request(prompt(200), params))
    await retarget(pair, decode_id, bytes(16), [])
    assert [token.token_id for token, _ in await pair.decode.tokens(decode_id)] == right


@pytest.mark.all
async def test_a_local_prefill_without_room_is_refused_and_the_youngest_is_preempted(
    caching_workers: Workers,
) -> None:
    async with attached(caching_workers[1]) as decode:
        # Both begin with 146 of 300 blocks. The end of the old one needs 155.
        grow = sampling(max_tokens=140, ignore_eos=True)
        async with paused(decode):
            old, young = [await decode.submit_decode(request(prompt(2330 + i), grow)) for i in range(2)]
            third = await decode.submit_decode(request(prompt(BLOCKS * 16 // 2), grow))
        for decode_id in (old, young):
            await decode.reserved(decode_id)
        assert (await decode.failure(third)).code == pb.FAILURE_CODE_NO_ROOM
        assert len(await decode.tokens(old)) == 140
        events = decode.events[young]
        last = [events.get_nowait().message for _ in range(events.qsize())][-1]
        assert isinstance(last, pb.AttemptFailed)
        assert last.code == pb.FAILURE_CODE_HANDED_BACK
    await assert_whole(*caching_workers)


async def test_metrics_count_a_local_prefill(caching_workers: Workers) -> None:
    worker: WorkerProcess = caching_workers[1]
    before = metrics(worker)
    async with attached(worker) as decode:
        decode_id = await decode.reserve(request(prompt(150), sampling(max_tokens=5, ignore_eos=True)))
        await decode.tokens(decode_id)
        await status(decode)
    after = metrics(worker)
    changed = {name: value - before.get(name, 0) for name, value in after.items()}
    assert changed["vllm:prompt_tokens_total"] == 150
    assert changed["vllm:generation_tokens_total"] == 5
    assert changed["vllm:request_prefill_time_seconds_count"] == 1
