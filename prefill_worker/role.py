"""The prefill role: makes attempts of prefills, and passes to them what engine and KV sender report."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import baton.kv_transfer as kv
from baton.engine.core.live_request import LiveRequest
from baton.prefill_worker.attempt import PrefillAttempt
from baton.prefill_worker.parts import PartAttempt, SplitSteps, pair_ids
from baton.prefill_worker.serving import ServedPrefixes
from baton.rpc import worker_pb2 as pb
from baton.worker.engine_process.engine_attempt import BatonResources, Reading, Resources
from baton.worker.engine_process.prefix_fetches import PrefixFetches
from baton.worker.engine_process.roles import Role
from baton.worker.engine_process.states import State
from baton.worker.messages import FromRouter
from baton.worker.requests import content_source, engine_request


class SenderSink:
    """The engine's hooks of prefills: passes reports to the KV sender and to their routers.

    `attach` is called after the engine is built, because `sender` and `split` use its cache.
    """

    sender: kv.Sender
    split: SplitSteps

    def __init__(self, trace: kv.TraceWriter) -> None:
        self._trace = trace
        self.layers_ready = 0
        """Layers of all steps that hand over KV. With several ranks, all ranks count the same."""
        self._cached: list[tuple[bytes, int]] = []  # prefills of the next step: positions in the prefix cache

    def attach(self, shared: BatonResources) -> SplitSteps:
        self.sender = shared.sender
        self.split = SplitSteps(shared.receiver, shared.sender, shared.tick)
        return self.split

    def prefill_started(self, live: LiveRequest) -> None:
        """The owner of the request is its prefill."""
        prefill: PrefillAttempt = live.owner
        prefill.open(len(live.token_ids))
        if live.num_cached:
            self._cached.append((prefill.id, live.num_cached))

    def layer_done(self, layer: int, chunks: Mapping[PrefillAttempt, range]) -> bool:
        """As in `Hooks`: True if the KV that all these prompts await will not come."""
        self.layers_ready += 1
        # Not before: another rank may still be computing cached positions until it comes to this step.
        for request_id, num_cached in self._cached:
            self.sender.ready(request_id, None, 0, num_cached)
        self._cached.clear()
        parts: list[tuple[PartAttempt, range]] = []
        for prefill, chunk in chunks.items():
            if isinstance(prefill, PartAttempt):
                parts.append((prefill, chunk))
            else:
                self.sender.ready(prefill.id, layer, chunk.start, chunk.stop)
        is_useless = bool(parts) and self.split.layer_done(layer, parts) and len(parts) == len(chunks)
        if self._trace.enabled:
            for prefill, chunk in chunks.items():
                self._trace.instant(
                    "layer", prefill=prefill.id.hex(), layer=layer, start=chunk.start, stop=chunk.stop
                )
        return is_useless


class PrefillRole(Role):
    """Prefills prompts for a handover, or for their first token alone. Polls the KV sender.

    The sender may read the blocks of a prefill while this has a lease `Reading`.
    """

    handles = ("prefill",)

    def __init__(self, shared: Resources, split: SplitSteps | None, prefix_fetches: PrefixFetches) -> None:
        """`split` None: the engine computes no parts of prompts."""
        self._shared = shared
        self._attempts = shared.attempts
        self._sender = shared.sender
        self._split = split
        self._prefix_fetches = prefix_fetches
        self._served = ServedPrefixes(shared.engine.prefix_exchange, self._sender, shared.trace)

    @property
    def idle(self) -> bool:
        return self._served.idle

    def handle(self, message: FromRouter, content: pb.SubmitPrefill) -> None:
        assert message.origin is not None, "it submits an attempt"
        request = engine_request(message.origin, content.request, message.pixels)
        fields: dict[str, Any] = {
            "shared": self._shared,
            "stream": message.stream,
            "origin": message.origin,
            "tokens": len(request.prompt_ids) + len(request.output_ids),
            "handover": content.handover,
            "awaited": content.handover and content.report_start,
        }
        prefill = PrefillAttempt(**fields)
        if content.plan:
            if self._split is None:
                self._attempts.fail(prefill, pb.FAILURE_CODE_INVALID, "this engine computes no such parts")
                return
            ids = pair_ids(request.id, content.plan)
            prefill = PartAttempt(steps=self._split, other_ids=ids, **fields)
        if not self._attempts.open(prefill):
            return
        self._shared.trace.instant("taken", attempt=request.id.hex())
        if isinstance(prefill, PartAttempt):
            prefill.start(request, content.plan)
            return
        if content.handover:
            prefill.reading = Reading(prefill, request.id)
            self._sender.expect(request.id)
        place = content_source(content)
        if self._prefix_fetches.get(prefill, request, place, partial(prefill.add, request)):
            prefill.to(State.IMPORTING)
        else:
            prefill.add(request, 0)

    def move_kv(self, spare: float) -> None:
        for event in self._sender.poll():
            if isinstance(event, kv.ContentWanted):
                self._served.serve(event)
            else:
                event.owner.handle(event)
        for attempt in [*self._attempts]:
            if isinstance(attempt, PartAttempt) and attempt.again is not None and not attempt.closed:
                attempt.again()
