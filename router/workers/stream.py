"""The gRPC stream to one worker, which is opened again whenever it ends."""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Iterable

import grpc
import grpc.aio

from baton.router import prompt_logprobs
from baton.router.config import RouterConfig
from baton.router.policy.prefill_loads import report_seconds
from baton.router.workers.adapters import LacksAdapters
from baton.router.workers.checks import (
    DRAINED,
    LOAD_ADAPTERS,
    NEW_WEIGHTS,
    SEE_WORKER_LOG,
    WAIT_FOR_WEIGHTS,
    RefusedWorker,
    explain,
    token_defect,
)
from baton.router.workers.flaps import FLAP_SECONDS, Flaps
from baton.router.workers.roster import Roster
from baton.router.workers.worker import (
    CALL_TIMEOUT,
    AttemptEvent,
    SendQueue,
    Worker,
    WorkerState,
    cancelled_from_outside,
)
from baton.rpc import worker_pb2 as pb
from baton.rpc.adapters import set_adapters
from baton.rpc.all_workers import NotDone
from baton.rpc.channel import connect
from baton.rpc.stubs import WorkerStub
from baton.rpc.weights import replace_weights
from baton.system.words import counted

log = logging.getLogger(__name__)

FIRST_BACKOFF, LAST_BACKOFF = 0.1, 2.0


class WorkerStream:
    """Owns the task that keeps the stream open. Tells the `roster` what the worker reports."""

    def __init__(self, worker: Worker, roster: Roster, config: RouterConfig) -> None:
        self.worker = worker
        self._roster = roster
        self._config = config
        self._flaps = Flaps()
        self._calm: asyncio.TimerHandle | None = None
        """When its link has stopped to flap, if it was ready again."""
        self._task = asyncio.create_task(self._run(), name=f"worker {worker.address}")

    def retire(self, on_closed: Callable[["WorkerStream"], None]) -> None:
        """The worker takes no new work from now on. The stream closes when the last attempt has ended."""
        worker = self.worker
        worker.retired, worker.on_end = True, self._close_if_done
        self._task.add_done_callback(lambda _: on_closed(self))
        self._roster.availability_changed(worker)
        self._close_if_done()

    def _close_if_done(self) -> None:
        if not self.worker.attempts:
            self._task.cancel()

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    # ------------------------------------------------------------ open and close

    async def _run(self) -> None:
        worker, backoff = self.worker, FIRST_BACKOFF
        drained = False  # the worker was draining when its last stream ended
        while not worker.retired:
            was_ready, began, weights, lacks_adapters = False, time.monotonic(), None, False
            try:
                try:
                    await self._serve()
                    worker.reason, worker.remedy = "the worker ended the stream", SEE_WORKER_LOG
                except grpc.aio.AioRpcError as error:
                    await self._roster.turn()
                    worker.reason, worker.remedy = explain(error, files=self._config.cluster_tls is not None)
                    drains = worker.state is WorkerState.DRAINING
                    if (drained or drains) and error.code() is grpc.StatusCode.UNAVAILABLE:
                        worker.reason, worker.remedy = "the worker drained and ended", DRAINED
                    if worker.state is WorkerState.REFUSED:
                        worker.state = WorkerState.CONNECTING
                        worker.described(pb.WorkerDescription())  # another one may start at this address
                except RefusedWorker as error:
                    worker.state = WorkerState.REFUSED
                    worker.reason, worker.remedy = str(error), error.remedy
                    backoff, weights = LAST_BACKOFF, self._roster.weights_for(worker)
                    lacks_adapters = isinstance(error, LacksAdapters)
                finally:
                    was_ready = worker.attached
                    drained = worker.state is WorkerState.DRAINING or (drained and not was_ready)
                    self._detach()
                if weights is not None:
                    backoff = await self._give(weights)
                elif lacks_adapters:
                    backoff = await self._give_adapters()
            except Exception as error:
                # A task that ends here would never connect to this worker again.
                worker.reason = f"a defect in the router: {type(error).__name__}: {error}"
                worker.remedy = "Report it with the router's log."
                log.exception("%s: the connection failed and is opened again", worker)
            if cancelled_from_outside():  # grpc.aio drops the cancellation if the stream breaks at once
                raise asyncio.CancelledError
            if self._flaps.lost(time.monotonic(), worker.reason, was_ready=was_ready):
                log.warning("%s is %s: %s. %s", worker, worker.state, worker.reason, worker.remedy)
            if was_ready and time.monotonic() - began > LAST_BACKOFF:
                backoff = FIRST_BACKOFF
            await asyncio.sleep(backoff * random.uniform(0.5, 1))
            backoff = min(2 * backoff, LAST_BACKOFF)

    async def _give(self, weights: pb.StageWeights) -> float:
        """Gives a worker that has started the weights of the others. Returns the seconds until the router
        connects again."""
        worker, began = self.worker, time.monotonic()
        worker.reason = f"it reads the weights of the other workers, version {weights.version}"
        worker.remedy = WAIT_FOR_WEIGHTS
        log.info("%s: %s", worker, worker.reason)
        try:
            config = self._config
            await replace_weights([worker.address], weights, config.secret, config.cluster_tls)
        except NotDone as error:
            [fault] = error.faults.values()
            why = "it ended the call" if fault is None else fault.details()
            worker.reason = f"it cannot take the weights of the other workers: {why}"
            worker.remedy = NEW_WEIGHTS
            return max(LAST_BACKOFF, time.monotonic() - began)  # at least half of the time it does not read
        return FIRST_BACKOFF

    async def _give_adapters(self) -> float:
        """As `_give`: the adapters of the others."""
        worker, newest, began = self.worker, self._roster.adapters.newest, time.monotonic()
        worker.reason, worker.remedy = "it loads the adapters of the other workers", WAIT_FOR_WEIGHTS
        log.info("%s: %s", worker, worker.reason)
        change = pb.AdapterSet(replaces=worker.description.adapters_revision)
        change.MergeFrom(newest)
        config = self._config
        questions, within = {worker.address: change}, config.request_timeout
        [reply] = (await set_adapters(questions, config.secret, config.cluster_tls, within)).values()
        if isinstance(reply, grpc.aio.AioRpcError):
            worker.reason = f"it cannot load the adapters of the other workers: {reply.details()}"
            worker.remedy = LOAD_ADAPTERS
            return max(LAST_BACKOFF, time.monotonic() - began)
        return FIRST_BACKOFF

    async def _serve(self) -> None:
        """Attaches to the worker and receives its messages until the stream ends."""
        worker = self.worker
        await self._roster.turn()
        messages = SendQueue(self._unread)
        hello = pb.RouterHello(
            router_id=self._config.id,
            report_seconds=report_seconds(len(self._roster.listed)),
            describe=True,
            cache=True,
        )
        messages.put(pb.RouterMessage(hello=hello))
        async with connect(worker.address, self._config.secret, self._config.cluster_tls) as channel:
            with contextlib.closing(messages):
                stub = WorkerStub(channel)
                self._call = stub.Attach(messages.messages())
                received = aiter(self._call)
                try:
                    async with asyncio.timeout(CALL_TIMEOUT):
                        first = await anext(received, None)
                except TimeoutError:
                    raise RefusedWorker(f"it does not describe itself within {CALL_TIMEOUT:g} s") from None
                if first is None:
                    return
                await self._roster.turn()
                self._attach(first.description, messages, stub)
                try:
                    async for message in received:
                        self._receive(message)
                except asyncio.CancelledError:
                    if cancelled_from_outside():
                        raise
                    raise RefusedWorker("it does not read the messages that the router sends") from None

    def _attach(self, described: pb.WorkerDescription, messages: SendQueue, stub: WorkerStub) -> None:
        """The worker may get work from now on, if it fits."""
        worker, status = self.worker, pb.WorkerStatus()
        status.CopyFrom(described.status)
        described.ClearField("status")
        worker.described(described)
        worker.staged_version = status.staged_version
        self._roster.accept(worker)
        worker.report(status)
        worker.send_queue, worker.stub, worker.reason, worker.remedy = messages, stub, "", ""
        if self._flaps.count:  # it flaps
            self._calm = asyncio.get_running_loop().call_later(FLAP_SECONDS, self._has_calmed)
        else:
            log.info("%s is %s", worker, worker.state)
        self._roster.availability_changed(worker)

    def _has_calmed(self) -> None:
        worker, lost = self.worker, counted(self._flaps.taken(), "more time")
        log.warning("%s is %s, after its connection was lost %s", worker, worker.state, lost)

    def _unread(self) -> None:
        log.error("%s does not read its messages: the router closes the stream", self.worker)
        self._call.cancel()

    def _detach(self) -> None:
        """Ends the session. All open attempts are lost."""
        worker, was_attached = self.worker, self.worker.attached
        if self._calm is not None:
            self._calm.cancel()
        failed = was_attached and worker.ready
        if worker.send_queue is not None:
            worker.send_queue.close()
        worker.send_queue = worker.stub = None
        if worker.state is not WorkerState.REFUSED:
            worker.state = WorkerState.CONNECTING
        lost = worker.lose_all()
        self._roster.release(worker)
        if was_attached:
            self._roster.availability_changed(worker)
        if failed:  # not earlier: an open breaker makes the router choose again, and this worker has gone
            worker.attempt_failed()
        for attempt in lost:
            try:
                attempt.on_event(attempt, None)
            except Exception:  # the other requests must still learn that their attempts are lost
                log.exception("request %s: a defect in the router", attempt.name)

    # ------------------------------------------------------------ messages of the worker

    def _receive(self, message: pb.WorkerMessage) -> None:
        match message.WhichOneof("kind"):
            case "step":
                self._receive_tokens(message.step.tokens)
            case "prompt_logprobs":
                self._receive_prompt_logprobs(message.prompt_logprobs)
            case "reserved":
                self._tell(message.reserved.decode_id, message.reserved)
            case "prefill_started":
                self._tell(message.prefill_started.prefill_id, message.prefill_started)
            case "failed":
                self._receive_failure(message.failed)
            case "encoded":
                self._roster.encoders.encoded(self.worker, message.encoded.encode_id)
            case "image_wanted":
                self._roster.encoders.wanted(self.worker, message.image_wanted)
            case "cache":
                self._roster.cache_changed(self.worker, message.cache)
            case "description":
                self._roster.redescribed(self.worker, message.description)
            case "status":
                self._roster.reported(self.worker, message.status)

    def _receive_tokens(self, events: Iterable[pb.TokenEvent]) -> None:
        vocab_size, attempts = self.worker.description.vocab_size, self.worker.attempts
        for event in events:
            attempt = attempts.get(event.attempt_id)
            if attempt is None:
                continue
            unusual = event.token_id >= vocab_size or event.HasField("logprobs")
            if unusual and (defect := token_defect(event, vocab_size)):
                self._reject(event.attempt_id, defect)
                continue
            if attempt.work is not None:
                self.worker.prefilled(attempt, computed=True)
            attempt.on_event(attempt, event)

    def _receive_prompt_logprobs(self, message: pb.PromptLogprobs) -> None:
        if defect := prompt_logprobs.defect(message, self.worker.description.vocab_size):
            self._reject(message.attempt_id, defect)
        else:
            self._tell(message.attempt_id, message)

    def _tell(self, attempt_id: bytes, event: AttemptEvent) -> None:
        attempt = self.worker.attempts.get(attempt_id)
        if attempt is not None:
            attempt.on_event(attempt, event)

    def _reject(self, attempt_id: bytes, defect: str) -> None:
        """Ends an attempt whose result cannot go to a client."""
        self.worker.send(pb.RouterMessage(cancel=pb.Cancel(attempt_id=attempt_id)))
        self._receive_failure(pb.AttemptFailed(attempt_id=attempt_id, message=f"{self.worker}: {defect}"))

    def _receive_failure(self, failure: pb.AttemptFailed) -> None:
        worker = self.worker
        if worker.encodes:
            self._roster.encoders.failed(worker, failure)
            return
        if (attempt := worker.fail(failure)) is None:
            return
        if failure.code == pb.FAILURE_CODE_DRAINING and worker.state is WorkerState.READY:
            worker.state = WorkerState.DRAINING
            self._roster.availability_changed(worker)
        attempt.on_event(attempt, failure)
