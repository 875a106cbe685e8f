"""The decode role: makes attempts of decodes, polls the KV receiver, and hands back what waits too long."""

import time
from functools import partial

from baton.decode_worker.attempt import DecodeAttempt
from baton.worker import messages
from baton.worker.engine_process.engine_attempt import Resources
from baton.worker.engine_process.prefix_fetches import PrefixFetches
from baton.worker.engine_process.roles import Role
from baton.worker.engine_process.states import State
from baton.worker.messages import ToEngine

_WAITING = (State.FETCHING, State.TAKING, State.WITHOUT_KV)


class DecodeRole(Role):
    """Decodes requests. Their KV comes from another worker, or is computed here.

    Polls the KV receiver, which also fetches prefixes and parts of prompts for the prefill role. The receiver
    may write into reserved blocks while their attempt has a lease `Writing`.
    """

    handles = (messages.Decode, messages.Retarget)

    def __init__(self, shared: Resources, prefix_fetches: PrefixFetches) -> None:
        self._shared = shared
        self._attempts = shared.attempts
        self._receiver = shared.receiver
        self._prefix_fetches = prefix_fetches

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
            shared=self._shared,
            stream=message.stream,
            origin=message.work.origin,
            tokens=len(request.prompt_ids) + len(request.output_ids),
            prompt_tokens=len(request.prompt_ids),
            source=source,
            deadline=time.monotonic() + message.work.timeout,
        )
        if not self._attempts.open(attempt):
            return
        self._shared.trace.instant("taken", attempt=request.id.hex())
        if source is not None and source.incarnation == self._shared.incarnation:
            attempt.take_prefill(source.prefill_id)
        elif source is not None:
            attempt.reserve(request)
        elif self._prefix_fetches.get(attempt, request, message.content, partial(attempt.compute, request)):
            attempt.to(State.IMPORTING)
        else:
            attempt.compute(request, 0)

    def move_kv(self, spare: float) -> None:
        for event in self._receiver.poll(spare):
            event.owner.handle(event)
        self._prefix_fetches.expire()
        self._shared.engine.loop.joins_at = self._receiver.next_injection
        now = time.monotonic()
        decodes = [attempt for attempt in self._attempts if isinstance(attempt, DecodeAttempt)]
        for attempt in decodes:
            if attempt.state in _WAITING or (attempt.again is not None and not attempt.closed):
                attempt.go_on(now)
