"""A lane: one TCP connection, cut into frames.

A lane belongs to one `Loop`. Its thread alone reads, writes and closes the socket; any thread may `push`.
Payloads go straight between socket and arena slot: `sendmsg` from it, `recvmsg_into` it, and the checksum is
computed here, piece by piece as they come and go, while the bytes are in this core's cache.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

import xxhash

from kv_transfer.process.loop import Loop
from kv_transfer.protocol.frame import (
    HEADER_BYTES,
    TRAILER_BYTES,
    FrameError,
    FrameType,
    Header,
    pack,
    parse,
    trailer,
)
from kv_transfer.protocol.hello import MAX_HELLO_BYTES
from kv_transfer.protocol.messages import MAX_CONTROL_BYTES
from kv_transfer.trace import TraceWriter

_PIECE = 1 << 20  # bytes: few enough for a core's cache, and enough for a wakeup
_BURST = 1 << 20  # bytes that one lane moves before the others of its loop have their turn
_LONG_BURST = 4 << 20  # the same of a lane that has its loop for itself
_EDGE_BYTES = TRAILER_BYTES + HEADER_BYTES  # between two payloads
_SO_RCVLOWAT = 18  # asm-generic/socket.h; the socket module has no name for it
_LONGEST_WAIT = struct.pack("ll", 0, 4000)  # of a call that waits for the kernel, a timeval


@dataclass(slots=True, eq=False)
class OutgoingFrame:
    """A KV frame on its way. Its slot is in use until the owner is told `frame_sent` or `frame_dropped`."""

    header: Header
    payload: memoryview
    slot: int
    started: float = 0.0


class LaneOwner(Protocol):
    """Who a lane reports to, from its loop. No method blocks."""

    def kv_begins(self, lane: Lane, header: Header) -> tuple[memoryview, Any] | None:
        """Where to put the payload, and a ticket for it; None: nowhere, read it away."""
        ...

    def kv_ends(self, lane: Lane, header: Header, ticket: Any, whole: bool | None) -> None:
        """The ticket comes back. `whole`: the checksum matched, or not; None: the lane ended in mid-frame."""
        ...

    def control(self, lane: Lane, header: Header, payload: memoryview) -> None: ...

    def frame_begins(self, frame: OutgoingFrame) -> bool:
        """The frame is next on the wire; False: it is no longer wanted (and has been dropped)."""
        ...

    def frame_sent(self, frame: OutgoingFrame) -> None: ...

    def frame_dropped(self, frame: OutgoingFrame) -> None: ...

    def lane_closed(self, lane: Lane, kind: str, why: str) -> None:
        """Last call. `kind` is a FrameError's kind, or "socket", "eof", or what `close_soon` was given."""
        ...


class Lane:
    def __init__(
        self, sock: socket.socket, loop: Loop, owner: LaneOwner, trace: TraceWriter, *, patient: bool
    ) -> None:
        """`patient`: have the kernel wait for much of a frame before it says that there is something. That
        costs fewer wakeups where cores are few, and speed where a core waits for nothing else."""
        sock.setblocking(True)  # each call says whether it waits
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _LONGEST_WAIT)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _LONGEST_WAIT)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 5)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 10_000)
        self.sock = sock
        self.owner = owner
        self.max_payload = 0  # of a KV frame; 0 until HELLO agreed on one
        self.may_wait = False  # for the kernel: no control message but PING comes or goes here
        self.opened = self.heard = time.monotonic()
        self.ticket: Any = None  # of the KV frame being received
        self.closing: tuple[str, str] | None = None
        self.closed = False
        self.loop = loop
        self._called = False  # `serve` is to be called, for what was pushed
        self._trace = trace
        # Outgoing. `push` appends and adds to _queued, the loop removes and adds to _sent.
        self._control: deque[bytes] = deque()
        self._frames: deque[OutgoingFrame] = deque()
        self._frame: OutgoingFrame | None = None  # of which not all is in _out yet, and
        self._at = 0  # so much is
        self._out: deque[tuple[memoryview, OutgoingFrame | None]] = deque()  # being written; whose end it is
        self._out_checksum = xxhash.xxh3_64()
        self._queued = 0
        self._sent = 0
        # Incoming.
        self._edge = memoryview(bytearray(_EDGE_BYTES))  # the trailer of one frame, the header of the next
        self._edge_got = TRAILER_BYTES
        self._header: Header | None = None  # of the frame being received
        self._payload = memoryview(b"")  # all of it; empty while it goes to scratch
        self._rest = 0  # bytes of the payload still to come
        self._checksum = xxhash.xxh3_64()  # of what came
        self._began = 0.0
        self._patient = patient
        self._low_water = 1

    @property
    def unsent(self) -> int:
        return self._queued - self._sent

    # ------------------------------------------------------------ any thread, under the owner's lock

    def push(self, kind: FrameType, transfer_id: bytes, payload: bytes, sender_rank: int = 0) -> None:
        """Queue a control message; it overtakes KV frames that have not begun."""
        header = Header(kind, transfer_id, length=len(payload), sender_rank=sender_rank)
        data = pack(header) + payload + trailer(xxhash.xxh3_64(payload))
        self._queued += len(data)
        self._control.append(data)
        self._call()

    def push_frame(self, frame: OutgoingFrame) -> None:
        self._queued += _EDGE_BYTES + len(frame.payload)
        self._frames.append(frame)
        self._call()

    def close_soon(self, kind: str, why: str) -> None:
        """Have the loop close it, after one attempt to write the control messages that are queued."""
        self.closing = self.closing or (kind, why)
        self.loop.wake(self.serve)

    def _call(self) -> None:
        if not self._called:
            self._called = True
            self.loop.wake(self.serve)

    # ------------------------------------------------------------ the loop's thread

    def serve(self, events: int = 0) -> None:
        """Read if `events` say so, write what there is; close on the first error."""
        self._called = False
        if self.closed:
            self._drop()  # pushed while its owner did not know yet
            return
        try:
            if self.closing is None and events & ~select.EPOLLOUT:
                self._read()
            self._write()
        except FrameError as e:
            self.close(e.kind, str(e))
        except OSError as e:
            self.close("socket", str(e))
        if self.closing is not None:
            self.close(*self.closing)

    def close(self, kind: str, why: str) -> None:
        """Close now, and give back every slot that the lane holds."""
        if self.closed:
            return
        self.closed = True
        self.loop.forget(self.sock.fileno())
        self.sock.close()
        if self.ticket is not None:
            assert self._header is not None
            ticket, self.ticket, self._payload = self.ticket, None, memoryview(b"")
            self.owner.kv_ends(self, self._header, ticket, None)
        self._drop()
        self.owner.lane_closed(self, kind, why)

    def _drop(self) -> None:
        unsent = [frame for _, frame in self._out if frame is not None]
        self._out.clear()
        if self._frame is not None:
            unsent.append(self._frame)
            self._frame = None
        while self._frames:
            unsent.append(self._frames.popleft())
        for frame in unsent:
            self.owner.frame_dropped(frame)

    def _read(self) -> None:
        waits = self._waits
        budget = _LONG_BURST if waits else _BURST
        while budget > 0 and self.closing is None:
            flags = socket.MSG_DONTWAIT
            edge = self._edge[self._edge_got :]
            if self._rest == 0:
                want = [edge]
            elif not self._payload:
                want = [self.loop.scratch[: self._rest]]
            elif not waits:
                want = [self._payload[-self._rest :], edge]
            else:
                at, flags = len(self._payload) - self._rest, socket.MSG_WAITALL
                want = [self._payload[at : at + _PIECE]]
                if self._rest <= _PIECE:
                    want.append(self._edge[:TRAILER_BYTES])
            room = sum(map(len, want))
            try:
                got = self.sock.recvmsg_into(want, 0, flags)[0]
            except BlockingIOError:
                return
            if got == 0:
                raise FrameError("eof", "closed by the peer")
            self.heard = time.monotonic()
            budget -= got
            self._take(got)
            if got < room:  # the socket is empty: a second recv would only say so
                if self._patient:
                    self._wait_for(min(max(self._rest, 1), _PIECE) if self.ticket is not None else 1)
                return

    def _take(self, got: int) -> None:
        """So many bytes came: of a payload, of its trailer, of the next header."""
        payload = min(got, self._rest)
        if payload:
            if self._payload:
                at = len(self._payload) - self._rest
                self._checksum.update(self._payload[at : at + payload])
            self._rest -= payload
        self._edge_got += got - payload
        if self._header is not None and self._edge_got >= TRAILER_BYTES:
            self._end(self._header)
        if self._edge_got == _EDGE_BYTES:
            self._begin()

    @property
    def _waits(self) -> bool:
        """Whether it waits for the kernel, in one call for a whole payload: where threads compete for the
        interpreter, each call less is a turn less. Only where nobody else needs this thread."""
        return self.may_wait and self.loop.lanes == 1 and not self._patient

    def relax(self) -> None:
        """Read what there is, however little: on a slow line even that is progress."""
        self._wait_for(1)

    def _wait_for(self, size: int) -> None:
        if size != self._low_water and not self.closed:
            self.sock.setsockopt(socket.SOL_SOCKET, _SO_RCVLOWAT, size)
            self._low_water = size

    def _begin(self) -> None:
        header = parse(self._edge[TRAILER_BYTES:])
        kv = header.type is FrameType.KV
        if self.max_payload == 0:  # not authenticated yet
            if header.type is not FrameType.HELLO or header.length > MAX_HELLO_BYTES:
                raise FrameError("hello", f"{header.type.name} of {header.length} bytes before the handshake")
        elif header.length > (self.max_payload if kv else MAX_CONTROL_BYTES):
            raise FrameError("length", f"{header.type.name} of {header.length} bytes")
        self._header, self._rest, self._edge_got = header, header.length, 0
        self._checksum = xxhash.xxh3_64()
        if not kv:
            self._payload = memoryview(bytearray(header.length))
        else:
            self._began = time.monotonic()
            place = self.owner.kv_begins(self, header)
            self._payload, self.ticket = place if place is not None else (memoryview(b""), None)

    def _end(self, header: Header) -> None:
        payload, ticket = self._payload, self.ticket
        self._header, self._payload, self.ticket = None, memoryview(b""), None
        whole = self._edge[:TRAILER_BYTES] == trailer(self._checksum)
        if header.type is not FrameType.KV:
            if not whole:
                raise FrameError("control", f"{header.type.name}: payload checksum does not match")
            self.owner.control(self, header, payload)
        elif ticket is not None:
            self.owner.kv_ends(self, header, ticket, whole)
            if self._trace.enabled:
                self._trace.span("recv", self._began, time.monotonic(), layer=header.layer, seq=header.seq)

    def _write(self) -> None:
        waits = self._waits and self.closing is None
        budget = _LONG_BURST if waits else _BURST
        while budget > 0 and self._fill():
            try:
                sent = self.sock.sendmsg(
                    [view for view, _ in self._out], (), 0 if waits else socket.MSG_DONTWAIT
                )
            except BlockingIOError:
                break
            budget -= sent
            self._sent += sent
            while sent:
                view, frame = self._out[0]
                if sent < len(view):
                    self._out[0] = (view[sent:], frame)
                    break
                sent -= len(view)
                self._out.popleft()
                if frame is not None:
                    self.owner.frame_sent(frame)
                    if self._trace.enabled:
                        h, now = frame.header, time.monotonic()
                        self._trace.span("send", frame.started, now, layer=h.layer, seq=h.seq)
        waiting = self._out or self._frame is not None or self._control or self._frames
        self.loop.watch(self.sock.fileno(), select.EPOLLIN | (select.EPOLLOUT if waiting else 0), self.serve)

    def _fill(self) -> bool:
        """Move what is queued into `_out`, control first, one piece; False: there is nothing to write."""
        room = _PIECE - sum(len(view) for view, _ in self._out)
        while room > 0:
            if (frame := self._frame) is not None:
                piece = frame.payload[self._at : self._at + room]
                self._out_checksum.update(piece)
                self._out.append((piece, None))
                self._at += len(piece)
                room -= len(piece)
                if self._at == len(frame.payload):
                    self._out.append((memoryview(trailer(self._out_checksum)), frame))
                    self._frame = None
            elif self._control:
                self._out.append((memoryview(self._control.popleft()), None))
            elif self._frames and self.closing is None:
                self._next(self._frames.popleft())
            else:
                break
        return bool(self._out)

    def _next(self, frame: OutgoingFrame) -> None:
        """Put its header into `_out`, unless nobody wants it any more."""
        if self.owner.frame_begins(frame):
            frame.started = time.monotonic()
            self._out.append((memoryview(pack(frame.header)), None))
            self._frame, self._at, self._out_checksum = frame, 0, xxhash.xxh3_64()
        else:
            self._sent += _EDGE_BYTES + len(frame.payload)
