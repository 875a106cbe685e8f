"""The transport over staging arenas: a transfer process moves the bytes over TCP lanes, or with NIXL."""

from __future__ import annotations

from dataclasses import dataclass

from baton.kv_transfer.arena import ArenaEnd
from baton.kv_transfer.endpoint.receiver import ArenaReceiver
from baton.kv_transfer.endpoint.sender import ArenaSender
from baton.kv_transfer.trace import TraceWriter
from baton.kv_transfer.transport import PagedKV


@dataclass(frozen=True, slots=True)
class ArenaTransport:
    """Implements `transport.Transport`. The sender and the receiver that it opens own their channels."""

    sending: ArenaEnd
    receiving: ArenaEnd
    trace: TraceWriter
    exports: bool = False
    """Workers of one host may read slots of each other, instead of getting the bytes over TCP."""
    adopts: bool = False
    """With `exports`: the transfer process has the slots that peers read, and reads those of peers."""

    def sender(self, kv: PagedKV) -> ArenaSender:
        return ArenaSender(self.sending, kv, self.trace, exports=self.exports, adopts=self.adopts)

    def receiver(self, kv: PagedKV) -> ArenaReceiver:
        return ArenaReceiver(self.receiving, kv, self.trace, pulls=self.exports)
