"""Passes the engine's reports of its prefills to the KV sender and to their routers, and never waits."""

from collections.abc import Mapping, Sequence

from baton.kv_transfer import Sender, TraceWriter
from baton.worker.engine_process.attempts import Attempts


class SenderSink:
    """The engine's hooks of prefills. `sender` is set after the engine is built, because it reads the
    engine's cache."""

    sender: Sender

    def __init__(self, trace: TraceWriter, attempts: Attempts) -> None:
        self._trace = trace
        self._attempts = attempts
        self.opened: set[bytes] = set()
        """Opened prefills. The sender may read their blocks until it reports them released."""
        self.awaited: set[bytes] = set()
        """Prefills that have not started, with routers that wait for that."""
        self.layers_ready = 0
        """Layers of all steps that hand over KV. With several ranks, all ranks count the same."""
        self._cached: list[tuple[bytes, int]] = []  # prefills of the next step: positions in the prefix cache

    def prefill_started(
        self, request_id: bytes, block_ids: Sequence[int], num_tokens: int, num_cached: int, state_slot: int
    ) -> None:
        self.opened.add(request_id)
        self.sender.open(request_id, block_ids, num_tokens, state_slot)
        if num_cached:
            self._cached.append((request_id, num_cached))
        if request_id in self.awaited:
            self.awaited.remove(request_id)
            self._attempts.prefill_started(request_id)

    def layer_done(self, layer: int, chunks: Mapping[bytes, range]) -> None:
        self.layers_ready += 1
        # Not before: another rank may still be computing cached positions until it comes to this step.
        for prefill_id, num_cached in self._cached:
            self.sender.ready(prefill_id, None, 0, num_cached)
        self._cached.clear()
        for prefill_id, chunk in chunks.items():
            self.sender.ready(prefill_id, layer, chunk.start, chunk.stop)
        if self._trace.enabled:
            for prefill_id, chunk in chunks.items():
                self._trace.instant(
                    "layer", prefill=prefill_id.hex(), layer=layer, start=chunk.start, stop=chunk.stop
                )
