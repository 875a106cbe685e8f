"""KV that outlives its workers: a store that all workers of a cluster share (`--kv-store`).

    engine process: `endpoint.shared_store`     store process: `__main__`    client process: `client`    store
    gathers KV into units        ── put ──────▶ seals, copies ─────────────▶ writes ── objects ─────────▶
    fetches what prompts lack    ── exists, get ▶ copies, then verifies ◀─── reads ◀───────────────────
    scatters verified units      ◀── answers ──

An object is the KV of one chunk of 64 tokens, all layers, in the layout of the wire, or a section of states
after one. So it fits any block size and any number of ranks. `chunk_object` seals it. A *unit* is the memory
of one object, in an arena that the engine and the store process map. Nothing in the store is trusted, and any
object may vanish: a wrong one is a miss.

The store's client has a process of its own. Its calls may block for seconds, its library may crash, and a
store may let every peer read and write the memory of its clients: Mooncake over TCP does. So that process has
no secret, and no memory that is used before the store process has copied and verified it. If either process
ends, the service starts both again. They run without torch.

To add a store, write a `StoreBackend` and name it in `BACKENDS`.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any
from urllib.parse import SplitResult, parse_qsl, urlsplit

import msgspec

from baton.kv_names import CHUNK_TOKENS
from baton.kv_transfer.arena import Arena
from baton.kv_transfer.config import PAGE
from baton.kv_transfer.layout import KVLayout, Piece, cut
from baton.kv_transfer.shared_store.chunk_object import SEAL_BYTES
from baton.system import usable_cpus

STORE_MODULE = "baton.kv_transfer.shared_store"
"""Run with `-m`, it is the store process."""
MEMORY = 64 << 20
"""Bytes of units. They bound what is under way to the store and from it."""
FEWEST_UNITS, MOST_UNITS = 4, 64
READERS = min(4, usable_cpus())
"""Threads that read at the same time, so that some read while others verify. Mooncake's client polls while it
waits, so more of them than CPUs would take the time of all others."""


EXIT_UNUSABLE = 2
"""Exit code of a store process or client if the client's library cannot be loaded."""


class StoreGone(Exception):
    """The store does not answer. The process ends, and its next one connects again."""


class StoreBackend(ABC):
    """The client of a store. Threads call it at the same time. Each call returns one result for each key,
    and raises `StoreGone` if the store cannot be reached. `places` are of the memory that it was given."""

    @abstractmethod
    def __init__(self, url: SplitResult, options: Mapping[str, str], memory: memoryview) -> None:
        """Connects. Raises `StoreGone`."""

    @abstractmethod
    def exists(self, keys: Sequence[str]) -> list[bool]: ...

    @abstractmethod
    def put(self, keys: Sequence[str], places: Sequence[memoryview]) -> list[bool]:
        """Writes objects. True: the store has an object with this key, perhaps an older one."""

    @abstractmethod
    def get(self, keys: Sequence[str], places: Sequence[memoryview]) -> list[bool | None]:
        """Reads objects. False: it cannot be read, or has another size. None: there is none."""

    @abstractmethod
    def remove(self, keys: Sequence[str]) -> None: ...

    @abstractmethod
    def clear(self, pattern: str) -> int:
        """Removes the objects whose keys match. Returns their number."""


BACKENDS = {"mooncake": ("baton.kv_transfer.shared_store.mooncake", "mooncake")}
"""By the scheme of `--kv-store`: the module with the class `Backend`, and the package that it needs."""


def parse(url: str) -> tuple[SplitResult, Mapping[str, str]]:
    """The address of a store, and its options. Raises ValueError if it names none."""
    parts = urlsplit(url)
    try:
        complete = parts.scheme in BACKENDS and parts.hostname and parts.port
    except ValueError:  # the port is none
        complete = False
    if not complete:
        forms = " or ".join(f"{scheme}://HOST:PORT" for scheme in BACKENDS)
        raise ValueError(f"--kv-store: {url!r} is no store; give {forms}")
    return parts, MappingProxyType(dict(parse_qsl(parts.query)))


def master_of(url: str) -> str:
    """The master's address in Mooncake's words."""
    parts, options = parse(url)
    return f"{'etcd://' if options.get('ha') == 'etcd' else ''}{parts.netloc}"


def max_age(url: str) -> float:
    """Seconds after which no object is used any more; 0: no limit. Raises ValueError."""
    max_age = parse(url)[1].get("max_age", "0")
    try:
        seconds = float(max_age)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ValueError(f"--kv-store: max_age={max_age}: must be a number of seconds, such as 86400")
    return seconds


def check(url: str) -> None:
    """Raises ValueError if the URL names no store, or its Python package is not installed."""
    _, package = BACKENDS[parse(url)[0].scheme]
    max_age(url)
    if find_spec(package) is None:
        raise ValueError(
            f"--kv-store: the package {package} is not installed; run `pip install -e '.[store]'` in Baton's "
            "source directory"
        )


def load_backend(url: str) -> type[StoreBackend]:
    """Raises `ImportError` if the system lacks a library."""
    return import_module(BACKENDS[parse(url)[0].scheme][0]).Backend


class Units(msgspec.Struct, frozen=True, dict=True):
    """How KV and states are cut into objects, and an arena into units.

    A unit has a slot for each slice of an object. If several ranks share the heads, it has as many more for
    each rank: ranks write their heads there, and the store process joins them."""

    layout: KVLayout
    ranks: int

    @cached_property
    def slot_bytes(self) -> int:
        needed = (
            array.bytes_of(array.heads, CHUNK_TOKENS) if array.per_token else array.head_bytes
            for array in self.layout.arrays
        )
        return -(-max(needed) // PAGE) * PAGE

    @property
    def object_slots(self) -> int:
        """The last one is for the seal."""
        return len(self._kv) + 1

    @property
    def slots(self) -> int:
        """Of a unit."""
        is_shared = any(len(self.of_ranks(piece)) > 1 for pieces in self.objects for piece in pieces)
        return self.object_slots * (1 + self.ranks if is_shared else 1)

    @cached_property
    def count(self) -> int:
        """How many units an arena has."""
        return max(FEWEST_UNITS, min(MOST_UNITS, MEMORY // (self.slots * self.slot_bytes)))

    @cached_property
    def objects(self) -> Sequence[Sequence[Piece]]:
        """The slices of the KV of a chunk, and then of each section of the states, all at position 0."""
        layout, most = self.layout, self.object_slots - 1
        states = [
            piece
            for number, array in enumerate(layout.arrays)
            if not array.per_token
            for layer in layout.layers[number]
            for piece in cut(layout, layer, (0, 0), (0, array.heads), self.slot_bytes, number)
        ]
        return [self._kv, *(states[at : at + most] for at in range(0, len(states), most))]

    @cached_property
    def _kv(self) -> Sequence[Piece]:
        """The slices of what each token of a chunk has."""
        return [
            Piece(layer, 0, array.heads, 0, CHUNK_TOKENS, number)
            for number, array in enumerate(self.layout.arrays)
            if array.per_token
            for layer in self.layout.layers[number]
        ]

    def object_bytes(self, section: int) -> int:
        return len(self.objects[section]) * self.slot_bytes + SEAL_BYTES

    def of_ranks(self, piece: Piece) -> list[Piece]:
        """The slice as ranks write it: the heads of each."""
        held = self.layout.arrays[piece.array].heads_of
        stop = piece.head_start + piece.head_count
        ranges = dict.fromkeys(held(rank, self.ranks) for rank in range(self.ranks))
        cuts = [(max(first, piece.head_start), min(last, stop)) for first, last in ranges]
        return [
            msgspec.structs.replace(piece, head_start=first, head_count=last - first)
            for first, last in cuts
            if first < last
        ]

    def memory(self, arena: memoryview, unit: int, section: int) -> memoryview:
        """The object in a unit."""
        at = unit * self.slots * self.slot_bytes
        return arena[at : at + self.object_bytes(section)]

    def map(self, memory_fd: int) -> Arena:
        """The units in memory of `memory_file`. All processes give it the same size."""
        return Arena.create(self.count * self.slots, self.slot_bytes, os.dup(memory_fd))


class StoreStart(msgspec.Struct, frozen=True, kw_only=True):
    """The first line on stdin of `python -m baton.kv_transfer.shared_store`, as JSON."""

    url: str
    name: str  # "prefill 0"
    title: str
    parent_pid: int
    encrypt: bool
    arena_fd: int  # inherited, and the next
    channel_fd: int
    logging: dict[str, Any] | None
