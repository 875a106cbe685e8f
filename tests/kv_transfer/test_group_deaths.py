"""Each rank of each side dies or hangs at each state of a transfer between unequal groups.

The transfer ends in one way for the other side, and all blocks and slots of that side come back.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import closing
from typing import Any, Literal

import pytest

import baton.kv_transfer as kv
from baton.kv_transfer.spawn import EXIT_ENGINE_GONE

from .conftest import Decode, Pair, Prefill, Worker, until
from .group_process import CONTEXT, GroupProcess, Side

State = Literal["asked", "streaming", "committed"]

LAYOUT = kv.KVLayout(num_layers=3, num_kv_heads=6, head_dim=8, dtype="float32")
TOKENS = 40
QUICK = kv.TransferDeadlines(ping=0.1, engine_dead=1.0, unreachable=1.0)
SETTINGS: dict[str, Any] = {"slots": 32, "deadlines": QUICK}  # all frames of a transfer have slots


@pytest.fixture(scope="module")
def others() -> Iterator[Pair]:
    """The workers that survive all tests. Each has three ranks."""
    CONTEXT.set_forkserver_preload(["tests.kv_transfer.group_process"])
    settings = SETTINGS | {"layout": LAYOUT, "ranks": 3, "device": "cpu"}
    with closing(Prefill(**settings)) as prefill, closing(Decode(block_size=32, **settings)) as decode:
        yield Pair(prefill, decode)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "hangs"])
@pytest.mark.parametrize("state", ["asked", "streaming", "committed"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_rank_fails(others: Pair, side: Side, rank: int, state: State, how: signal.Signals) -> None:
    """committed: the rank has not copied the last slices."""
    with closing(GroupProcess(side, 2, LAYOUT, **SETTINGS)) as victim:
        if side == "prefill":
            prefill_id = others.prefill.open(TOKENS)
            compute(others.prefill, prefill_id, range(3))
            fails_at_prefill(victim, others.decode, rank, state, how)
        else:
            prefill_id = fails_at_decode(victim, others.prefill, rank, state, how)
    blocks = others.prefill.held[prefill_id]
    decode_id = others.decode.fetch(others.prefill, prefill_id, TOKENS)
    assert isinstance(others.event(decode_id), kv.Injected)
    others.assert_same(blocks, decode_id, 0, TOKENS)
    others.until(lambda: others.prefill.released.get(prefill_id) == "acked", "the ACK")
    others.assert_whole()
    others.decode.release(decode_id)
    assert not any(layer.any() for layer in others.decode.ranks.tensors), "a late byte landed"
    for worker in (others.prefill, others.decode):
        assert sorted(worker.free) == [*range(64)]


def fails_at_prefill(
    victim: GroupProcess, decode: Decode, rank: int, state: State, how: signal.Signals
) -> None:
    came = decode.stats().frames_received
    prefill_id = os.urandom(16)
    victim.order(0, "open", prefill_id, TOKENS)
    decode_id = decode.fetch(victim, prefill_id, TOKENS)
    until(lambda: victim.stats().transfers_open, "the FETCH")
    layers = {"asked": 0, "streaming": 1, "committed": 2}[state]
    for layer in range(layers):
        for number in range(2):
            victim.order(number, "layer_done", layer)
    until(lambda: decode.stats().frames_received == came + 4 * layers, "the frames")

    def go_on() -> None:
        for layer in range(layers, 3):
            victim.order(0, "layer_done", layer)
        victim.order(0, "commit")

    if state == "committed":
        go_on()
    victim.strike(rank, how)
    if rank and state != "committed":
        go_on()
    notice(victim, decode, rank, how)
    event = until(lambda: decode.poll() or decode.events.get(decode_id), "the end", decode.receiver)
    assert isinstance(event, kv.FetchFailed)
    decode.release(decode_id)


def fails_at_decode(
    victim: GroupProcess, prefill: Prefill, rank: int, state: State, how: signal.Signals
) -> bytes:
    """Returns the prefill, which is held."""
    prefill_id = prefill.open(TOKENS)
    where = {
        "prefill_id": prefill_id, "kv_address": prefill.address, "incarnation": prefill.incarnation
    }  # fmt: skip
    victim.order(0, "fetch", b"the decode", TOKENS, where)
    until(lambda: prefill.sender.has_fetch(prefill_id), "the FETCH", prefill.sender)
    layers = {"asked": 0, "streaming": 1, "committed": 3}[state]
    if state == "committed":
        victim.strike(rank, signal.SIGSTOP)
    compute(prefill, prefill_id, range(layers))
    until(lambda: victim.stats().frames_received == 6 * layers, "the frames")
    victim.strike(rank, how)
    compute(prefill, prefill_id, range(layers, 3))
    notice(victim, prefill, rank, how)
    until(lambda: not prefill.sender.has_fetch(prefill_id), "the end", prefill.sender)
    prefill.poll()
    assert prefill_id in prefill.held
    return prefill_id


def compute(prefill: Prefill, prefill_id: bytes, layers: range) -> None:
    for layer in layers:
        prefill.ranks.layer_done(layer)
        prefill.sender.ready(prefill_id, layer, 0, TOKENS)
        if layer == 2:
            prefill.sender.commit(prefill_id, kv.FirstToken(1))


def notice(victim: GroupProcess, other: Worker, rank: int, how: signal.Signals) -> None:
    """Waits until another process has noticed that the rank failed. All processes of its worker end then."""
    match rank, how:
        case 0, signal.SIGKILL:
            assert victim.process.wait(20) == EXIT_ENGINE_GONE
        case 0, signal.SIGSTOP:
            ended = other.stats().deadlines.get("engine_dead", 0)
            until(lambda: other.stats().deadlines.get("engine_dead", 0) > ended, "the other worker to notice")
        case _, signal.SIGKILL:
            assert "ChannelClosed" in victim.error()
        case _:
            victim.order(0, "silence", 0.01)
            assert "rank 1 has not copied KV" in victim.error()
    victim.kill()
