"""The engine's end and the store process together, over a store that is a dict."""

import itertools
import os
import re
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import msgspec
import pytest
import torch

import baton.kv_transfer as kv
from baton.kv_names import CHUNK_TOKENS
from baton.kv_names.cache_kinds import LATENT, STATE, CacheArray
from baton.kv_transfer.arena import Arena, channel_pair, memory_file
from baton.kv_transfer.channel import Channel, ChannelClosed
from baton.kv_transfer.endpoint.other_ranks import OtherRanks
from baton.kv_transfer.endpoint.rank_copier import RankCopier
from baton.kv_transfer.endpoint.shared_store import SharedStore
from baton.kv_transfer.endpoint.store_offers import LATER, Lent
from baton.kv_transfer.protocol.local_messages import StoreLayout, StoreOrder
from baton.kv_transfer.shared_store import (
    MEMORY,
    READERS,
    StoreBackend,
    StoreStart,
    Units,
    __main__,
)
from baton.kv_transfer.shared_store.__main__ import StoreProcess
from baton.kv_transfer.shared_store.chunk_object import ObjectSeal, StoreKeys
from baton.kv_transfer.shared_store.client import ClientProcess
from tests.layouts import kv_layout, other_arrays, paged
from tests.ledger import LedgerCache

from .conftest import until

LAYOUT = kv_layout(num_layers=3, num_kv_heads=2, head_dim=20, dtype="float32")  # no multiple of a page
FP8 = kv_layout(num_layers=3, num_kv_heads=2, head_dim=20, dtype="float8_e4m3fn")
LATENT = kv_layout(num_layers=3, num_kv_heads=1, head_dim=20, dtype="bfloat16", kind=LATENT)
HYBRID = kv_layout(
    num_layers=4, num_kv_heads=2, head_dim=20, dtype="bfloat16", state_layers=(1, 2),
    states=(CacheArray(STATE, "c", 3, 4, 200, "bfloat16"), CacheArray(STATE, "s", 2, 6, 900, "float32")),
)  # fmt: skip
LEDGER = kv.KVLayout.of([HYBRID.arrays[:1], LedgerCache(4).arrays, (*HYBRID.arrays, *LedgerCache(4).arrays)])
SECRET = b"s" * 32
STATE_SLOTS = 3
NAMES = [bytes([i]) * 16 for i in range(40)]


class DictStore(StoreBackend):
    """Objects in a dict, and the client process: `memory` is what peers may change. `opened` is cleared to
    make calls of prompts hang."""

    def __init__(self) -> None:
        self.memory = memoryview(bytearray(MEMORY))
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
        if self.full:
            return [False] * len(keys)
        for key, place in zip(keys, places, strict=True):
            self.objects.setdefault(key, bytes(place))
        return [True] * len(keys)

    def get(self, keys: Sequence[str], places: Sequence[memoryview]) -> list[bool | None]:
        self.opened.wait()
        sizes: list[bool | None] = []
        for key, place in zip(keys, places, strict=True):
            found = self.objects.get(key)
            sizes.append(None if found is None else len(found) == place.nbytes)
            if sizes[-1]:
                place[:] = self.objects[key]
        return sizes

    def remove(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.objects.pop(key, None)

    def clear(self, pattern: str) -> int:
        found = [key for key in self.objects if re.match(pattern, key)]
        self.remove(found)
        return len(found)

    def call(self, connection: int, method: str, keys: Any, places: Sequence[tuple[int, int]] = ()) -> Any:
        """As `ClientProcess`."""
        given = [self.memory[at : at + size] for at, size in places]
        if method == "put" and connection == 0:  # else it is that of a process that begins
            self.puts += keys
        return getattr(self, method)(keys, *([given] if given else []))


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
        layout: kv.KVLayout = LAYOUT, max_age: float = 0, ranks: int = 1,
    ) -> None:  # fmt: skip
        self.layout = layout
        self.block_size = block_size
        blocks = len(NAMES) * CHUNK_TOKENS // block_size
        rows, heads, dtype = layout.arrays[0].rows, layout.arrays[0].heads, getattr(torch, layout.dtypes.kv)
        shape = rows, blocks, block_size, heads, layout.arrays[0].head_dim
        self.layers = [torch.randn(shape).to(dtype) for _ in layout.layers[0]]
        self.scales: list[torch.Tensor] = []
        if layout is FP8:
            self.scales = [torch.rand(rows, blocks, heads, block_size) for _ in layout.layers[0]]
        self.others = other_arrays(layout, blocks, block_size, STATE_SLOTS, torch.randn)
        tokens = sum(array.per_token for array in layout.arrays) - 1
        self.states = self.others[tokens:]
        self.pools = [*self.layers, *itertools.chain.from_iterable(self.others[:tokens])]
        """What each token has."""
        self._arena_fd = memory_file()
        ours, self._theirs = channel_pair()
        self.pinned: list[bytes] = []
        self.known: set[bytes] = set()
        self.lacking: set[bytes] = set()
        pairs = [channel_pair() for _ in range(ranks - 1)]
        fds, self.ranks = (self._arena_fd, ours.detach()), OtherRanks([mine for mine, _ in pairs])
        self.units = Units(layout, ranks)
        self.waited: list[float] = []
        self.probed: list[tuple[float, int]] = []  # seconds, and what is unanswered then
        self.store = SharedStore(
            self._of_rank(0, ranks), fds, self.ranks, "model", lend=self._lend, known=self._knows,
            answered=self.waited.append,
            probed=lambda _, seconds: self.probed.append((seconds, self.store.unanswered)),
        )  # fmt: skip
        for rank, (_, theirs) in enumerate(pairs, start=1):
            unused, units = Arena.create(1, 4096), self.units.map(self._arena_fd)
            RankCopier(self._of_rank(rank, ranks), theirs, unused, unused, store=units)
        self._start = StoreStart(
            url=f"mooncake://h:1?max_age={max_age}", name="", title="", parent_pid=0,
            encrypt=encrypt, arena_fd=self._arena_fd, channel_fd=0, logging=None,
        )  # fmt: skip
        self._secret = secret
        self._thread: threading.Thread | None = None
        self.start_process(store)

    def _of_rank(self, rank: int, ranks: int) -> kv.PagedKV:
        held = [slice(*section.heads_of(rank, ranks)) for section in self.layout.arrays]
        return paged(
            [x[..., held[0], :] for x in self.layers], self.block_size, self.layout, "cpu", rank, ranks,
            scales=[x[:, :, held[0]] for x in self.scales],
            others=[
                [x[:, :, :, heads] if array.per_token else x[:, :, heads] for x in xs]
                for array, xs, heads in zip(self.layout.arrays[1:], self.others, held[1:], strict=True)
            ],
        )  # fmt: skip

    def start_process(self, store: DictStore) -> None:
        """A store process, as a thread, after the end of the one before."""
        self._end_process()
        channel = _Channel(socket.socket(fileno=os.dup(self._theirs.fileno())), StoreOrder | StoreLayout)
        start = msgspec.structs.replace(self._start, arena_fd=os.dup(self._arena_fd))
        process = StoreProcess(start, self._secret, channel, "model", self.units)
        self._killed = channel.killed

        def run() -> None:
            with pytest.raises(ChannelClosed):
                process.run(cast("ClientProcess", store))

        self._thread = threading.Thread(target=run)
        self._thread.start()
        before = self.store.session
        self.until(lambda: self.store.session != before, "another session")

    def _end_process(self) -> None:
        if self._thread is not None:
            self._killed.set()
            self._thread.join(10)
            assert not self._thread.is_alive()

    def _lend(self, name: bytes, section: int, chunk: int) -> Lent:
        self.pinned.append(name)
        blocks = () if section else [*range(len(self.layers[0][0]))]
        return Lent(blocks, 1, lambda: self.pinned.remove(name))

    def _knows(self, name: bytes, there: bool) -> None:
        (self.known.add if there else self.known.discard)(name)
        (self.lacking.discard if there else self.lacking.add)(name)

    def until(self, condition: object, what: str) -> None:
        def pumped() -> bool:
            self.store.move(busy=False)
            assert callable(condition)
            return condition()

        until(pumped, what, self.store)

    def offer(self, names: Sequence[bytes], salt: bytes = b"") -> None:
        for name in names:
            self.store.offer(salt, name, NAMES.index(name))
        self.until(lambda: not self.store.offers.writes, "all writes")

    def fetch(self, names: Sequence[bytes], salt: bytes = b"") -> None:
        self.store.fetch_content(
            b"f", salt=salt, chunks=names, first_chunk=NAMES.index(names[0]),
            block_ids=[*range(len(self.layers[0][0]))], state_slot=2 if self.states else None,
        )  # fmt: skip

    def event(self) -> kv.Injected | kv.FetchFailed | kv.Closed:
        events: list[kv.Injected | kv.FetchFailed | kv.Closed] = []
        self.until(lambda: events.extend(self.store.poll()) or events, "an event")
        [event] = events
        return event

    def fetched(self, names: Sequence[bytes], salt: bytes = b"") -> int:
        """How many chunks came."""
        self.fetch(names, salt)
        event = self.event()
        return event.stats.tokens // CHUNK_TOKENS if isinstance(event, kv.Injected) else 0

    def chunk(self, name: bytes) -> torch.Tensor:
        first = NAMES.index(name) * CHUNK_TOKENS
        scales = [x.transpose(2, 3).unsqueeze(4) for x in self.scales]
        flat = [x.float().flatten(1, 2)[:, first : first + CHUNK_TOKENS] for x in (*self.pools, *scales)]
        return torch.cat([x.flatten() for x in flat])

    def close(self) -> None:
        self.until(lambda: self.store.idle, "all copies and writes")
        assert not self.pinned
        self.until(lambda: len(self.store._orders.free) == self.units.count, "all units to come back")
        self._end_process()
        self.store.close()
        self.ranks.close()
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


@pytest.mark.cases(1)
@pytest.mark.parametrize("ranks", [(1, 1), (2, 1), (1, 2)], ids=str)
@pytest.mark.parametrize(
    "layout", [LAYOUT, FP8, LATENT, HYBRID, LEDGER], ids=["plain", "fp8", "latent", "hybrid", "ledger"]
)
def test_every_kind_of_cache_and_number_of_ranks_fits(layout: kv.KVLayout, ranks: tuple[int, int]) -> None:
    store = DictStore()
    writer, reader = (
        Worker(store, size, layout=layout, ranks=count) for size, count in zip((16, 128), ranks, strict=True)
    )
    writer.offer(NAMES)
    if layout.has_states:
        assert reader.fetched(NAMES) == 0, "KV is of no use without states"
        writer.store.offer(b"", NAMES[28], 28, states=True)  # within a block of the reader
        writer.store.offer(b"", NAMES[33], 33, states=True)
        writer.until(lambda: not writer.store.offers.writes, "all writes")
    stop = 34 if layout.has_states else len(NAMES)
    assert reader.fetched(NAMES) == stop
    for name in NAMES[:stop]:
        assert torch.equal(reader.chunk(name), writer.chunk(name))
    for read, written in zip(reader.states, writer.states, strict=True):
        for layer in range(len(read)):
            assert torch.equal(read[layer][2], written[layer][1])
    for worker in (writer, reader):
        worker.close()


def test_states_that_are_not_whole_bring_nothing() -> None:
    store = DictStore()
    writer, reader = (Worker(store, 16, layout=HYBRID) for _ in range(2))
    assert len(writer.units.objects) > 2, "states of more than one object"
    writer.offer(NAMES[:4])
    chunks = {*store.objects}
    writer.store.offer(b"", NAMES[3], 3, states=True)
    writer.until(lambda: not writer.store.offers.writes, "all writes")
    first, *_ = (key for key in store.objects if key not in chunks)
    store.objects[first] = bytes(len(store.objects[first]))
    assert reader.fetched(NAMES[:4]) == 0
    assert first not in store.objects
    for worker in (writer, reader):
        worker.close()


def test_each_content_is_written_once(two: tuple[DictStore, Worker, Worker]) -> None:
    store, writer, reader = two
    writer.offer(NAMES[:4])
    writer.offer(NAMES[:4])
    reader.offer(NAMES[:4])
    assert len(store.puts) == 4
    assert len(store.asked) == 12, "each time"


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


def test_a_wrong_object_that_is_found_after_the_prompt_was_computed_is_written_again(
    two: tuple[DictStore, Worker, Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt did not wait for it. So its KV was offered while the store still had the wrong object."""
    store, writer, reader = two
    writer.offer(NAMES[:1])
    [(key, good)] = store.objects.items()
    store.objects[key] = bytes(len(good))
    get, may_read = store.get, threading.Event()
    monkeypatch.setattr(store, "get", lambda keys, places: may_read.wait() and get(keys, places))
    reader.fetch(NAMES[:1])
    reader.until(lambda: reader.store.ends(b"f") is not None, "what the store has")
    reader.store.cancel(b"f")
    reader.offer(NAMES[:1])
    assert store.objects[key] == bytes(len(good)), "it seems to be there"
    may_read.set()
    reader.until(lambda: reader.store.missed and not reader.store.offers.writes, "the right one")
    assert writer.fetched(NAMES[:1]) == 1


@pytest.mark.all
def test_what_a_peer_changes_after_it_was_verified_is_not_used(
    two: tuple[DictStore, Worker, Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever reaches the ports of a store may write to the memory of its client at any time."""
    store, writer, reader = two
    writer.offer(NAMES[:2])
    verify = ObjectSeal.open

    def verified(seal: ObjectSeal, name: bytes, period: int, place: memoryview) -> bool:
        is_right = verify(seal, name, period, place)
        store.memory[:] = bytes(MEMORY)
        return is_right

    monkeypatch.setattr(ObjectSeal, "open", verified)
    assert reader.fetched(NAMES[:1]) == 1
    assert torch.equal(reader.chunk(NAMES[0]), writer.chunk(NAMES[0]))


def test_no_object_is_used_beyond_the_age_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1_000_000.0
    monkeypatch.setattr(__main__.time, "time", lambda: now)
    store = DictStore()
    writer, reader = (Worker(store, 16, max_age=100) for _ in range(2))
    writer.offer(NAMES[:1])
    now += 60
    writer.offer(NAMES[1:2])
    assert reader.fetched(NAMES[:2]) == 2
    now += 40
    reader.until(lambda: len(store.objects) == 1, "the older one to be removed")
    assert reader.fetched(NAMES[:1]) == 0
    assert reader.fetched(NAMES[1:2]) == 1
    reader.offer(NAMES[:1])
    assert reader.fetched(NAMES[:1]) == 1
    for worker in (writer, reader):
        worker.close()


def test_the_objects_of_one_tenant_can_be_removed(two: tuple[DictStore, Worker, Worker]) -> None:
    store, writer, reader = two
    writer.offer(NAMES[:3], salt=b"a" * 16)
    writer.offer(NAMES[:2], salt=b"b" * 16)
    assert reader.fetched(NAMES[:3], salt=b"b" * 16) == 2, "none of the other tenant"
    assert store.clear(StoreKeys(SECRET).pattern(salt=b"a" * 16)) == 3
    assert reader.fetched(NAMES[:2], salt=b"a" * 16) == 0
    assert reader.fetched(NAMES[:2], salt=b"b" * 16) == 2


def test_chunks_before_a_missing_one_come(two: tuple[DictStore, Worker, Worker]) -> None:
    store, writer, reader = two
    writer.offer(NAMES)
    keys = list(store.objects)
    del store.objects[keys[30]]
    assert reader.fetched(NAMES) == 30
    store.objects[keys[7]] = b"wrong"
    assert reader.fetched(NAMES) == 7
    assert reader.known == {*NAMES} - {NAMES[7], NAMES[30]}


def test_kv_is_read_only_with_the_secret_and_by_workers_that_encrypt_alike(
    two: tuple[DictStore, Worker, Worker],
) -> None:
    """Also if a store gives objects to another worker that asks for its own ones."""
    store, writer, reader = two
    encrypt = writer._start.encrypt
    writer.offer(NAMES[:2])
    found = [*store.objects.values()]
    pieces = [piece.numpy().tobytes() for piece in writer.chunk(NAMES[0]).split(LAYOUT.arrays[0].head_dim)]
    assert {piece in b"".join(found) for piece in pieces} == {not encrypt}
    assert reader.fetched(NAMES[:2]) == 2
    assert all(torch.equal(reader.chunk(name), writer.chunk(name)) for name in NAMES[:2])
    assert (pieces[0] in bytes(store.memory)) is not encrypt, "peers of the store may read it"
    for secret, encrypts in ((SECRET, not encrypt), (b"t" * 32, encrypt)):
        stranger = Worker(store, 16, secret=secret, encrypt=encrypts)
        before = [layer.clone() for layer in stranger.layers]
        store.asked.clear()
        assert stranger.fetched(NAMES[:2]) == 0
        assert stranger.lacking == {*NAMES[:2]}, "routers may believe that it is there"
        store.objects |= zip(store.asked, found, strict=True)
        assert stranger.fetched(NAMES[:2]) == 0
        assert stranger.store.missed == 2, "it has read them, and refused them"
        assert all(map(torch.equal, stranger.layers, before))
        stranger.close()


def test_a_fetch_that_is_given_up_gives_its_blocks_back_at_once(
    two: tuple[DictStore, Worker, Worker],
) -> None:
    store, writer, reader = two
    writer.offer(NAMES)
    store.opened.clear()
    before = reader.chunk(NAMES[0])
    reader.fetch(NAMES)
    reader.store.cancel(b"f")
    reader.store.cancel(b"f")
    assert reader.event() == kv.Closed(b"f")
    assert (reader.store.unanswered, reader.waited) == (1, [])
    store.opened.set()
    reader.until(lambda: not reader.store.unanswered, "the late answer")
    assert len(reader.waited) == 1
    assert torch.equal(reader.chunk(NAMES[0]), before)
    assert reader.fetched(NAMES) == len(NAMES)


def test_a_fetch_that_is_given_up_waits_for_its_own_copies_alone(
    two: tuple[DictStore, Worker, Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, worker, _ = two
    with monkeypatch.context() as late:
        late.setattr(worker.store._orders.pool, "passed", lambda event: False)
        worker.store.offer(b"", NAMES[0], 0)
        worker.until(lambda: worker.store._orders.copying, "a chunk that is gathered")
        worker.fetch(NAMES[1:3])
        worker.store.cancel(b"f")
        assert worker.event() == kv.Closed(b"f")
        assert worker.pinned


def test_what_the_pool_has_no_room_to_keep_is_written_later(two: tuple[DictStore, Worker, Worker]) -> None:
    store, worker, _ = two
    hold, refused = worker._lend, [NAMES[0]] * 3 + [NAMES[2]]

    def without_room(name: bytes, section: int, chunk: int) -> Lent:
        if name in refused:
            refused.remove(name)
            return LATER
        return hold(name, section, chunk)

    worker.store.offers._lend = without_room
    worker.offer(NAMES[:4])
    assert len(store.objects) == 4
    assert worker.known == {*NAMES[:4]}


def test_how_far_a_fetch_is_says_when_it_will_end(
    two: tuple[DictStore, Worker, Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, writer, reader = two
    writer.offer(NAMES)
    get, permits = store.get, threading.Semaphore(1)
    monkeypatch.setattr(store, "get", lambda keys, places: permits.acquire() and get(keys, places))
    reader.fetch(NAMES)
    assert not reader.store.ends(b"f"), "nothing has come"
    reader.until(lambda: reader.store.ends(b"f"), "some objects")
    fetch = reader.store._fetches[b"f"]
    fetch.found_at, fetch.answered_at, fetch.answered, asked = 1.0, 1.5, 4, fetch.answered
    in_time = 4 + (READERS - 1) * reader.store._batch
    assert reader.store.ends(b"f") == 1.0 + 0.5 * max(1.0, len(NAMES) / in_time)
    fetch.answered = asked
    permits.release(len(NAMES))
    assert isinstance(reader.event(), kv.Injected)
    assert reader.store.ends(b"f") is None


def test_a_probe_measures_all_readers_and_leaves_nothing(two: tuple[DictStore, Worker, Worker]) -> None:
    store, worker, _ = two
    assert worker.store.probe()
    assert worker.store.unanswered, "no prompt should wait meanwhile"
    worker.until(lambda: worker.probed, "how long it took")
    [(_, unanswered)] = worker.probed
    assert not unanswered, "prompts may wait for it from now on"
    worker.until(lambda: not store.objects, "its objects to be removed")
    store.full = True
    worker.until(worker.store.probe, "the units of the first probe")
    assert not worker.store.probe(), "its units are in use"
    worker.until(lambda: not worker.store.unanswered, "all answers")
    assert len(worker.probed) == 1, "nothing was read"


def test_a_new_store_process_does_nothing_of_the_one_before(
    two: tuple[DictStore, Worker, Worker],
) -> None:
    """What the old one was to read and write has failed. Its last answers come late."""
    store, writer, reader = two
    writer.offer(NAMES)
    hanging = DictStore()
    reader.start_process(hanging)
    hanging.opened.clear()
    reader.fetch(NAMES)
    reader.start_process(store)
    assert reader.event() == kv.FetchFailed(b"f", "gone")
    hanging.opened.set()
    assert reader.fetched(NAMES) == len(NAMES)


@pytest.mark.all
def test_a_store_that_has_lost_its_objects_gets_them_again(two: tuple[DictStore, Worker, Worker]) -> None:
    store, writer, reader = two
    writer.offer(NAMES[:4])
    store.objects.clear()
    assert writer.fetched(NAMES[:4]) == 0
    assert writer.known == set()
    writer.offer(NAMES[:4])
    assert reader.fetched(NAMES[:4]) == 4
    another = DictStore()
    writer.start_process(another)
    writer.offer(NAMES[:4])
    assert len(another.objects) == 4


@pytest.mark.all
def test_a_store_process_that_ends_while_it_writes_causes_no_pause(
    two: tuple[DictStore, Worker, Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that is about to end would not write what it has, since nothing could be written."""
    store, writer, _ = two
    put, began, may_write = store.put, threading.Event(), threading.Event()
    monkeypatch.setattr(
        store, "put", lambda keys, places: began.set() or (may_write.wait() and put(keys, places))
    )
    writer.store.offer(b"", NAMES[0], 0)
    writer.until(began.is_set, "a write")
    another = DictStore()
    writer.start_process(another)
    writer.offer(NAMES[1:4])
    assert len(another.objects) == 4, "also what was being written"
    may_write.set()


def test_a_full_store_is_left_alone_for_a_while(two: tuple[DictStore, Worker, Worker]) -> None:
    store, writer, reader = two
    store.full = True
    writer.offer(NAMES)
    assert 1 <= len(store.puts) <= writer.units.count // 2, "those under way"
    writer.until(lambda: not writer.store._orders._orders, "answers")
    assert not writer.store.copies, "nothing is due"
    store.full = False
    writer.store.offers._paused_until = 0.0
    writer.until(lambda: not writer.store.offers.writes, "the rest")
    assert reader.fetched(NAMES) == len(NAMES), "also what was refused"
    assert writer.store.offers.refused >= 1
