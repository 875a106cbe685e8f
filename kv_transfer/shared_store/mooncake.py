"""Mooncake Store (https://github.com/kvcache-ai/Mooncake): `mooncake://MASTER:PORT[?protocol=&device=&host=]`,
or `mooncake://ETCD:PORT?ha=etcd` for masters that etcd elects a leader of.

Workers own no memory of the store: their segment has 0 bytes, so the end of a worker loses nothing.
Mooncake's calls release Python's lock. They block for seconds if the master or a store process hangs."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from urllib.parse import SplitResult

from baton.kv_transfer.arena import address_of
from baton.kv_transfer.shared_store import StoreBackend, StoreGone, master_of

os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # of the library
from mooncake.store import MooncakeDistributedStore

CLIENT_BUFFER = 16 << 20
"""Bytes that Mooncake's client takes for itself. Objects do not pass through it."""
_RPC_FAILED = -900
_NOT_FOUND = -704


class Backend(StoreBackend):
    def __init__(self, url: SplitResult, options: Mapping[str, str], memory: memoryview) -> None:
        assert url.hostname is not None and url.port is not None, "checked by `parse`"  # noqa: PT018
        protocol, device = options.get("protocol", "tcp"), options.get("device", "")
        try:
            with socket.create_connection((url.hostname, url.port), timeout=5.0) as probe:
                host = options.get("host", probe.getsockname()[0])
        except OSError as error:
            raise StoreGone(f"the master does not answer: {error}") from error
        self._store = MooncakeDistributedStore()
        if code := self._store.setup(
            host, "P2PHANDSHAKE", 0, CLIENT_BUFFER, protocol, device, master_of(url.geturl())
        ):
            raise StoreGone(f"setup failed with code {code}")
        self._memory = memory  # registered, so it must stay
        if code := self._store.register_buffer(address_of(memory), memory.nbytes):
            raise StoreGone(f"memory was refused with code {code}")

    def exists(self, keys: Sequence[str]) -> list[bool]:
        return [code == 1 for code in _answered(self._store.batch_is_exist(list(keys)))]

    def put(self, keys: Sequence[str], places: Sequence[memoryview]) -> list[bool]:
        codes = self._store.batch_put_from(list(keys), *_buffers(places))
        return [code == 0 for code in _answered(codes)]

    def get(self, keys: Sequence[str], places: Sequence[memoryview]) -> list[bool | None]:
        codes = _answered(self._store.batch_get_into(list(keys), *_buffers(places)))
        sizes = [place.nbytes for place in places]
        return [None if code == _NOT_FOUND else code == size for code, size in zip(codes, sizes, strict=True)]

    def remove(self, keys: Sequence[str]) -> None:
        self._store.batch_remove(list(keys), True)  # also while a lease protects it

    def clear(self, pattern: str) -> int:
        removed = self._store.remove_by_regex(pattern, True)
        if removed < 0:
            raise StoreGone(f"the master answered with code {removed}")
        return removed


def _answered(codes: Sequence[int]) -> Sequence[int]:
    if _RPC_FAILED in codes:
        raise StoreGone("the master does not answer")
    return codes


def _buffers(places: Sequence[memoryview]) -> tuple[list[int], list[int]]:
    return [address_of(place) for place in places], [place.nbytes for place in places]
