"""Serves the prefix cache to other workers: what they ask for stays in its blocks until it is sent.

The life of a pin: a worker asks for chunks (`ContentWanted`). The tiers below the device bring what they
have. The cache keeps the blocks until the sender reports `Released`.
"""

from dataclasses import dataclass
from typing import Any

from baton.kv_names import CHUNK_TOKENS
from baton.kv_transfer import ContentWanted, Released, TraceWriter
from baton.worker.engine_process.engine_protocol import Exchange, SendingEnd


@dataclass(slots=True, eq=False)
class Serving:
    """A pin that another worker reads, as its owner at the sender."""

    pin: Any
    under_way: "set[Serving]"

    def handle(self, event: Released) -> None:
        self.under_way.remove(self)
        self.pin.end(copied=event.reason == "acked" or None)


class ServedPrefixes:
    """Owns the pins of the prefix cache. `exchange` None: there is no cache, and nothing is served."""

    def __init__(self, exchange: Exchange | None, sender: SendingEnd, trace: TraceWriter) -> None:
        self._exchange = exchange
        self._sender = sender
        self._trace = trace
        self._under_way: set[Serving] = set()

    @property
    def idle(self) -> bool:
        return not self._under_way

    def serve(self, wanted: ContentWanted) -> None:
        """Sends what the cache has of the chunks, its tiers below the device included."""
        exchange = self._exchange
        if exchange is None:
            self._sender.close(wanted.pin_id, "unsupported")
        elif not exchange.bring(wanted.chunks, wanted.first_chunk, lambda: self._pin(exchange, wanted)):
            self._pin(exchange, wanted)

    def _pin(self, exchange: Exchange, wanted: ContentWanted) -> None:
        first, pin = wanted.first_chunk, exchange.pin_prefix(wanted.chunks, wanted.first_chunk)
        if pin is None:
            self._sender.close(wanted.pin_id, "gone")
            return
        self._trace.instant("pinned", chunks=pin.num_chunks)
        serving = Serving(pin, self._under_way)
        self._under_way.add(serving)
        start, stop = (chunk * CHUNK_TOKENS for chunk in (first, first + pin.num_chunks))
        self._sender.serve(wanted.pin_id, pin.table, start, stop, pin.state_slot, serving)
