"""What no peer should send: noise, damage and forgeries."""

import random
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from baton.kv_transfer.wait import wait

from .second_wire import (
    ABORT,
    ABORTED,
    ACK,
    COMMIT,
    CREDIT,
    EXPORT,
    FETCH,
    FETCH_CONTENT,
    HAVE,
    HELLO,
    PING,
    REACH,
    SLICES,
    TAKEN,
    frame,
    pack,
)  # fmt: skip

OF_SESSION = (HELLO, CREDIT, PING, EXPORT, REACH, TAKEN)  # their headers have no transfer id
CONTROL = (
    *OF_SESSION, FETCH, COMMIT, ACK, ABORT, ABORTED, FETCH_CONTENT, HAVE, SLICES,
)  # fmt: skip


@dataclass
class Noise:
    """Makes things that no peer should send. `ids` are real ones, to be hit now and then."""

    rng: random.Random
    ids: list[bytes]

    def some_id(self) -> bytes:
        return self.rng.choice([*self.ids, self.rng.randbytes(16)])

    def id_for(self, kind: int) -> bytes:
        """The transfer id in a header of this type: zeros where it means none."""
        return bytes(16) if kind in OF_SESSION else self.some_id()

    def number(self) -> int:
        few = (0, 1, 2, 3, 10, 255, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)
        return self.rng.choice([*few, self.rng.getrandbits(32), self.rng.getrandbits(10)])

    def value(self, depth: int = 0) -> Any:
        """Anything that msgpack can say, often something that looks right."""
        rng = self.rng
        scalars: list[Callable[[], Any]] = [
            self.number, lambda: -self.number(), self.some_id, lambda: None, rng.random, lambda: True,
            lambda: rng.randbytes(rng.randrange(40)), lambda: "gone", lambda: "x" * rng.randrange(600),
            lambda: float("nan"), lambda: 1 << 63,
        ]  # fmt: skip
        if depth < 3 and rng.random() < 0.4:
            return [self.value(depth + 1) for _ in range(rng.randrange(6))]
        return rng.choice(scalars)()

    def message(self, kind: int) -> Any:
        """A control message with fields of the right kinds and wild values, or of any kinds."""
        rng, n = self.rng, self.number
        if rng.random() < 0.3:
            return self.value()
        ranges = (
            [[n(), n()] for _ in range(rng.randrange(3))]
            if rng.random() < 0.5
            else [[0, rng.randrange(1, 50)]]
        )
        where = [n() for _ in range(5)]
        return {
            FETCH: lambda: [self.some_id(), n(), ranges],
            FETCH_CONTENT: lambda: [[self.some_id()], n()],
            HAVE: lambda: [n()],
            EXPORT: lambda: ["shared_memory", rng.randbytes(8), n(), n(), rng.randbytes(16)],
            REACH: lambda: [rng.random() < 0.5, "why"],
            SLICES: lambda: [[[n(), n(), n(), n(), where], [n(), n(), n(), n(), [*where, n()]]]],
            TAKEN: lambda: [[n(), rng.randrange(16)]],
            CREDIT: lambda: [rng.choice([n(), rng.randrange(20)]), rng.choice([True, False, n()])],
            COMMIT: lambda: [[n(), rng.choice([None, -0.5]), [1], [-0.5]], rng.randrange(5), n()],
            ACK: list,
            ABORT: lambda: [rng.choice(["cancelled", "gone", "integrity", "nonsense"])],
            ABORTED: lambda: [rng.choice(["gone", "busy", "deadline", "integrity", "?"]), rng.randrange(9)],
            PING: lambda: [n()],
            HELLO: lambda: ["proof", rng.randbytes(32)],
        }[kind]()

    def forged(self) -> bytes:
        """A well-made frame around nonsense."""
        kind = self.rng.choice(CONTROL)
        return frame(kind, pack(self.message(kind)), self.id_for(kind))

    def damaged(self, data: bytes, first: int = 0) -> bytes:
        """Some bits of a frame flipped on the way, from byte `first` on."""
        broken = bytearray(data)
        for _ in range(self.rng.randrange(1, 9)):
            broken[self.rng.randrange(first, len(broken))] ^= 1 << self.rng.randrange(8)
        return bytes(broken)


def hostile_frames(noise: Noise) -> Iterator[bytes]:
    """What a prefill worker may be sent. Most keep the session, some end it."""
    rng = noise.rng
    while True:
        kind = rng.random()
        if kind < 0.80:  # understood, and about things that are or are not there
            which = rng.choice([FETCH, FETCH, FETCH_CONTENT, CREDIT, ABORT, ACK, REACH])
            body = {
                FETCH: lambda: [noise.some_id(), 0, [[0, rng.randrange(1, 60)]]],
                FETCH_CONTENT: lambda: [[noise.some_id()], 0],
                REACH: lambda: [rng.random() < 0.8, ""],
                CREDIT: lambda: [rng.randrange(64), False],
                ABORT: lambda: ["cancelled"],
                ACK: list,
            }[which]()
            yield frame(which, pack(body), noise.id_for(which))
        elif kind < 0.90:
            yield noise.forged()
        elif kind < 0.96:
            yield noise.damaged(noise.forged())
        else:
            yield rng.randbytes(rng.randrange(1, 3000))


def drained(sock: socket.socket) -> bool:
    """Reads away what the other side said; False once it has closed."""
    while wait([sock.fileno()], 0):
        try:
            if not sock.recv(1 << 16):
                return False
        except ConnectionError:
            return False
    return True
