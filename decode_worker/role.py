"""The decode role: handles messages, reports of the KV receiver, and the outputs of engine steps."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from baton.engine import Engine, EngineRequest, Output, StepResult
from baton.engine.core.live_request import LiveRequest
from baton.kv_transfer import Began, Closed, FetchFailed, Injected, Receiver
from baton.kv_transfer.endpoint.receiver import Event
from baton.worker import messages
from baton.worker.engine_process.attempts import Attempt, logprobs_of
from baton.worker.engine_process.loop import Parts, Role
from baton.worker.engine_process.prefix_fetches import PrefixFetches
from baton.worker.messages import Code, PrefillSource, ToEngine


class Phase(Enum):
    FETCHING = auto()  # the receiver may write into the blocks
    IMPORTING = auto()  # the prefix cache fetches the beginning of the prompt; the attempt has no blocks
    TAKING = auto()  # a prefill of this worker has the KV, or will have it; the attempt has no blocks
    FAILED = auto()  # the KV did not arrive; the blocks wait for a Retarget, a Cancel or the deadline
    RUNNING = auto()  # in the engine's batch: the request decodes, or its prompt is prefilled on this worker


_WAITING = (Phase.FETCHING, Phase.TAKING, Phase.FAILED)


@dataclass(slots=True, eq=False, kw_only=True)
class DecodeAttempt(Attempt):
    """One request, from its reservation to its end."""

    prompt_tokens: int
    source: PrefillSource | None  # None: the prompt is prefilled on this worker
    deadline: float  # time.monotonic(), before which the KV must arrive
    phase: Phase = Phase.FETCHING
    block_ids: Sequence[int] = ()  # of a reservation
    state_slot: int = 0  # of a reservation, if the model has state layers
    cached: int = 0  # positions from the start on, with their KV in the prefix cache already
    joined_at: float = 0.0  # time.monotonic() at which the request joined the batch with its prompt computed
    first_token_at: float | None = None  # when COMMIT named the first token; None after the second token
    sampled: int = 0  # tokens that this worker sampled


class DecodeRole(Role):
    """Decodes requests. Their KV comes from another worker, or is computed here.

    Owns the KV receiver, which also fetches prefixes for the prefill role. The receiver may write into
    reserved blocks. They are freed only after the receiver has reported Closed.
    """

    handles = (messages.Decode, messages.Retarget)

    def __init__(
        self,
        parts: Parts,
        engine: Engine,
        receiver: Receiver,
        prefix_fetches: PrefixFetches,
        take: Callable[[bytes, bytes], LiveRequest | bool | None],
        let_go: Callable[..., None],
        fetched: Callable[[Event], bool],
    ) -> None:
        """`prefix_fetches` share the receiver. `take`, `let_go` and `fetched` are those of `PrefillRole`."""
        self._attempts = parts.attempts
        self._counts = parts.counts
        self._trace = parts.trace
        self.engine = engine
        self._receiver = receiver
        self._take = take
        self._let_go = let_go
        self._fetched = fetched
        self._prefix_fetches = prefix_fetches
        self._incarnation = parts.config.incarnation
        self._table = parts.attempts.table(DecodeAttempt)

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
        return self._receiver.idle

    # ------------------------------------------------------------ messages

    def handle(self, message: ToEngine) -> None:
        match message:
            case messages.Decode():
                self._submit(message)
            case messages.Retarget():
                attempt = self._table.get(message.decode_id)
                if attempt is not None and attempt.stream == message.stream:
                    self._retarget(attempt, message)
            case _:
                raise AssertionError(f"not of this role: {message}")

    def shutdown(self) -> None:
        self._receiver.shutdown()

    def _submit(self, message: messages.Decode) -> None:
        request, source = message.work.request, message.source
        attempt = DecodeAttempt(
            stream=message.stream,
            origin=message.work.origin,
            tokens=len(request.prompt_ids) + len(request.output_ids),
            prompt_tokens=len(request.prompt_ids),
            source=source,
            deadline=time.monotonic() + message.work.timeout,
        )
        if not self._attempts.open(attempt):
            return
        self._trace.instant("taken", attempt=request.id.hex())
        if source is None:
            self._compute(request, attempt, message.content)
        elif source.incarnation == self._incarnation:
            self._take_here(attempt, source.prefill_id)
        elif live := self.engine.reserve(request, owner=attempt):
            attempt.live, attempt.cached, attempt.state_slot = live, live.num_cached, live.state_slot
            attempt.block_ids = tuple(live.blocks)
            self._attempts.reserved(attempt)
            self._fetch(attempt)
        else:
            self._refuse(attempt, Code.NO_ROOM, self._no_room())

    def _compute(
        self, request: EngineRequest, attempt: DecodeAttempt, content: messages.ContentSource | None
    ) -> None:
        """Computes a prompt here, without what the prefix cache gets from another worker first."""

        def start(fetched: int) -> None:
            attempt.fetched = fetched
            self._trace.instant("added", attempt=request.id.hex())
            attempt.live = self.engine.start(request, owner=attempt)
            if attempt.live is not None:
                attempt.phase = Phase.RUNNING
                self._attempts.reserved(attempt)
            else:
                self._refuse(attempt, Code.NO_ROOM, self._no_room())

        if self._prefix_fetches.get(request, content, start):
            attempt.phase = Phase.IMPORTING
        else:
            start(0)

    def _refuse(self, attempt: DecodeAttempt, code: Code, message: str) -> None:
        """Ends an attempt that has no blocks."""
        del self._table[attempt.id]
        self._attempts.fail(attempt, code, message)

    def _take_here(self, attempt: DecodeAttempt, prefill_id: bytes) -> None:
        """The KV is in this worker already. The request needs neither blocks nor a transfer.

        A held prefill never waits for another attempt, and it needs only a seat to go on. A running request
        leaves its seat in the end, so this wait forms no circle.
        """
        if self._take(prefill_id, attempt.id) is None:
            text = f"there is no prefill {prefill_id.hex()[:8]} on this worker"
            self._refuse(attempt, Code.HANDED_BACK, text)
        else:
            attempt.phase = Phase.TAKING
            self._attempts.reserved(attempt)

    def _resume(self, attempt: DecodeAttempt) -> None:
        """Resumes the prefill that the attempt takes, if it is ready and there is a seat."""
        assert attempt.source is not None, "it takes a prefill"
        prefill_id = attempt.source.prefill_id
        live = self._take(prefill_id, attempt.id)
        if live is None:
            self._end(attempt, Code.HANDED_BACK, "the prefill has ended before")
        elif isinstance(live, LiveRequest) and (
            output := self.engine.resume(live, attempt.id, owner=attempt)
        ):
            attempt.live = live
            self._let_go(prefill_id, attempt.id, resumed=True)
            attempt.phase = Phase.RUNNING
            attempt.joined_at = time.monotonic()
            self._send(attempt, output)

    def _retarget(self, attempt: DecodeAttempt, message: messages.Retarget) -> None:
        """Fetches the KV from another prefill. A request that already has its KV ignores the message."""
        if attempt.phase not in (Phase.FETCHING, Phase.FAILED):
            return
        if message.source.incarnation == self._incarnation:
            self._end(attempt, Code.HANDED_BACK, "the new prefill is on this worker: submit again")
            return
        live = attempt.live
        assert live is not None, "it is a reservation"
        try:
            extended = self.engine.extend_reservation(live, message.output_ids)
        except ValueError as error:
            self._end(attempt, Code.INVALID, str(error))
            return
        if not extended:
            self._end(attempt, Code.NO_ROOM, self._no_room())
            return
        attempt.block_ids = tuple(live.blocks)
        attempt.tokens = attempt.prompt_tokens + len(message.output_ids)
        attempt.source = message.source
        self._fetch(attempt)

    def _no_room(self) -> str:
        self._counts.no_room += 1
        return f"{self.engine.blocks_free} of {self.engine.num_blocks} blocks are free"

    def _fetch(self, attempt: DecodeAttempt) -> None:
        """Starts a fetch of what the prefix cache lacks. It replaces an earlier fetch of the same attempt."""
        source = attempt.source
        assert source is not None
        attempt.phase = Phase.FETCHING
        self._receiver.fetch(
            attempt.id,
            prefill_id=source.prefill_id,
            kv_address=source.kv_address,
            incarnation=source.incarnation,
            attempt=source.attempt,
            block_ids=attempt.block_ids,
            num_tokens=attempt.tokens,
            start=attempt.cached,
            state_slot=attempt.state_slot,
        )

    # ------------------------------------------------------------ ends

    def _end(self, attempt: DecodeAttempt, code: Code, message: str) -> None:
        """Ends an attempt and tells its router why."""
        self._attempts.fail(attempt, code, message)
        self.cancel(attempt.id)

    def cancel(self, decode_id: bytes) -> None:
        attempt = self._table[decode_id]
        if attempt.closed:
            return
        if attempt.phase is Phase.TAKING:
            assert attempt.source is not None, "it takes a prefill"
            del self._table[decode_id]
            self._let_go(attempt.source.prefill_id, decode_id, resumed=False)
        elif attempt.phase is Phase.FETCHING:
            attempt.closed = True
            self._receiver.cancel(decode_id)
        else:
            self._forget(decode_id)

    def _forget(self, decode_id: bytes) -> None:
        """Removes an attempt when the receiver no longer writes into its blocks."""
        attempt = self._table.pop(decode_id)
        self._prefix_fetches.cancel(decode_id)
        if attempt.live is not None:
            self.engine.cancel(attempt.live)

    # ------------------------------------------------------------ KV

    def move_kv(self, spare: float) -> None:
        for event in self._receiver.poll(spare):
            attempt = self._table.get(event.decode_id)
            if attempt is None:
                if not self._fetched(event):
                    assert not isinstance(event, Began), "only parts of prompts have ranges"
                    self._prefix_fetches.handle(event)
                continue
            match event:
                case Injected():
                    self._join(attempt, event)
                case FetchFailed():
                    attempt.phase = Phase.FAILED
                    if event.reason == "finished":
                        self._end(attempt, Code.FINISHED, "prefill's token is the last")
                        continue
                    assert attempt.source is not None
                    self._attempts.fail(attempt, Code.KV_FAILED, event.reason, attempt.source.prefill_id)
                case Closed():
                    self._forget(event.decode_id)
        self._prefix_fetches.expire()
        self.engine.joins_at = self._receiver.next_injection
        now = time.monotonic()
        for attempt in [of for of in self._table.values() if of.phase in _WAITING]:
            if attempt.deadline < now:
                text = "the KV did not arrive before the request's deadline"
                self._end(attempt, Code.HANDED_BACK, text)
            elif attempt.phase is Phase.TAKING:
                self._resume(attempt)

    def spare(self) -> Iterator[DecodeAttempt]:
        """Reservations whose KV has not begun to come."""
        for decode_id, attempt in self._table.items():
            waits = attempt.phase is Phase.FETCHING and not self._receiver.began(decode_id)
            if not attempt.closed and (waits or attempt.phase is Phase.FAILED):
                yield attempt

    def drop(self, attempt: DecodeAttempt) -> None:
        self._end(attempt, Code.HANDED_BACK, "prompts on this worker need its blocks")

    def _join(self, attempt: DecodeAttempt, event: Injected) -> None:
        stats, first, vocabulary = event.stats, event.first_token, self.engine.model_config.vocab_size
        attempt.phase = Phase.RUNNING
        attempt.joined_at = time.monotonic()
        attempt.first_token_at = stats.commit_at
        fetch_us = stats.fetch_seconds * 1e6
        self._trace.instant("joined", decode=attempt.id.hex(), bytes=stats.bytes, fetch_us=fetch_us)
        self._attempts.report(messages.KVInjected(attempt.origin, stats))
        # These token ids come from a peer. An out-of-range id would crash the engine or the router.
        if (largest := max((first.token_id, *first.top_ids))) >= vocabulary:
            text = f"COMMIT names token {largest}, beyond the vocabulary of {vocabulary}"
            self._end(attempt, Code.ENGINE, text)
            return
        assert attempt.live is not None, "its KV came into its blocks"
        output = self.engine.join(attempt.live, first.token_id, logprobs_of(first))
        # This repeats prefill's token. The router emits each index once, from the worker that sends it first.
        self._send(attempt, output)

    # ------------------------------------------------------------ steps

    def after_step(self, result: StepResult) -> None:
        for output in result.outputs:
            attempt = self._table.get(output.id)
            if attempt is None:
                continue
            if attempt.source is None and not attempt.sampled:
                self._prefilled(attempt, output)
            if attempt.first_token_at is not None:
                self._attempts.report(messages.SecondToken(time.monotonic() - attempt.first_token_at))
                attempt.first_token_at = None
            attempt.sampled += 1
            self._counts.count(output)
            self._send(attempt, output)
        preempted = "preempted: other requests needed its blocks"
        for code, ended in (
            (Code.HANDED_BACK, ((decode_id, preempted) for decode_id in result.preempted)),
            (Code.ENGINE, result.failed),
            (Code.INVALID, result.refused),
        ):
            for decode_id, message in ended:
                if (attempt := self._table.get(decode_id)) is not None:
                    self._refuse(attempt, code, message)

    def after_tokens(self, result: StepResult) -> None:
        pass

    def _prefilled(self, attempt: DecodeAttempt, output: Output) -> None:
        """Reports the prefill of a prompt that this worker computed."""
        self._trace.instant("first token", prefill=output.id.hex(), computing=output.prefill_seconds)
        attempt.joined_at = time.monotonic()
        self._counts.count_prompt(attempt.tokens, output.cached_tokens, attempt.fetched)
        self._attempts.prefilled(attempt, output)

    def _send(self, attempt: DecodeAttempt, output: Output) -> None:
        """Sends a token. The last one ends the attempt: the engine has already freed its blocks."""
        self._attempts.token(attempt, output)
        if output.finish_reason:
            del self._table[attempt.id]
            done = messages.Decoded(attempt.origin, attempt.joined_at, time.monotonic(), attempt.sampled)
            self._attempts.report(done)
