"""An object of the shared store: KV of one chunk, sealed with the cluster secret. Pure.

    KV of each layer with KV, each in a slot │ magic, version, is_encrypted │ nonce │ tag

The tag is that of AES-256-GCM over all before it. Without encryption the KV is authenticated data: its MAC
takes a tenth of the time of a keyed hash. The key of the object in the store, and the key of the cipher,
are keyed hashes of the identity of the KV and of its content name. So an object under another name, of
another model or layout, or of another cluster has a wrong tag, and the store learns no name.
"""

from __future__ import annotations

import os
import struct
from hashlib import blake2b

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import GCM

VERSION = 1
"""Of objects. Those of other versions are misses."""
_HEADER = struct.Struct("<4sHH")
_MAGIC = b"BKVO"
_NONCE, _TAG = 12, 16
SEAL_BYTES = _HEADER.size + _NONCE + _TAG


class ObjectSeal:
    """Seals and opens the objects of one cluster and one layout, in place."""

    def __init__(self, secret: bytes, identity: str, *, encrypt: bool) -> None:
        """`identity`: what the KV depends on beside its content name."""
        self._root = blake2b(b"baton store", key=secret[:64], digest_size=32).digest()
        self._identity = identity.encode()
        self._header = _HEADER.pack(_MAGIC, VERSION, encrypt)
        self._encrypt = encrypt
        self._prefix = "baton-" + blake2b(b"cluster", key=self._root, digest_size=4).hexdigest()

    def key(self, name: bytes) -> str:
        """Under which the store has the object."""
        return f"{self._prefix}-{self._derive(name)[:16].hex()}"

    def seal(self, name: bytes, place: memoryview) -> None:
        """`place`: the KV, and `SEAL_BYTES` behind it for the seal."""
        kv, seal = place[:-SEAL_BYTES], place[-SEAL_BYTES:]
        nonce = os.urandom(_NONCE)
        cipher = Cipher(AES(self._derive(name)[16:]), GCM(nonce)).encryptor()
        cipher.authenticate_additional_data(self._header)
        if self._encrypt:
            cipher.update_into(kv, kv)
        else:
            cipher.authenticate_additional_data(kv)
        cipher.finalize()
        seal[:] = self._header + nonce + cipher.tag

    def open(self, name: bytes, place: memoryview) -> bool:
        """Whether the object is that of this name. If not, its bytes are undefined."""
        kv, seal = place[:-SEAL_BYTES], bytes(place[-SEAL_BYTES:])
        if seal[: _HEADER.size] != self._header:
            return False
        nonce, tag = seal[_HEADER.size : -_TAG], seal[-_TAG:]
        cipher = Cipher(AES(self._derive(name)[16:]), GCM(nonce, tag)).decryptor()
        cipher.authenticate_additional_data(self._header)
        if self._encrypt:
            cipher.update_into(kv, kv)
        else:
            cipher.authenticate_additional_data(kv)
        try:
            cipher.finalize()
        except InvalidTag:
            return False
        return True

    def _derive(self, name: bytes) -> bytes:
        """16 bytes for the store's key, and the cipher's key."""
        return blake2b(name + self._identity, key=self._root, digest_size=48).digest()
