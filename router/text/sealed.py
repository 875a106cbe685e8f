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


@lru_cache(maxsize=4)
def seal_key(secret: bytes) -> bytes:
    """Returns the key for reasoning. The cluster secret does not follow from it: children that read texts of
    clients have it."""
    return HKDF(hashes.SHA256(), 32, salt=None, info=b"baton reasoning").derive(secret)


def signature(text: str, key: bytes) -> str:
    """Returns the same digest in each router and after each restart."""
    return base64.b64encode(_DIGEST + hmac.digest(key, text.encode(), "sha256")).decode()


def sealed(text: str, key: bytes) -> str:
    """Returns the text in a form that only the cluster reads."""
    nonce = os.urandom(_NONCE_BYTES)
    return base64.b64encode(_SEALED + nonce + AESGCM(key).encrypt(nonce, text.encode(), None)).decode()


def unsealed(signature: str, key: bytes) -> str:
    """Returns the text in a signature: an empty one if it has none, or is not of this cluster."""
    try:
        data = base64.b64decode(signature, validate=True)
        if data[:1] != _SEALED or not key:
            return ""
        nonce, encrypted = data[1 : 1 + _NONCE_BYTES], data[1 + _NONCE_BYTES :]
        return AESGCM(key).decrypt(nonce, encrypted, None).decode()
    except (binascii.Error, ValueError, InvalidTag):
        return ""
