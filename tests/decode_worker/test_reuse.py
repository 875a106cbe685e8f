"""KV that some worker has is neither moved nor computed again. Tiny model."""

import asyncio
import random

import pytest

from baton.rpc import worker_pb2 as pb
from tests.cluster_helpers import (
    Pair,
    WorkerProcess,
    WorkerStream,
    assert_whole,
    attached,
    metrics,
    request,
    sampling,
)

from .conftest import Workers, retarget, status

TOKEN_BYTES = 2 * 2 * 2 * 16 * 4
"""KV of one position in all layers: K and V, of two layers with two heads of 16 float32."""
FETCHED = 'baton:prefix_fetched_tokens_total{tier="device"}'
SHORT = sampling(max_tokens=5, ignore_eos=True)


@pytest.fixture
def pair(caching_pair: Pair) -> Pair:
    return caching_pair


def text(length: int, seed: int) -> list[int]:
    """One that no other module sends to the shared workers, which cache it."""
    return random.Random(f"reuse {seed}").choices(range(500), k=length)


async def received(workers: Workers, pair: Pair) -> float:
    """Bytes of KV that the decode worker has received."""
    await status(pair.decode)  # the metrics follow it
    return metrics(workers[1])['baton:kv_bytes_total{direction="receive"}']


async def handed_over(workers: Workers, pair: Pair, prompt: list[int]) -> tuple[list[int], float]:
    """The tokens of a handover, and the positions that travelled for it."""
    before = await received(workers, pair)
    answer = await pair.generate(prompt, SHORT)
    return answer.tokens, (await received(workers, pair) - before) / TOKEN_BYTES


@pytest.mark.parametrize(("length", "more"), [(100, 40), (96, 1), (11, 17)])
async def test_the_next_turn_moves_only_what_decode_lacks(
    caching_workers: Workers, pair: Pair, length: int, more: int
) -> None:
    first = text(length, length)
    tokens, moved = await handed_over(caching_workers, pair, first)
    assert moved == length
    second = [*first, *tokens, *text(more, 1000 + length)]
    known = (length + len(tokens) - 1) // 16 * 16  # full blocks; the last token has no KV
    again, moved = await handed_over(caching_workers, pair, second)
    assert moved == len(second) - known
    assert await answered(pair.prefill, second, SHORT) == again, "computed by one worker"


async def test_a_prompt_that_decode_has_needs_only_its_first_token(
    caching_workers: Workers, pair: Pair
) -> None:
    prompt = text(64, 64)
    tokens, moved = await handed_over(caching_workers, pair, prompt)
    assert moved == 64
    assert await handed_over(caching_workers, pair, prompt) == (tokens, 0)


async def test_a_retarget_fetches_what_is_missing_of_the_longer_text(
    caching_workers: Workers, pair: Pair
) -> None:
    """The prefill of the first attempt is lost. The second one has one token more."""
    prompt = text(70, 70)
    tokens, _ = await handed_over(caching_workers, pair, prompt)
    before = await received(caching_workers, pair)
    lost = pair.source(bytes(16))
    decode_id = await pair.decode.reserve(request(prompt, SHORT), lost)
    again = request(prompt, SHORT, tokens[:1])
    prefill_id = await pair.prefill.submit_prefill(again, handover=True)
    await retarget(pair, decode_id, prefill_id, tokens[:1])
    decoded = await pair.decode.tokens(decode_id)
    assert [token.token_id for token, _ in decoded] == tokens[1:]
    assert (await received(caching_workers, pair) - before) / TOKEN_BYTES == 71 - 64


def cache_of(worker: WorkerProcess) -> pb.ContentSource:
    return pb.ContentSource(kv_address=worker.ready["kv_address"], incarnation=worker.ready["incarnation"])


async def answered(
    stream: WorkerStream,
    prompt: list[int],
    params: pb.SamplingParams,
    content: pb.ContentSource | None = None,
) -> list[int]:
    """The tokens of a request that one worker computes and decodes."""
    tokens, _ = await alone(stream, prompt, params, content)
    return tokens


async def alone(
    stream: WorkerStream,
    prompt: list[int],
    params: pb.SamplingParams,
    content: pb.ContentSource | None = None,
    salt: bytes = b"",
) -> tuple[list[int], int]:
    """As `answered`, and how many positions were cached."""
    here = request(prompt, params)
    here.cache_salt = salt
    decode_id = await stream.reserve(here, content=content)
    events = [token for token, _ in await stream.tokens(decode_id)]
    return [token.token_id for token in events], events[0].cached_tokens


async def prefilled(stream: WorkerStream, prompt: list[int], content: pb.ContentSource) -> tuple[int, int]:
    """The first token of a prompt, and how many positions were cached."""
    prefill_id = await stream.submit_prefill(
        request(prompt, sampling(max_tokens=1)), handover=False, content=content
    )
    token, _ = await stream.token(prefill_id)
    return token.token_id, token.cached_tokens


async def by_source(worker: WorkerProcess, stream: WorkerStream) -> dict[str, float]:
    """Prompt tokens that a worker prefilled, by the source of their KV."""
    await status(stream)  # the metrics follow it
    found, name = metrics(worker), "vllm:prompt_tokens_by_source_total"
    sources = ("local_compute", "local_cache_hit", "external_kv_transfer")
    return {source: found[f'{name}{{source="{source}"}}'] for source in sources}


@pytest.mark.all
async def test_the_kv_of_an_answer_comes_back_for_the_next_turn(caching_workers: Workers, pair: Pair) -> None:
    _, decode = caching_workers
    first = text(200, 7)
    answer = await answered(pair.decode, first, sampling(max_tokens=100, ignore_eos=True))
    second = [*first, *answer, *text(20, 8)]
    known = await by_source(caching_workers[0], pair.prefill)
    token, cached = await prefilled(pair.prefill, second, cache_of(decode))
    assert cached == 288 // 64 * 64, "full blocks of 299 positions, in chunks"
    assert [token] == await answered(pair.decode, second, sampling(max_tokens=1))
    assert await by_source(caching_workers[0], pair.prefill) == {
        "local_compute": known["local_compute"] + len(second) - cached,
        "local_cache_hit": known["local_cache_hit"],
        "external_kv_transfer": known["external_kv_transfer"] + cached,
    }
    longer = [*second, *text(400, 9)]
    token, cached = await prefilled(pair.prefill, longer, cache_of(decode))
    assert cached == len(second) // 16 * 16, "what it computed itself"
    assert [token] == await answered(pair.decode, longer, sampling(max_tokens=1))


@pytest.mark.all
async def test_turns_that_change_workers_compute_little_of_what_is_known(
    caching_workers: Workers, pair: Pair
) -> None:
    """Each worker computes and decodes every second turn alone, and fetches the turns before."""
    streams, chat, known, computed = (pair.prefill, pair.decode), text(640, 20), 0, 0
    for turn in range(6):
        content = cache_of(caching_workers[1 - turn % 2])
        tokens, cached = await alone(streams[turn % 2], chat, SHORT, content)
        assert (tokens, 0) == await alone(streams[turn % 2], chat, SHORT, salt=b"no cache %d" % turn)
        computed += known - cached
        known = len(chat) + len(tokens) - 1  # the last token has no KV
        chat = [*chat, *tokens, *text(120, 21 + turn)]
    assert computed <= 0.05 * sum(640 + 125 * turn for turn in range(5))


@pytest.mark.parametrize("left", ["cancelled", "router gone"])
async def test_a_request_that_ends_while_its_prefix_is_fetched_leaves_nothing(
    caching_workers: Workers, left: str
) -> None:
    prompt = text(1500, 30)
    async with attached(caching_workers[0]) as prefill, attached(caching_workers[1]) as decode:
        await answered(decode, prompt, SHORT)
        content = cache_of(caching_workers[1])
        decode_id = await prefill.submit_decode(request([*prompt, 1], SHORT), content=content)
        if left == "cancelled":
            await prefill.cancel(decode_id)
    await assert_whole(*caching_workers)


async def test_a_request_that_ends_before_its_prefix_has_come_is_not_computed(
    caching_workers: Workers,
) -> None:
    content = pb.ContentSource(kv_address="127.0.0.1:1", incarnation=7)  # nothing listens there
    async with attached(caching_workers[1]) as decode:
        before = await status(decode)
        decode_id = await decode.submit_decode(request(text(1500, 31), SHORT), content=content)
        await decode.cancel(decode_id)
        await assert_whole(caching_workers[1])
        assert (await status(decode)).prefix_cache_queries == before.prefix_cache_queries


@pytest.mark.cases(1)
@pytest.mark.parametrize("wrong", ["nothing cached", "another incarnation", "no listener", "itself"])
async def test_a_stale_hint_costs_time_alone(caching_workers: Workers, pair: Pair, wrong: str) -> None:
    prefill, decode = caching_workers
    content = {
        "nothing cached": cache_of(decode),
        "another incarnation": pb.ContentSource(kv_address=decode.ready["kv_address"], incarnation=1),
        "no listener": pb.ContentSource(kv_address="127.0.0.1:1", incarnation=1),
        "itself": cache_of(prefill),
    }[wrong]
    prompt = text(150, sum(map(ord, wrong)))
    other, one = [*prompt[1:], 1], sampling(max_tokens=1)
    (first, cached), (tokens, also_cached) = await asyncio.gather(
        prefilled(pair.prefill, prompt, content), alone(pair.prefill, other, one, content)
    )
    assert cached == also_cached == 0
    assert [first] == await answered(pair.decode, prompt, one)
    assert tokens == await answered(pair.decode, other, one)


async def test_prompts_with_the_same_beginning_wait_for_one_fetch(
    caching_workers: Workers, pair: Pair
) -> None:
    _, decode = caching_workers
    shared = text(640, 11)
    await answered(pair.decode, [*shared, 1], SHORT)
    await status(pair.prefill)
    before = metrics(caching_workers[0]).get(FETCHED, 0)
    ids = [
        await pair.prefill.submit_prefill(
            request([*shared, number], SHORT), handover=True, content=cache_of(decode)
        )
        for number in range(4)
    ]
    await pair.prefill.cancel(ids[0])
    await pair.prefill.cancel(ids[3])
    for prefill_id in ids[1:3]:
        token, _ = await pair.prefill.token(prefill_id)
        assert token.cached_tokens == 640
        await pair.prefill.cancel(prefill_id)
    await status(pair.prefill)
    assert metrics(caching_workers[0])[FETCHED] - before == 640


@pytest.mark.all
async def test_two_workers_that_fetch_from_each_other_all_go_on(caching_workers: Workers, pair: Pair) -> None:
    """More prompts than a worker serves at a time. Some are computed, since the other worker is busy."""
    streams = (pair.prefill, pair.decode)
    # Few enough tokens for the pool: else fetched blocks may be evicted before their prompt starts.
    prompts = [[text(200, 100 * side + number) for number in range(5)] for side in range(2)]
    for stream, own in zip(streams, prompts, strict=True):
        for prompt in own:
            await answered(stream, [*prompt, 1], SHORT)
    asked = [
        prefilled(streams[1 - side], [*prompt, 2], cache_of(caching_workers[side]))
        for side in range(2)
        for prompt in prompts[side]
    ]
    tokens = await asyncio.gather(*asked)
    assert {cached for _, cached in tokens} <= {0, 192}
    assert sum(cached > 0 for _, cached in tokens) >= 4


@pytest.mark.all
async def test_what_was_handed_over_or_fetched_is_evicted_first_while_others_have_it(
    caching_workers: Workers, pair: Pair
) -> None:
    """Else both workers would cache the same. Routers say what no other worker has any more."""
    local, handed, only_here, fetched = (text(96, seed) for seed in (91, 92, 93, 94))

    async def cached(prompt: list[int]) -> int:
        return (await alone(pair.prefill, prompt, SHORT))[1]

    await pair.prefill.send(only_copies=pb.OnlyCopies(all=True))
    for seed in range(4):
        await cached(text(1500, 95 + seed))  # all blocks are cached now
    await cached(local)
    await cached(fetched)
    for prompt in (handed, only_here):
        await handed_over(caching_workers, pair, prompt)
    await prefilled(pair.decode, fetched, cache_of(caching_workers[0]))
    await pair.prefill.send(only_copies=pb.OnlyCopies(chunks=await pair.prefill.hints(only_here)))
    await cached(text(240, 99))
    found = [await cached(prompt) for prompt in (local, only_here, handed, fetched)]
    assert found == [80, 64, 0, 0], "routers know of whole chunks"
