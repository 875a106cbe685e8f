"""A second implementation of the wire, from docs/protocol.md alone: nothing of kv_transfer is imported."""

import hashlib
import hmac
import os
import socket
import struct
from pathlib import Path
from typing import Any

import msgspec
import xxhash
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from tests.within import WITHIN

SECRET = b"a cluster secret for tests"
LAYOUT = "kv12 layers=3 attention.kv=2x2x16"
HELLO, FETCH, CREDIT, KV, COMMIT, ACK, ABORT, ABORTED, PING, FETCH_CONTENT, HAVE, *_REST = range(1, 16)
EXPORT, REACH, SLICES, TAKEN = _REST
pack, unpack = msgspec.msgpack.encode, msgspec.msgpack.decode


class Direction:
    """The frames of one direction of an encrypted lane."""

    def __init__(self, key: bytes, frames_of_a_key: int = 1 << 20) -> None:
        self.key = key
        self.frames_of_a_key = frames_of_a_key
        self.frames = 0

    def _next(self) -> bytes:
        if self.frames == self.frames_of_a_key:
            self.key, self.frames = hmac.digest(self.key, b"baton kv next key", "sha256"), 0
        self.frames += 1
        return struct.pack("<QI", self.frames - 1, 0)

    def seal(self, plain: bytes) -> bytes:
        """The frame, encrypted: its checksum goes, a tag comes."""
        nonce, head = self._next(), plain[:64]
        return head + AESGCM(self.key).encrypt(nonce, plain[64:-8], head)

    def open(self, head: bytes, rest: bytes) -> bytes:
        nonce = self._next()
        return AESGCM(self.key).decrypt(nonce, rest, head)


class Exchange:
    """This side's part of the exchange of keys. Without encryption, a nonce and no keys."""

    def __init__(self, encrypt: bool) -> None:
        self._private = X25519PrivateKey.generate() if encrypt else None
        self.nonce = self._private.public_key().public_bytes_raw() if self._private else os.urandom(32)

    def keys(self, peer: bytes, *said: bytes) -> tuple[Direction, Direction] | tuple[None, None]:
        """Of the initiator's frames and of the listener's."""
        if self._private is None:
            return None, None
        shared = self._private.exchange(X25519PublicKey.from_public_bytes(peer))
        extracted = hmac.digest(mac(SECRET, b"keys", *said), shared, "sha256")
        first = hmac.digest(extracted, b"baton kv lane keys\x01", "sha256")
        second = hmac.digest(extracted, first + b"baton kv lane keys\x02", "sha256")
        return Direction(first), Direction(second)


class Lane:
    """One connection, blocking. `head` fields as in the table of frames."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.granted = self.sent = 0  # of KV frames
        self.answers = True  # recalls of credit, as one must
        self.number = 0
        self.peer = b""  # its identity, if it is the listener
        self.outgoing: Direction | None = None  # of an encrypted lane, after the handshake
        self.incoming: Direction | None = None
        sock.settimeout(WITHIN)

    def send(self, frame_type: int, body: bytes = b"", transfer: bytes = bytes(16), **head: Any) -> None:
        self.sent += frame_type == KV
        plain = frame(frame_type, body, transfer, **head)
        self.sock.sendall(self.outgoing.seal(plain) if self.outgoing else plain)

    def say(self, kind: int, message: object, transfer: bytes = bytes(16)) -> None:
        self.send(kind, pack(message), transfer)

    def read(self) -> tuple[int, bytes, dict[str, int], bytes]:
        """The next frame but PINGs: type, transfer id, header, payload. Type 0: the lane was closed."""
        while True:
            raw = self._exactly(64)
            if raw is None:
                return 0, b"", {}, b""
            (check,) = struct.unpack("<I", raw[60:])
            assert check == xxhash.xxh3_64_intdigest(raw[:60]) & 0xFFFFFFFF
            magic, version, kind, flags = struct.unpack("<4sBBH", raw[:8])
            assert (magic, version, flags) == (b"BtKV", 12, 0)
            names = (
                "layer",
                "kind",
                "head_start",
                "head_count",
                "token_start",
                "token_count",
                "seq",
                "length",
            )
            head = dict(zip(names, struct.unpack("<4H4I", raw[24:48]), strict=True))
            assert raw[48:60] == bytes(12)
            rest = self._exactly(head["length"] + (16 if self.incoming else 8))
            if rest is None:
                return 0, b"", {}, b""
            if self.incoming:
                payload = self.incoming.open(raw, rest)
            else:
                payload = rest[:-8]
                assert struct.unpack("<Q", rest[-8:])[0] == xxhash.xxh3_64_intdigest(payload)
            if kind == CREDIT:
                self.granted, recall = unpack(payload)
                if recall and self.answers:
                    self.say(CREDIT, [self.granted, self.sent])
                    self.granted = self.sent
            if kind != PING:
                return kind, raw[8:24], head, payload

    def expect(self, kind: int) -> tuple[bytes, Any]:
        """Transfer id and message of the next frame that is no CREDIT."""
        found, transfer, _, payload = self.read()
        while found == CREDIT:
            found, transfer, _, payload = self.read()
        assert found == kind
        return transfer, unpack(payload)

    def _exactly(self, size: int) -> bytes | None:
        data = b""
        while len(data) < size:
            try:
                more = self.sock.recv(size - len(data))
            except ConnectionResetError:
                return None
            if not more:
                return None
            data += more
        return data


def frame(frame_type: int, body: bytes, transfer: bytes = bytes(16), **h: Any) -> bytes:
    head = struct.pack("<4sBBH", h.get("magic", b"BtKV"), h.get("version", 12), frame_type, h.get("flags", 0))
    head += transfer
    head += struct.pack("<4H", *(h.get(x, 0) for x in ("layer", "kind", "head_start", "head_count")))
    head += struct.pack("<3I", *(h.get(x, 0) for x in ("token_start", "token_count", "seq")))
    length = h.get("length", len(body))
    head += struct.pack("<I12s", length, bytes(12))
    head += struct.pack("<I", h.get("check", xxhash.xxh3_64_intdigest(head) & 0xFFFFFFFF))
    return head + body + struct.pack("<Q", h.get("checksum", xxhash.xxh3_64_intdigest(body)))


def mac(secret: bytes, label: bytes, opened: bytes, nonce: bytes, identity: bytes) -> bytes:
    parts = (b"baton kv lane", label, opened, nonce, identity)
    return hmac.digest(secret, b"".join(struct.pack("<I", len(p)) + p for p in parts), hashlib.sha256)


def identity(
    side: str,
    incarnation: int = 5,
    dtype: str = "float32",
    states: str = "",
    layout: str = LAYOUT,
    model: str = "model of the tests",
    slot_bytes: int = 4096,
    memory: str = "",
) -> bytes:
    said = [side, f"fake {side}", incarnation, model, layout, [dtype, states], slot_bytes]
    return pack([*said, memory] if memory else said)


def this_host() -> str:
    """`memory` of a worker whose processes share it with others of this host."""
    return f"host {Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"


def part_id(sender: bytes, receiver: bytes) -> bytes:
    """Under which the sender's part of a split prompt is offered to the receiver's."""
    return hashlib.blake2b(sender + receiver, digest_size=16).digest()


def connect(
    port: int,
    secret: bytes = SECRET,
    session: bytes = b"",
    number: int = 0,
    lanes: int = 1,
    behind: bytes = b"",
    encrypt: bool = False,
    who: bytes = b"",
    **about: Any,
) -> Lane:
    """As a decode worker, one lane, up to the listener's verdict; `behind` its last word, in one piece. `who`
    is its identity, in place of one with `about`."""
    lane = Lane(socket.create_connection(("127.0.0.1", port)))
    lane.answers = False
    exchange = Exchange(encrypt)
    tag, session = "open_encrypted" if encrypt else "open", session or os.urandom(16)
    opened = pack([tag, session, number, lanes, exchange.nonce, who or identity("receiver", **about)])
    lane.send(HELLO, opened)
    kind, _, _, payload = lane.read()
    tag, nonce, theirs, proof = unpack(payload)
    lane.peer = theirs
    assert (kind, tag) == (HELLO, "reply")
    if secret == SECRET:
        assert proof == mac(secret, b"listener", opened, nonce, theirs)
    proof = pack(["proof", mac(secret, b"initiator", opened, nonce, theirs)])
    lane.sock.sendall(frame(HELLO, proof) + behind)
    lane.outgoing, lane.incoming = exchange.keys(nonce, opened, nonce, theirs)
    return lane


class FakePrefill:
    """As a prefill worker: accepts the lanes of one session."""

    def __init__(self, **about: Any) -> None:
        self.about = about
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"

    def accept(self) -> Lane:
        self.listener.settimeout(WITHIN)
        lane = Lane(self.listener.accept()[0])
        while lane.sock.recv(4, socket.MSG_PEEK) != b"BtKV":  # a client of another server that had the port
            lane.sock.close()
            lane = Lane(self.listener.accept()[0])
        _, _, _, opened = lane.read()
        lane.number = unpack(opened)[2]
        nonce, mine = os.urandom(32), identity("sender", **self.about)
        lane.say(HELLO, ["reply", nonce, mine, mac(SECRET, b"listener", opened, nonce, mine)])
        tag, proof = unpack(lane.read()[3])
        assert (tag, proof) == ("proof", mac(SECRET, b"initiator", opened, nonce, mine))
        return lane
