"""The output queue of a router, and the messages that go through it."""

import asyncio
import gc
from collections.abc import AsyncIterator, Callable
from itertools import pairwise
from typing import Any, cast

import grpc.aio
import pytest

from baton.engine import Logprobs, Output, PromptLogprobs
from baton.kv_names import Tier
from baton.rpc import worker_pb2 as pb
from baton.worker import messages
from baton.worker.engine_process import to_routers
from baton.worker.engine_process.to_routers import StepTokens
from baton.worker.ipc import EngineLink
from baton.worker.processes import TreeError
from baton.worker.service_process import backend as backend_module
from baton.worker.service_process import cache_feed, streams
from baton.worker.service_process.backend import Backend
from baton.worker.service_process.cache_feed import MAX_CHUNKS, CacheFeed
from baton.worker.service_process.grpc_service import AttachService
from baton.worker.service_process.live_engine import LiveEngine
from baton.worker.service_process.streams import MAX_UNREAD_BYTES, Routers, RouterStream
from baton.worker.service_process.tree import WorkerTree
from tests.router_messages import next_message
from tests.stand_in import stand_in
from tests.within import WITHIN, within


class SlowContext:
    """A router that reads a message only when `gate` is released."""

    def __init__(self) -> None:
        self.gate = asyncio.Semaphore(0)
        self.reading = asyncio.Semaphore(0)
        self.written: list[bytes] = []

    async def write(self, message: bytes) -> None:
        await self.gate.acquire()
        self.written.append(message)
        self.reading.release()

    async def abort(self, code: grpc.StatusCode, reason: str) -> None:
        raise AssertionError(reason)


def slow() -> tuple[SlowContext, grpc.aio.ServicerContext]:
    context = SlowContext()
    return context, cast(grpc.aio.ServicerContext, context)


def big(nbytes: int) -> bytes:
    return pb.WorkerMessage(failed=pb.AttemptFailed(message="x" * nbytes)).SerializeToString()


read = pb.WorkerMessage.FromString


async def test_more_than_8_mib_unread_sets_overflow() -> None:
    stream = RouterStream(1)
    context, as_context = slow()
    writing = asyncio.create_task(stream.write_to(as_context))
    for _ in range(8):
        stream.put(big((1 << 20) - 100))
    await asyncio.sleep(0)
    assert not stream.overflow.is_set()
    assert stream.unread_bytes <= MAX_UNREAD_BYTES
    stream.put(big(1000))
    assert stream.overflow.is_set()
    writing.cancel()
    assert context.written == []


async def test_messages_that_were_read_do_not_count_as_unread() -> None:
    stream = RouterStream(1)
    context, as_context = slow()
    writing = asyncio.create_task(stream.write_to(as_context))
    for _ in range(32):
        stream.put(big(1 << 20))
        context.gate.release()
        await context.reading.acquire()
    assert not stream.overflow.is_set()
    assert len(context.written) == 32
    writing.cancel()


async def test_finish_writes_the_queued_messages() -> None:
    stream = RouterStream(1)
    context, as_context = slow()
    for _ in range(3):
        stream.put(big(1))
    stream.finish()
    for _ in range(3):
        context.gate.release()
    await within(stream.write_to(as_context))
    assert len(context.written) == 3


def test_a_worker_knows_so_much_of_a_store_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_feed, "MOST_STORED", 3)
    feed = CacheFeed()
    for chunk in range(5):
        feed.changed({}, {chunk: True, chunk + 100: False})
    assert [chunk for part in map(read, feed.snapshot()) for chunk in part.cache.stored] == [2, 3, 4]


async def test_a_router_gets_a_cache_of_any_size_and_tokens_between_its_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streams, "MAX_UNREAD_BYTES", 100_000)
    feed, chunks = CacheFeed(), range(5 * MAX_CHUNKS)
    feed.changed(dict.fromkeys(chunks, Tier.HOST))  # a part of the snapshot has 64 KiB
    context, as_context = slow()

    async def sent() -> AsyncIterator[bytes]:
        hello = pb.RouterHello(router_id=b"r" * 16, cache=True)
        yield pb.RouterMessage(hello=hello).SerializeToString()
        await asyncio.Event().wait()

    async def send(message: messages.ToEngine) -> None: ...

    backend = stand_in(Backend, cache_snapshot=feed.snapshot, send=send, draining="")
    limits: Any = None
    routers = Routers()
    service = AttachService(backend, routers, limits, pb.WorkerDescription())
    attached = asyncio.create_task(service.Attach(sent(), as_context))

    async def next_one() -> pb.WorkerMessage:
        context.gate.release()
        reading = asyncio.create_task(context.reading.acquire())
        await asyncio.wait({reading, attached}, timeout=WITHIN, return_when=asyncio.FIRST_COMPLETED)
        assert not attached.done(), attached
        return read(context.written[-1])

    parts = [await next_one(), await next_one()]
    [evicted] = feed.changed({chunks[-1]: None})
    routers.broadcast_cache_events(evicted)
    routers.deliver(messages.ToRouter(1, big(9)))
    between = [await next_one() for _ in range(3)]
    assert between[1:] == [read(evicted), read(big(9))]
    parts += [between[0], await next_one(), await next_one()]
    assert [part.cache.reset for part in parts] == [True, False, False, False, False]
    assert [chunk for part in parts for chunk in part.cache.host] == [*chunks[:-1]]
    attached.cancel()


def test_a_snapshot_begins_again_when_events_are_dropped_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts before would lack them."""
    monkeypatch.setattr(streams, "MAX_UNREAD_CACHE_BYTES", 100)
    feed, stream, held = CacheFeed(), RouterStream(1), set[int]()
    feed.changed(dict.fromkeys(range(2 * MAX_CHUNKS), Tier.HOST))
    stream.want_cache_events(feed.snapshot)
    parts = [next_message(stream)]  # it is written now, so it counts as unread
    [evicted] = feed.changed({0: None})
    stream.put_cache_events(evicted)
    while (part := next_message(stream)) is not None:
        parts.append(part)
    for part in map(read, filter(None, parts)):
        held = set(part.cache.host) | (set() if part.cache.reset else held)
    assert held == {*range(1, 2 * MAX_CHUNKS)}


async def test_several_routers_get_reports_as_often_as_all_can_take() -> None:
    async def send(message: messages.ToEngine) -> None: ...

    backend = stand_in(Backend, cache_snapshot=CacheFeed().snapshot, send=send, draining="")
    limits: Any = None
    routers = Routers()
    service, ended = AttachService(backend, routers, limits, pb.WorkerDescription()), []

    async def attach(report_seconds: float) -> float:
        end, reading = asyncio.Event(), asyncio.Event()
        ended.append(end)

        async def sent() -> AsyncIterator[bytes]:
            hello = pb.RouterHello(router_id=b"r" * 16, report_seconds=report_seconds)
            yield pb.RouterMessage(hello=hello).SerializeToString()
            reading.set()
            await end.wait()

        context, as_context = slow()
        context.gate.release()  # for the only message, a snapshot
        attached.append(asyncio.create_task(service.Attach(sent(), as_context)))
        await reading.wait()
        return routers.report_seconds

    attached: list[asyncio.Task[None]] = []
    assert routers.report_seconds == 1
    assert await attach(0.01) == 1, "it knows its own requests"
    assert await attach(0.01) == 0.05
    assert await attach(0.2) == 0.2
    assert await attach(0) == 1, "an older router does not say"
    for end, expected in zip(reversed(ended), (0.2, 0.05, 1, 1), strict=True):
        end.set()
        await attached.pop()
        assert routers.report_seconds == expected


def test_a_router_learns_what_others_have_waiting() -> None:
    routers = Routers()
    first, second = routers.open(1.0), routers.open(1.0)
    routers.waiting = {first.number: 70}
    routers.tell(pb.WorkerStatus(tokens_waiting=70))
    told = [next_message(router) for router in (first, second)]
    assert [message and read(message).status.tokens_of_others for message in told] == [0, 70]


def live_engine(send: Callable[[messages.ToEngine], Any]) -> LiveEngine:
    return LiveEngine(stand_in(WorkerTree, engine_link=stand_in(EngineLink, send=send)), None)


async def test_an_engine_that_ends_during_a_question_leaves_no_unread_error() -> None:
    """The call that asks may end at the same time."""
    unread: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unread.append(context))

    async def send(message: messages.ToEngine) -> None:
        engine.end("it was killed")
        raise asyncio.CancelledError

    engine = live_engine(send)
    with pytest.raises(asyncio.CancelledError):
        await engine.status()
    gc.collect()
    assert not unread
    with pytest.raises(TreeError, match="the engine process has ended: it was killed"):
        await engine.status()


async def test_a_question_to_the_engine_is_forgotten_with_the_call_that_asks() -> None:
    """The engine may be gone, and answer no more."""
    asked: list[messages.ToEngine] = []

    async def send(message: messages.ToEngine) -> None:
        asked.append(message)

    engine = live_engine(send)
    asking = asyncio.create_task(engine.status())
    await asyncio.sleep(0)
    assert (asked, [*engine.answers]) == ([messages.AskStatus(0)], [0])
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert not engine.answers


async def test_an_unchanged_status_is_reported_each_second_although_timers_fire_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, reports = 100.0, []

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds - 0.001  # as uvloop's timers
        if now > 110:
            raise asyncio.CancelledError

    async def status() -> pb.WorkerStatus:
        return pb.WorkerStatus(blocks_free=7)

    monkeypatch.setattr(backend_module.asyncio, "sleep", sleep)
    monkeypatch.setattr(backend_module.time, "monotonic", lambda: now)
    routers = stand_in(Routers, report_seconds=1.0, tell=lambda status: reports.append(now))
    worker = stand_in(Backend, _routers=routers, status=status)
    with pytest.raises(asyncio.CancelledError):
        await Backend.report(worker)
    assert [after - before for before, after in pairwise(reports)] == [pytest.approx(0.999)] * 9


@pytest.mark.parametrize(
    ("reason", "expected"),
    [("", pb.FINISH_REASON_NONE), ("stop", pb.FINISH_REASON_STOP), ("length", pb.FINISH_REASON_LENGTH)],
)
def test_tokens_keep_every_field(reason: str, expected: Any) -> None:
    logprobs = Logprobs(-0.5, (3, 4), (-0.5, -1.5))
    tokens = StepTokens()
    tokens.add(Output(b"a" * 16, 5, 3, logprobs, reason, 2, 0.0, 0.0, True, 4), tell_cached=True)
    [token] = tokens.message.step.tokens
    assert (token.accepted_draft, token.rejected_drafts) == (True, 4)
    assert (token.attempt_id, token.output_index, token.token_id) == (b"a" * 16, 5, 3)
    assert (token.finish_reason, token.cached_tokens) == (expected, 2)
    assert token.logprobs.logprob == -0.5
    assert list(token.logprobs.top_ids) == [3, 4]
    assert list(token.logprobs.top_logprobs) == [-0.5, -1.5]


def test_logprobs_of_a_prompt_keep_every_field() -> None:
    given = PromptLogprobs(b"a" * 16, 5, b"logp", b"rank", b"ids!", b"tops")
    sent = read(to_routers.scored(1, given).data).prompt_logprobs
    assert [value for _, value in sent.ListFields()] == list(given)
