"""KV that outlives its workers: a store that all workers of a cluster share (`--kv-store`).

    engine process: `endpoint.shared_store`     store process: `__main__`           the store
    gathers chunks into units    ── put ──────▶ seals and writes      ── objects ──▶
    fetches what prompts lack    ── exists, get ▶ reads and verifies  ◀── objects ──
    scatters verified units      ◀── answers ──

An object is the KV of one chunk of 64 tokens, all layers, in the layout of the wire. So it fits any block
size and any number of ranks. `chunk_object` seals it. A *unit* is the memory of one object, in an arena that
both processes map. Nothing in the store is trusted, and any object may vanish: a wrong one is a miss.

The store's client has a process of its own, since its calls may block for seconds and its library may crash.
The service starts the process again if it ends. It runs without torch.

To add a store, write a `StoreBackend` and name it in `BACKENDS`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any
from urllib.parse import SplitResult, parse_qsl, urlsplit

import msgspec

from baton.content import CHUNK_TOKENS
from baton.kv_transfer.config import PAGE
from baton.kv_transfer.layout import KVLayout

STORE_MODULE = "baton.kv_transfer.shared_store"
"""Run with `-m`, it is the store process."""
MEMORY = 64 << 20
"""Bytes of units. They bound what is under way to the store and from it."""
FEWEST_UNITS, MOST_UNITS = 4, 64


EXIT_UNUSABLE = 2
"""Exit code of a store process if its client cannot be loaded."""


class StoreGone(Exception):
    """The store does not answer. The process ends, and its next one connects again."""


class StoreBackend:
    """The client of a store. Two threads call it at the same time. Each call returns one result for each key,
    and raises `StoreGone` if the store cannot be reached."""

    def __init__(self, url: SplitResult, options: Mapping[str, str], memory: memoryview) -> None:
        """Connects. `memory` has all places of `put` and `get`. Raises `StoreGone`."""

    def exists(self, keys: Sequence[str]) -> list[bool]:
        raise NotImplementedError

    def put(self, keys: Sequence[str], places: Sequence[memoryview]) -> list[bool]:
        """Writes objects. True: the store has an object with this key, perhaps an older one."""
        raise NotImplementedError

    def get(self, keys: Sequence[str], places: Sequence[memoryview]) -> list[bool]:
        """Reads objects. False: there is none of exactly this size."""
        raise NotImplementedError

    def remove(self, keys: Sequence[str]) -> None:
        raise NotImplementedError


BACKENDS = {"mooncake": ("baton.kv_transfer.shared_store.mooncake", "mooncake")}
"""By the scheme of `--kv-store`: the module with the class `Backend`, and the package that it needs."""


def parse(url: str) -> tuple[SplitResult, Mapping[str, str]]:
    """The address of a store, and its options. Raises ValueError if it names none."""
    found = urlsplit(url)
    try:
        complete = found.scheme in BACKENDS and found.hostname and found.port
    except ValueError:  # the port is none
        complete = False
    if not complete:
        forms = " or ".join(f"{scheme}://HOST:PORT" for scheme in BACKENDS)
        raise ValueError(f"--kv-store: {url!r} is no store; give {forms}")
    return found, MappingProxyType(dict(parse_qsl(found.query)))


def check(url: str) -> None:
    """Raises ValueError if the URL names no store, or its Python package is not installed."""
    _, package = BACKENDS[parse(url)[0].scheme]
    if find_spec(package) is None:
        raise ValueError(
            f"--kv-store: the package {package} is not installed; run `pip install -e '.[store]'` in Baton's "
            "source directory"
        )


def open_backend(url: str, memory: memoryview) -> StoreBackend:
    """Connects to the store. Raises `StoreGone`, and `ImportError` if the system lacks a library."""
    found, options = parse(url)
    return import_module(BACKENDS[found.scheme][0]).Backend(found, options, memory)


class Units(msgspec.Struct, frozen=True):
    """How an arena is cut: a unit has a slot for each layer with KV, and one for what seals the object."""

    count: int
    slots: int  # of each unit
    slot_bytes: int

    @classmethod
    def of(cls, layout: KVLayout) -> Units:
        slot_bytes = -(-CHUNK_TOKENS * layout.bytes_per_token_layer // PAGE) * PAGE
        slots = len(layout.kv_layers) + 1
        fitting = MEMORY // (slots * slot_bytes)
        return cls(max(FEWEST_UNITS, min(MOST_UNITS, fitting)), slots, slot_bytes)

    def memory(self, arena: memoryview, unit: int) -> memoryview:
        """The bytes of a unit. Its object is their beginning."""
        size = self.slots * self.slot_bytes
        return arena[unit * size : (unit + 1) * size]


class StoreStart(msgspec.Struct, frozen=True, kw_only=True):
    """The first line on stdin of `python -m baton.kv_transfer.shared_store`, as JSON."""

    url: str
    name: str  # "prefill 0"
    title: str
    parent_pid: int
    identity: str  # as in `ObjectSeal`
    encrypt: bool
    units: Units
    arena_fd: int  # inherited, and the next
    channel_fd: int
    logging: dict[str, Any] | None
