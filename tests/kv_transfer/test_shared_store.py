"""The engine's end and the store process together, over a store that is a dict."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from urllib.parse import urlsplit

import pytest
import torch

import baton.kv_transfer as kv
from baton.content import CHUNK_TOKENS
from baton.kv_transfer.arena import Arena, channel_pair, memory_file
from baton.kv_transfer.channel import Channel, ChannelClosed
from baton.kv_transfer.endpoint.shared_store import SharedStore
from baton.kv_transfer.protocol.local_messages import StoreOrder
from baton.kv_transfer.shared_store import StoreBackend, StoreStart, Units, __main__
from baton.kv_transfer.shared_store.__main__ import StoreProcess

from .conftest import until

LAYOUT = kv.KVLayout(num_layers=3, num_kv_heads=2, head_dim=20, dtype="float32")  # no multiple of a page
FP8 = kv.KVLayout(num_layers=3, num_kv_heads=2, head_dim=20, dtype="float8_e4m3fn")
LATENT = kv.KVLayout(num_layers=3, num_kv_heads=1, head_dim=20, dtype="bfloat16", kind="latent")
SECRET = b"s" * 32
NAMES = [bytes([i]) * 16 for i in range(40)]


class DictStore(StoreBackend):
    """Objects in a dict. `opened` is cleared to make calls of prompts hang."""

    def __init__(self) -> None:
        super().__init__(urlsplit("dict://"), {}, memoryview(b""))
        self.objects: dict[str, bytes] = {}
        self.opened = threading.Event()
        self.opened.set()
        self.full = False
        self.asked: list[str] = []
        self.puts: list[str] = []

    def exists(self, keys: Sequence[str]) -> list[bool]:
        self.opened.wait()
        self.asked += keys
        return [key in self.objects for key in keys]

    def put(self, keys: Sequence[str], places: Sequence[memoryview]) -> list[bool]:
        self.puts += keys
        if self.full:
            return [False] * len(keys)
        for key, place in zip(keys, places, strict=True):
            self.objects.setdefault(key, bytes(place))
        return [True] * len(keys)

    def get(self, keys: Sequence[str], places: Sequence[memoryview]) -> list[bool]:
        self.opened.wait()
        for key, place in zip(keys, places, strict=True):
            found = self.objects.get(key, b"")[: place.nbytes]
            place[: len(found)] = found
        return [
            len(self.objects.get(key, b"")) == place.nbytes for key, place in zip(keys, places, strict=True)
        ]

    def remove(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.objects.pop(key, None)


class _Channel(Channel):
    """Of a process that can be killed."""

    def __init__(self, sock: socket.socket, receives: type) -> None:
        super().__init__(sock, receives)
        self.killed = threading.Event()

    def receive(self) -> Sequence[StoreOrder]:
        if self.killed.is_set():
            raise ChannelClosed
        return super().receive()


class Worker:
    """A KV cache of random bytes with the chunks `NAMES` behind each other, and its end of the store."""

    def __init__(
        self, store: DictStore, block_size: int, *, secret: bytes = SECRET, encrypt: bool = False,
        layout: kv.KVLayout = LAYOUT,
    ) -> None:  # fmt: skip
        self.block_size = block_size
        blocks = len(NAMES) * CHUNK_TOKENS // block_size
        rows, heads, dtype = layout.parts[0].rows, layout.num_kv_heads, getattr(torch, layout.dtype)
        shape = rows, blocks, block_size, heads, layout.head_dim
        self.layers = [torch.randn(shape).to(dtype) for _ in range(layout.num_layers)]
        self.scales: list[torch.Tensor] = []
        if layout is FP8:
            self.scales = [torch.rand(rows, blocks, heads, block_size) for _ in range(layout.num_layers)]
        paged = kv.PagedKV(self.layers, block_size, layout, "cpu", scales=self.scales)
        self._arena_fd = memory_file()
        ours, self._theirs = channel_pair()
        self.pinned: set[bytes] = set()
        self.known: set[bytes] = set()
        self.store = SharedStore(
            paged, os.dup(self._arena_fd), ours, pin=self._pin, unpin=self.pinned.remove, known=self._knows
        )
        self.units = Units.of(layout)
        self._start = StoreStart(
            url="", name="", title="", parent_pid=0, identity="model", encrypt=encrypt, units=self.units,
            arena_fd=0, channel_fd=0, logging=None,
        )  # fmt: skip
        self._secret = secret
        self._thread: threading.Thread | None = None
        self.start_process(store)

    def start_process(self, store: DictStore) -> None:
        """A store process, as a thread, after the end of the one before."""
        self._end_process()
        arena = Arena(os.dup(self._arena_fd), self.units.count * self.units.slots, self.units.slot_bytes)
        channel = _Channel(socket.socket(fileno=os.dup(self._theirs.fileno())), StoreOrder)
        process = StoreProcess(self._start, self._secret, channel, arena)
        self._killed = channel.killed

        def run() -> None:
            with pytest.raises(ChannelClosed):
                process.run(store)

        self._thread = threading.Thread(target=run)
        self._thread.start()
        before = self.store._session
        self.until(lambda: self.store._session != before, "another session")

    def _end_process(self) -> None:
        if self._thread is not None:
            self._killed.set()
            self._thread.join(10)
            assert not self._thread.is_alive()

    def _pin(self, pin_id: bytes, chunks: Sequence[bytes], first: int) -> tuple[int, Sequence[int]]:
        self.pinned.add(pin_id)
        return 1, range(len(self.layers[0][0]))

    def _knows(self, name: bytes, there: bool) -> None:
        (self.known.add if there else self.known.remove)(name)

    def until(self, condition: object, what: str) -> None:
        def pumped() -> bool:
            self.store.move(busy=False)
            assert callable(condition)
            return condition()

        until(pumped, what, self.store)

    def offer(self, names: Sequence[bytes]) -> None:
        for name in names:
            self.store.offer(name, NAMES.index(name))
        self.until(lambda: not self.store.writes, "all writes")

    def fetch(self, names: Sequence[bytes], fetch_id: bytes = b"f") -> None:
        self.store.fetch_content(
            fetch_id, chunks=names, first_chunk=NAMES.index(names[0]), kv_address="", incarnation=0,
            block_ids=range(len(self.layers[0][0])),
        )  # fmt: skip

    def event(self) -> kv.Injected | kv.FetchFailed | kv.Closed:
        events: list[kv.Injected | kv.FetchFailed | kv.Closed] = []
        self.until(lambda: events.extend(self.store.poll()) or events, "an event")
        [event] = events
        return event

    def fetched(self, names: Sequence[bytes]) -> int:
        """How many chunks came."""
        self.fetch(names)
        event = self.event()
        return event.stats.tokens // CHUNK_TOKENS if isinstance(event, kv.Injected) else 0

    def chunk(self, name: bytes) -> torch.Tensor:
        first = NAMES.index(name) * CHUNK_TOKENS
        scales = [x.transpose(2, 3).unsqueeze(4) for x in self.scales]
        flat = [x.float().flatten(1, 2)[:, first : first + CHUNK_TOKENS] for x in (*self.layers, *scales)]
        return torch.cat([x.flatten() for x in flat])

    def close(self) -> None:
        assert not self.pinned
        assert self.store.idle
        self.until(lambda: len(self.store._free) == self.units.count, "all units to come back")
        self._end_process()
        self.store.close()
        self._theirs.close()
        os.close(self._arena_fd)


@pytest.fixture(autouse=True)
def times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(__main__, "TICK", 0.02)


Workers = Iterator[tuple[DictStore, Worker, Worker]]


@pytest.fixture(params=[False, True], ids=["plain", "encrypted"])
def two(request: pytest.FixtureRequest) -> Workers:
    """A store and two workers with other block sizes."""
    store = DictStore()
    workers = [Worker(store, size, encrypt=request.param) for size in (16, 128)]
    yield store, workers[0], workers[1]
    for worker in workers:
        worker.close()


def damaged(store: DictStore) -> Mapping[str, list[bytes]]:
    """What may stand in place of an object."""
    good = list(store.objects.values())
    return {
        "cut": [good[0][:-1]],
        "longer": [good[0] + b"x"],
        "swapped": [good[1]],
        "garbage": [os.urandom(len(good[0])), bytes(len(good[0])), b""],
        "one bit": [bytes([good[0][0] ^ 1]) + good[0][1:]],
    }


def test_what_one_worker_wrote_another_one_reads(two: tuple[DictStore, Worker, Worker]) -> None:
    store, writer, reader = two
    writer.offer(NAMES)
    assert len(store.objects) == len(NAMES)
    assert writer.known == {*NAMES}
    assert reader.fetched(NAMES[3:]) == len(NAMES) - 3, "more chunks than units"
    for name in NAMES[3:]:
        assert torch.equal(reader.chunk(name), writer.chunk(name))
    assert not torch.equal(reader.chunk(NAMES[0]), writer.chunk(NAMES[0]))
    assert reader.known == {*NAMES[3:]}


@pytest.mark.parametrize("layout", [FP8, LATENT], ids=["fp8", "latent"])
def test_every_kind_of_cache_fits(layout: kv.KVLayout) -> None:
    store = DictStore()
    writer, reader = Worker(store, 16, layout=layout), Worker(store, 128, layout=layout)
    writer.offer(NAMES)
    assert reader.fetched(NAMES) == len(NAMES)
    for name in NAMES:
        assert torch.equal(reader.chunk(name), writer.chunk(name))
    for worker in (writer, reader):
        worker.close()


def test_each_content_is_written_once(two: tuple[DictStore, Worker, Worker]) -> None:
    store, writer, reader = two
    writer.offer(NAMES[:4])
    writer.offer(NAMES[:4])
    reader.offer(NAMES[:4])
    assert len(store.puts) == 4
    assert len(store.asked) == 8, "once by each worker"


def test_a_wrong_object_is_a_miss_and_is_written_again(two: tuple[DictStore, Worker, Worker]) -> None:
    store, writer, reader = two
    writer.offer(NAMES[:2])
    first = next(iter(store.objects))
    for what, objects in damaged(store).items():
        for wrong in objects:
            good, store.objects[first] = store.objects[first], wrong
            before = reader.chunk(NAMES[0])
            assert reader.fetched(NAMES[:2]) == 0, what
            assert torch.equal(reader.chunk(NAMES[0]), before), "nothing wrong is copied"
            assert first not in store.objects, f"{what}: removed"
            reader.offer(NAMES[:1])
            assert store.objects[first], "its own KV, under the same name"
            store.objects[first] = good
    assert reader.fetched(NAMES[:2]) == 2


def test_chunks_before_a_missing_one_come(two: tuple[DictStore, Worker, Worker]) -> None:
    store, writer, reader = two
    writer.offer(NAMES)
    keys = list(store.objects)
    del store.objects[keys[30]]
    assert reader.fetched(NAMES) == 30
    store.objects[keys[7]] = b"wrong"
    assert reader.fetched(NAMES) == 7
    assert reader.known == {*NAMES[:30]} - {NAMES[7]}


def test_another_secret_finds_nothing() -> None:
    store = DictStore()
    writer, stranger = Worker(store, 16), Worker(store, 16, secret=b"t" * 32)
    writer.offer(NAMES[:2])
    assert stranger.fetched(NAMES[:2]) == 0
    stranger.offer(NAMES[:2])
    assert len(store.objects) == 4, "and takes nothing away"
    for worker in (writer, stranger):
        worker.close()


def test_a_fetch_that_is_given_up_gives_its_blocks_back_at_once(
    two: tuple[DictStore, Worker, Worker],
) -> None:
    store, writer, reader = two
    writer.offer(NAMES)
    store.opened.clear()
    before = reader.chunk(NAMES[0])
    reader.fetch(NAMES)
    reader.store.cancel(b"f")
    assert reader.event() == kv.Closed(b"f")
    store.opened.set()
    reader.until(lambda: not reader.store._orders, "the late answer")
    assert torch.equal(reader.chunk(NAMES[0]), before)
    assert reader.fetched(NAMES) == len(NAMES)


def test_a_new_store_process_does_nothing_of_the_one_before(
    two: tuple[DictStore, Worker, Worker],
) -> None:
    """What the old one was to read and write has failed. Its last answers come late."""
    store, writer, reader = two
    writer.offer(NAMES)
    hanging = DictStore()
    hanging.opened.clear()
    reader.start_process(hanging)
    reader.fetch(NAMES)
    reader.start_process(store)
    assert reader.event() == kv.FetchFailed(b"f", "gone")
    hanging.opened.set()
    assert reader.fetched(NAMES) == len(NAMES)


def test_a_full_store_is_left_alone_for_a_while(two: tuple[DictStore, Worker, Worker]) -> None:
    store, writer, reader = two
    store.full = True
    writer.offer(NAMES)
    assert 1 <= len(store.puts) <= writer.units.count // 2, "those under way"
    writer.until(lambda: not writer.store._orders, "answers")
    store.full = False
    writer.store._paused_until = 0.0
    writer.until(lambda: not writer.store.writes, "the rest")
    assert reader.fetched(NAMES[-2:]) == 2
    assert writer.store.refused >= 1
