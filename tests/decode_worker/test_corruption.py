"""Bytes that the network corrupts: decode detects them, fetches again, and the tokens are right."""

import pytest

from baton.rpc import worker_pb2 as pb
from tests.cluster_helpers import Pair, assert_whole, metrics, paired, request, sampling

from .conftest import WorkersAndNetwork, damaging, prompt, retarget
from .test_reuse import alone, answered, cache_of

PROMPT = prompt(200)
PARAMS = sampling(max_tokens=12, ignore_eos=True)


async def right_answer(pair: Pair) -> list[int]:
    return (await pair.generate(PROMPT, PARAMS)).tokens


@pytest.mark.cases(1)
@pytest.mark.parametrize(("fault", "kind"), [("corrupt", "payload"), ("header", "header")])
async def test_corrupt_bytes_are_detected_and_fetched_again(
    workers_and_network: WorkersAndNetwork, fault: str, kind: str
) -> None:
    """A corrupt payload ends the transfer, a corrupt header the session. Decode fetches again by itself."""
    counter = f'baton:kv_checksum_failures_total{{kind="{kind}"}}'
    workers, network = workers_and_network
    decode = workers[1]
    async with paired(*workers) as pair:
        right = await right_answer(pair)
        before = metrics(decode)[counter]
        with damaging(network, fault):
            assert await right_answer(pair) == right
            assert network.hits == 0
        await assert_whole(*workers)
        assert metrics(decode)[counter] == before + 1


@pytest.mark.all
@pytest.mark.parametrize(
    ("fault", "kind", "tier"), [("corrupt", "payload", pb.TIER_HOST), ("header", "header", pb.TIER_DISK)]
)
async def test_corrupt_bytes_of_a_prefix_are_never_cached(
    caching_workers_and_network: WorkersAndNetwork, fault: str, kind: str, tier: pb.Tier
) -> None:
    """A worker that fetches a prefix from the other one computes it instead.

    After a failed fetch the worker uses that tier of the other one no more for a while."""
    workers, network = caching_workers_and_network
    asker, holder = workers
    content = cache_of(holder)
    content.tier = tier
    counter = f'baton:kv_checksum_failures_total{{kind="{kind}"}}'
    async with paired(*workers) as pair:
        text = prompt(300 + len(kind))
        right = await answered(pair.decode, text, PARAMS)
        before = metrics(asker)[counter]
        with damaging(network, fault):
            assert await alone(pair.prefill, text, PARAMS, content) == (right, 0)
            assert network.hits == 0
        assert (await pair.generate(text, PARAMS)).tokens == right  # KV of a handover is still fetched
        await assert_whole(*workers)
        assert metrics(asker)[counter] == before + 1


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("first", "named"),
    [([(1 << 32) - 1, None, [], []], (1 << 32) - 1), ([5, -1.0, [5, 512], [-1.0, -2.0]], 512)],
)
async def test_a_first_token_beyond_the_vocabulary_fails_its_request_alone(
    workers_and_network: WorkersAndNetwork, first: list[object], named: int
) -> None:
    """The checksums are right, but COMMIT names a token that the model does not have."""
    workers, network = workers_and_network
    async with paired(*workers) as pair:
        right = await right_answer(pair)
        network.first_token = first
        _, decode_id = await pair.reserve(request(PROMPT, PARAMS))
        failure = await pair.decode.failure(decode_id)
        assert (failure.code, failure.message) == (
            pb.FAILURE_CODE_ENGINE,
            f"COMMIT names token {named}, beyond the vocabulary of 512",
        )
        await assert_whole(*workers)
        assert await right_answer(pair) == right


async def test_repeated_corruption_fails_the_kv_and_keeps_the_reservation(
    workers_and_network: WorkersAndNetwork,
) -> None:
    """After two more FETCHes the worker reports KV_FAILED. A Retarget then uses the same reservation.

    Its blocks have the KV of another prompt, of which no token comes."""
    workers, network = workers_and_network
    async with paired(*workers) as pair:
        right = await right_answer(pair)
        assert (await pair.generate(prompt(201)[:200], PARAMS)).tokens != right
        with damaging(network, "corrupt", frames=10_000):
            prefill_id, decode_id = await pair.reserve(request(PROMPT, PARAMS))
            failure = await pair.decode.failure(decode_id)
            assert (failure.code, failure.message) == (pb.FAILURE_CODE_KV_FAILED, "integrity")
        await pair.prefill.cancel(prefill_id)
        again = await pair.prefill.submit_prefill(request(PROMPT, PARAMS), handover=True)
        await retarget(pair, decode_id, again, [])
        tokens = await pair.decode.tokens(decode_id)
        assert [token.token_id for token, _ in tokens] == right
        await assert_whole(*workers)
