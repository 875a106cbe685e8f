"""The decode role: handles messages, reports of the KV receiver, and the outputs of engine steps."""

import time

from decode_worker.attempt import Attempt, AttemptPhase
from engine import Logprobs, Output, StepResult
from kv_transfer import Closed, FetchFailed, Injected
from worker import messages
from worker.engine_loop import Parts, paged_kv
from worker.messages import Code, ToEngine


class DecodeRole:
    """The role of a decode worker. Owns the engine and the KV receiver.

    The receiver may write into reserved blocks. They are freed only after the receiver has reported Closed.
    """

    def __init__(self, parts: Parts) -> None:
        self._attempts = parts.attempts
        self._counts = parts.counts
        self._link = parts.link
        self._trace = parts.trace
        self.engine = parts.start_engine()
        self._receiver = parts.transport.receiver(paged_kv(self.engine))
        self._table: dict[bytes, Attempt] = {}  # by decode id

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
                if self._attempts.owned(message.stream, message.decode_id):
                    self._retarget(message)
            case _:
                raise AssertionError(f"not for a decode engine: {message}")

    def shutdown(self) -> None:
        self._receiver.shutdown()

    def _submit(self, message: messages.Decode) -> None:
        request = message.work.request
        decode_id = request.id
        if decode_id in self._table:
            self._attempts.refuse_reused(message.stream, decode_id)
            return
        self._attempts.open(message.stream, decode_id)
        prefill_locally = message.source is None
        block_ids = self.engine.start(request) if prefill_locally else self.engine.reserve(request)
        if block_ids is None:
            self._attempts.fail(decode_id, Code.NO_ROOM, self._no_room())
            return
        self._attempts.reserved(decode_id)
        self._table[decode_id] = Attempt(
            prompt_tokens=len(request.prompt_ids),
            output_tokens=len(request.output_ids),
            block_ids=block_ids,
            source=message.source,
            deadline=time.monotonic() + message.work.timeout,
        )
        if prefill_locally:
            self._table[decode_id].phase = AttemptPhase.RUNNING
        else:
            self._fetch(decode_id)

    def _retarget(self, message: messages.Retarget) -> None:
        """Fetches the KV from another prefill. A running request already has its KV, so nothing changes."""
        attempt = self._table[message.decode_id]
        if attempt.phase is AttemptPhase.RUNNING:
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
        """Starts a fetch, which replaces an earlier fetch of the same attempt."""
        attempt = self._table[decode_id]
        source = attempt.source
        assert source is not None
        attempt.phase = AttemptPhase.FETCHING
        self._receiver.fetch(
            decode_id,
            prefill_id=source.prefill_id,
            kv_address=source.kv_address,
            incarnation=source.incarnation,
            attempt=0,
            block_ids=attempt.block_ids,
            num_tokens=attempt.prompt_tokens + attempt.output_tokens,
        )

    # ------------------------------------------------------------ ends

    def _end(self, decode_id: bytes, code: Code, message: str) -> None:
        """Ends an attempt and tells its router why."""
        self._attempts.fail(decode_id, code, message)
        self.cancel(decode_id)

    def cancel(self, decode_id: bytes) -> None:
        self._attempts.end(decode_id)
        attempt = self._table[decode_id]
        if attempt.phase is AttemptPhase.FETCHING:
            attempt.phase = AttemptPhase.CLOSING
            self._receiver.cancel(decode_id)
        elif attempt.phase is not AttemptPhase.CLOSING:
            self._forget(decode_id)

    def _forget(self, decode_id: bytes) -> None:
        """Removes an attempt when the receiver no longer writes into its blocks."""
        del self._table[decode_id]
        self.engine.cancel(decode_id)

    # ------------------------------------------------------------ KV

    def move_kv(self, spare: float) -> None:
        for event in self._receiver.poll(spare):
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
        self._expire()

    def _expire(self) -> None:
        now = time.monotonic()
        late = [
            decode_id
            for decode_id, attempt in self._table.items()
            if attempt.phase in (AttemptPhase.FETCHING, AttemptPhase.FAILED) and attempt.deadline < now
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
        self._link.send(messages.Injected(event.decode_id, event.stats))
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
            attempt = self._table[output.id]
            if attempt.source is None and not attempt.tokens:
                self._prefilled(attempt, output)
            if attempt.first_token_at is not None:
                self._link.send(messages.SecondToken(time.monotonic() - attempt.first_token_at))
                attempt.first_token_at = None
            attempt.tokens += 1
            self._counts.count(output)
            self._attempts.token(output)
            if output.finish_reason:
                self._finished(output.id)
        for decode_id in result.preempted:
            self._attempts.fail(decode_id, Code.HANDED_BACK, "preempted: other requests needed its blocks")
            del self._table[decode_id]
        for decode_id, message in result.failed:
            self._attempts.fail(decode_id, Code.ENGINE, message)
            del self._table[decode_id]
        for decode_id, message in result.refused:
            self._attempts.fail(decode_id, Code.INVALID, message)
            del self._table[decode_id]

    def _prefilled(self, attempt: Attempt, output: Output) -> None:
        """Reports the prefill of a prompt that this worker computed."""
        attempt.joined_at = now = time.monotonic()
        tokens = attempt.prompt_tokens + attempt.output_tokens
        self._counts.prompt_tokens += tokens
        began = now - output.prefill_seconds
        self._link.send(
            messages.Prefilled(
                output.id, began - output.queue_seconds, began, now, tokens, output.cached_tokens
            )
        )

    def _finished(self, decode_id: bytes) -> None:
        """Removes an attempt that got its last token. The engine has already freed its blocks."""
        self._attempts.end(decode_id)
        attempt = self._table.pop(decode_id)
        self._link.send(messages.Decoded(decode_id, attempt.joined_at, time.monotonic(), attempt.tokens))
