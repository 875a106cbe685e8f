"""The decode role: makes attempts of decodes, polls the KV receiver, and hands back what waits too long."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from baton.engine import Engine, EngineRequest, Output
from baton.engine.core.live_request import LiveRequest
from baton.kv_transfer import Began, Closed, FetchFailed, Injected, Receiver
from baton.kv_transfer.protocol.messages import Reason
from baton.worker import messages
from baton.worker.engine_process.attempts import Attempt, Lease, State, Writing, logprobs_of
from baton.worker.engine_process.loop import Context, Role
from baton.worker.engine_process.prefix_fetches import PrefixFetches
from baton.worker.messages import Code, PrefillSource, ToEngine

_WAITING = (State.FETCHING, State.TAKING, State.WITHOUT_KV)


@dataclass(slots=True, eq=False)
class Taking(Lease):
    """The decode waits for the blocks of a prefill on this worker.

    A held prefill never waits for another attempt, and it needs only a seat to go on. A running request
    leaves its seat in the end, so this wait forms no circle.
    """

    prefill: Attempt

    def revoke(self, reason: Reason) -> None:
        self.end()
        self.prefill.let_go(self.attempt, resumed=False)


@dataclass(slots=True, eq=False, kw_only=True)
class DecodeAttempt(Attempt):
    """One request, from its reservation to its end."""

    role: "DecodeRole"
    prompt_tokens: int
    source: PrefillSource | None  # None: the prompt is prefilled on this worker
    deadline: float  # time.monotonic(), before which the KV must arrive
    writing: Writing | None = None  # of the fetch that is under way
    taking: Taking | None = None
    joined_at: float = 0.0  # time.monotonic() at which the request joined the batch with its prompt computed
    first_token_at: float | None = None  # when COMMIT named the first token; None after the second token
    num_sampled: int = 0  # tokens that this worker sampled

    # ------------------------------------------------------------ to its KV

    def compute(self, request: EngineRequest, fetched: int) -> None:
        """Computes the prompt here. `fetched`: as in the attribute."""
        self.fetched = fetched
        self.role.trace.instant("added", attempt=self.id.hex())
        self.live = self.role.engine.start(request, owner=self)
        if self.live is not None:
            self.to(State.COMPUTING)
            self.attempts.reserved(self)
        else:
            self.lost(Code.NO_ROOM, self.role.no_room())

    def reserve(self, request: EngineRequest) -> None:
        """Reserves blocks for the KV of another worker, and fetches it."""
        self.live = self.role.engine.reserve(request, owner=self)
        if self.live is None:
            self.lost(Code.NO_ROOM, self.role.no_room())
            return
        self.attempts.reserved(self)
        self._fetch()

    def _fetch(self) -> None:
        """Starts a fetch of what the prefix cache lacks. It replaces an earlier fetch of the attempt."""
        source, receiver, live = self.source, self.role.receiver, self.live_request
        assert source is not None
        if self.writing is None:
            self.to(State.FETCHING)
            self.writing = Writing(self, receiver, self.id)
        receiver.fetch(
            self.id,
            prefill_id=source.prefill_id,
            kv_address=source.kv_address,
            incarnation=source.incarnation,
            attempt=source.attempt,
            block_ids=tuple(live.blocks),
            num_tokens=self.tokens,
            start=live.num_cached,
            state_slot=live.state_slot,
            owner=self.writing,
        )

    def retarget(self, source: PrefillSource, output_ids: Sequence[int]) -> None:
        """Fetches the KV from another prefill. A request that already has its KV ignores the message."""
        if self.state not in (State.FETCHING, State.WITHOUT_KV):
            return
        if source.incarnation == self.role.incarnation:
            self.lost(Code.HANDED_BACK, "the new prefill is on this worker: submit again")
            return
        try:
            extended = self.role.engine.extend_reservation(self.live_request, output_ids)
        except ValueError as error:
            self.lost(Code.INVALID, str(error))
            return
        if not extended:
            self.lost(Code.NO_ROOM, self.role.no_room())
            return
        self.tokens = self.prompt_tokens + len(output_ids)
        self.source = source
        self._fetch()

    def written(self, event: Injected | FetchFailed | Closed | Began) -> None:
        self.writing = None
        if self.closed:
            return
        if isinstance(event, Injected):
            self._join(event)
            return
        assert isinstance(event, FetchFailed), "only an attempt that has ended closes its fetch"
        self.to(State.WITHOUT_KV)
        if event.reason == "finished":
            self.lost(Code.FINISHED, "prefill's token is the last")
        else:
            assert self.source is not None
            self.attempts.fail(self, Code.KV_FAILED, event.reason, self.source.prefill_id)

    def _join(self, event: Injected) -> None:
        role, stats, first = self.role, event.stats, event.first_token
        vocabulary = role.engine.model_config.vocab_size
        self.to(State.DECODING)
        self.joined_at = time.monotonic()
        self.first_token_at = stats.commit_at
        fetch_us = stats.fetch_seconds * 1e6
        role.trace.instant("joined", decode=self.id.hex(), bytes=stats.bytes, fetch_us=fetch_us)
        self.attempts.report(messages.KVInjected(self.origin, stats))
        # These token ids come from a peer. An out-of-range id would crash the engine or the router.
        if (largest := max((first.token_id, *first.top_ids))) >= vocabulary:
            text = f"COMMIT names token {largest}, beyond the vocabulary of {vocabulary}"
            self.lost(Code.ENGINE, text)
            return
        output = role.engine.join(self.live_request, first.token_id, logprobs_of(first))
        # This repeats prefill's token. The router emits each index once, from the worker that sends it first.
        self._send(output)

    def take_prefill(self, prefill_id: bytes) -> None:
        """The KV is in this worker already. The request needs neither blocks nor a transfer."""
        prefill = self.attempts.find(prefill_id)
        if prefill is None or prefill.take(self) is None:
            self.lost(Code.HANDED_BACK, f"there is no prefill {prefill_id.hex()[:8]} on this worker")
            return
        self.taking = Taking(self, prefill)
        self.to(State.TAKING)
        self.attempts.reserved(self)

    def _resume(self, taking: Taking) -> None:
        """Resumes the prefill that the attempt takes, if it is ready and there is a seat."""
        live = taking.prefill.take(self)
        if live is None:
            self.lost(Code.HANDED_BACK, "the prefill has ended before")
        elif isinstance(live, LiveRequest) and (output := self.role.engine.resume(live, self.id, owner=self)):
            self.live = live
            taking.end()
            self.taking = None
            taking.prefill.let_go(self, resumed=True)
            self.to(State.DECODING)
            self.joined_at = time.monotonic()
            self._send(output)

    def go_on(self, now: float) -> None:
        """Goes on if its prefill is ready. Hands the request back if its KV is too late."""
        if self.deadline < now:
            self.lost(Code.HANDED_BACK, "the KV did not arrive before the request's deadline")
        elif self.taking is not None:
            self._resume(self.taking)

    @property
    def is_spare(self) -> bool:
        """Its KV has not begun to come."""
        waits = self.state is State.FETCHING and not self.role.receiver.began(self.id)
        return waits or self.state is State.WITHOUT_KV

    def drop(self) -> None:
        self.lost(Code.HANDED_BACK, "prompts on this worker need its blocks")

    # ------------------------------------------------------------ tokens

    def sampled(self, output: Output) -> None:
        if not self.num_sampled and self.state is State.COMPUTING:
            self._prefilled(output)
        if self.first_token_at is not None:
            self.attempts.report(messages.SecondToken(time.monotonic() - self.first_token_at))
            self.first_token_at = None
        self.num_sampled += 1
        self.role.counts.count(output)
        self._send(output)

    def _prefilled(self, output: Output) -> None:
        """Reports the prefill of a prompt that this worker computed."""
        self.to(State.DECODING)
        self.role.trace.instant("first token", prefill=self.id.hex(), computing=output.prefill_seconds)
        self.joined_at = time.monotonic()
        self.role.counts.count_prompt(self.tokens, output.cached_tokens, self.fetched)
        self.attempts.prefilled(self, output)

    def _send(self, output: Output) -> None:
        """Sends a token. The last one ends the attempt: the engine has already freed its blocks."""
        self.attempts.token(self, output)
        if output.finish_reason:
            self.close("finished")
            done = messages.Decoded(self.origin, self.joined_at, time.monotonic(), self.num_sampled)
            self.attempts.report(done)

    def stop(self) -> None:
        if self.live is not None:
            self.role.engine.cancel(self.live)


class DecodeRole(Role):
    """Decodes requests. Their KV comes from another worker, or is computed here.

    Owns the KV receiver, which also fetches prefixes and parts of prompts for the prefill role. The receiver
    may write into reserved blocks while their attempt has a lease `Writing`.
    """

    handles = (messages.Decode, messages.Retarget)

    def __init__(
        self, context: Context, engine: Engine, receiver: Receiver, prefix_fetches: PrefixFetches
    ) -> None:
        """`prefix_fetches` share the receiver."""
        self.counts = context.counts
        self.trace = context.trace
        self.engine = engine
        self.receiver = receiver
        self.incarnation = context.config.incarnation
        self._attempts = context.attempts
        self._prefix_fetches = prefix_fetches

    @property
    def kv_fd(self) -> int:
        return self.receiver.fileno()

    @property
    def poll_within(self) -> float | None:
        return self.receiver.poll_within

    @property
    def empty(self) -> bool:
        return self.receiver.idle

    def handle(self, message: ToEngine) -> None:
        match message:
            case messages.Decode():
                self._submit(message)
            case messages.Retarget(stream, decode_id, source, output_ids):
                attempt = self._attempts.find(decode_id)
                if isinstance(attempt, DecodeAttempt) and attempt.stream == stream:
                    attempt.retarget(source, output_ids)
            case _:
                raise AssertionError(f"not of this role: {message}")

    def _submit(self, message: messages.Decode) -> None:
        request, source = message.work.request, message.source
        attempt = DecodeAttempt(
            role=self,
            stream=message.stream,
            origin=message.work.origin,
            tokens=len(request.prompt_ids) + len(request.output_ids),
            prompt_tokens=len(request.prompt_ids),
            source=source,
            deadline=time.monotonic() + message.work.timeout,
        )
        if not self._attempts.open(attempt):
            return
        self.trace.instant("taken", attempt=request.id.hex())
        if source is not None and source.incarnation == self.incarnation:
            attempt.take_prefill(source.prefill_id)
        elif source is not None:
            attempt.reserve(request)
        elif self._prefix_fetches.get(attempt, request, message.content, partial(attempt.compute, request)):
            attempt.to(State.IMPORTING)
        else:
            attempt.compute(request, 0)

    def no_room(self) -> str:
        """Counts a refusal, and says why."""
        self.counts.no_room += 1
        return f"{self.engine.blocks_free} of {self.engine.num_blocks} blocks are free"

    def move_kv(self, spare: float) -> None:
        for event in self.receiver.poll(spare):
            event.owner.handle(event)
        self._prefix_fetches.expire()
        self.engine.loop.joins_at = self.receiver.next_injection
        now = time.monotonic()
        for attempt in [of for of in self._attempts if of.state in _WAITING]:
            assert isinstance(attempt, DecodeAttempt), "these are states of decodes"
            attempt.go_on(now)

    def after_step(self) -> None:
        pass

    def after_tokens(self) -> None:
        pass

    def shutdown(self) -> None:
        self.receiver.shutdown()
