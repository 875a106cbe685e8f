"""Peers of one host read slices where they were gathered; over TCP where they cannot."""

import os
import threading
from collections.abc import Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest

import baton.kv_transfer as kv
from baton.kv_transfer.device.cuda_pool import CudaPool
from baton.kv_transfer.device.host_pool import HostPool
from baton.kv_transfer.peer_memory import Unreachable
from baton.kv_transfer.slices import Slice
from tests.device import DEVICE
from tests.kv_transfer.conftest import Pair, Prefill, until
from tests.kv_transfer.transfer_process import deadlines

from .conftest import EXPORTED, Kind

POOL: Any = CudaPool if DEVICE == "cuda" else HostPool
WRONG = "tcp: a slice could not be read, or was wrong"

pytestmark = pytest.mark.parametrize("transport", [EXPORTED], indirect=True, ids=str)


def readers(prefill: Prefill) -> int:
    """Ranks that have opened the arena that the worker exports. All ranks are in this process."""
    inode = str(os.fstat(prefill.sending.arena.fd).st_ino)
    # A library may have the same inode on another device.
    maps = (line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "/memfd:" in line)
    return sum(fields[4] == inode for fields in maps) - len(prefill.ranks.caches)


def pulled(pair: Any) -> int:
    """Transfers 64 positions, bit for bit. Returns how many slices decode read itself, of 12."""
    scatter, slices = POOL.scatter, 0

    def counted(self: Any, batch: Sequence[Slice], memory: Any = None) -> Any:
        nonlocal slices
        slices += len(batch) if memory else 0
        return scatter(self, batch, memory)

    prefill_id = pair.prefill.hold(64)
    blocks = pair.prefill.held[prefill_id]
    decode_id = pair.decode.fetch(pair.prefill, prefill_id, 64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(POOL, "scatter", counted)
        assert isinstance(pair.event(decode_id), kv.Injected)
    pair.assert_same(blocks, decode_id, 0, 64)
    pair.decode.release(decode_id)
    pair.assert_whole()
    return slices


def unreachable(*_: Any) -> Any:
    raise Unreachable("no peer access")


@pytest.mark.all
def test_it_is_withdrawn_after_a_wrong_slice_and_closed_with_its_session(
    make_pair: Any, transport: Kind
) -> None:
    pair = make_pair(decode={"deadlines": deadlines(idle_close=0.3)})
    assert readers(pair.prefill) == (DEVICE == "cpu")  # a GPU's memory is no mapping here
    assert pulled(pair) == 12
    with transport.bent(pair):
        assert pulled(pair) < 24, "all of it was read twice"
    assert pair.prefill.stats().transports == {"decode 0": WRONG}
    assert pulled(pair) == 0
    pair.until(lambda: pair.prefill.stats().transports == {}, "the session to end")
    pair.until(lambda: readers(pair.prefill) == 0, "the memory to be closed")
    transport.connect(pair)
    assert pulled(pair) == 12


def test_memory_that_cannot_be_read_any_more(make_pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The transfer goes on over TCP."""
    pair = make_pair()

    with monkeypatch.context() as patch:
        patch.setattr(POOL, "_pull", unreachable)
        assert pulled(pair) > 0
    assert pair.prefill.stats().transports == {"decode 0": WRONG}
    assert pulled(pair) == 0


def test_slices_are_read_after_the_sender_is_dead(make_pair: Any) -> None:
    """All of them were named, and COMMIT came. The request need not be prefilled again."""
    pair = make_pair({"slots": 32}, {"slots": 32})
    decode, prefill_id = pair.decode, pair.prefill.hold(64)
    blocks = pair.prefill.held[prefill_id]
    decode_id = decode.fetch(pair.prefill, prefill_id, 64)
    until(lambda: (stats := decode.stats()).receiver_slots_free == stats.slots - 12, "all slices")
    pair.prefill.process.kill()
    until(lambda: decode.stats().sessions == 0, "the session to end")
    event = until(lambda: decode.poll() or decode.events.get(decode_id), "the KV", decode.receiver)
    assert isinstance(event, kv.Injected)
    pair.assert_same(blocks, decode_id, 0, 64)
    until(lambda: decode.poll() or readers(pair.prefill) == 0, "the memory to be closed", decode.receiver)


@pytest.mark.parametrize(
    ("side", "config", "why"),
    [
        ("prefill", {"exports": False}, "--kv-connector tcp at the sender"),
        ("decode", {"exports": False}, "--kv-connector tcp at the receiver"),
    ],
)
def test_why_a_pair_uses_tcp(
    make_prefill: Any, make_decode: Any, side: str, config: dict[str, Any], why: str
) -> None:
    prefill = make_prefill(**(config if side == "prefill" else {}))
    pair = Pair(prefill, make_decode(**(config if side == "decode" else {})))
    assert pulled(pair) == 0
    pair.until(lambda: pair.prefill.stats().transports == {"decode 0": f"tcp: {why}"}, "the answer")


def of_other_ranks(patch: pytest.MonkeyPatch, name: str, other: Any, times: int | None = None) -> None:
    """Calls of a method of pools by other ranks than 0, so many of them, go to `other`."""
    method, calls = getattr(POOL, name), islice(count(), times)

    def patched(self: Any, *args: Any) -> Any:
        if threading.current_thread().name == "rank copies" and next(calls, None) is not None:
            return other(method, self, *args)
        return method(self, *args)

    patch.setattr(POOL, name, patched)


def wrong(pull: Any, *args: Any) -> Any:
    event, outcome = pull(*args)
    return event, lambda: [None for _ in outcome()]


@pytest.mark.cases(1)
@pytest.mark.parametrize("fault", [unreachable, wrong])
def test_a_slice_that_only_another_rank_finds_wrong(
    make_pair: Any, monkeypatch: pytest.MonkeyPatch, fault: Any
) -> None:
    """The KV is fetched again, over TCP. Then all ranks close the memory."""
    ranks = {"ranks": 2, "deadlines": deadlines(idle_close=0.3)}
    pair = make_pair(ranks, ranks)
    assert readers(pair.prefill) == 2 * (DEVICE == "cpu"), "each rank reads one rank"
    with monkeypatch.context() as patch:
        of_other_ranks(patch, "_pull", fault, times=1)
        assert pulled(pair) > 0
    assert pair.prefill.stats().transports == {"decode 0": WRONG}
    assert pulled(pair) == 0
    pair.until(lambda: readers(pair.prefill) == 0, "the memory to be closed")


@pytest.mark.parametrize(("name", "side"), [("export", "prefill"), ("open", "decode")])
def test_another_rank_cannot_use_exported_memory(
    make_prefill: Any, make_decode: Any, monkeypatch: pytest.MonkeyPatch, name: str, side: str
) -> None:
    of_other_ranks(monkeypatch, name, unreachable)
    prefill = make_prefill(ranks=2 if side == "prefill" else 1)
    pair = Pair(prefill, make_decode(ranks=2 if side == "decode" else 1))
    assert pulled(pair) == 0
    why = {"decode 0": "tcp: rank 1: no peer access"}
    pair.until(lambda: pair.prefill.stats().transports == why, "the answer")
    assert readers(pair.prefill) == 0, "rank 0 has closed the memory"
