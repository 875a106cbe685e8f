"""The decode role: makes attempts of decodes, polls the KV receiver, and hands back what waits too long."""

import time
from functools import partial

from baton.decode_worker.attempt import DecodeAttempt
from baton.rpc import worker_pb2 as pb
from baton.worker.engine_process.engine_attempt import Resources
from baton.worker.engine_process.prefix_fetches import PrefixFetches
from baton.worker.engine_process.roles import Role
from baton.worker.engine_process.states import State
from baton.worker.messages import FromRouter
from baton.worker.requests import content_source, engine_request, prefill_source

_WAITING = (State.FETCHING, State.TAKING, State.WITHOUT_KV)


class DecodeRole(Role):
    """Decodes requests. Their KV comes from another worker, or is computed here.

    Polls the KV receiver, which also fetches prefixes and parts of prompts for the prefill role. The receiver
    may write into reserved blocks while their attempt has a lease `Writing`.
    """

    handles = ("decode", "retarget")

    def __init__(self, shared: Resources, prefix_fetches: PrefixFetches) -> None:
        self._shared = shared
        self._attempts = shared.attempts
        self._receiver = shared.receiver
        self._prefix_fetches = prefix_fetches

    def handle(self, message: FromRouter, content: pb.SubmitDecode | pb.Retarget) -> None:
        if isinstance(content, pb.SubmitDecode):
            self._submit(message, content)
            return
        attempt = self._attempts.find(content.decode_id)
        if isinstance(attempt, DecodeAttempt) and attempt.stream == message.stream:
            attempt.retarget(content.source, content.output_ids[:])

    def _submit(self, message: FromRouter, submit: pb.SubmitDecode) -> None:
        origin, source = message.origin, prefill_source(submit)
        assert origin is not None, "it submits an attempt"
        request = engine_request(origin, submit.request, message.pixels)
        attempt = DecodeAttempt(
            shared=self._shared,
            stream=message.stream,
            origin=origin,
            tokens=len(request.prompt_ids) + len(request.output_ids),
            prompt_tokens=len(request.prompt_ids),
            source=source,
            deadline=time.monotonic() + submit.request.timeout_ms / 1000,
        )
        if not self._attempts.open(attempt):
            return
        self._shared.trace.instant("taken", attempt=request.id.hex())
        if source is not None and source.incarnation == self._shared.incarnation:
            attempt.take_prefill(source.prefill_id)
        elif source is not None:
            attempt.reserve(request)
        elif self._prefix_fetches.get(
            attempt, request, content_source(submit), partial(attempt.compute, request)
        ):
            attempt.to(State.IMPORTING)
        else:
            attempt.compute(request, 0)

    def move_kv(self, spare: float) -> None:
        for event in self._receiver.poll(spare):
            event.owner.handle(event)
        self._prefix_fetches.expire()
        now = time.monotonic()
        decodes = [attempt for attempt in self._attempts if isinstance(attempt, DecodeAttempt)]
        for attempt in decodes:
            if attempt.state in _WAITING or (attempt.again is not None and not attempt.closed):
                attempt.go_on(now)
