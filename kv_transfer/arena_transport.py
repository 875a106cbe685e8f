"""The transport over a staging arena: a transfer process moves the bytes, today over TCP lanes."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from kv_transfer.arena import Arena
from kv_transfer.receiver import ArenaReceiver
from kv_transfer.sender import ArenaSender
from kv_transfer.trace import TraceWriter
from kv_transfer.transport import PagedKV


@dataclass(frozen=True, slots=True)
class ArenaTransport:
    """Implements `transport.Transport`. The sender or receiver that it opens takes the channel over."""

    channel: socket.socket  # to the transfer process
    arena: Arena  # shared with the transfer process
    trace: TraceWriter

    def sender(self, kv: PagedKV) -> ArenaSender:
        return ArenaSender(self.channel, self.arena, kv, self.trace)

    def receiver(self, kv: PagedKV) -> ArenaReceiver:
        return ArenaReceiver(self.channel, self.arena, kv, self.trace)
