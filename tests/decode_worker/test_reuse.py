"""A decode worker asks a prefill worker only for the KV that its prefix cache lacks. Tiny model."""

import random

import pytest

from rpc import worker_pb2 as pb
from tests.cluster_helpers import Pair, assert_whole, metrics, paired, request, sampling

from .conftest import Workers, retarget, status

TOKEN_BYTES = 2 * 2 * 2 * 16 * 4
"""KV of one position in all layers: K and V, of two layers with two heads of 16 float32."""
SHORT = sampling(max_tokens=5, ignore_eos=True)


def text(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(500), k=length)


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
    caching_workers: Workers, length: int, more: int
) -> None:
    async with paired(*caching_workers) as pair:
        first = text(length, length)
        tokens, moved = await handed_over(caching_workers, pair, first)
        assert moved == length
        second = [*first, *tokens, *text(more, 1000 + length)]
        known = (length + len(tokens) - 1) // 16 * 16  # full blocks; the last token has no KV
        again, moved = await handed_over(caching_workers, pair, second)
        assert moved == len(second) - known
        # The same request on a worker that computes everything itself.
        here = request(second, SHORT)
        await pair.prefill.send(decode=pb.SubmitDecode(decode_id=here.request_id, request=here))
        await pair.prefill.reserved(here.request_id)
        assert [t.token_id for t, _ in await pair.prefill.tokens(here.request_id)] == again
        await assert_whole(*caching_workers)


async def test_a_prompt_that_decode_has_needs_only_its_first_token(caching_workers: Workers) -> None:
    async with paired(*caching_workers) as pair:
        prompt = text(64, 64)
        tokens, moved = await handed_over(caching_workers, pair, prompt)
        assert moved == 64
        assert await handed_over(caching_workers, pair, prompt) == (tokens, 0)
        await assert_whole(*caching_workers)


async def test_a_retarget_fetches_what_is_missing_of_the_longer_text(caching_workers: Workers) -> None:
    """The prefill of the first attempt is lost. The second one has one token more."""
    async with paired(*caching_workers) as pair:
        prompt = text(70, 70)
        tokens, _ = await handed_over(caching_workers, pair, prompt)
        before = await received(caching_workers, pair)
        lost = pair.source(bytes(16))
        decode_id = await pair.decode.submit_decode(request(prompt, SHORT), lost)
        await pair.decode.reserved(decode_id)
        again = request(prompt, SHORT, tokens[:1])
        prefill_id = await pair.prefill.submit_prefill(again, handover=True)
        await retarget(pair, decode_id, prefill_id, tokens[:1])
        decoded = await pair.decode.tokens(decode_id)
        assert [token.token_id for token, _ in decoded] == tokens[1:]
        assert (await received(caching_workers, pair) - before) / TOKEN_BYTES == 71 - 64
        await assert_whole(*caching_workers)
