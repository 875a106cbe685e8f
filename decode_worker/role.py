"""The decode role: handles messages, reports of the KV receiver, and the outputs of engine steps."""

import time
from collections.abc import Iterator
from typing import ClassVar, Protocol

from baton.decode_worker.attempt import Attempt, AttemptPhase
from baton.engine import Engine, EngineRequest, Logprobs, Output, StepResult
from baton.kv_transfer import Closed, FetchFailed, Injected, Receiver
from baton.worker import messages
from baton.worker.engine_process.loop import Parts
from baton.worker.engine_process.prefix_fetches import PrefixFetches
from baton.worker.messages import Code, ToEngine

_WAITING = (AttemptPhase.FETCHING, AttemptPhase.TAKING, AttemptPhase.FAILED)


class LocalPrefills(Protocol):
    """Prefills of this worker, which a decode on this worker can go on with."""

    def take(self, prefill_id: bytes) -> bool | None:
        """Keeps a prefill for a decode here. True: the engine can resume it. None: it does not exist."""

    def taken(self, prefill_id: bytes) -> None:
        """The engine has resumed the prefill."""

    def give_up(self, prefill_id: bytes) -> None:
        """The decode has ended before."""


class DecodeRole:
    """Decodes requests. Their KV comes from another worker, or is computed here.

    Owns the KV receiver, which also fetches prefixes for the prefill role. The receiver may write into
    reserved blocks. They are freed only after the receiver has reported Closed.
    """

    handles: ClassVar[tuple[type, ...]] = (messages.Decode, messages.Retarget)

    def __init__(
        self,
        parts: Parts,
        engine: Engine,
        receiver: Receiver,
        prefills: LocalPrefills,
        prefix_fetches: PrefixFetches,
    ) -> None:
        """`prefix_fetches` share the receiver."""
        self._attempts = parts.attempts
        self._counts = parts.counts
        self._trace = parts.trace
        self.engine = engine
        self._receiver = receiver
        self._prefills = prefills
        self._prefix_fetches = prefix_fetches
        self._incarnation = parts.config.incarnation
        self._table: dict[bytes, Attempt] = {}  # by decode id
        self._taking: dict[bytes, bytes] = {}  # of attempts that are TAKING: decode id -> prefill id

    def owns(self, attempt_id: bytes) -> bool:
        return attempt_id in self._table

    @property
    def kv_fd(self) -> int:
        return self._receiver.fileno()

    @property
    def poll_within(self) -> float | None:
        return self._receiver.poll_within

    @property
    def empty(self) -> bool:
        return not self._table and self._receiver.idle

    # ------------------------------------------------------------ messages

    def handle(self, message: ToEngine) -> None:
        match message:
            case messages.Decode():
                self._submit(message)
            case messages.Retarget():
                # The id may also be that of a prefill of the same router.
                if self._attempts.owned(message.stream, message.decode_id) and self.owns(message.decode_id):
                    self._retarget(message)
            case _:
                raise AssertionError(f"not of this role: {message}")

    def shutdown(self) -> None:
        self._receiver.shutdown()

    def _submit(self, message: messages.Decode) -> None:
        request = message.work.request
        decode_id = request.id
        if self.engine.has(decode_id) or decode_id in self._attempts:
            self._attempts.refuse_reused(message.stream, decode_id)
            return
        self._attempts.open(message.stream, decode_id)
        self._trace.instant("taken", attempt=decode_id.hex())
        source = message.source
        if source is not None and source.incarnation == self._incarnation:
            self._take(message, source.prefill_id)
            return
        attempt = self._table[decode_id] = Attempt(
            prompt_tokens=len(request.prompt_ids),
            output_tokens=len(request.output_ids),
            source=source,
            deadline=time.monotonic() + message.work.timeout,
        )
        if source is None:
            self._compute(request, attempt, message.content)
        elif reservation := self.engine.reserve(request):
            attempt.block_ids, attempt.cached, attempt.state_slot = reservation
            self._attempts.reserved(decode_id)
            self._fetch(decode_id)
        else:
            self._refuse(decode_id)

    def _compute(
        self, request: EngineRequest, attempt: Attempt, content: messages.ContentSource | None
    ) -> None:
        """Computes a prompt here, without what the prefix cache gets from another worker first."""

        def start(fetched: int) -> None:
            attempt.fetched = fetched
            self._trace.instant("added", attempt=request.id.hex())
            if self.engine.start(request):
                attempt.phase = AttemptPhase.RUNNING
                self._attempts.reserved(request.id)
            else:
                self._refuse(request.id)

        if content is not None and self._prefix_fetches.start(request, content, start):
            attempt.phase = AttemptPhase.IMPORTING
        else:
            start(0)

    def _refuse(self, decode_id: bytes) -> None:
        del self._table[decode_id]
        self._attempts.fail(decode_id, Code.NO_ROOM, self._no_room())

    def _take(self, message: messages.Decode, prefill_id: bytes) -> None:
        """The KV is in this worker already. The request needs neither blocks nor a transfer.

        A held prefill never waits for another attempt, and it needs only a seat to go on. A running request
        leaves its seat in the end, so this wait forms no circle.
        """
        request = message.work.request
        taken = prefill_id not in self._taking.values() and self._prefills.take(prefill_id) is not None
        if not taken:
            text = f"there is no prefill {prefill_id.hex()[:8]} on this worker"
            self._attempts.fail(request.id, Code.HANDED_BACK, text)
            return
        self._attempts.reserved(request.id)
        self._taking[request.id] = prefill_id
        self._table[request.id] = Attempt(
            prompt_tokens=len(request.prompt_ids),
            output_tokens=len(request.output_ids),
            source=message.source,
            deadline=time.monotonic() + message.work.timeout,
            phase=AttemptPhase.TAKING,
        )

    def _resume(self) -> None:
        """Resumes the prefills that are ready, as far as there are seats."""
        for decode_id, prefill_id in list(self._taking.items()):
            ready = self._prefills.take(prefill_id)
            if ready is None:
                self._end(decode_id, Code.HANDED_BACK, "the prefill has ended before")
            elif ready and (output := self.engine.resume(prefill_id, decode_id)) is not None:
                del self._taking[decode_id]
                self._prefills.taken(prefill_id)
                attempt = self._table[decode_id]
                attempt.phase = AttemptPhase.RUNNING
                attempt.joined_at = time.monotonic()
                self._attempts.token(output)
                if output.finish_reason:
                    self._finished(decode_id)

    def _retarget(self, message: messages.Retarget) -> None:
        """Fetches the KV from another prefill. A request that already has its KV ignores the message."""
        attempt = self._table[message.decode_id]
        if attempt.phase in (AttemptPhase.RUNNING, AttemptPhase.IMPORTING, AttemptPhase.TAKING):
            return
        if message.source.incarnation == self._incarnation:
            self._end(message.decode_id, Code.HANDED_BACK, "the new prefill is on this worker: submit again")
            return
        try:
            block_ids = self.engine.extend_reservation(message.decode_id, message.output_ids)
        except ValueError as error:
            self._end(message.decode_id, Code.INVALID, str(error))
            return
        if block_ids is None:
            self._end(message.decode_id, Code.NO_ROOM, self._no_room())
            return
        attempt.block_ids = block_ids
        attempt.output_tokens = len(message.output_ids)
        attempt.source = message.source
        self._fetch(message.decode_id)

    def _no_room(self) -> str:
        self._counts.no_room += 1
        return f"{self.engine.blocks_free} of {self.engine.num_blocks} blocks are free"

    def _fetch(self, decode_id: bytes) -> None:
        """Starts a fetch of what the prefix cache lacks. It replaces an earlier fetch of the same attempt."""
        attempt = self._table[decode_id]
        source = attempt.source
        assert source is not None
        attempt.phase = AttemptPhase.FETCHING
        self._receiver.fetch(
            decode_id,
            prefill_id=source.prefill_id,
            kv_address=source.kv_address,
            incarnation=source.incarnation,
            attempt=source.attempt,
            block_ids=attempt.block_ids,
            num_tokens=attempt.prompt_tokens + attempt.output_tokens,
            start=attempt.cached,
            state_slot=attempt.state_slot,
        )

    # ------------------------------------------------------------ ends

    def _end(self, decode_id: bytes, code: Code, message: str) -> None:
        """Ends an attempt and tells its router why."""
        self._attempts.fail(decode_id, code, message)
        self.cancel(decode_id)

    def cancel(self, decode_id: bytes) -> None:
        self._attempts.end(decode_id)
        attempt = self._table[decode_id]
        if attempt.phase is AttemptPhase.TAKING:
            del self._table[decode_id]
            self._prefills.give_up(self._taking.pop(decode_id))
        elif attempt.phase is AttemptPhase.FETCHING:
            attempt.phase = AttemptPhase.CLOSING
            self._receiver.cancel(decode_id)
        elif attempt.phase is not AttemptPhase.CLOSING:
            self._forget(decode_id)

    def _forget(self, decode_id: bytes) -> None:
        """Removes an attempt when the receiver no longer writes into its blocks."""
        del self._table[decode_id]
        self._prefix_fetches.cancel(decode_id)
        self.engine.cancel(decode_id)

    # ------------------------------------------------------------ KV

    def move_kv(self, spare: float) -> None:
        for event in self._receiver.poll(spare):
            if event.decode_id not in self._table:
                self._prefix_fetches.handle(event)
                continue
            match event:
                case Injected():
                    self._join(event)
                case FetchFailed():
                    attempt = self._table[event.decode_id]
                    attempt.phase = AttemptPhase.FAILED
                    if event.reason == "finished":
                        self._end(event.decode_id, Code.FINISHED, "prefill's token is the last")
                        continue
                    assert attempt.source is not None
                    self._attempts.kv_failed(event.decode_id, attempt.source.prefill_id, event.reason)
                case Closed():
                    self._forget(event.decode_id)
        self._prefix_fetches.expire()
        self.engine.joins_at = self._receiver.next_injection
        self._resume()
        self._expire()

    def wanted(self, decode_id: bytes) -> bool:
        return False

    def closing(self) -> Iterator[bytes]:
        return (
            decode_id for decode_id, attempt in self._table.items() if attempt.phase is AttemptPhase.CLOSING
        )

    def spare(self) -> Iterator[bytes]:
        """Reservations whose KV has not begun to come."""
        for decode_id, attempt in self._table.items():
            waits = attempt.phase is AttemptPhase.FETCHING and not self._receiver.began(decode_id)
            if waits or attempt.phase is AttemptPhase.FAILED:
                yield decode_id

    def drop(self, decode_id: bytes) -> None:
        self._end(decode_id, Code.HANDED_BACK, "prompts on this worker need its blocks")

    def _expire(self) -> None:
        now = time.monotonic()
        late = [
            decode_id
            for decode_id, attempt in self._table.items()
            if attempt.phase in _WAITING and attempt.deadline < now
        ]
        for decode_id in late:
            self._end(decode_id, Code.HANDED_BACK, "the KV did not arrive before the request's deadline")

    def _join(self, event: Injected) -> None:
        attempt = self._table[event.decode_id]
        attempt.phase = AttemptPhase.RUNNING
        attempt.joined_at = time.monotonic()
        attempt.first_token_at = event.stats.commit_at
        self._trace.instant(
            "joined",
            decode=event.decode_id.hex(),
            bytes=event.stats.bytes,
            fetch_us=event.stats.fetch_seconds * 1e6,
        )
        self._attempts.report(messages.KVInjected(event.decode_id, event.stats))
        first, vocabulary = event.first_token, self.engine.model_config.vocab_size
        # These token ids come from a peer. An out-of-range id would crash the engine or the router.
        if (largest := max((first.token_id, *first.top_ids))) >= vocabulary:
            text = f"COMMIT names token {largest}, beyond the vocabulary of {vocabulary}"
            self._end(event.decode_id, Code.ENGINE, text)
            return
        logprobs = None
        if first.logprob is not None:
            logprobs = Logprobs(first.logprob, first.top_ids, first.top_logprobs)
        output = self.engine.join(event.decode_id, first.token_id, logprobs)
        # This repeats prefill's token. The router emits each index once, from the worker that sends it first.
        self._attempts.token(output)
        if output.finish_reason:
            self._finished(event.decode_id)

    # ------------------------------------------------------------ steps

    def after_step(self, result: StepResult) -> None:
        for output in result.outputs:
            attempt = self._table.get(output.id)
            if attempt is None:
                continue
            if attempt.source is None and not attempt.tokens:
                self._prefilled(attempt, output)
            if attempt.first_token_at is not None:
                self._attempts.report(messages.SecondToken(time.monotonic() - attempt.first_token_at))
                attempt.first_token_at = None
            attempt.tokens += 1
            self._counts.count(output)
            self._attempts.token(output)
            if output.finish_reason:
                self._finished(output.id)
        for decode_id in result.preempted:
            self._attempts.fail(decode_id, Code.HANDED_BACK, "preempted: other requests needed its blocks")
            del self._table[decode_id]
        for code, ended in ((Code.ENGINE, result.failed), (Code.INVALID, result.refused)):
            for decode_id, message in ended:
                if decode_id in self._table:
                    self._attempts.fail(decode_id, code, message)
                    del self._table[decode_id]

    def after_tokens(self, result: StepResult) -> None:
        pass

    def _prefilled(self, attempt: Attempt, output: Output) -> None:
        """Reports the prefill of a prompt that this worker computed."""
        self._trace.instant("first token", prefill=output.id.hex(), computing=output.prefill_seconds)
        attempt.joined_at = now = time.monotonic()
        tokens = attempt.prompt_tokens + attempt.output_tokens
        self._counts.count_prompt(tokens, output.cached_tokens, attempt.fetched)
        began = now - output.prefill_seconds
        self._attempts.report(
            messages.Prefilled(
                output.id, began - output.queue_seconds, began, now, tokens, output.cached_tokens
            )
        )

    def _finished(self, decode_id: bytes) -> None:
        """Removes an attempt that got its last token. The engine has already freed its blocks."""
        self._attempts.end(decode_id)
        attempt = self._table.pop(decode_id)
        self._attempts.report(
            messages.Decoded(decode_id, attempt.joined_at, time.monotonic(), attempt.tokens)
        )
