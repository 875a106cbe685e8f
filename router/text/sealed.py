"""Signatures of reasoning, by which a later turn brings it back to any router of the cluster.

Clients of Anthropic's API keep a block of thinking only with a signature. That of a block that is shown is a
digest. If the client wants none shown, the signature holds the text, encrypted. Keys come from the cluster
secret, so a signature outlives restarts. The model sees the reasoning of a block with another signature, too.
"""

import base64
import binascii
import hmac
import os
from functools import lru_cache

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

_DIGEST, _SEALED = b"\x01", b"\x02"
_NONCE_BYTES = 12
_SEALING = b"baton reasoning: sealed texts"
"""Names what the key and the texts are for: the texts have it as associated data."""


@lru_cache(maxsize=8)
def _key(secret: bytes, purpose: bytes) -> bytes:
    return HKDF(hashes.SHA256(), 32, salt=None, info=purpose).derive(secret)


def seal_key(secret: bytes) -> bytes:
    """Returns the key of sealed texts. Children that read texts of clients have it, and can make neither the
    cluster secret nor the key of signatures of it."""
    return _key(secret, _SEALING)


def signature(text: str, secret: bytes) -> str:
    """Returns the same digest in each router and after each restart. `secret`: of the cluster."""
    digest = hmac.digest(_key(secret, b"baton reasoning: signatures"), text.encode(), "sha256")
    return base64.b64encode(_DIGEST + digest).decode()


def sealed(text: str, secret: bytes) -> str:
    """Returns the text in a form that only the cluster with this secret reads."""
    nonce = os.urandom(_NONCE_BYTES)
    encrypted = AESGCM(seal_key(secret)).encrypt(nonce, text.encode(), _SEALING)
    return base64.b64encode(_SEALED + nonce + encrypted).decode()


def unsealed(signature: str, key: bytes) -> str:
    """Returns the text in a signature: an empty one if it has none, or is not of this cluster. `key`: the
    `seal_key`."""
    try:
        data = base64.b64decode(signature, validate=True)
        if data[:1] != _SEALED or not key:
            return ""
        nonce, encrypted = data[1 : 1 + _NONCE_BYTES], data[1 + _NONCE_BYTES :]
        return AESGCM(key).decrypt(nonce, encrypted, _SEALING).decode()
    except (binascii.Error, ValueError, InvalidTag):
        return ""
