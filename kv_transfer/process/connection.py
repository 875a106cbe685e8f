"""A TCP connection, cut into frames.

It belongs to the `Loop` of its process, and never blocks it. Payloads go straight between socket and
arena slot: `sendmsg` from it, `recvmsg_into` it. The checksum is computed here, as the bytes come and go,
while they are in this core's cache. On an encrypted lane they are encrypted and decrypted in their slot.
"""

import fcntl
import select
import socket
import sys
import termios
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from baton.kv_transfer.arena import Arena
from baton.kv_transfer.process.frames import SlotPipe
from baton.kv_transfer.process.lane_messages import Begins, Ends, Gone, LaneClosed, Report, Said
from baton.kv_transfer.process.loop import Loop
from baton.kv_transfer.protocol.frame import (
    HEADER_BYTES,
    MAX_TRAILER_BYTES,
    FrameError,
    FrameReader,
    FrameType,
    FrameWriter,
    Header,
    LaneKeys,
    pack,
    parse,
    sum_of,
)
from baton.kv_transfer.protocol.hello import MAX_HELLO_BYTES
from baton.kv_transfer.protocol.messages import MAX_CONTROL_BYTES
from baton.kv_transfer.slices import Slice
from baton.kv_transfer.trace import TraceWriter

_WAKEUP = 1 << 20  # bytes of a slice: fewer are not worth a wakeup
_FEW = 256 << 10  # bytes that are not written yet: the next frame goes with them
_BURST = 4 << 20  # bytes that one lane moves before the others of its loop have their turn
_MOST_VIEWS = 1000  # written at once; the kernel takes 1,024
_MOST_CONTROL = 16384  # messages that wait for a peer to read
_EDGE_BYTES = MAX_TRAILER_BYTES + HEADER_BYTES  # between two payloads
_AHEAD_BYTES = 16 << 10
_NOTHING = memoryview(bytearray())
_SO_RCVLOWAT = 18  # asm-generic/socket.h; the socket module has no name for it


class Connection:
    def __init__(
        self, sock: socket.socket, loop: Loop, report: Callable[[Report], object], trace: TraceWriter,
        number: int = 0, *, read: bytes = bytes(MAX_TRAILER_BYTES), unwritten: bytes = b"",
        keys: LaneKeys | None = None, ahead: bool = False,
    ) -> None:  # fmt: skip
        """`report` gets reports with this number, and must not block. `read`, `unwritten`, `keys`: what
        `leave` returned. `ahead`: many short messages come, so several are read at once, and it cannot
        `leave`. KV would begin at odd addresses, so its copies would take longer."""
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 5)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 10_000)
        self.sock = sock
        self._report = report
        self._number = number
        self.slots: SlotPipe | None = None  # for slices that come; None: none may come
        self.sending: Arena | None = None  # of slices that leave
        self.max_payload = 0  # of a KV frame; 0 until HELLO agreed on one
        self.summed = False  # as in `protocol.frame`
        self.heard = time.monotonic()
        # When bytes of a KV frame last came, or (see `look_at_sent`) were last taken by the peer.
        self.kv_moved = 0.0
        self._coming: Slice | None = None  # into its slot
        self.closing: tuple[str, str] | None = None
        self.closed = False  # or gone to another process
        self.loop = loop
        self._called = False  # the loop will call `serve`, because something was pushed
        self._trace = trace
        self._keys: LaneKeys | None = None  # it is encrypted
        # Outgoing.
        self._writer = FrameWriter()
        self._control: deque[tuple[bytes, bytes]] = deque()  # header, payload
        self._slices: deque[Slice] = deque()
        # To be written, with the slice that ends there, and when it began.
        self._out: deque[tuple[memoryview, Slice | None, float]] = deque()
        # Bytes, counted from the first that is written here.
        self._laid = 0  # put into _out
        self._sent = 0
        self._kv_end = 0  # behind the last of a KV frame that was
        self._taken = 0  # by the peer's kernel, as of the last look
        if unwritten:
            self._lay(memoryview(unwritten))
        # Incoming.
        self._reader = FrameReader()
        self._edge = memoryview(bytearray(_EDGE_BYTES))  # the trailer of one frame, the header of the next
        self._edge[: len(read)] = read
        self._edge_got = len(read)
        self._ahead_room = memoryview(bytearray(_AHEAD_BYTES * ahead))
        self._ahead = self._ahead_room[:0]  # bytes that follow those in _edge
        self._header: Header | Slice | None = None  # of the frame being received
        self._payload = _NOTHING
        self._rest = _NOTHING  # of the payload: still to come
        self._began = 0.0
        self._low_water = 1
        if keys is not None:
            self.encrypt(keys)

    @property
    def receiving(self) -> bool:
        """Whether a KV frame has begun to arrive and is not complete."""
        return self._coming is not None

    # ------------------------------------------------------------ for its owner

    def push(self, kind: FrameType, transfer_id: bytes, payload: bytes) -> None:
        """Queue a control message; it overtakes KV frames that have not begun."""
        if len(self._control) >= _MOST_CONTROL:
            self.close_soon("flood", f"{_MOST_CONTROL} messages wait, and the peer reads none")
            return
        self._control.append((pack(Header(kind, transfer_id, length=len(payload))), payload))
        self._call()

    def push_slice(self, s: Slice) -> None:
        """Queue a slice of the arena."""
        self._slices.append(s)
        self._call()

    def close_soon(self, kind: str, why: str) -> None:
        """Makes the loop close it, after one attempt to write the queued control messages."""
        self.closing = self.closing or (kind, why)
        self._call()

    def encrypt(self, keys: LaneKeys) -> None:
        """From now on, encrypt each frame that is pushed, and decrypt each frame that comes."""
        from baton.kv_transfer.protocol.encryption import FrameDecryptor, FrameEncryptor

        self._lay_messages()
        self._keys = keys
        self._writer = FrameEncryptor(keys.outgoing)
        self._reader = FrameDecryptor(keys.incoming)

    def leave(self) -> tuple[socket.socket, bytes, bytes, LaneKeys | None]:
        """Stops serving the connection here, so that a mover can. It must be between two frames.

        Returns its socket, the trailer and the part of the next header that were read, the bytes that are
        still to be written, and its keys."""
        assert self._header is None
        assert not self._slices
        self.closed = True
        self.loop.forget(self.sock.fileno())
        self._lay_messages()
        unwritten = b"".join(view for view, *_ in self._out)
        self._out.clear()
        return self.sock, bytes(self._edge[: self._edge_got]), unwritten, self._keys

    def _call(self) -> None:
        if not self._called:
            self._called = True
            self.loop.wake(self.serve)

    # ------------------------------------------------------------ for its loop

    def serve(self, events: int = 0) -> None:
        """Read if `events` say so, write what there is; close on the first error."""
        self._called = False
        if self.closed:
            self._drop()  # pushed while its owner did not know yet
            return
        try:
            if self.closing is None and events & ~select.EPOLLOUT:
                self._read()
            if not self.closed:
                self._write()
        except FrameError as e:
            if e.kind == "version":
                header = pack(Header(FrameType.HELLO))
                with suppress(OSError):  # the peer finds another version in this header, too, and logs both
                    self.sock.send(header + self._writer.message(header, b""))
            self.close(e.kind, str(e))
        except OSError as e:
            self.close("socket", str(e))
        if self.closing is not None:
            self.close(*self.closing)

    def close(self, kind: str, why: str) -> None:
        """Close now, and give back every slot that it holds."""
        if self.closed:
            return
        self.closed = True
        self.loop.forget(self.sock.fileno())
        self.sock.close()
        if self._coming is not None:
            self._coming, self._payload, self._rest = None, _NOTHING, _NOTHING
            self._report(Ends(self._number, None, self._began, time.monotonic()))
        self._drop()
        self._report(LaneClosed(self._number, kind, why[:512]))

    def _drop(self) -> None:
        unsent = [*(s for _, s, _ in self._out if s is not None), *self._slices]
        self._out.clear()
        self._slices.clear()
        for s in unsent:
            self._report(Gone(self._number, s.slot, sent=False))

    def _read(self) -> None:
        if self._edge_got == _EDGE_BYTES:  # read in another process
            self._begin()
        budget, is_empty = _BURST, False
        while (budget > 0 or self._ahead) and self.closing is None and not self.closed:
            want = self._rest, self._edge[self._edge_got :]
            if self._ahead:
                self._take(self._move_ahead(want))
                continue
            if is_empty:  # a recv would only say so
                break
            ahead = self._ahead_room[: 0 if self._rest else _AHEAD_BYTES]
            try:
                got = self.sock.recvmsg_into((*want, ahead))[0]
            except BlockingIOError:
                break
            if got == 0:
                raise FrameError("eof", "closed by the peer")
            self.heard = time.monotonic()
            if self.receiving:
                self.kv_moved = self.heard
            budget -= got
            room = len(want[0]) + len(want[1])
            is_empty = got < room + len(ahead)
            self._ahead = ahead[: max(0, got - room)]
            self._take(min(got, room))
        self._wait_for(min(max(len(self._rest), 1), _WAKEUP) if self.receiving else 1)

    def _move_ahead(self, want: Sequence[memoryview]) -> int:
        """Fills `want` with bytes that were read ahead, as far as there are any. Returns their number."""
        before = len(self._ahead)
        for view in want:
            count = min(len(view), len(self._ahead))
            view[:count] = self._ahead[:count]
            self._ahead = self._ahead[count:]
        return before - len(self._ahead)

    def _take(self, got: int) -> None:
        """Counts `got` bytes that came: of a payload, of its trailer, of the next header."""
        if self._rest:
            piece, self._rest = self._rest[:got], self._rest[got:]
            self._reader.piece(piece)
            got -= len(piece)
        self._edge_got += got
        if self._header is not None and self._edge_got >= MAX_TRAILER_BYTES:
            self._end(self._header)
        if self._edge_got == _EDGE_BYTES and self.closing is None and not self.closed:
            self._begin()

    def tick(self, now: float) -> None:
        """Several times a second. On a slow line, a few bytes are progress: from now on one byte of a slice
        that comes is enough for a wakeup. Bytes of slices that the peer has acknowledged are progress, too.

        A write is no progress: the kernel takes megabytes at once. It asks for more when a third of them has
        left, which on a slow line is a minute later."""
        if self.receiving:
            self._wait_for(1)
        if self._taken < self._kv_end and not self.closed:
            taken = self._sent - self._waiting()
            if taken > self._taken:
                self._taken, self.kv_moved = taken, now

    def _waiting(self) -> int:
        """Bytes in this kernel that the peer's has not acknowledged."""
        waiting = fcntl.ioctl(self.sock.fileno(), termios.TIOCOUTQ, bytes(4))
        return int.from_bytes(waiting, sys.byteorder)

    def _wait_for(self, size: int) -> None:
        if size != self._low_water and not self.closed:
            self.sock.setsockopt(socket.SOL_SOCKET, _SO_RCVLOWAT, size)
            self._low_water = size

    def _begin(self) -> None:
        packed = self._edge[MAX_TRAILER_BYTES:]
        header = parse(packed)
        if isinstance(header, Slice):
            name, length, most = "KV", header.size, self.max_payload
        else:
            name, length, most = header.type.name, header.length, MAX_CONTROL_BYTES
        if self.max_payload == 0:  # not authenticated yet
            if name != "HELLO" or length > MAX_HELLO_BYTES:
                raise FrameError("hello", f"{name} of {length} bytes before the handshake")
        elif length > most:
            raise FrameError("length", f"{name} of {length} bytes")
        self._reader.begin(packed, summed=self.summed and isinstance(header, Slice))
        self._header = header
        self._edge_got = MAX_TRAILER_BYTES - self._reader.trailer_bytes
        if isinstance(header, Header):
            self._payload = memoryview(bytearray(length))
        elif self.slots is None:
            raise FrameError("direction", "a KV frame came to the sender")
        else:
            self._began = self.kv_moved = time.monotonic()
            header.slot = self.slots.take()
            self._coming, self._payload = header, self.slots.arena.slot(header.slot)[:length]
            self._report(Begins(self._number, header))
        self._rest = self._payload

    def _end(self, header: Header | Slice) -> None:
        start = MAX_TRAILER_BYTES - self._reader.trailer_bytes
        trailer = self._edge[start:MAX_TRAILER_BYTES]
        intact = self._reader.is_intact(trailer)
        name = header.type.name if isinstance(header, Header) else "KV"
        if self._keys is not None and not intact:  # the header may be forged, too
            raise FrameError("tag", f"{name} is not as it was sent")
        payload = self._payload
        self._header, self._payload, self._coming = None, _NOTHING, None
        if isinstance(header, Header):
            if not intact:
                raise FrameError("control", f"{name}: payload checksum does not match")
            self._report(Said(self._number, header, bytes(payload)))
        else:
            now = time.monotonic()
            checksum = sum_of(trailer) if self.summed else None
            self._report(Ends(self._number, intact, self._began, now, checksum))
            self._trace.moved("recv", header, self._began, now)

    def _write(self) -> None:
        budget = _BURST
        while budget > 0 and self._fill():
            try:
                sent = self.sock.sendmsg([view for view, *_ in self._out])
            except BlockingIOError:
                break
            budget -= sent
            self._sent += sent
            while sent:
                view, s, began = self._out[0]
                if sent < len(view):
                    self._out[0] = (view[sent:], s, began)
                    break
                sent -= len(view)
                self._out.popleft()
                if s is not None:
                    self._trace.moved("send", s, began, time.monotonic())
                    waiting = self._waiting()
                    gone = Gone(self._number, s.slot, True, self._sent - waiting, waiting)
                    self._report(gone)
        waiting = self._out or self._control or self._slices
        self.loop.watch(self.sock.fileno(), select.EPOLLIN | (select.EPOLLOUT if waiting else 0), self.serve)

    def _fill(self) -> bool:
        """Moves what is queued into `_out`, control first. False: there is nothing to write."""
        while self._laid - self._sent < _FEW and len(self._out) < _MOST_VIEWS:
            if self._control:
                self._lay_message()
            elif self._slices and self.closing is None:
                self._lay_slice(self._slices.popleft())
            else:
                break
        return bool(self._out)

    def _lay_messages(self) -> None:
        while self._control:
            self._lay_message()

    def _lay_message(self) -> None:
        header, payload = self._control.popleft()
        self._lay(memoryview(header + self._writer.message(header, payload)))

    def _lay_slice(self, s: Slice) -> None:
        assert self.sending is not None
        began, header, payload = time.monotonic(), pack(s), self.sending.slot(s.slot)[: s.size]
        trailer = self._writer.trailer(header, payload, s.sum if self.summed else None)
        for view in (memoryview(header), payload):
            self._lay(view)
        self._lay(memoryview(trailer), s, began)
        self._kv_end = self._laid

    def _lay(self, view: memoryview, ends: Slice | None = None, began: float = 0.0) -> None:
        self._out.append((view, ends, began))
        self._laid += len(view)
