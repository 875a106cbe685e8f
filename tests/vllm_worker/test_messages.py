"""No message of a router, in no state of an attempt, ends a vLLM worker. The messages are those of
tests/prefill_worker/test_messages.py, for the roles of Baton's engine."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from baton.engine import Image
from baton.kv_transfer import Injected, Released
from baton.rpc import worker_pb2 as pb
from baton.vllm_worker.attachment import Close
from baton.worker import messages
from tests.router_messages import (
    HERE,
    MESSAGES,
    OTHER_STREAM,
    STREAM,
    cancel,
    new_id,
    source,
    submit_decode,
    submit_prefill,
    work,
)
from tests.vllm_worker.test_roles import FIRST, STATS, Worker, output

pytestmark = pytest.mark.all


async def prefill(worker: Worker, of: bytes) -> None:
    worker.roles.handle(submit_prefill(STREAM, work(of), handover=True))


async def held(worker: Worker, of: bytes) -> None:
    await prefill(worker, of)
    await worker.says(of, output([5], "length"))


async def answered(worker: Worker, of: bytes) -> None:
    """It has no token for a decode."""
    worker.roles.handle(submit_prefill(STREAM, work(of, max_tokens=1), handover=False))
    await worker.says(of, output([5]))


async def fetching(worker: Worker, of: bytes) -> None:
    worker.roles.handle(submit_decode(STREAM, work(of), source(new_id())))
    await worker.settle()


async def injected(worker: Worker, of: bytes) -> None:
    await fetching(worker, of)
    worker.roles.heard(Injected(of, FIRST, STATS))


async def joined(worker: Worker, of: bytes) -> None:
    await injected(worker, of)
    await worker.says(of, output([6]))


async def taken(worker: Worker, of: bytes) -> None:
    await held(worker, of)
    worker.roles.handle(submit_decode(STREAM, work(new_id()), source(of, HERE)))
    await worker.settle()


async def decoding(worker: Worker, of: bytes) -> None:
    worker.roles.handle(submit_decode(STREAM, work(of), None))
    await worker.says(of, output([6]))


async def closing(worker: Worker, of: bytes) -> None:
    await held(worker, of)
    worker.roles.handle(cancel(STREAM, of))


async def ended(worker: Worker, of: bytes) -> None:
    await closing(worker, of)
    worker.roles.heard(Released(of, "cancelled"))


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
        worker.roles.handle(messages.Detached(stream))
    await worker.settle()
    for attempt in [*worker.attempts]:
        assert Close(attempt.id) in worker.told, "it waits for the connector alone"
        worker.roles.heard(Released(attempt.id, "cancelled"))
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
        worker.roles.handle(MESSAGES[message](attempt_id))
        await worker.settle()
    await goes_away(worker)
    assert not errors


async def test_an_answered_attempt_of_another_kind_is_no_prefill_to_go_on_with() -> None:
    worker = Worker()
    for state in (answered, joined, decoding):
        await state(worker, attempt_id := new_id())
        worker.roles.handle(submit_decode(STREAM, work(new_id()), source(attempt_id, HERE)))
        assert worker.failures().pop() == pb.FAILURE_CODE_HANDED_BACK
        worker.roles.handle(cancel(STREAM, attempt_id))
        await worker.settle()


async def test_a_prefill_of_another_prompt_is_none_to_go_on_with() -> None:
    """vLLM would look for the images of that prompt in this one."""
    worker, prefill_id, other = Worker(), new_id(), new_id()
    shown_images = (Image(b"i" * 32, 3, 2, 4, b"pixels"),)
    shown = submit_prefill(STREAM, work(prefill_id).show(shown_images))
    worker.roles.handle(shown)
    await worker.says(prefill_id, output([5], "length"))
    for tokens, images in ((20, ()), (30, (Image(b"i" * 32, 3, 2, 4),)), (20, (Image(b"j" * 32, 3, 2, 4),))):
        decode = submit_decode(STREAM, work(new_id(), tokens).show(images), source(prefill_id, HERE))
        worker.roles.handle(decode)
    assert worker.failures() == [pb.FAILURE_CODE_HANDED_BACK] * 3
    decode = submit_decode(STREAM, work(other).show([Image(b"i" * 32, 3, 2, 4)]), source(prefill_id, HERE))
    worker.roles.handle(decode)
    await worker.settle()
    assert worker.images[other] == shown_images


async def test_a_decode_of_another_worker_ends_no_attempt_here() -> None:
    """The id of its prefill may be that of any attempt here."""
    worker, running, decode_id = Worker(), new_id(), new_id()
    worker.roles.handle(submit_decode(OTHER_STREAM, work(running), None))
    await worker.says(running, output([6]))
    worker.roles.handle(submit_decode(STREAM, work(decode_id), source(running)))
    worker.roles.heard(Injected(decode_id, FIRST, STATS))
    await worker.says(decode_id, output([6]))
    assert running in worker.computing


@pytest.mark.parametrize("state", [fetching, computing])
async def test_an_id_that_vllm_has_had_is_not_used_again(
    state: Callable[[Worker, bytes], Awaitable[None]],
) -> None:
    """vLLM may still end its first request, and the connector the fetch of it."""
    worker, attempt_id = Worker(), new_id()
    await state(worker, attempt_id)
    worker.roles.handle(cancel(STREAM, attempt_id))
    await worker.settle()
    worker.roles.handle(submit_decode(STREAM, work(attempt_id), source(new_id())))
    assert worker.failures() == [pb.FAILURE_CODE_INVALID]
    assert worker.idle
