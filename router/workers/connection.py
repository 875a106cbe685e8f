"""The connection to one worker: a gRPC stream that is opened again whenever it ends.

    connecting ─ Describe, check, GetStatus, Attach ─▶ ready ⇄ draining ─ the stream ends ─▶ connecting
        └─ the worker does not fit this router ─▶ refused ─ later ─▶ connecting

All open attempts are lost with the stream, and the worker cancels them too. A connection that discovery no
longer lists is retired: it takes nothing new, and closes after its last attempt.

A status may name another pool. From then on the worker gets the new work of that pool, over the same stream.
The attempts that it has go on to their end: pools only decide which worker is chosen.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable
from enum import StrEnum
from typing import Protocol

import grpc
import grpc.aio

from baton.machine.logs import of_request
from baton.machine.tracing import Span
from baton.router import prompt_logprobs
from baton.router.policy import DecodeLoad, PrefillWork
from baton.router.workers.attempts import Attempt, AttemptTable, CircuitBreaker, Lost, OnEvent
from baton.router.workers.checks import (
    DRAINED,
    SEE_WORKER_LOG,
    CacheAction,
    CacheSequence,
    RefusedWorker,
    clear_invalid_rates,
    explain,
    token_defect,
)
from baton.router.workers.send_queue import SendQueue
from baton.rpc import worker_pb2 as pb
from baton.rpc.channel import connect
from baton.rpc.tls import TlsFiles
from baton.rpc.worker_pb2_grpc import WorkerStub

log = logging.getLogger(__name__)

CALL_TIMEOUT = 5.0
OFFERS = 6.0
"""Seconds that the stream of a worker stays open after the worker left the list. It may offer prefixes then,
for a shorter time (`prefill_worker.offers`)."""
FIRST_BACKOFF, LAST_BACKOFF = 0.1, 2.0
POOL_NAMES: dict["pb.Pool", str] = {pb.POOL_PREFILL: "prefill", pb.POOL_DECODE: "decode"}


class WorkerState(StrEnum):
    CONNECTING = "connecting"
    READY = "ready"
    DRAINING = "draining"  # finishes its attempts and takes no new ones
    REFUSED = "refused"  # another model, or an invalid description


class Observer(Protocol):
    """The worker pool. The connection's task calls it."""

    @property
    def report_seconds(self) -> float:
        """The least time between two reports of a worker."""
        ...

    def check(self, connection: "WorkerConnection") -> None:
        """Raises RefusedWorker if the worker does not fit the other workers."""

    def availability_changed(self, connection: "WorkerConnection") -> None: ...
    def load_changed(self, connection: "WorkerConnection") -> None:
        """The worker may have capacity for another decode."""
        ...

    def prefill_reported(self, connection: "WorkerConnection") -> None: ...
    def prefill_sent(self, connection: "WorkerConnection", work: PrefillWork) -> None: ...
    def cache_changed(self, connection: "WorkerConnection", events: pb.CacheEvents) -> None:
        """Gets events without gaps. Raises RefusedWorker if more chunks are cached than its blocks hold."""
        ...

    def prefill_ended(self, connection: "WorkerConnection", work: PrefillWork, *, computed: bool) -> None:
        """The first token came (`computed`), or the prefill was cancelled. Not called for lost streams."""
        ...

    def offered(self, connection: "WorkerConnection", offer: pb.Offer) -> None:
        """The worker leaves its pool, and another one may fetch this prefix from it."""
        ...

    def breaker_changed(self, connection: "WorkerConnection") -> None: ...


class WorkerConnection:
    """Owns the stream to one worker and the table of its attempts.

    Attributes:
        description: of the attached incarnation, or of the last one.
        accepted: the worker passed `Observer.check`. False again after the stream ends.
        reason, remedy: why the worker is not ready and what to do; empty if it is ready.
        status: the last report.
        prefix_links: those of the last report, by incarnation and tier of the other worker.
        pool: in which the worker gets new work: that of the last report, or else its first.
        attempts: the open attempts, and the worker's decode load.
        breaker: decides whether the worker fails too often to get work.
    """

    def __init__(
        self,
        address: str,
        secret: bytes,
        router_id: bytes,
        observer: Observer,
        tls: TlsFiles | None = None,
    ) -> None:
        self.address = address
        self.state = WorkerState.CONNECTING
        self.reason = self.remedy = ""
        self.accepted = False
        self.description = pb.WorkerDescription()
        self.status = pb.WorkerStatus()
        self.prefix_links: dict[tuple[int, int], pb.PrefixLink] = {}
        self.pool = pb.POOL_UNSPECIFIED
        self.attempts = AttemptTable()
        self.breaker = CircuitBreaker()
        self.retired = False
        self._may_offer = False  # it is retired, and its stream stays open for offers
        self._invalid_rates = False  # in `status`
        self._secret = secret
        self._tls = tls
        self._router_id = router_id
        self._observer = observer
        self._send_queue: SendQueue | None = None
        self._cache = CacheSequence()
        self._stub: WorkerStub | None = None
        self._task = asyncio.create_task(self._run(), name=f"worker {address}")

    def __str__(self) -> str:
        first = POOL_NAMES.get(self.description.first_pool)
        return f"{f'{first} {self.description.index}' if first else 'worker'} at {self.address}"

    @property
    def ready(self) -> bool:
        """Whether the worker takes new work."""
        return self.state is WorkerState.READY and not self.retired

    def ready_in(self, pool: "pb.Pool") -> bool:
        """Whether the worker takes new work of this pool."""
        return self.ready and self.pool == pool

    @property
    def attached(self) -> bool:
        return self._send_queue is not None

    def when_closed(self, callback: Callable[["WorkerConnection"], None]) -> None:
        self._task.add_done_callback(lambda _: callback(self))

    def retire(self) -> None:
        """Takes no new work from now on. The stream closes when the last attempt has ended. A worker that
        leaves may offer its prefixes before, for a bounded time."""
        self.retired = True
        self._observer.availability_changed(self)
        if self.attached and self.description.fetches_prefixes:
            self._may_offer = True
            asyncio.get_running_loop().call_later(OFFERS, self._offers_over)
        self._close_if_done()

    def _offers_over(self) -> None:
        self._may_offer = False
        self._close_if_done()

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def current_status(self) -> pb.WorkerStatus:
        """Asks the worker. Returns the last report if the worker does not answer in time."""
        if self._stub is None:
            return self.status
        try:
            status = await self._stub.GetStatus(pb.StatusRequest(), timeout=CALL_TIMEOUT)
            clear_invalid_rates(status)
            return status
        except grpc.aio.AioRpcError:
            return self.status
        except asyncio.CancelledError:
            if _cancelled_from_outside():
                raise
            return self.status  # the stream ended and closed the channel during the call

    # ------------------------------------------------------------ attempts

    def submit_prefill(
        self, submit: pb.SubmitPrefill, on_event: OnEvent, request_span: Span, work: PrefillWork
    ) -> None:
        """`on_event` is told what happens to the attempt. `request_span`: the span of the request."""
        span = self._begin_span("prefill attempt", request_span, submit.request)
        self.attempts.add(submit.prefill_id, Attempt(submit.request.name, on_event, span, work=work))
        self._submit(submit.prefill_id, submit.request.name, pb.RouterMessage(prefill=submit))
        self._observer.prefill_sent(self, work)

    def submit_decode(
        self,
        submit: pb.SubmitDecode,
        on_event: OnEvent,
        request_span: Span,
        tokens: int,
        work: PrefillWork | None,
    ) -> None:
        """The worker reserves `tokens` KV positions, and computes the prompt itself if there is `work`."""
        span = self._begin_span("decode attempt", request_span, submit.request)
        self.attempts.add(submit.decode_id, Attempt(submit.request.name, on_event, span, tokens, work))
        self._submit(submit.decode_id, submit.request.name, pb.RouterMessage(decode=submit))
        if work is not None:
            self._observer.prefill_sent(self, work)
        self._observer.load_changed(self)

    def fetch_prefix(self, prefix: pb.Prefix, content: pb.ContentSource) -> None:
        """The worker should have this prefix in its cache."""
        self._send(pb.RouterMessage(fetch_prefix=pb.FetchPrefix(prefix=prefix, content=content)))

    def decline(self, offer: pb.Offer) -> None:
        """No other worker lacks the prefix that this worker offers."""
        self._send(pb.RouterMessage(offer_declined=pb.OfferDeclined(number=offer.number)))

    def retarget(self, message: pb.Retarget) -> None:
        self._send(pb.RouterMessage(retarget=message))

    def cancel(self, attempt_id: bytes, failure: str = "") -> None:
        """Ends an attempt here and at the worker. Does nothing if it has ended."""
        if self._end(attempt_id, failure):
            self._send(pb.RouterMessage(cancel=pb.Cancel(attempt_id=attempt_id)))

    def release(self, prefill_id: bytes) -> None:
        """Cancels a handed-over prefill, in case its decode worker died before it acknowledged the KV.

        Without the cancel the prefill worker would keep the KV until its hold deadline.
        """
        self._end(prefill_id)
        self._send(pb.RouterMessage(cancel=pb.Cancel(attempt_id=prefill_id)))

    def forget(self, attempt_id: bytes) -> None:
        """Ends an attempt here that has ended at the worker."""
        self._end(attempt_id)

    def attempt_succeeded(self) -> None:
        if self.breaker.attempt_succeeded():
            log.info("%s works again", self)
            self._observer.breaker_changed(self)

    def attempt_failed(self) -> None:
        """Counts a failed attempt, or a lost stream, against the worker."""
        if self.breaker.attempt_failed(time.monotonic()):
            log.warning("%s failed repeatedly and gets no requests for a while", self)
            self._observer.breaker_changed(self)

    def _begin_span(self, name: str, request_span: Span, request: pb.Request) -> Span:
        worker = {"baton.worker": str(self), "baton.output_tokens": len(request.output_ids)}
        span = request_span.child(name, worker, "client")
        request.traceparent = span.traceparent
        return span

    def _submit(self, attempt_id: bytes, name: str, message: pb.RouterMessage) -> None:
        assert self.ready, "work goes to ready workers only"
        if log.isEnabledFor(logging.DEBUG):
            log.debug(
                "request %s, attempt %s: %s at %s",
                name, attempt_id.hex(), message.WhichOneof("kind"), self,
                extra=of_request(name, attempt_id),
            )  # fmt: skip
        if self.breaker.attempt_sent(time.monotonic()):
            self._observer.breaker_changed(self)
        self._send(message)

    def _end(self, attempt_id: bytes, failure: str = "") -> bool:
        attempt = self.attempts.end(attempt_id, failure)
        if attempt is not None:
            self._ended(attempt)
        return attempt is not None

    def _ended(self, attempt: Attempt) -> None:
        self._prefilled(attempt, computed=False)
        if attempt.tokens:
            self._observer.load_changed(self)
        self._close_if_done()

    def _prefilled(self, attempt: Attempt, *, computed: bool) -> None:
        work = self.attempts.prefilled(attempt)
        if work is not None:
            self._observer.prefill_ended(self, work, computed=computed)

    def _send(self, message: pb.RouterMessage) -> None:
        if self._send_queue is not None and not self._send_queue.put(message):
            log.error("%s does not read its messages: the router closes the stream", self)
            self._call.cancel()

    def _close_if_done(self) -> None:
        if self.retired and not self.attempts and not self._may_offer:
            self._task.cancel()

    # ------------------------------------------------------------ the stream

    async def _run(self) -> None:
        backoff, logged = FIRST_BACKOFF, ""
        drained = False  # the worker was draining when its last stream ended
        while not self.retired:
            was_ready, began = False, time.monotonic()
            try:
                try:
                    await self._serve_stream()
                    self.reason, self.remedy = "the worker ended the stream", SEE_WORKER_LOG
                except grpc.aio.AioRpcError as error:
                    self.reason, self.remedy = explain(error, files=self._tls is not None)
                    drains = self.state is WorkerState.DRAINING
                    if (drained or drains) and error.code() is grpc.StatusCode.UNAVAILABLE:
                        self.reason, self.remedy = "the worker drained and ended", DRAINED
                    if self.state is WorkerState.REFUSED:  # another worker may start at this address
                        self.state, self.description = WorkerState.CONNECTING, pb.WorkerDescription()
                        self.pool = pb.POOL_UNSPECIFIED
                except RefusedWorker as error:
                    self.state, self.reason, self.remedy = WorkerState.REFUSED, str(error), error.remedy
                    backoff = LAST_BACKOFF
                finally:
                    was_ready = self.attached
                    drained = self.state is WorkerState.DRAINING or (drained and not was_ready)
                    self._detach()
            except Exception as error:
                # A task that ends here would never connect to this worker again.
                self.reason = f"a defect in the router: {type(error).__name__}: {error}"
                self.remedy = "Report it with the router's log."
                log.exception("%s: the connection failed and is opened again", self)
            if _cancelled_from_outside():  # grpc.aio drops the cancellation if the stream breaks at once
                raise asyncio.CancelledError
            if was_ready or self.reason != logged:  # not with each try
                logged = self.reason
                log.warning("%s is %s: %s. %s", self, self.state, self.reason, self.remedy)
            if was_ready and time.monotonic() - began > LAST_BACKOFF:
                backoff = FIRST_BACKOFF
            await asyncio.sleep(backoff * random.uniform(0.5, 1))
            backoff = min(2 * backoff, LAST_BACKOFF)

    async def _serve_stream(self) -> None:
        """Attaches to the worker and receives its messages until the stream ends."""
        async with connect(self.address, self._secret, self._tls) as channel:
            stub = WorkerStub(channel)
            self.description = await stub.Describe(pb.DescribeRequest(), timeout=CALL_TIMEOUT)
            self.pool = self.description.first_pool
            self._observer.check(self)
            self.accepted = True
            self.attempts.load = _decode_load(self.address, self.description)
            self._report(await stub.GetStatus(pb.StatusRequest(), timeout=CALL_TIMEOUT))
            self._send_queue, self._cache = SendQueue(), CacheSequence()
            hello = pb.RouterHello(router_id=self._router_id, report_seconds=self._observer.report_seconds)
            self._send_queue.put(pb.RouterMessage(hello=hello))
            self._call = stub.Attach(self._send_queue.messages())
            self._stub, self.reason, self.remedy = stub, "", ""
            log.info("%s is %s", self, self.state)
            self._observer.availability_changed(self)
            try:
                async for message in self._call:
                    self._receive(message)
            except asyncio.CancelledError:
                if _cancelled_from_outside():
                    raise
                raise RefusedWorker("it does not read the messages that the router sends") from None

    def _detach(self) -> None:
        """Ends the session. All open attempts are lost."""
        was_attached = self._send_queue is not None
        failed = was_attached and self.state is WorkerState.READY and not self.retired
        if self._send_queue is not None:
            self._send_queue.close()
        self._send_queue = self._stub = None
        self.accepted = False
        if self.state is not WorkerState.REFUSED:
            self.state = WorkerState.CONNECTING
        lost = self.attempts.lose_all()
        if was_attached:
            self._observer.availability_changed(self)
        if failed:  # not earlier: an open breaker makes the router choose again, and this worker has gone
            self.attempt_failed()
        for attempt_id, attempt in lost.items():
            try:
                attempt.on_event(Lost(attempt_id))
            except Exception:  # the other requests must still learn that their attempts are lost
                log.exception("request %s: a defect in the router", attempt.name)

    def _receive(self, message: pb.WorkerMessage) -> None:
        match message.WhichOneof("kind"):
            case "step":
                for event in message.step.tokens:
                    self._receive_token(event)
            case "prompt_logprobs":
                self._receive_prompt_logprobs(message.prompt_logprobs)
            case "reserved":
                attempt = self.attempts.get(message.reserved.decode_id)
                if attempt is not None:
                    attempt.on_event(message.reserved)
            case "prefill_started":
                attempt = self.attempts.get(message.prefill_started.prefill_id)
                if attempt is not None:
                    attempt.on_event(message.prefill_started)
            case "failed":
                self._receive_failure(message.failed)
            case "cache":
                self._receive_cache(message.cache)
            case "offer":
                self._observer.offered(self, message.offer)
            case "status":
                self._receive_status(message.status)

    def _receive_status(self, status: pb.WorkerStatus) -> None:
        changed = self._report(status)
        self._observer.prefill_reported(self)
        if changed:  # first: requests that start now must not go to a worker that drains or has left
            self._observer.availability_changed(self)
        else:
            self._observer.load_changed(self)

    def _receive_token(self, event: pb.TokenEvent) -> None:
        attempt = self.attempts.get(event.attempt_id)
        if attempt is None:
            return
        if defect := token_defect(event, self.description.vocab_size):
            self._reject(event.attempt_id, defect)
            return
        if attempt.work is not None:
            self._prefilled(attempt, computed=True)
        attempt.on_event(event)

    def _receive_prompt_logprobs(self, message: pb.PromptLogprobs) -> None:
        attempt = self.attempts.get(message.attempt_id)
        if attempt is None:
            return
        if defect := prompt_logprobs.defect(message, self.description.vocab_size):
            self._reject(message.attempt_id, defect)
        else:
            attempt.on_event(message)

    def _reject(self, attempt_id: bytes, defect: str) -> None:
        """Ends an attempt whose result cannot go to a client."""
        self._send(pb.RouterMessage(cancel=pb.Cancel(attempt_id=attempt_id)))
        self._receive_failure(pb.AttemptFailed(attempt_id=attempt_id, message=f"{self}: {defect}"))

    def _receive_failure(self, failure: pb.AttemptFailed) -> None:
        attempt = self.attempts.fail(failure)
        if attempt is None:
            return
        if failure.code != pb.FAILURE_CODE_KV_FAILED:
            self._ended(attempt)
        if failure.code == pb.FAILURE_CODE_DRAINING and self.state is WorkerState.READY:
            self.state = WorkerState.DRAINING
            self._observer.availability_changed(self)
        attempt.on_event(failure)

    def _receive_cache(self, events: pb.CacheEvents) -> None:
        action = self._cache.follow(events)
        if action is CacheAction.APPLY:
            self._observer.cache_changed(self, events)
        elif action is CacheAction.RESYNC:
            log.info("%s: cache reports are missing; the router asks for a snapshot", self)
            self._send(pb.RouterMessage(cache_resync=pb.CacheResync()))

    def _report(self, status: pb.WorkerStatus) -> bool:
        """Stores a status report. Returns whether the worker's state or pool changed."""
        invalid = clear_invalid_rates(status)
        if invalid and not self._invalid_rates:  # not with each report
            log.warning("%s reports impossible rates, which count as unknown: %s", self, ", ".join(invalid))
        self.status, self._invalid_rates = status, bool(invalid)
        self.prefix_links = {(link.incarnation, link.tier): link for link in status.prefix_links}
        if self.attempts.load is not None:
            running = status.requests_running + status.reservations
            self.attempts.load.reported(blocks_free=status.blocks_free, running=running)
        before = self.state, self.pool
        serving = status.health == pb.WorkerStatus.HEALTH_SERVING
        self.state = WorkerState.READY if serving else WorkerState.DRAINING
        self.pool = status.pool or self.description.first_pool
        if self.attached and self.pool != before[1]:
            log.info("%s gets the work of the %s pool", self, POOL_NAMES.get(self.pool, self.pool))
        return (self.state, self.pool) != before


def _decode_load(address: str, described: pb.WorkerDescription) -> DecodeLoad:
    return DecodeLoad(
        worker=address,
        block_size=described.block_size,
        blocks_total=described.num_blocks,
        max_running=described.max_num_seqs,
    )


def _cancelled_from_outside() -> bool:
    """Distinguishes a cancelled task from a cancelled gRPC call. Both raise CancelledError."""
    task = asyncio.current_task()
    return task is None or bool(task.cancelling())
