"""AES-256-GCM for the frames of a lane and for what no lane may show, and the keys of a lane. Pure.
docs/protocol.md has the bytes.

Each lane has a key for each direction. The number of the frame is the nonce, and the header is authenticated
with the payload. So a frame that is changed, repeated, left out or moved has a wrong tag. Headers are not
secret.

The import takes 50 ms, so it waits until a worker encrypts.
"""

import os

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import GCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from baton.kv_transfer.protocol.frame import DirectionKey, FrameReader, FrameWriter, LaneKeys

TAG_BYTES = 16
_NONCE_BYTES = 12


class KeyExchange:
    """This side's part of the X25519 exchange of one lane."""

    def __init__(self) -> None:
        self._private = X25519PrivateKey.generate()
        self.public = self._private.public_key().public_bytes_raw()

    def keys(self, peer: bytes, bound_to: bytes, *, initiates: bool) -> LaneKeys:
        """The keys of the lane, with the public key of the peer. ValueError: it is none.

        `bound_to`: a MAC of the handshake under the cluster secret, so that the keys depend on both."""
        shared = self._private.exchange(X25519PublicKey.from_public_bytes(peer))
        both = HKDF(SHA256(), 64, salt=bound_to, info=b"baton kv lane keys").derive(shared)
        initiator, listener = DirectionKey(both[:32]), DirectionKey(both[32:])
        return LaneKeys(initiator, listener) if initiates else LaneKeys(listener, initiator)


class Seal:
    """For holders of the cluster secret alone, also on lanes that are not encrypted."""

    def __init__(self, secret: bytes, label: bytes) -> None:
        self._aead = AESGCM(HKDF(SHA256(), 32, salt=None, info=label).derive(secret))

    def seal(self, plain: bytes, owner: bytes) -> bytes:
        nonce = os.urandom(_NONCE_BYTES)
        return nonce + self._aead.encrypt(nonce, plain, owner)

    def open(self, sealed: bytes, owner: bytes) -> bytes:
        """ValueError: no holder of the secret has sealed it for this owner."""
        try:
            return self._aead.decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], owner)
        except (InvalidTag, ValueError):
            raise ValueError("it is not sealed with this cluster's secret, or is of another worker") from None


class FrameEncryptor(FrameWriter):
    def __init__(self, key: DirectionKey) -> None:
        self._key = key

    def message(self, header: bytes, payload: bytes) -> bytes:
        key, nonce = self._key.next()
        return AESGCM(key).encrypt(nonce, payload, header)

    def trailer(self, header: bytes, payload: memoryview, known: int | None = None) -> bytes:
        key, nonce = self._key.next()
        cipher = Cipher(AES(key), GCM(nonce)).encryptor()
        cipher.authenticate_additional_data(header)
        cipher.update_into(payload, payload)
        cipher.finalize()
        return cipher.tag


class FrameDecryptor(FrameReader):
    trailer_bytes = TAG_BYTES

    def __init__(self, key: DirectionKey) -> None:
        self._key = key

    def begin(self, header: memoryview, *, summed: bool = False) -> None:
        key, nonce = self._key.next()
        self._cipher = Cipher(AES(key), GCM(nonce)).decryptor()
        self._cipher.authenticate_additional_data(header)

    def piece(self, piece: memoryview) -> None:
        self._cipher.update_into(piece, piece)

    def is_intact(self, trailer: memoryview) -> bool:
        try:
            self._cipher.finalize_with_tag(bytes(trailer))
        except InvalidTag:
            return False
        return True
