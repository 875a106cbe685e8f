"""Objects of the shared store: only what this cluster sealed under this name is taken."""

import os
import re

import pytest

from baton.kv_transfer.shared_store import chunk_object
from baton.kv_transfer.shared_store.chunk_object import SEAL_BYTES, ObjectSeal, StoreKeys, label, name_of

SECRET, NAME = b"s" * 32, label(b"tenant", b"n" * 16)
KV = os.urandom(1000)


def sealed(encrypt: bool = False, period: int = 0) -> bytearray:
    found = bytearray(KV + bytes(SEAL_BYTES))
    ObjectSeal(SECRET, "model", encrypt=encrypt).seal(NAME, period, memoryview(found))
    return found


def opens(
    found: bytearray,
    *,
    secret: bytes = SECRET,
    name: bytes = NAME,
    identity: str = "model",
    encrypt: bool = False,
    period: int = 0,
) -> bool:
    return ObjectSeal(secret, identity, encrypt=encrypt).open(name, period, memoryview(found))


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
    first, second = (b"-----BEGIN PRIVATE KEY-----".ljust(64, b"=") + end for end in (b"a", b"b"))
    assert ObjectSeal(first, "model", encrypt=encrypt).keys.root != StoreKeys(second).root, "each byte counts"
    for other in (label(b"tenant", b"m" * 16), label(b"other", b"n" * 16), label(b"tenant", b"n" * 16, 1)):
        assert not opens(sealed(encrypt), name=other, encrypt=encrypt)
    assert not opens(sealed(encrypt, period=1), encrypt=encrypt), "written long ago"
    assert not opens(sealed(encrypt), identity="other model", encrypt=encrypt)
    assert not opens(bytearray(os.urandom(len(KV) + SEAL_BYTES)), encrypt=encrypt)
    assert not opens(bytearray(len(KV) + SEAL_BYTES), encrypt=encrypt)


def test_an_object_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = sealed()
    monkeypatch.setattr(chunk_object, "VERSION", chunk_object.VERSION + 1)
    assert not opens(found)


def test_keys_depend_on_secret_identity_name_and_period() -> None:
    keys = {
        ObjectSeal(secret, identity, encrypt=False).key(name, period)
        for secret in (SECRET, b"t" * 32)
        for identity in ("model", "other model")
        for name in (NAME, label(b"tenant", b"m" * 16), label(b"other", b"n" * 16))
        for period in (0, 1)
    }
    assert len(keys) == 24
    assert name_of(NAME).hex() not in "".join(keys), "the store learns no name"


def test_patterns_find_a_tenant_and_old_periods() -> None:
    seal, other = (ObjectSeal(secret, "model", encrypt=False) for secret in (SECRET, b"t" * 32))
    salts = {b"": b"", b"long": b"a" * 16, b"longer": b"a" * 16 + b"field of a request"}
    keys = {(name, period): seal.key(label(salt, b"n" * 16), period) for name, salt in salts.items()
            for period in (1, 0x10, 0x11)}  # fmt: skip

    def found(pattern: str) -> set[tuple[bytes, int]]:
        assert not re.match(pattern, other.key(NAME, 1)), "of another cluster"
        return {key for key, text in keys.items() if re.match(pattern, text)}

    assert found(seal.keys.pattern()) == keys.keys()
    assert {name for name, _ in found(seal.keys.pattern(salt=b"a" * 16))} == {b"long", b"longer"}
    assert {name for name, _ in found(seal.keys.pattern(salt=b""))} == {b""}
    assert {period for _, period in found(seal.keys.pattern(keep=(0x11, 0x10)))} == {1}
