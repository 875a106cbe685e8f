"""Objects of the shared store: only what this cluster sealed under this name is taken."""

import os

import pytest

from baton.kv_transfer.shared_store import chunk_object
from baton.kv_transfer.shared_store.chunk_object import SEAL_BYTES, ObjectSeal

SECRET, NAME = b"s" * 32, b"n" * 16
KV = os.urandom(1000)


def sealed(encrypt: bool = False) -> bytearray:
    found = bytearray(KV + bytes(SEAL_BYTES))
    ObjectSeal(SECRET, "model", encrypt=encrypt).seal(NAME, memoryview(found))
    return found


def opens(
    found: bytearray,
    *,
    secret: bytes = SECRET,
    name: bytes = NAME,
    identity: str = "model",
    encrypt: bool = False,
) -> bool:
    return ObjectSeal(secret, identity, encrypt=encrypt).open(name, memoryview(found))


@pytest.mark.parametrize("encrypt", [False, True])
def test_the_kv_comes_back_and_is_readable_only_without_encryption(encrypt: bool) -> None:
    found = sealed(encrypt)
    assert (found[: len(KV)] == KV) is not encrypt
    assert opens(found, encrypt=encrypt)
    assert found[: len(KV)] == KV


@pytest.mark.parametrize("encrypt", [False, True])
def test_what_is_wrong_is_refused(encrypt: bool) -> None:
    for at in (0, 500, *range(len(KV), len(KV) + SEAL_BYTES)):
        found = sealed(encrypt)
        found[at] ^= 1
        assert not opens(found, encrypt=encrypt), f"byte {at}"
    assert not opens(sealed(encrypt), encrypt=not encrypt)
    assert not opens(sealed(encrypt), secret=b"t" * 32, encrypt=encrypt)
    assert not opens(sealed(encrypt), name=b"m" * 16, encrypt=encrypt)
    assert not opens(sealed(encrypt), identity="other model", encrypt=encrypt)
    assert not opens(bytearray(os.urandom(len(KV) + SEAL_BYTES)), encrypt=encrypt)
    assert not opens(bytearray(len(KV) + SEAL_BYTES), encrypt=encrypt)


def test_an_object_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = sealed()
    monkeypatch.setattr(chunk_object, "VERSION", chunk_object.VERSION + 1)
    assert not opens(found)


def test_keys_depend_on_secret_identity_and_name() -> None:
    keys = {
        ObjectSeal(secret, identity, encrypt=False).key(name)
        for secret in (SECRET, b"t" * 32)
        for identity in ("model", "other model")
        for name in (NAME, b"m" * 16)
    }
    assert len(keys) == 8
    assert NAME.hex() not in "".join(keys), "the store learns no name"
