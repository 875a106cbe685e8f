"""The handshake on each lane: three messages, each side proves that it knows the cluster secret. Pure.

    initiator (the receiver of KV)              listener (the sender of KV)
    open: session, lane, nonce, identity  --->
                                          <---  reply: nonce, identity, HMAC over both sides' words
    proof: HMAC over the same             --->  lane is up

docs/protocol.md has the rules. Fingerprints are compared after the peer has proved itself.
"""

import hashlib
import hmac
import os
from typing import TYPE_CHECKING

from baton.kv_transfer.config import MAX_LANES, MAX_SLOT_BYTES, PAGE
from baton.kv_transfer.protocol import messages as wire
from baton.kv_transfer.protocol.frame import LaneKeys

if TYPE_CHECKING:
    from baton.kv_transfer.protocol.encryption import KeyExchange

MAX_HELLO_BYTES = 4096


class LaneRefused(Exception):
    """The peer is not one to talk to. `reason` names the counter: secret, side, model, layout, …"""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


class Initiator:
    """One lane, from the side that connected."""

    def __init__(
        self, secret: bytes, identity: wire.Identity, session_id: bytes, lane: int, lanes: int,
        incarnation: int, *, encrypt: bool = False,
    ) -> None:  # fmt: skip
        """`incarnation`: the one that must answer."""
        self._secret = secret
        self._identity = identity
        self._incarnation = incarnation
        self.lane = lane
        self._exchange, nonce = _key_exchange(encrypt)
        kind = wire.HelloOpenEncrypted if encrypt else wire.HelloOpen
        self.open = wire.encode(kind(session_id, lane, lanes, nonce, wire.encode(identity)))
        # To be sent as soon as it is there, even if what follows refuses.
        self.proof: wire.HelloProof | None = None
        self.keys: LaneKeys | None = None
        """After `reply`, of an encrypted lane."""

    def reply(self, message: wire.HelloReply) -> wire.Identity:
        """The identity of the listener. LaneRefused: it is not a peer, and is told so with the keys if there
        are any."""
        if not hmac.compare_digest(message.mac, _mac(self._secret, b"listener", self.open, message)):
            raise LaneRefused("secret", "the listener does not know this cluster's secret")
        self.proof = wire.HelloProof(_mac(self._secret, b"initiator", self.open, message))
        if self._exchange is not None:
            bound = _mac(self._secret, b"keys", self.open, message)
            self.keys = _keys(self._exchange, message.nonce, bound, initiates=True)
        theirs = _identity(message.identity)
        _check(self._identity, theirs)
        if theirs.incarnation != self._incarnation:
            raise LaneRefused(
                "incarnation", f"{theirs.name} is now {theirs.incarnation:x}, not {self._incarnation:x}"
            )
        return theirs


class Listener:
    """One lane, from the side that accepted."""

    def __init__(self, secret: bytes, identity: wire.Identity, *, encrypt: bool = False) -> None:
        self._secret = secret
        self._identity = identity
        self._encrypt = encrypt
        self._exchange: KeyExchange | None = None
        self._open: wire.HelloOpen | None = None
        self._expected = self._bound = b""
        self.keys: LaneKeys | None = None
        """After `check`, of an encrypted lane."""

    def answer(self, message: wire.HelloOpen, payload: bytes) -> wire.HelloReply:
        """The reply to `message`, which came as `payload`."""
        if self._open is not None or not 0 <= message.lane < message.lanes <= MAX_LANES:
            raise LaneRefused("hello", f"lane {message.lane} of {message.lanes}, or opened twice")
        encrypted = isinstance(message, wire.HelloOpenEncrypted)
        if encrypted != self._encrypt:
            without = self._identity.name if encrypted else _identity(message.identity).name
            raise LaneRefused("encryption", f"{without} does not encrypt lanes (--kv-encrypt), its peer does")
        self._open = message
        self._exchange, nonce = _key_exchange(encrypted)
        unsigned = wire.HelloReply(nonce, wire.encode(self._identity), bytes(32))
        self._expected = _mac(self._secret, b"initiator", payload, unsigned)
        self._bound = _mac(self._secret, b"keys", payload, unsigned)
        mac = _mac(self._secret, b"listener", payload, unsigned)
        return wire.HelloReply(unsigned.nonce, unsigned.identity, mac)

    def check(self, message: wire.HelloProof) -> tuple[wire.HelloOpen, wire.Identity]:
        """What the initiator opened, and its identity. LaneRefused: it is not a peer."""
        if self._open is None:
            raise LaneRefused("hello", "proof before open")
        if not hmac.compare_digest(message.mac, self._expected):
            raise LaneRefused("secret", "the initiator does not know this cluster's secret")
        theirs = _identity(self._open.identity)
        _check(self._identity, theirs)
        if self._exchange is not None:
            self.keys = _keys(self._exchange, self._open.nonce, self._bound, initiates=False)
        return self._open, theirs


def why_lanes(sender: str, receiver: str) -> str:
    """The way of slices in a session, by `memory` of both identities. Empty: the receiver reads them in
    memory of the sender, if it can. Otherwise they go by lanes, and the text says why."""
    if not (sender and receiver):
        return f"--kv-connector tcp at the {'receiver' if sender else 'sender'}"
    if sender == receiver:
        return ""
    kind, other = sender.partition(" ")[0], receiver.partition(" ")[0]
    return "another machine" if kind == other else f"the sender has KV in {kind}, the receiver in {other}"


def _mac(secret: bytes, label: bytes, opened: bytes, reply: wire.HelloReply) -> bytes:
    """Over all that both said but the MAC; each part's length first, so that there is one reading."""
    parts = (b"baton kv lane", label, opened, reply.nonce, reply.identity)
    message = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
    return hmac.digest(secret, message, hashlib.sha256)


def _key_exchange(encrypt: bool) -> "tuple[KeyExchange | None, bytes]":
    """This side's part of an exchange, if the lane is encrypted, and its nonce."""
    if not encrypt:
        return None, os.urandom(32)
    from baton.kv_transfer.protocol.encryption import KeyExchange

    exchange = KeyExchange()
    return exchange, exchange.public


def _keys(exchange: "KeyExchange", peer: bytes, bound_to: bytes, *, initiates: bool) -> LaneKeys:
    try:
        return exchange.keys(peer, bound_to, initiates=initiates)
    except ValueError as e:
        raise LaneRefused("encryption", f"the peer's public key: {e}") from None


def _identity(payload: bytes) -> wire.Identity:
    try:
        return wire.decode_identity(payload)
    except wire.ProtocolError as e:
        raise LaneRefused("hello", str(e)) from None


def _check(mine: wire.Identity, theirs: wire.Identity) -> None:
    if theirs.side == mine.side:
        raise LaneRefused("side", f"{theirs.name} and {mine.name} both say that they are the {mine.side}")
    if theirs.incarnation == mine.incarnation:
        raise LaneRefused("self", f"{mine.name} cannot fetch from itself over a lane")
    for reason in ("model", "layout"):
        a, b = (getattr(side, f"{reason}_fingerprint") for side in (mine, theirs))
        if a != b:
            raise LaneRefused(reason, f"{reason}_fingerprint: {mine.name} has {a!r}, {theirs.name} has {b!r}")
    if not mine.dtypes.exchanges(theirs.dtypes):
        raise LaneRefused("dtype", f"{mine.name} has {mine.dtypes}, {theirs.name} has {theirs.dtypes}")
    if not PAGE <= theirs.slot_bytes <= MAX_SLOT_BYTES:
        raise LaneRefused("limits", f"{theirs.name} takes slices of {theirs.slot_bytes} bytes")
