"""Peers of one host read slices where they were gathered; over TCP where they cannot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import kv_transfer as kv
from kv_transfer.cuda_pool import CudaPool
from kv_transfer.device import HostPool, Staged
from tests.device import DEVICE

from .conftest import EXPORTED, Kind

pytestmark = pytest.mark.parametrize("transport", [EXPORTED], indirect=True, ids=str)


def mappings() -> int:
    """Of arenas, in this process."""
    return Path("/proc/self/maps").read_text().count("baton-kv-arena")


def pulled(pair: Any) -> int:
    """Transfers 64 positions, bit for bit. Returns how many slices decode read itself, of 12."""
    pool: Any = CudaPool if DEVICE == "cuda" else HostPool
    pull, slices = pool.pull, 0

    def counted(self: Any, memory: Any, batch: Sequence[Staged]) -> Any:
        nonlocal slices
        slices += len(batch)
        return pull(self, memory, batch)

    prefill_id = pair.prefill.hold(64)
    blocks = pair.prefill.held[prefill_id]
    decode_id = pair.decode.fetch(pair.prefill, prefill_id, 64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "pull", counted)
        assert isinstance(pair.event(decode_id), kv.Injected)
    pair.assert_same(blocks, decode_id, 0, 64)
    pair.decode.release(decode_id)
    pair.assert_whole()
    return slices


def test_it_is_withdrawn_after_a_wrong_slice_and_closed_with_its_session(
    make_pair: Any, transport: Kind
) -> None:
    before = mappings()
    pair = make_pair(decode={"deadlines": kv.TransferDeadlines(idle_close=0.3)})
    opened = DEVICE == "cpu"  # a GPU's memory is no mapping here
    assert mappings() == before + 4 + opened, "four arenas, and one of them as peer"
    assert pulled(pair) == 12
    with transport.bent(pair.prefill):
        assert pulled(pair) < 24, "all of it was read twice"
    assert pair.prefill.stats().transports == {"decode 0": "tcp: a slice was wrong"}
    assert pulled(pair) == 0
    pair.until(lambda: pair.prefill.stats().transports == {}, "the session to end")
    pair.until(lambda: mappings() == before + 4, "the memory to be closed")
    transport.connect(pair)
    assert pulled(pair) == 12


@pytest.mark.parametrize("group", ["prefill", "decode"])
def test_a_group_uses_tcp(make_pair: Any, group: str) -> None:
    pair = make_pair(**{group: {"ranks": 2}})
    assert pulled(pair) == 0
    why = {"prefill": "tcp", "decode": "tcp: several ranks here"}[group]
    pair.until(lambda: pair.prefill.stats().transports == {"decode 0": why}, "the answer")
