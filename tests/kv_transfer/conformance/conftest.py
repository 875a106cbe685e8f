"""What every transport must do, in one suite. A test here knows sender, receiver and pools, and no socket.

`transport` is a parameter of every test. A transport is a `Kind`: the settings of its workers, and a way to
damage one slice between gather and scatter.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import xxhash
from msgspec.structs import replace

from baton.kv_transfer import staging
from baton.kv_transfer.device import host_pool
from baton.kv_transfer.device.cuda_pool import CudaPool
from baton.kv_transfer.device.host_pool import HostPool
from baton.kv_transfer.slices import Slice
from baton.system import cuda_driver
from tests.bad_network import BadNetwork
from tests.device import DEVICE
from tests.kv_transfer.conftest import Decode, Pair, Prefill


class SummingPool(HostPool):
    """On a CPU it stands for a pool on a GPU: it sums what it copies to and from slots of the arena."""

    def gather(self, batch: Sequence[Slice], after: Sequence[Any] = ()) -> tuple[Any, Any]:
        event, _ = super().gather(batch, after)
        sums = [self._sum(x) for x in batch]
        return event, lambda: sums

    def scatter(self, batch: Sequence[Slice], memory: Any = None) -> tuple[Any, Any]:
        left = [0 if x.verified else (x.sum - self._sum(x)) % (1 << 64) for x in batch]
        event, _ = super().scatter([replace(x, verified=True) for x in batch], memory)
        return event, lambda: left

    def _sum(self, x: Slice) -> int:
        return xxhash.xxh3_64_intdigest(self._arena.slot(x.slot)[: self._slice_bytes(x)])


@contextmanager
def _bent_on_a_lane(pair: Pair) -> Iterator[str]:
    trailer = 16 if pair.prefill.encrypt else 8
    with closing(BadNetwork(pair.prefill.port, fault="corrupt", hits=1, trailer=trailer)) as network:
        yield network.address
        assert network.suffered == 1


@contextmanager
def _bent_after_its_checksum(pair: Pair) -> Iterator[str]:
    with closing(BadNetwork(pair.prefill.port)) as network:
        NIXL.connect(pair, kv_address=network.address)
        network.arena = pair.prefill.sending.arena
        yield network.address
        assert network.suffered == 1


@contextmanager
def _bent_in_memory(pair: Pair) -> Iterator[str]:
    pool: Any = CudaPool if DEVICE == "cuda" else host_pool.HostPool
    gather, done = pool.gather, []

    def bent(self: Any, batch: Sequence[Slice], after: Sequence[Any] = ()) -> Any:
        gathered = gather(self, batch, after)
        if bool(batch[0].memory) is pair.prefill.exports and not done:
            done.append(batch[0])
            if DEVICE == "cuda":
                torch.cuda.synchronize()
            if DEVICE == "cuda" and pair.prefill.exports:
                cuda_driver.call("cuMemsetD8_v2", self._exported.slot(batch[0].slot), 0xA5, 4)
            else:
                pair.prefill.sending.arena.slot(batch[0].slot)[7] ^= 1
        return gathered

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "gather", bent)
        yield pair.prefill.address
    assert done


@dataclass(frozen=True)
class Kind:
    name: str
    bend: Callable[[Pair], AbstractContextManager[str]]
    settings: dict[str, Any] = field(default_factory=dict)
    reached: str = "tcp"
    """As in `TransferStats.transports`."""
    found: tuple[str, str] = ("payload", "integrity")
    """As what a bent byte counts in `checksum_failures`, and why its transfer ends."""

    def bent(self, pair: Pair) -> AbstractContextManager[str]:
        """Within it, one byte of the next slice that is fetched from the address changes on its way.

        The address may be new. The pair must not be connected at another one then: a peer has one session,
        and the byte would not pass the new address."""
        if self.bend is _bent_in_memory:
            self.connect(pair)
        return self.bend(pair)

    def connect(self, pair: Pair, **where: Any) -> None:
        """Waits until the pair uses this transport."""
        if self.reached != "tcp":
            prefill_id = pair.prefill.hold(1)
            decode_id = pair.decode.fetch(pair.prefill, prefill_id, 1, start=1, **where)
            pair.event(decode_id)
            pair.until(lambda: pair.prefill.stats().transports == {"decode 0": self.reached}, "the test copy")
            pair.until(lambda: prefill_id in pair.prefill.released, "the ACK")
            del pair.prefill.released[prefill_id], pair.decode.events[decode_id]
            pair.decode.release(decode_id)

    def __str__(self) -> str:
        return self.name


TCP = Kind("tcp", _bent_on_a_lane, {"movers": 2})  # in forks; encrypted lanes are in the transfer process
SUMMED = Kind("tcp+sums", _bent_in_memory, {"movers": 1, "sums": True})  # the slot changes before it is sent
ENCRYPTED = Kind("tcp+aes", _bent_on_a_lane, {"encrypt": True, "sums": True}, found=("tag", "lost"))
KIND = "cuda_ipc" if DEVICE == "cuda" else "shared_memory"
EXPORTED = Kind(KIND, _bent_in_memory, {"exports": True}, KIND)
NIXL = Kind("nixl", _bent_after_its_checksum, {"reader": "nixl"}, "nixl")
NIXL_DEVICE = "cuda:0" if DEVICE == "cuda" else "cpu"
NIXL_KIND = "nixl_cuda" if DEVICE == "cuda" else "nixl_host"
NIXL_WITH_MARKS = Kind(
    NIXL_KIND, _bent_in_memory, {"reader": "nixl", "reader_device": NIXL_DEVICE, "exports": True}, NIXL_KIND
)
EVERY_KIND = [TCP, SUMMED, ENCRYPTED, EXPORTED, NIXL, NIXL_WITH_MARKS]
# On a CPU the last is NIXL's reads and the marks of exported memory: what only both together do has tests.
KINDS = EVERY_KIND if DEVICE == "cuda" else EVERY_KIND[:-1]


@pytest.fixture(scope="package", params=KINDS, ids=str)
def transport(request: pytest.FixtureRequest) -> Iterator[Kind]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param is SUMMED:
            patch.setattr(host_pool, "HostPool", SummingPool)
        yield request.param


@pytest.fixture(autouse=True)
def _small_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots that peers read are as small as those of an arena, also on a GPU. So the slices of a transfer are
    the same in each transport."""
    monkeypatch.setattr(staging, "EXPORTED_SLOT_BYTES", 1)


@pytest.fixture
def settings(transport: Kind) -> dict[str, Any]:
    return transport.settings


@pytest.fixture
def make_pair(
    make_prefill: Callable[..., Prefill], make_decode: Callable[..., Decode], transport: Kind
) -> Callable[..., Pair]:
    def make(
        prefill: dict[str, Any] | None = None, decode: dict[str, Any] | None = None, connected: bool = True
    ) -> Pair:
        made = Pair(make_prefill(**(prefill or {})), make_decode(**(decode or {})))
        if connected:
            transport.connect(made)
        return made

    return make


@pytest.fixture(scope="package")
def _shared(transport: Kind) -> Iterator[Pair]:
    prefill = Prefill(block_size=32, **transport.settings)
    with closing(prefill), closing(Decode(**transport.settings)) as decode:
        pair = Pair(prefill, decode)
        transport.connect(pair)
        yield pair


@pytest.fixture
def pair(_shared: Pair) -> Iterator[Pair]:
    """Workers that tests share, with blocks of 32 and of 16 positions. Their pools are whole after each."""
    yield _shared
    for decode_id in list(_shared.decode.reserved):
        _shared.decode.release(decode_id)
    _shared.assert_whole()
    assert len(_shared.decode.free) == 64
    assert not any(layer.any() for layer in _shared.decode.ranks.tensors), "a late byte landed"
