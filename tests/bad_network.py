"""A network between two workers that does what it is told: lanes go through it, frame by frame.

What a network may do to TCP it does to bytes (delay, throttle, cut, half-open); what only a broken NIC,
switch or proxy does, it does to frames (corrupt, reorder, duplicate, lose one).
"""

import asyncio
import contextlib
import random
from dataclasses import dataclass, field
from typing import Any

from tests.kv_transfer.second_wire import COMMIT, HELLO, KV, SLICES, pack, unpack
from tests.kv_transfer.second_wire import frame as whole_frame
from tests.proxy import Proxy

HEADER = 64
FAULTS = (
    "delay",
    "throttle",
    "cut",
    "truncate",
    "half-open",
    "corrupt",
    "header",
    "reorder",
    "duplicate",
    "lose",
)
# The other way there are small messages only, and none is lost, repeated or overtaken as a whole: nothing
# between two workers knows where one begins.
BACK_FAULTS = ("delay", "cut", "truncate", "half-open", "corrupt", "header", "hole")


@dataclass
class BadNetwork(Proxy):
    """`fault` holds for KV frames from prefill to decode, or the other way for messages of types in `back`;
    each of `hits` first ones that come by suffers it. `kind`, `layer`: of KV frames, those of this kind
    and of this layer alone."""

    port: int  # of the prefill worker
    fault: str = ""
    kind: int | None = None
    layer: int | None = None
    back: tuple[int, ...] = ()
    suffered: int = 0  # how many were hit
    first_token: list[object] | None = None  # replaces that of the next COMMIT; checksums are right
    hits: int = 0
    chance: float = 1.0  # that a frame is hit at all
    arena: Any = None  # of slots that peers read: a byte of the next one that SLICES names is bent
    trailer: int = 8  # bytes behind the payload of a frame, except of HELLO
    bytes_per_second: float = 125_000.0  # of "throttle": 1 Mbit/s
    rng: random.Random = field(default_factory=lambda: random.Random(1))

    def __post_init__(self) -> None:
        super().__init__()

    async def _carry(self, near: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        """One lane, both ways, until either end closes."""
        ends = [back]
        with contextlib.suppress(OSError, asyncio.CancelledError):
            far, forth = await asyncio.open_connection("127.0.0.1", self.port)
            ends.append(forth)
            there, here = self._frames(near, forth, back=True), self._frames(far, back, back=False)
            ways = [asyncio.create_task(way) for way in (there, here)]
            done, others = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            for way in others:
                way.cancel()
            await asyncio.gather(*done, *others, return_exceptions=True)
        for end in ends:
            end.close()

    async def _frames(self, source: asyncio.StreamReader, to: asyncio.StreamWriter, *, back: bool) -> None:
        """`back`: from decode to prefill."""
        kept = b""  # to come after the next one
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                head = await source.readexactly(HEADER)
                length = int.from_bytes(head[44:48], "little")
                trailer = 8 if head[5] == HELLO else self.trailer
                frame = bytearray(head + await source.readexactly(length + trailer))
                if head[5] == COMMIT and self.first_token is not None:
                    message = unpack(frame[HEADER:-trailer])
                    message[0], self.first_token = self.first_token, None
                    frame = bytearray(whole_frame(COMMIT, pack(message), head[8:24]))
                meant = head[5] in self.back if back else head[5] == KV and not self.back
                meant = meant and self.kind in (None, head[26]) and self.layer in (None, head[24])
                if head[5] == SLICES and self.arena is not None:
                    [[[slot, *_], *_]] = unpack(frame[HEADER:-trailer])
                    self.arena.slot(slot)[7] ^= 1
                    self.arena, self.suffered = None, 1
                hit = meant and self.hits > 0 and self.rng.random() < self.chance
                self.hits -= hit
                self.suffered += hit
                match self.fault if hit else "":
                    case "delay":
                        await asyncio.sleep(self.rng.random() * 0.1)
                    case "throttle":
                        await asyncio.sleep(len(frame) / self.bytes_per_second)
                    case "cut":
                        return
                    case "truncate":
                        to.write(frame[: self.rng.randrange(1, len(frame))])
                        await to.drain()
                        return
                    case "half-open":
                        await asyncio.sleep(3600)
                    case "corrupt":
                        frame[self.rng.randrange(HEADER, len(frame))] ^= 1 << self.rng.randrange(8)
                    case "header":
                        frame[self.rng.randrange(HEADER)] ^= 1 << self.rng.randrange(8)
                    case "reorder":
                        kept, frame = bytes(frame), bytearray(kept)
                    case "duplicate":
                        frame += frame
                    case "hole":
                        at = self.rng.randrange(len(frame))
                        del frame[at : at + self.rng.randrange(1, 100)]
                    case "lose":
                        frame = bytearray()
                to.write(frame)
                if kept and not hit:
                    to.write(kept)
                    kept = b""
                await to.drain()
