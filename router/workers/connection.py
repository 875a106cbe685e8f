"""One worker, as a router sees it: a stream that owns what was submitted on it, and the worker's load.

Life: connect → Describe → accept or refuse it → GetStatus → Attach → ready → the stream ends, and with it, at
once, every attempt on it → wait a little → again, until the worker is taken off the list.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import grpc
import grpc.aio

import rpc
from router.policy import DecodeLoad, PrefillWork
from router.workers.breaker import Breaker
from router.workers.cache_sequence import CacheSequence, Verdict
from router.workers.outgoing import Outgoing
from router.workers.refusal import OWN_LOG, Refused, cause
from router.workers.reports import forget_wrong_rates, wrong_token
from rpc import worker_pb2 as pb
from rpc.logs import of_request
from rpc.tracing import Span
from rpc.worker_pb2_grpc import WorkerStub

log = logging.getLogger(__name__)

CALL_TIMEOUT = 5.0
FIRST_BACKOFF, LAST_BACKOFF = 0.1, 2.0


class State(StrEnum):
    CONNECTING = "connecting"
    READY = "ready"
    DRAINING = "draining"  # serves what it has, takes nothing new
    REFUSED = "refused"  # another model, or a description that makes no sense


class AttemptOwner(Protocol):
    """Whose attempts they are. Called from the connection's task; must not wait."""

    span: Span
    """Of the request: those of attempts are its children."""
    name: str
    """The request's id as its client knows it."""

    def on_token(self, event: pb.TokenEvent) -> None: ...
    def on_reserved(self, decode_id: bytes) -> None: ...
    def on_failed(self, failure: pb.AttemptFailed) -> None: ...
    def on_lost(self, attempt_id: bytes) -> None: ...


class Observer(Protocol):
    """The pool. Called from the connection's task."""

    def check(self, connection: "WorkerConnection") -> None:
        """Raises Refused when a worker of this description does not fit the others."""

    def membership_changed(self, connection: "WorkerConnection") -> None: ...
    def load_changed(self, connection: "WorkerConnection") -> None:
        """Of a decode worker."""
        ...

    def prefill_reported(self, connection: "WorkerConnection") -> None: ...
    def prefill_sent(self, connection: "WorkerConnection", work: PrefillWork) -> None: ...
    def cache_changed(self, connection: "WorkerConnection", events: pb.CacheEvents) -> None:
        """In order, none missing. Raises Refused when more is cached than the worker has blocks for."""
        ...

    def prefill_ended(self, connection: "WorkerConnection", work: PrefillWork, *, computed: bool) -> None:
        """Its token came, or it was given up. Not said of those that are lost with the stream."""
        ...

    def breaker_changed(self, connection: "WorkerConnection") -> None: ...


@dataclass(slots=True)
class _Attempt:
    owner: AttemptOwner
    span: Span
    tokens: int = 0  # of a decode: positions to hold
    work: PrefillWork | None = None  # of a prefill, until its token comes


class WorkerConnection:
    """Owns the stream to one worker, and the table of what is submitted on it.

    Attributes:
        description: of the incarnation that is attached; the last one while it is not.
        accepted: the worker fits the pool, from that check until the stream ends.
        reason, remedy: why it is not ready, and what to do about it; empty where it is.
        status: as last reported.
        decode_load: of a decode worker that is attached.
        started_tokens: prompt tokens that this router gave it to prefill since `status` (decode workers).
        breaker: whether it fails too often to be given work.
    """

    def __init__(
        self,
        address: str,
        secret: bytes,
        router_id: bytes,
        observer: Observer,
        tls: rpc.TlsFiles | None = None,
    ) -> None:
        self.address = address
        self.state = State.CONNECTING
        self.reason = self.remedy = ""
        self.accepted = False
        self.description = pb.WorkerDescription()
        self.status = pb.WorkerStatus()
        self._wrong_rates = False  # in `status`
        self.started_tokens = 0
        self.decode_load: DecodeLoad | None = None
        self.breaker = Breaker()
        self.retired = False
        self._secret = secret
        self._tls = tls
        self._router_id = router_id
        self._observer = observer
        self._attempts: dict[bytes, _Attempt] = {}
        self._outgoing: Outgoing | None = None
        self._cache = CacheSequence()
        self._stub: WorkerStub | None = None
        self._task = asyncio.create_task(self._run(), name=f"worker {address}")

    def __str__(self) -> str:
        role = {pb.ROLE_PREFILL: "prefill", pb.ROLE_DECODE: "decode"}.get(self.description.role)
        return f"{f'{role} {self.description.index}' if role else 'worker'} at {self.address}"

    @property
    def ready(self) -> bool:
        """Whether it takes new work."""
        return self.state is State.READY and not self.retired

    @property
    def attached(self) -> bool:
        return self._outgoing is not None

    def when_closed(self, callback: Callable[["WorkerConnection"], None]) -> None:
        self._task.add_done_callback(lambda _: callback(self))

    @property
    def attempts(self) -> int:
        return len(self._attempts)

    def retire(self) -> None:
        """It is off the list: nothing new goes there, and the stream is closed once nothing is left on it."""
        self.retired = True
        self._observer.membership_changed(self)
        self._close_if_done()

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def current_status(self) -> pb.WorkerStatus:
        """Asked for now; the last report when it does not answer in time."""
        if self._stub is None:
            return self.status
        try:
            status = await self._stub.GetStatus(pb.StatusRequest(), timeout=CALL_TIMEOUT)
            forget_wrong_rates(status)
            return status
        except grpc.aio.AioRpcError:
            return self.status
        except asyncio.CancelledError:
            if _cancelled_from_outside():
                raise
            return self.status  # the worker was lost meanwhile, and the channel closed under the call

    # ------------------------------------------------------------ attempts

    def submit_prefill(self, submit: pb.SubmitPrefill, owner: AttemptOwner, work: PrefillWork) -> None:
        attempt = _Attempt(owner, self._begin("prefill attempt", owner, submit.request), work=work)
        self._submit(submit.prefill_id, attempt, pb.RouterMessage(prefill=submit))
        self._observer.prefill_sent(self, work)

    def submit_decode(
        self, submit: pb.SubmitDecode, owner: AttemptOwner, tokens: int, *, computes: int = 0
    ) -> None:
        """`tokens` positions are to be held, and `computes` of them prefilled there."""
        assert self.decode_load is not None
        self.decode_load.sent(tokens)
        self.started_tokens += computes
        attempt = _Attempt(owner, self._begin("decode attempt", owner, submit.request), tokens)
        self._submit(submit.decode_id, attempt, pb.RouterMessage(decode=submit))
        self._observer.load_changed(self)

    def retarget(self, message: pb.Retarget) -> None:
        self._send(pb.RouterMessage(retarget=message))

    def cancel(self, attempt_id: bytes, failure: str = "") -> None:
        """Nobody wants it any more, because of a failure or not; harmless when it is over."""
        if self._end(attempt_id, failure):
            self._send(pb.RouterMessage(cancel=pb.Cancel(attempt_id=attempt_id)))

    def forget(self, attempt_id: bytes) -> None:
        """It ended over there."""
        self._end(attempt_id)

    def worked(self) -> None:
        """It served an attempt: what it had to give was taken."""
        if self.breaker.worked():
            log.info("%s works again", self)
            self._observer.breaker_changed(self)

    def failed(self) -> None:
        """It failed an attempt, or fell away with all it had."""
        if self.breaker.failed(time.monotonic()):
            log.warning("%s failed again and again: left out for a while", self)
            self._observer.breaker_changed(self)

    def _begin(self, name: str, owner: AttemptOwner, request: pb.Request) -> Span:
        worker = {"baton.worker": str(self), "baton.output_tokens": len(request.output_ids)}
        span = owner.span.child(name, worker, "client")
        request.traceparent = span.traceparent
        return span

    def _submit(self, attempt_id: bytes, attempt: _Attempt, message: pb.RouterMessage) -> None:
        assert self.ready, "work goes to ready workers only"
        self._attempts[attempt_id] = attempt
        if log.isEnabledFor(logging.DEBUG):
            kind, name = message.WhichOneof("kind"), attempt.owner.name
            log.debug(
                "request %s, attempt %s: %s at %s", name, attempt_id.hex(), kind, self,
                extra=of_request(name, attempt_id),
            )  # fmt: skip
        if self.breaker.given(time.monotonic()):
            self._observer.breaker_changed(self)
        self._send(message)

    def _end(self, attempt_id: bytes, failure: str = "") -> bool:
        attempt = self._attempts.pop(attempt_id, None)
        if attempt is None:
            return False
        attempt.span.end(failure)
        if self.decode_load is not None:
            self.decode_load.ended(attempt.tokens)
            self._observer.load_changed(self)
        else:
            self._prefill_ended(attempt, computed=False)
        self._close_if_done()
        return True

    def _prefill_ended(self, attempt: _Attempt, *, computed: bool) -> None:
        work, attempt.work = attempt.work, None
        if work is not None:
            attempt.span.end()
            self._observer.prefill_ended(self, work, computed=computed)

    def _send(self, message: pb.RouterMessage) -> None:
        if self._outgoing is not None and not self._outgoing.put(message):
            log.error("%s takes no more messages: the stream is closed", self)
            self._call.cancel()

    def _close_if_done(self) -> None:
        if self.retired and not self._attempts:
            self._task.cancel()

    # ------------------------------------------------------------ the stream

    async def _run(self) -> None:
        backoff = FIRST_BACKOFF
        logged = ""
        while not self.retired:
            was_ready, began = False, time.monotonic()
            try:
                try:
                    await self._attached()
                    self.reason, self.remedy = "the worker ended the stream", OWN_LOG
                except grpc.aio.AioRpcError as error:
                    self.reason, self.remedy = cause(error, tls=self._tls is not None)
                    if self.state is State.REFUSED:  # another worker may come in its place
                        self.state, self.description = State.CONNECTING, pb.WorkerDescription()
                except Refused as error:
                    self.state, self.reason, self.remedy = State.REFUSED, str(error), error.remedy
                    backoff = LAST_BACKOFF
                finally:
                    was_ready = self.attached
                    self._detached()
            except Exception as error:
                # Without this the task would end, and no connection would be opened to this worker again.
                self.reason = f"a defect in the router: {type(error).__name__}: {error}"
                self.remedy = "Report it with the router's log."
                log.exception("%s: the connection failed and is opened again", self)
            if _cancelled_from_outside():  # grpc.aio swallows that where the stream breaks in the same moment
                raise asyncio.CancelledError
            if was_ready or self.reason != logged:  # not with each try
                logged = self.reason
                log.warning("%s is %s: %s. %s", self, self.state, self.reason, self.remedy)
            if was_ready and time.monotonic() - began > LAST_BACKOFF:
                backoff = FIRST_BACKOFF
            await asyncio.sleep(backoff * random.uniform(0.5, 1))
            backoff = min(2 * backoff, LAST_BACKOFF)

    async def _attached(self) -> None:
        """One session, from Describe to the end of the stream."""
        async with rpc.connect(self.address, self._secret, self._tls) as channel:
            stub = WorkerStub(channel)
            self.description = await stub.Describe(pb.DescribeRequest(), timeout=CALL_TIMEOUT)
            self._observer.check(self)
            self.accepted = True
            if self.description.role == pb.ROLE_DECODE:
                self.decode_load = _decode_load(self.address, self.description)
            self._report(await stub.GetStatus(pb.StatusRequest(), timeout=CALL_TIMEOUT))
            self._outgoing, self._cache = Outgoing(), CacheSequence()
            self._outgoing.put(pb.RouterMessage(hello=pb.RouterHello(router_id=self._router_id)))
            self._call = stub.Attach(self._outgoing.messages())
            self._stub, self.reason, self.remedy = stub, "", ""
            log.info("%s is %s", self, self.state)
            self._observer.membership_changed(self)
            try:
                async for message in self._call:
                    self._receive(message)
            except asyncio.CancelledError:
                if _cancelled_from_outside():
                    raise
                raise Refused("it leaves what it is sent unread") from None

    def _detached(self) -> None:
        """Every attempt on the stream is lost with it."""
        was_attached = self._outgoing is not None
        if self._outgoing is not None:
            self._outgoing.close()
        self._outgoing = self._stub = None
        self.accepted = False
        if was_attached and self.state is State.READY and not self.retired:
            self.failed()
        if self.state is not State.REFUSED:
            self.state = State.CONNECTING
        lost, self._attempts = self._attempts, {}
        self.started_tokens = 0
        self.decode_load = None
        if was_attached:
            self._observer.membership_changed(self)
        for attempt_id, attempt in lost.items():
            attempt.span.end("the worker was lost")
            try:
                attempt.owner.on_lost(attempt_id)
            except Exception:  # the other requests must still learn that their attempts are lost
                log.exception("request %s: a defect in the router", attempt.owner.name)

    def _receive(self, message: pb.WorkerMessage) -> None:
        match message.WhichOneof("kind"):
            case "step":
                for event in message.step.tokens:
                    attempt = self._attempts.get(event.attempt_id)
                    if attempt is None:
                        continue
                    if wrong := wrong_token(event, self.description.vocab_size):
                        self._send(pb.RouterMessage(cancel=pb.Cancel(attempt_id=event.attempt_id)))
                        failure = pb.AttemptFailed(attempt_id=event.attempt_id, message=f"{self}: {wrong}")
                        self._receive_failure(failure)
                        continue
                    self._prefill_ended(attempt, computed=True)
                    attempt.owner.on_token(event)
            case "reserved":
                attempt = self._attempts.get(message.reserved.decode_id)
                if attempt is not None:
                    attempt.owner.on_reserved(message.reserved.decode_id)
            case "failed":
                self._receive_failure(message.failed)
            case "cache":
                verdict = self._cache.follow(message.cache)
                if verdict is Verdict.APPLY:
                    self._observer.cache_changed(self, message.cache)
                elif verdict is Verdict.RESYNC:
                    log.info("%s: reports of its cache were dropped; asking for all of it", self)
                    self._send(pb.RouterMessage(cache_resync=pb.CacheResync()))
            case "status":
                changed = self._report(message.status)
                if self.decode_load is None:
                    self._observer.prefill_reported(self)
                else:
                    self._observer.load_changed(self)
                if changed:
                    self._observer.membership_changed(self)

    def _receive_failure(self, failure: pb.AttemptFailed) -> None:
        attempt = self._attempts.get(failure.attempt_id)
        if attempt is None:
            return
        if failure.code not in pb.FailureCode.values():  # the worker is newer than this router
            failure.message = f"{failure.message} (unknown failure code {failure.code})"
            failure.code = pb.FAILURE_CODE_UNSPECIFIED
        if failure.code != pb.FAILURE_CODE_KV_FAILED:  # which leaves the reservation
            attempt.span.end(f"{pb.FailureCode.Name(failure.code)}: {failure.message}")
        if failure.code == pb.FAILURE_CODE_NO_ROOM and self.decode_load is not None:
            del self._attempts[failure.attempt_id]
            self.decode_load.refused(attempt.tokens)
            self._observer.load_changed(self)
        elif failure.code != pb.FAILURE_CODE_KV_FAILED:
            self._end(failure.attempt_id)
        if failure.code == pb.FAILURE_CODE_DRAINING and self.state is State.READY:
            self.state = State.DRAINING
            self._observer.membership_changed(self)
        attempt.owner.on_failed(failure)

    def _report(self, status: pb.WorkerStatus) -> bool:
        """Takes a status in. Returns whether the worker's health changed with it."""
        wrong = forget_wrong_rates(status)
        if wrong and not self._wrong_rates:  # not with each report
            log.warning("%s reports impossible figures, which count as unknown: %s", self, ", ".join(wrong))
        self.status, self._wrong_rates = status, bool(wrong)
        self.started_tokens = 0
        if self.decode_load is not None:
            running = status.requests_running + status.reservations
            self.decode_load.reported(blocks_free=status.blocks_free, running=running)
        before = self.state
        serving = status.health == pb.WorkerStatus.HEALTH_SERVING
        self.state = State.READY if serving else State.DRAINING
        return self.state is not before


def _decode_load(address: str, described: pb.WorkerDescription) -> DecodeLoad:
    return DecodeLoad(
        worker=address,
        block_size=described.block_size,
        blocks_total=described.num_blocks,
        max_running=described.max_num_seqs,
    )


def _cancelled_from_outside() -> bool:
    """Tells the end of this task from that of a gRPC call, which raises the same."""
    task = asyncio.current_task()
    return task is None or bool(task.cancelling())
