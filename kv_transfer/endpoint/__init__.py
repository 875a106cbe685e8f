"""The engine process's half of KV transfer: what is copied, when, and by which rank.

A `Sender` reads KV of the engine's cache, and a `Receiver` writes KV to it. All their methods are for the
engine thread, and none blocks. The transfer process moves the bytes.
"""

from dataclasses import dataclass

from baton.kv_transfer.arena import ArenaEnd, Arenas
from baton.kv_transfer.endpoint.other_ranks import NO_RANKS, OtherRanks
from baton.kv_transfer.endpoint.receiver import Receiver
from baton.kv_transfer.endpoint.sender import Sender
from baton.kv_transfer.trace import TraceWriter
from baton.kv_transfer.transport import PagedKV


@dataclass(frozen=True, slots=True)
class Transport:
    """Opens the sender and the receiver of an engine, which own their channels."""

    sending: ArenaEnd
    receiving: ArenaEnd
    trace: TraceWriter
    exports: bool = False
    """Workers of one host may read slots of each other, instead of getting the bytes over TCP."""
    adopts: bool = False
    """With `exports`: the transfer process has the slots that peers read, and reads those of peers."""
    ranks: OtherRanks = NO_RANKS
    """Of the engine. They copy, too."""

    @classmethod
    def inherited(cls, arenas: Arenas, trace: TraceWriter) -> "Transport":
        """Of rank 0."""
        return cls(*arenas.ends(), trace, arenas.exports, arenas.adopts, OtherRanks(arenas.ranks()))

    def prepare(self, device: str) -> None:
        """As `device.host_pool.prepare`."""
        from baton.kv_transfer.device.host_pool import prepare  # torch: in engine processes only

        for end in (self.sending, self.receiving):
            prepare(end.arena, device)

    def sender(self, kv: PagedKV) -> Sender:
        return Sender(
            self.sending, kv, self.trace, exports=self.exports, adopts=self.adopts, ranks=self.ranks
        )

    def receiver(self, kv: PagedKV) -> Receiver:
        return Receiver(self.receiving, kv, self.trace, self.ranks)
