"""A worker that prefills for others and decodes for others, at the same time."""

import asyncio
import os
from collections.abc import AsyncIterator

import pytest

from baton.decode_worker.attempt import DecodeAttempt
from baton.kv_transfer import Receiver
from baton.rpc import worker_pb2 as pb
from baton.rpc.token_ids import unpacked_ids
from baton.worker.engine_process.attempt import AttemptTable
from baton.worker.engine_process.engine_attempt import EngineAttempt, Resources
from baton.worker.engine_process.roles import Roles
from baton.worker.engine_process.states import State
from baton.worker.messages import Origin
from tests.cluster_helpers import Pair, assert_whole, attached, request, sampling
from tests.stand_in import stand_in
from tests.within import within

from .conftest import BLOCKS, Workers, paused, prompt

GREEDY = sampling(max_tokens=12, ignore_eos=True)


Directions = dict[str, Pair]


@pytest.fixture
async def pairs(workers: Workers) -> AsyncIterator[Directions]:
    """The same two workers, by the direction of the KV. All pools are whole afterwards."""
    async with attached(workers[0]) as a, attached(workers[1]) as b:
        addresses = [(w.ready["kv_address"], w.ready["incarnation"]) for w in workers]
        yield {
            "forth": Pair(a, b, *addresses[0]),
            "back": Pair(b, a, *addresses[1]),
            "here": Pair(a, a, *addresses[0]),
            "there": Pair(b, b, *addresses[1]),
        }
        await assert_whole(*workers)


class Turns:
    """A request that is refused goes on when another one has ended, or at once if all have been refused."""

    def __init__(self, requests: int) -> None:
        self._running = requests
        self._ended = asyncio.Event()

    async def refused(self) -> None:
        self._running -= 1
        if self._running:
            await self._ended.wait()
        self._running += 1

    def end(self) -> None:
        self._running -= 1
        self._ended.set()
        self._ended = asyncio.Event()


async def persistent(pair: Pair, token_ids: list[int], turns: Turns) -> list[int]:
    """The tokens of a request, which is submitted again whenever a worker has no room for it."""
    while True:
        prefill_id, decode_id = await pair.submit(request(token_ids, GREEDY))
        tokens: list[int] = []
        while True:
            message = (await pair.decode.next(decode_id)).message
            if isinstance(message, pb.AttemptFailed):
                break
            if isinstance(message, pb.TokenEvent):
                tokens.append(message.token_id)
                if message.finish_reason:
                    turns.end()
                    return tokens
        await pair.decode.cancel(decode_id)
        await pair.prefill.cancel(prefill_id)
        await turns.refused()


@pytest.mark.cases(1)
@pytest.mark.parametrize("way", ["back", "here", "there"])
async def test_each_way_gives_the_same_tokens(pairs: Directions, way: str) -> None:
    """`here` and `there`: a held prefill goes on where it is, and no KV moves."""
    for length in (40, 41, 200):
        token_ids = prompt(length)
        expected = await pairs["forth"].generate(token_ids, GREEDY)
        answer = await pairs[way].generate(token_ids, GREEDY)
        assert (answer.tokens, answer.finish_reason) == (expected.tokens, expected.finish_reason)


async def test_a_decode_takes_a_prefill_that_is_held_already(pairs: Directions) -> None:
    here, asked = pairs["here"], request(prompt(40), GREEDY)
    expected = await pairs["forth"].generate(unpacked_ids(asked.prompt_ids), GREEDY)
    prefill_id = await here.prefill.submit_prefill(asked, handover=True)
    first, _ = await here.prefill.token(prefill_id)
    decode_id = await here.decode.reserve(asked, here.source(prefill_id))
    tokens = [token.token_id for token, _ in await here.decode.tokens(decode_id)]
    assert tokens == expected.tokens
    assert tokens[0] == first.token_id
    again = await here.decode.submit_decode(asked, here.source(prefill_id))
    assert (await here.decode.failure(again)).code == pb.FAILURE_CODE_HANDED_BACK


@pytest.mark.parametrize("ended", ["decode", "prefill"])
async def test_a_cancel_before_a_decode_takes_its_prefill(
    workers: Workers, pairs: Directions, ended: str
) -> None:
    """With the decode its prefill ends, too."""
    here = pairs["here"]
    async with paused(here.decode):
        prefill_id, decode_id = await here.submit(request(prompt(200), GREEDY))
        await here.decode.cancel(decode_id if ended == "decode" else prefill_id)
    await here.decode.reserved(decode_id)
    if ended == "prefill":
        assert (await here.decode.failure(decode_id)).code == pb.FAILURE_CODE_HANDED_BACK


@pytest.mark.all
async def test_blocks_of_two_workers_run_out_in_both_directions_at_once(pairs: Directions) -> None:
    """Each worker holds prefills and reservations for the other. All requests end with the right tokens."""
    prompts = [prompt(840 + i) for i in range(3)]
    assert 4 * sum(map(len, prompts)) > 2 * 16 * BLOCKS, "more than both workers have room for"
    expected = [(await pairs["forth"].generate(token_ids, GREEDY)).tokens for token_ids in prompts]
    asked = [(pair, i) for i in range(len(prompts)) for pair in pairs.values()]
    turns = Turns(len(asked))
    answers = await within(asyncio.gather(*(persistent(pair, prompts[i], turns) for pair, i in asked)))
    assert answers == [expected[i] for _, i in asked]


@pytest.mark.all
async def test_a_prompt_takes_the_blocks_of_reservations_whose_kv_has_not_begun(pairs: Directions) -> None:
    """Else two workers full of reservations for each other's prompts would wait for each other."""
    forth, back = pairs["forth"], pairs["back"]
    waiting = [
        await back.decode.submit_decode(request(prompt(1000), GREEDY), back.source(os.urandom(16)))
        for _ in range(4)
    ]
    for decode_id in waiting:
        await back.decode.reserved(decode_id)
    await forth.generate(prompt(1001), GREEDY)
    assert (await back.decode.failure(waiting[0])).code == pb.FAILURE_CODE_HANDED_BACK
    for decode_id in waiting[1:]:
        await back.decode.cancel(decode_id)


def test_no_reservation_is_dropped_whose_kv_comes() -> None:
    attempts = AttemptTable[EngineAttempt](lambda message: None)
    receiver = stand_in(Receiver, began=lambda decode_id: decode_id == b"begun")
    shared = stand_in(Resources, receiver=receiver)
    ways = {
        b"waits": (State.FETCHING,),
        b"begun": (State.FETCHING,),
        b"ends": (State.FETCHING, State.CLOSING),
        b"failed": (State.FETCHING, State.WITHOUT_KV),
        b"runs": (State.FETCHING, State.DECODING),
    }
    for name, states in ways.items():
        origin = Origin(name, "", "", 0.0)
        attempt = DecodeAttempt(
            shared=shared, stream=1, origin=origin, tokens=1, prompt_tokens=1,
            source=None, deadline=0.0,
        )  # fmt: skip
        assert attempts.open(attempt)
        for state in states:
            attempt.to(state)
    roles = stand_in(Roles, _attempts=attempts)
    assert [attempt.id for attempt in Roles.spare(roles)] == [b"waits", b"failed"]


async def test_a_worker_changes_its_pool(pairs: Directions) -> None:
    stream = pairs["forth"].prefill
    status = await stream.stub.SetPool(pb.SetPoolRequest(pool=pb.POOL_DECODE))
    assert status.pool == pb.POOL_DECODE
    while (await stream.next_status()).pool != pb.POOL_DECODE:
        pass
    assert (await stream.stub.Describe(pb.DescribeRequest())).first_pool == pb.POOL_PREFILL
    await stream.stub.SetPool(pb.SetPoolRequest(pool=pb.POOL_PREFILL))
