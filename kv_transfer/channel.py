"""The channel between two processes of a worker: `local_messages` over a SEQPACKET socketpair."""

import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from baton.kv_transfer.protocol.local_messages import Local

_PACKET = 48 << 10  # messages are packed together up to this size; a single one may be larger
_LARGEST = 256 << 10
_BUFFER = 1 << 20
_HOLD = 0.001  # seconds that a message may wait for others
_FEW = 4  # messages that wait for no more

_encode = msgspec.msgpack.Encoder().encode


class ChannelClosed(Exception):
    """The other process is gone."""


class Channel:
    """One end of a channel. Calls must not overlap, and none blocks.

    Messages that the socket does not take wait in `pending`."""

    def __init__(
        self, sock: socket.socket, receives: Any, on_blocked: Callable[[], object] = lambda: None,
        gone: Callable[[str], Exception] = ChannelClosed,
    ) -> None:  # fmt: skip
        """`receives`: the union of messages that come to this end. `on_blocked`: flush() is needed later.
        `gone`: makes what is raised when the other process is gone."""
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        self.sock = sock
        self.pending: list[bytes] = []  # encoded: posted, or the socket is full
        self.due = 0.0  # time.monotonic() when the first of what is posted should go
        self.full = False  # flush when there is room
        self._on_blocked = on_blocked
        self._gone = gone
        self._decode = msgspec.msgpack.Decoder(list[receives]).decode
        self._buffer = memoryview(bytearray(_LARGEST))

    def fileno(self) -> int:
        return self.sock.fileno()

    def post(self, message: msgspec.Struct) -> None:
        """Queues a message for the next `flush`. So the messages of one event share a packet."""
        self.pending.append(_encode(message))
        self.due = 0.0

    def hold(self, message: Local) -> None:
        """Queues a message until there are a few, or until `due`.

        A wakeup of the reader costs more than a message."""
        if not self.pending:
            self.due = time.monotonic() + _HOLD
        self.pending.append(_encode(message))
        if len(self.pending) >= _FEW:
            self.due = 0.0

    def send(self, *messages: Local) -> None:
        self.pending.extend(map(_encode, messages))
        if not self.full:
            self.flush()

    def flush(self) -> None:
        """Sends the messages that wait. Called when the socket is writable, or once in a while."""
        self.full = False
        while self.pending:
            count, size = 0, 0
            while count < len(self.pending) and (count == 0 or size + len(self.pending[count]) <= _PACKET):
                size += len(self.pending[count])
                count += 1
            packet = b"\xdd" + count.to_bytes(4, "big") + b"".join(self.pending[:count])  # a msgpack array
            try:
                self.sock.send(packet)
            except BlockingIOError:
                self.full = True
                self._on_blocked()
                return
            except OSError as e:
                raise self._gone(str(e)) from None
            del self.pending[:count]

    def receive(self) -> Sequence[Any]:
        """The messages of the next packet. None if no packet has come."""
        try:
            size = self.sock.recv_into(self._buffer)
        except BlockingIOError:
            return ()
        except OSError as e:
            raise self._gone(str(e)) from None
        if size == 0:
            raise self._gone("closed")
        return self._decode(self._buffer[:size])
