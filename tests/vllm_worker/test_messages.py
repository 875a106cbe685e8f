"""No message of a router, in no state of an attempt, ends a vLLM worker. The messages are those of
tests/prefill_worker/test_messages.py, for the roles of Baton's engine."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from baton.kv_transfer import Closed, FetchFailed, Injected, Released
from baton.rpc import worker_pb2 as pb
from baton.vllm_worker.attachment import Close
from baton.vllm_worker.metadata import Started
from baton.worker import messages
from tests.router_messages import (
    HERE,
    MESSAGES,
    OTHER_STREAM,
    STREAM,
    cancel,
    content_at,
    new_id,
    source,
    submit_decode,
    submit_prefill,
    work,
)
from tests.vllm_worker.test_roles import FIRST, STATS, Worker, output

pytestmark = pytest.mark.all


async def prefill(worker: Worker, of: bytes) -> None:
    worker.handle(submit_prefill(STREAM, work(of), handover=True))


async def held(worker: Worker, of: bytes) -> None:
    await prefill(worker, of)
    await worker.says(of, output([5], "length"))


async def answered(worker: Worker, of: bytes) -> None:
    """It has no token for a decode."""
    worker.handle(submit_prefill(STREAM, work(of, max_tokens=1), handover=False))
    await worker.says(of, output([5]))


async def fetching(worker: Worker, of: bytes) -> None:
    worker.handle(submit_decode(STREAM, work(of), source(new_id())))
    await worker.settle()


async def injected(worker: Worker, of: bytes) -> None:
    await fetching(worker, of)
    worker.heard(Injected(of, FIRST, STATS))


async def joined(worker: Worker, of: bytes) -> None:
    await injected(worker, of)
    await worker.says(of, output([6]))


async def taken(worker: Worker, of: bytes) -> None:
    await held(worker, of)
    worker.handle(submit_decode(STREAM, work(new_id()), source(of, HERE)))
    await worker.settle()


async def decoding(worker: Worker, of: bytes) -> None:
    worker.handle(submit_decode(STREAM, work(of), None))
    await worker.says(of, output([6]))


async def closing(worker: Worker, of: bytes) -> None:
    await held(worker, of)
    worker.handle(cancel(STREAM, of))


async def ended(worker: Worker, of: bytes) -> None:
    await closing(worker, of)
    worker.heard(Released(of, "cancelled"))


async def unknown(worker: Worker, of: bytes) -> None: ...


async def computing(worker: Worker, of: bytes) -> None:
    await prefill(worker, of)
    await worker.settle()


STATES: list[Callable[[Worker, bytes], Awaitable[None]]] = [
    unknown, prefill, computing, answered, held, taken, closing, ended, fetching, injected, joined, decoding,
]  # fmt: skip


async def goes_away(worker: Worker) -> None:
    """Both routers leave, and the connector gives back what it has."""
    for stream in (STREAM, OTHER_STREAM):
        worker.handle(messages.Detached(stream))
    await worker.settle()
    for attempt in [*worker.attempts]:
        assert Close(attempt.id) in worker.told, "it waits for the connector alone"
        worker.heard(Released(attempt.id, "cancelled"))
    await worker.settle()
    assert worker.idle


@pytest.mark.parametrize("message", MESSAGES)
@pytest.mark.parametrize("state", STATES)
async def test_no_message_ends_a_worker(
    state: Callable[[Worker, bytes], Awaitable[None]], message: str
) -> None:
    errors: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    worker, attempt_id = Worker(), new_id()
    await state(worker, attempt_id)
    for _ in range(2):
        worker.handle(MESSAGES[message](attempt_id))
        await worker.settle()
    await goes_away(worker)
    assert not errors


async def test_an_answered_attempt_of_another_kind_is_no_prefill_to_go_on_with() -> None:
    worker = Worker()
    for state in (answered, joined, decoding):
        await state(worker, attempt_id := new_id())
        worker.handle(submit_decode(STREAM, work(new_id()), source(attempt_id, HERE)))
        assert worker.failures().pop() == pb.FAILURE_CODE_HANDED_BACK
        worker.handle(cancel(STREAM, attempt_id))
        await worker.settle()


async def test_a_decode_of_another_worker_ends_no_attempt_here() -> None:
    """The id of its prefill may be that of any attempt here."""
    worker, running, decode_id = Worker(), new_id(), new_id()
    worker.handle(submit_decode(OTHER_STREAM, work(running), None))
    await worker.says(running, output([6]))
    worker.handle(submit_decode(STREAM, work(decode_id), source(running)))
    worker.heard(Injected(decode_id, FIRST, STATS))
    await worker.says(decode_id, output([6]))
    assert running in worker.computed


@pytest.mark.parametrize("state", [fetching, computing])
async def test_an_id_is_used_again(state: Callable[[Worker, bytes], Awaitable[None]]) -> None:
    """vLLM may still end its first request, and the connector the fetch of it."""
    worker, attempt_id = Worker(), new_id()
    await state(worker, attempt_id)
    first = worker.fetches.get(attempt_id, new_id())
    worker.handle(cancel(STREAM, attempt_id))
    await worker.settle()
    worker.handle(submit_decode(STREAM, work(attempt_id), source(new_id())))
    await worker.settle()
    worker.roles.heard(Injected(first, FIRST, STATS))
    await worker.says(attempt_id, output([6], "stop"))
    assert not worker.tokens(), "this KV is of the first"
    worker.heard(Injected(attempt_id, FIRST, STATS))
    await worker.settle()
    assert worker.tokens() == [(0, 5, ""), (1, 6, "stop")]
    assert worker.idle


@pytest.mark.parametrize("state", [computing, ended])
async def test_no_prefill_has_the_id_of_another(state: Callable[[Worker, bytes], Awaitable[None]]) -> None:
    """The connector may not know yet that the first one has ended, and offers one for each id."""
    worker, attempt_id = Worker(), new_id()
    await state(worker, attempt_id)
    worker.handle(cancel(STREAM, attempt_id))
    await worker.settle()
    worker.fields.clear()
    await computing(worker, attempt_id)
    assert not worker.fields, "vLLM does not get it"
    assert worker.failures() == [pb.FAILURE_CODE_INVALID]
    assert worker.idle


REASONS = "acked", "cancelled", "deadline", "finished", "gone", "reused"
ENDS = None, None, "length", "stop"


def params_of(fields: dict[str, Any]) -> dict[str, Any]:
    return fields["extra_args"]["kv_transfer_params"]


@pytest.mark.parametrize("seed", range(60))
async def test_no_order_of_events_ends_a_worker(seed: int) -> None:
    """Routers, vLLM and the connector say what they may, for four ids, before or after the roles' turn."""
    errors: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    draw, worker, ids = random.Random(seed), Worker(), [new_id() for _ in range(4)]
    place, fetched, reads = content_at(), set[bytes](), set[bytes]()
    for _ in range(80):
        one, other = draw.sample(ids, 2)
        match draw.randrange(10):
            case 0 | 1:
                worker.roles.handle(MESSAGES[draw.choice([*MESSAGES])](one))
            case 2:
                worker.roles.handle(submit_prefill(STREAM, work(one, 130), handover=True, content=place))
            case 3:
                worker.roles.handle(submit_decode(OTHER_STREAM, work(one, 130), None, place))
            case 4:
                worker.roles.handle(submit_decode(STREAM, work(one), source(other, HERE)))
            case 5 if open_fetches := [x for x in worker.fetches.values() if x not in fetched]:
                fetched.add(fetch := draw.choice(open_fetches))
                ends = Injected(fetch, FIRST, STATS), FetchFailed(fetch, draw.choice(REASONS)), Closed(fetch)
                worker.roles.heard(draw.choice(ends))
            case 6 if begun := [
                x for x, fields in worker.running.items() if "prefill_id" in params_of(fields)
            ]:
                reads.add(one := draw.choice(begun))
                worker.roles.heard(Started(one))
            case 7 if reads:
                reads.remove(one := draw.choice(sorted(reads)))
                worker.roles.heard(Released(one, draw.choice(REASONS)))
            case 8 if worker.running:
                one = draw.choice([*worker.running])
                is_last = worker.running[one]["max_tokens"] == 1
                sampled = output([5], "length") if is_last else output([5, 6], draw.choice(ENDS))
                await worker.says(one, draw.choice([sampled, output([], "error")]))
            case _:
                await worker.settle()
    for stream in (STREAM, OTHER_STREAM):
        worker.handle(messages.Detached(stream))
    await worker.settle()
    for fetch in {*worker.fetches.values()} - fetched:
        worker.heard(Closed(fetch))
    for attempt in [*worker.attempts]:
        worker.heard(Released(attempt.id, "cancelled"))
    for one in [*worker.running]:  # what was handed over before vLLM's answer
        await worker.says(one, output([5], "length"))
    await worker.settle()
    assert not errors
    assert worker.idle
