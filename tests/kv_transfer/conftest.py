"""Real transfer processes with a small arena and a small model, and engines' endpoints around them."""

import os
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import baton.kv_transfer as kv
from baton.kv_transfer.wait import wait
from tests.device import DEVICE
from tests.layouts import kv_layout, other_arrays
from tests.within import WITHIN

from .ranks import Ranks, as_bytes, positions
from .second_wire import FakePrefill, Lane
from .transfer_process import TransferProcess, deadlines
from .wire_transfers import asked

LAYOUT = kv_layout(num_layers=3, num_kv_heads=2, head_dim=16, dtype="float32")  # 256 B a position and layer
NO_TRACE = kv.TraceWriter(None, "")


def until(condition: Callable[[], Any], what: str, *waiting: Any) -> Any:
    """The first true value of `condition`, looked at again whenever something in `waiting` is readable."""
    deadline = time.monotonic() + WITHIN
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {WITHIN} s for {what}"
        wait([item.fileno() for item in waiting], 0.02)
    return value


class Worker(TransferProcess):
    """A transfer process, and an engine's KV cache."""

    def __init__(
        self, role: Any, *, blocks: int, block_size: int, layout: kv.KVLayout = LAYOUT, ranks: int = 1,
        device: str = DEVICE, exports: bool = False, **config: Any,
    ) -> None:  # fmt: skip
        settings: dict[str, Any] = {"name": f"{role} 0", **config}
        super().__init__(layout, exports=exports, **settings)
        self.block_size = block_size
        self.exports = exports
        self.adopts = "reader_device" in config
        rows = layout.arrays[0].rows
        shape = (rows, blocks, block_size, layout.arrays[0].heads, layout.arrays[0].head_dim)
        dtype, each = getattr(torch, layout.dtypes.kv), layout.layers[0]
        layers = [self.filled(torch.zeros(shape, device=device)).to(dtype) for _ in each]
        scales: list[torch.Tensor] = []
        if layout.dtypes.kv == "float8_e4m3fn":
            shape = (2, blocks, layout.arrays[0].heads, block_size)
            scales = [self.filled(torch.zeros(shape, device=device)).abs() for _ in each]
        self.others = other_arrays(
            layout, blocks, block_size, 4, lambda shape: self.filled(torch.zeros(shape, device=device))
        )
        self.states = [
            x for array, x in zip(layout.arrays[1:], self.others, strict=True) if not array.per_token
        ]
        """Of each array of requests and each layer, four slots."""
        self.ranks = Ranks(
            layers, scales, block_size, layout, ranks, self.sending, self.receiving, self.others,
            exports=exports, adopts=self.adopts,
        )  # fmt: skip
        self.free = list(range(blocks))
        random.shuffle(self.free)

    def filled(self, layer: torch.Tensor) -> torch.Tensor:
        """A layer of the cache at the start, or its scales, from zeros."""
        return layer

    @property
    def transport(self) -> kv.Transport:
        return kv.Transport(
            self.sending, self.receiving, NO_TRACE, self.exports, self.adopts, self.ranks.channels
        )

    @property
    def pool(self) -> list[torch.Tensor]:
        """The layers of a worker with one rank."""
        [layers] = self.ranks.caches
        return layers

    def stop(self) -> None:
        self.ranks.close()
        super().stop()

    def allocate(self, num_tokens: int) -> list[int]:
        return [self.free.pop() for _ in range(-(-num_tokens // self.block_size))]

    def rows(self, blocks: list[int], layer: int, start: int, stop: int) -> torch.Tensor:
        """[2, stop − start, heads, head_dim] of these positions, on the CPU."""
        return self.ranks.rows(layer, positions(blocks, self.block_size, start, stop))

    def exact_rows(self, blocks: list[int], layer: int, start: int, stop: int) -> torch.Tensor:
        """The same, as the numbers that FP8 stands for, float32."""
        return self.ranks.exact_rows(layer, positions(blocks, self.block_size, start, stop))


class Prefill(Worker):
    def __init__(self, blocks: int = 64, block_size: int = 16, **config: Any) -> None:
        super().__init__("prefill", blocks=blocks, block_size=block_size, **config)
        self.sender = self.transport.sender(self.ranks.kv)
        self.released: dict[bytes, str] = {}
        self.held: dict[bytes, list[int]] = {}
        self.cached: list[bytes] | None = None  # names of the chunks of one prompt, from its beginning on
        self.cached_blocks: list[int] = []  # with the KV of these

    def filled(self, layer: torch.Tensor) -> torch.Tensor:
        return layer.normal_()

    def open(self, num_tokens: int, prefill_id: bytes | None = None, state_slot: int = 0) -> bytes:
        prefill_id = prefill_id or os.urandom(16)
        self.held[prefill_id] = self.allocate(num_tokens)
        self.sender.open(prefill_id, self.held[prefill_id], num_tokens, state_slot)
        return prefill_id

    def hold(
        self, num_tokens: int, prefill_id: bytes | None = None, token: int = 7, state_slot: int = 0
    ) -> bytes:
        """A finished prefill."""
        prefill_id = self.open(num_tokens, prefill_id, state_slot)
        with_kv = self.layout.token_layers
        for layer in sorted(range(self.layout.num_layers), key=lambda layer: layer not in with_kv):
            self.sender.ready(prefill_id, layer, 0, num_tokens)
        self.sender.commit(prefill_id, kv.FirstToken(token))
        return prefill_id

    def poll(self) -> None:
        for event in self.sender.poll():
            if isinstance(event, kv.ContentWanted):
                self.answer(event)
                continue
            assert event.prefill_id not in self.released, "released twice"
            self.released[event.prefill_id] = event.reason
            self.free += self.held.pop(event.prefill_id)

    def cache(self, num_chunks: int) -> list[bytes]:
        """Keeps the KV of a prompt. Returns the names of its chunks."""
        self.cached = [os.urandom(16) for _ in range(num_chunks)]
        self.cached_blocks = self.allocate(num_chunks * 64)
        return self.cached

    def answer(self, wanted: kv.ContentWanted) -> None:
        first, chunks = wanted.first_chunk, list(wanted.chunks)
        if self.cached is None:
            self.sender.close(wanted.pin_id, "unsupported")
            return
        while chunks and self.cached[first : first + len(chunks)] != chunks:
            chunks.pop()
        if chunks:
            stop = (first + len(chunks)) * 64
            self.held[wanted.pin_id] = []
            self.released.pop(wanted.pin_id, None)  # a peer may use the id of a transfer again
            self.sender.serve(wanted.pin_id, self.cached_blocks, first * 64, stop, state_slot=1)
        else:
            self.sender.close(wanted.pin_id, "gone")

    def close(self) -> None:
        self.sender.shutdown()
        self.stop()


class Decode(Worker):
    def __init__(self, blocks: int = 64, block_size: int = 16, **config: Any) -> None:
        super().__init__("decode", blocks=blocks, block_size=block_size, **config)
        self.receiver = self.transport.receiver(self.ranks.kv)
        self.reserved: dict[bytes, list[int]] = {}
        self.events: dict[bytes, Any] = {}  # decode id → the one event that ended it

    def fetch(
        self, source: TransferProcess, prefill_id: bytes, num_tokens: int, start: int = 0, **other: Any
    ) -> bytes:
        decode_id = os.urandom(16)
        self.reserved[decode_id] = self.allocate(num_tokens)
        where: Any = {"kv_address": source.address, "incarnation": source.incarnation, "attempt": 0} | other
        self.receiver.fetch(
            decode_id, prefill_id=prefill_id, block_ids=self.reserved[decode_id], num_tokens=num_tokens,
            start=start, **where,
        )  # fmt: skip
        return decode_id

    def fetch_content(
        self, source: Prefill, chunks: list[bytes], first_chunk: int = 0, state_slot: int = 0
    ) -> bytes:
        fetch_id = os.urandom(16)
        self.reserved[fetch_id] = self.allocate((first_chunk + len(chunks)) * 64)
        self.receiver.fetch_content(
            fetch_id, chunks=chunks, first_chunk=first_chunk, kv_address=source.address,
            incarnation=source.incarnation, block_ids=self.reserved[fetch_id],
            state_slot=state_slot,
        )  # fmt: skip
        return fetch_id

    def poll(self) -> None:
        for event in self.receiver.poll():
            assert event.decode_id not in self.events, "reported twice"
            self.events[event.decode_id] = event

    def release(self, decode_id: bytes) -> None:
        """Give its blocks back, wiped: late bytes would show."""
        blocks = self.reserved.pop(decode_id)
        for layer in self.ranks.tensors:
            layer[:, blocks] = 0
        self.free += blocks

    def close(self) -> None:
        self.receiver.shutdown()
        self.stop()


class Pair:
    """One prefill and one decode worker."""

    def __init__(self, prefill: Prefill, decode: Decode) -> None:
        self.prefill = prefill
        self.decode = decode

    def poll(self) -> None:
        self.prefill.poll()
        self.decode.poll()

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        def polled() -> Any:
            self.poll()
            return condition()

        return until(polled, what, self.prefill.sender, self.decode.receiver)

    def event(self, decode_id: bytes) -> Any:
        """How a fetch ended."""
        return self.until(lambda: self.decode.events.get(decode_id), "the fetch to end")

    def assert_same(self, prefill_blocks: list[int], decode_id: bytes, start: int, stop: int) -> None:
        """Bit for bit the same values of the first array at both sides."""
        for layer in range(len(self.prefill.layout.layers[0])):
            there = self.prefill.rows(prefill_blocks, layer, start, stop)
            here = self.decode.rows(self.decode.reserved[decode_id], layer, start, stop)
            assert torch.equal(as_bytes(there), as_bytes(here)), f"layer {layer} differs"

    def assert_whole(self) -> None:
        """Nothing is open and every slot is home, in all four processes."""

        def whole() -> bool:
            a, b = self.prefill.stats(), self.decode.stats()
            return (
                self.prefill.sender.idle
                and self.decode.receiver.idle
                and (a.transfers_open, a.prefills_held, a.fetches_waiting, b.transfers_open) == (0, 0, 0, 0)
                and a.sender_slots_free == a.receiver_slots_free == a.slots
                and b.sender_slots_free == b.receiver_slots_free == b.slots
            )

        self.until(whole, "the pools to be whole")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def workers() -> Iterator[list[Any]]:
    """Workers appended here are closed at the end."""
    made: list[Any] = []
    yield made
    for worker in made:
        worker.close()


@pytest.fixture
def settings() -> dict[str, Any]:
    """Of all workers, unless a test says another."""
    return {}


@pytest.fixture
def make_prefill(workers: list[Any], settings: dict[str, Any]) -> Callable[..., Prefill]:
    def make(**config: Any) -> Prefill:
        workers.append(Prefill(**settings | config))
        return workers[-1]

    return make


@pytest.fixture
def make_decode(workers: list[Any], settings: dict[str, Any]) -> Callable[..., Decode]:
    def make(**config: Any) -> Decode:
        workers.append(Decode(**settings | config))
        return workers[-1]

    return make


@pytest.fixture
def make_pair(
    make_prefill: Callable[..., Prefill], make_decode: Callable[..., Decode]
) -> Callable[..., Pair]:
    def make(prefill: dict[str, Any] | None = None, decode: dict[str, Any] | None = None) -> Pair:
        return Pair(make_prefill(**(prefill or {})), make_decode(**(decode or {})))

    return make


@pytest.fixture(name="until")
def _until() -> Callable[..., Any]:
    return until


@pytest.fixture
def pair_of() -> type[Pair]:
    return Pair


class BareDecode(Worker):
    """A decode worker whose engine may hold another layout: it only asks."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__("decode", blocks=4, block_size=16, **config)
        self.receiver = self.transport.receiver(self.ranks.kv)

    def failure(self, source: Prefill, **other: Any) -> str:
        """Why a fetch from that prefill worker fails."""
        where: Any = {"kv_address": source.address, "incarnation": source.incarnation, "attempt": 0} | other
        self.receiver.fetch(
            os.urandom(16), prefill_id=source.hold(20), block_ids=[0, 1], num_tokens=20, **where
        )
        (event,) = until(self.receiver.poll, "the fetch to fail", self.receiver)
        assert isinstance(event, kv.FetchFailed)
        return event.reason

    def close(self) -> None:
        self.receiver.shutdown()
        self.stop()


@pytest.fixture
def bare_decode(workers: list[Any]) -> Callable[[dict[str, Any]], BareDecode]:
    def make(config: dict[str, Any]) -> BareDecode:
        workers.append(BareDecode(config))
        return workers[-1]

    return make


@pytest.fixture
def fetching(make_decode: Any) -> Any:
    """A decode worker (one lane) that has asked a fake prefill worker for 10 positions."""

    def make(
        ranks: int = 1, about: dict[str, Any] | None = None, device: str = DEVICE, **soon: float
    ) -> tuple[Any, FakePrefill, Lane, bytes, bytes]:
        fake = FakePrefill(**(about or {}))
        decode = make_decode(lanes=1, ranks=ranks, device=device, deadlines=deadlines(**soon), exports=True)
        blocks = decode.reserved[b"d"] = decode.allocate(10)
        decode.receiver.fetch(
            b"d",
            prefill_id=b"p" * 16,
            kv_address=fake.address,
            incarnation=5,
            attempt=0,
            block_ids=blocks,
            num_tokens=10,
        )
        lane = fake.accept()
        transfer = asked(lane)
        return decode, fake, lane, transfer, blocks

    return make
