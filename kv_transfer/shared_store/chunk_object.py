"""An object of the shared store: KV of one chunk or a section of states, sealed by the cluster secret. Pure.

    KV of each layer with KV, or slices of states, each in a slot │ nonce │ tag

The tag is that of AES-256-GCM over all before it. Without encryption the KV is authenticated data: its MAC
takes a tenth of the time of a keyed hash. The key of the object in the store, and the key of the cipher, are
keyed hashes of what the object is: version, model, layout, tenant, content name, section, and the period in
which it was written. So an object of another kind, or under another name, is a miss, and the store learns no
name.

A key in the store is baton-CLUSTER-TENANT-PERIOD-OBJECT: a pattern finds what a tenant or a period has.
"""

import os
from collections.abc import Iterable
from hashlib import blake2b

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import GCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

VERSION = 2
"""Of objects. Those of other versions are misses."""
_NONCE, _TAG = 12, 16
SEAL_BYTES = _NONCE + _TAG
_TENANT = 16
"""A salt begins with that of its API key: so many bytes."""


def label(salt: bytes, name: bytes, section: int = 0) -> bytes:
    """Names an object. `section`: 0 is the KV of the chunk with this name; 1, 2, … are states after it."""
    return salt[:_TENANT].ljust(_TENANT, b"\0") + section.to_bytes(2) + name


def section_of(name: bytes) -> int:
    """The section in a label."""
    return int.from_bytes(name[_TENANT : _TENANT + 2])


def name_of(name: bytes) -> bytes:
    """The content name in a label."""
    return name[_TENANT + 2 :]


class StoreKeys:
    """The keys of one cluster's objects."""

    def __init__(self, secret: bytes) -> None:
        self.root = HKDF(SHA256(), 32, salt=None, info=b"baton store").derive(secret)
        self._cluster = blake2b(b"cluster", key=self.root, digest_size=4).hexdigest()

    def key(self, tenant: bytes, period: int, name: str) -> str:
        return f"baton-{self._cluster}-{self._tenant(tenant)}-{period:x}-{name}"

    def _tenant(self, salt: bytes) -> str:
        return blake2b(b"tenant" + label(salt, b""), key=self.root, digest_size=8).hexdigest()

    def pattern(self, *, salt: bytes | None = None, keep: Iterable[int] = ()) -> str:
        """A regular expression of the keys of one tenant, or of all; without those of some periods."""
        tenant = "[0-9a-f]+" if salt is None else self._tenant(salt)
        kept = "|".join(f"{period:x}-" for period in keep)
        return f"^baton-{self._cluster}-{tenant}-{f'(?!{kept})' if kept else ''}.*"


class ObjectSeal:
    """Seals and opens the objects of one cluster and one layout, in place."""

    def __init__(self, secret: bytes, identity: str, *, encrypt: bool) -> None:
        """`identity`: what the bytes depend on beside the content name of the KV, which stands for the
        weights of now. It stays the same while they change."""
        self.keys = StoreKeys(secret)
        self._identity = f"{VERSION} {encrypt} {identity} ".encode()
        self._encrypt = encrypt

    def key(self, name: bytes, period: int) -> str:
        """Under which the store has the object. `name`: a `label`."""
        return self.keys.key(name[:_TENANT], period, self._derive(name, period)[:16].hex())

    def seal(self, name: bytes, period: int, place: memoryview) -> None:
        """`place`: the KV, and `SEAL_BYTES` behind it for the seal."""
        kv, seal = place[:-SEAL_BYTES], place[-SEAL_BYTES:]
        nonce = os.urandom(_NONCE)
        cipher = Cipher(AES(self._derive(name, period)[16:]), GCM(nonce)).encryptor()
        if self._encrypt:
            cipher.update_into(kv, kv)
        else:
            cipher.authenticate_additional_data(kv)
        cipher.finalize()
        seal[:] = nonce + cipher.tag

    def open(self, name: bytes, period: int, place: memoryview) -> bool:
        """Whether the object is the one of this name and period. If not, its bytes are undefined. Nothing
        else may write to `place`."""
        kv, seal = place[:-SEAL_BYTES], bytes(place[-SEAL_BYTES:])
        cipher = Cipher(AES(self._derive(name, period)[16:]), GCM(seal[:_NONCE], seal[_NONCE:])).decryptor()
        if self._encrypt:
            cipher.update_into(kv, kv)
        else:
            cipher.authenticate_additional_data(kv)
        try:
            cipher.finalize()
        except InvalidTag:
            return False
        return True

    def _derive(self, name: bytes, period: int) -> bytes:
        """16 bytes for the store's key, and the cipher's key."""
        return blake2b(
            self._identity + period.to_bytes(8) + name, key=self.keys.root, digest_size=48
        ).digest()
