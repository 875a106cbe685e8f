"""Plays one side of a recorded session of an older wire version, or of the newest one, over a socket.

`wire3.json` to `wire5.json` hold the frames of both sides by exchange, each as side, name and hexadecimal
bytes. Recorded frames go out as they are, and those of the peer must equal the recording. There are four
exceptions: MACs are computed, since the peer's nonce is fresh; a sender follows the peer's credit; PINGs of
the peer are skipped; EXPORT names memory of the peer, of which only the size is compared.

A recording never changes. A later version adds its own. This file imports nothing of `kv_transfer` and of
`second_wire`, because these follow the newest version.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import socket
import struct
from pathlib import Path
from typing import Literal

import msgspec
import xxhash

SECRET = b"a cluster secret for tests"
Recording = dict[str, list[tuple[str, str, bytes]]]
RECORDINGS: dict[int, Recording] = {
    version: {
        exchange: [(side, name, bytes.fromhex(data)) for side, name, data in frames]
        for exchange, frames in json.loads(
            Path(__file__).with_name(f"wire{version}.json").read_text()
        ).items()
    }
    for version in (3, 4, 5)
}
CREDIT, PING = 3, 9
pack, unpack = msgspec.msgpack.encode, msgspec.msgpack.decode


def payload(frame: bytes) -> bytes:
    return frame[64:-8]


def with_payload(frame: bytes, body: bytes) -> bytes:
    """A recorded frame with another payload of the same length, so that its header stays valid."""
    assert len(body) == len(payload(frame))
    return frame[:64] + body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))


def mac(label: bytes, opened: bytes, nonce: bytes, identity: bytes) -> bytes:
    parts = (b"baton kv lane v3", label, opened, nonce, identity)
    return hmac.digest(SECRET, b"".join(struct.pack("<I", len(p)) + p for p in parts), hashlib.sha256)


class RecordedPeer:
    """`side` is the one that it plays, on a lane that is connected."""

    def __init__(self, side: Literal["sender", "receiver"], sock: socket.socket, version: int) -> None:
        sock.settimeout(20)
        self._side = side
        self._sock = sock
        self._stream = sock.makefile("rb")
        self._granted = self._sent = 0  # KV frames
        self._recording = RECORDINGS[version]
        opened, reply, proof = (frame for _, _, frame in self._recording["handshake"])
        if side == "receiver":
            sock.sendall(opened)
            tag, nonce, identity, proved = unpack(payload(self._read()))
            assert (tag, proved) == ("reply", mac(b"listener", payload(opened), nonce, identity))
            answer = ["proof", mac(b"initiator", payload(opened), nonce, identity)]
            sock.sendall(with_payload(proof, pack(answer)))
        else:
            told = payload(self._read())
            _, nonce, identity, _ = unpack(payload(reply))
            answer = ["reply", nonce, identity, mac(b"listener", told, nonce, identity)]
            sock.sendall(with_payload(reply, pack(answer)))
            assert unpack(payload(self._read())) == ["proof", mac(b"initiator", told, nonce, identity)]

    def play(self, exchange: str) -> None:
        for side, name, frame in self._recording[exchange]:
            if name == "CREDIT" and self._side == "sender":
                continue  # `_read` answers what the peer really grants and recalls
            if side == self._side:
                while name == "KV" and self._sent == self._granted:
                    self._take_credit(self._frame())
                self._sent += name == "KV"
                self._sock.sendall(frame)
            elif name == "EXPORT":
                [_, _, _, *size, _], [_, _, _, *recorded, _] = (
                    unpack(payload(x)) for x in (self._read(), frame)
                )
                assert size == recorded
            elif name != "PING":
                assert self._read() == frame, f"{name} differs from the recording"

    def _read(self) -> bytes:
        """The next frame that is not for `_take_credit`."""
        while (frame := self._frame())[5] == CREDIT and self._side == "sender":
            self._take_credit(frame)
        return frame

    def _take_credit(self, frame: bytes) -> None:
        assert frame[5] == CREDIT
        self._granted, recall = unpack(payload(frame))
        if recall:
            answer = next(f for s, n, f in RECORDINGS[3]["acknowledged"] if (s, n) == ("sender", "CREDIT"))
            self._sock.sendall(with_payload(answer, pack([self._granted, self._sent])))
            self._granted = self._sent

    def _frame(self) -> bytes:
        """The next frame other than PING, as sent."""
        while True:
            header = self._stream.read(64)
            assert len(header) == 64, "the peer closed the lane"
            (length,) = struct.unpack_from("<I", header, 44)
            frame = header + self._stream.read(length + 8)
            if header[5] != PING:
                return frame
