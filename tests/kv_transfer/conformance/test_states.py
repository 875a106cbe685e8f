"""States travel with the KV of a prefill, and are not used before all of them have come. Those of heads come
in the narrower dtype of both sides; else they come bit for bit."""

from typing import Any

import pytest
import torch

import baton.kv_transfer as kv
from baton.kv_names.cache_kinds import HEAD_STATE, STATE, CacheArray
from tests.kv_transfer.conftest import Pair
from tests.kv_transfer.ranks import positions
from tests.layouts import kv_layout
from tests.ledger import LedgerCache

from .conftest import Kind


def side(kv_dtype: str, state_dtype: str) -> dict[str, Any]:
    """The KV of the second layer is converted. A state `ssm` takes two slots in float32, else one,
    and `conv` one."""
    states = (
        CacheArray(STATE, "conv", 3, 8, 16, "bfloat16"),
        CacheArray(HEAD_STATE, "ssm", 1, 8, 256, state_dtype),
    )
    return {"layout": kv_layout(3, 2, 16, kv_dtype, states, (0, 2))}


SIDES = [side("float32", "float32"), side("float8_e4m3fn", "float32")]


def as_sent(pair: Pair) -> kv.KVLayout:
    ours, theirs = pair.prefill.layout, pair.decode.layout
    return ours.sent_as(ours.dtypes.sent_to(theirs.dtypes))


def state_bytes(pair: Pair) -> int:
    """Of a request, in all layers, as they are sent."""
    layout = as_sent(pair)
    each = zip(layout.arrays, layout.layers, strict=True)
    return sum(array.bytes * len(layers) for array, layers in each if not array.per_token)


def assert_states(pair: Pair, there: int, here: int) -> None:
    """The states in these slots of prefill and decode are the same, rounded to the dtype of decode."""
    for sent, received in zip(pair.prefill.states, pair.decode.states, strict=True):
        for layer, other in zip(sent, received, strict=True):
            assert other[here].any()
            assert torch.equal(layer[there].to(other.dtype).cpu(), other[here].cpu())


@pytest.mark.parametrize(
    ("sent", "kept"),
    [("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "float32"), ("float16", "bfloat16")],
)
def test_states_come_when_the_last_chunk_has_passed_their_layer(make_pair: Any, sent: str, kept: str) -> None:
    """Narrow states are half the bytes of a handover, and one frame in place of two."""
    pair = make_pair(side("float32", sent), side("float8_e4m3fn", kept))
    of_layer = 3 if sent == kept == "float32" else 2
    assert state_bytes(pair) == 2 * (3 * 8 * 16 * 2 + 8 * 256 * (4 if of_layer == 3 else 2))
    prefill, decode, n = pair.prefill, pair.decode, 32
    came = decode.stats().frames_received  # of the test copy
    prefill_id = prefill.open(n, state_slot=3)
    blocks = prefill.held[prefill_id]
    decode_id = decode.fetch(prefill, prefill_id, n, state_slot=2)
    steps = (0, 0, 0), (0, 1, 1), (0, 2, 1), (16, 0, 1 + of_layer), (16, 1, 2 + of_layer)
    for start, layer, frames in (*steps, (16, 2, 2 + 2 * of_layer)):
        prefill.sender.ready(prefill_id, layer, start, start + 16)
        pair.until(lambda frames=frames: decode.stats().frames_received >= came + frames, "the frames")
        assert decode.stats().frames_received == came + frames
    assert decode_id not in decode.events
    prefill.sender.commit(prefill_id, kv.FirstToken(1))
    event = pair.event(decode_id)
    assert isinstance(event, kv.Injected)
    assert (event.stats.tokens, event.stats.frames) == (n, 2 + 2 * of_layer)
    assert event.stats.bytes == n * as_sent(pair).bytes_per_token + state_bytes(pair)
    assert_states(pair, 3, 2)
    assert not any(layer[[1, 3]].any() for layers in decode.states for layer in layers)
    error = decode.exact_rows(decode.reserved[decode_id], 0, 0, n) - prefill.rows(blocks, 0, 0, n)
    assert error.abs().max() < 0.3
    pair.assert_whole()


LAYOUT = SIDES[0]["layout"]
LEDGER = kv.KVLayout.of([LAYOUT.arrays[:1], LedgerCache(4).arrays, (*LAYOUT.arrays, *LedgerCache(4).arrays)])
"""Some layers keep arrays of tokens and of requests, of kinds that only tests know."""


def test_each_array_of_a_layer_travels(make_pair: Any) -> None:
    pair = make_pair({"layout": LEDGER, "block_size": 32}, {"layout": LEDGER})
    n, start = 50, 20
    prefill_id = pair.prefill.hold(n, state_slot=1)
    blocks = pair.prefill.held[prefill_id]
    decode_id = pair.decode.fetch(pair.prefill, prefill_id, n, start=start, state_slot=3)
    assert_everything(pair, decode_id, blocks, start, n)


def test_a_prefix_comes_with_all_arrays_at_its_end(make_pair: Any) -> None:
    """The holder lacks the last chunk that is asked for."""
    pair = make_pair({"layout": LEDGER, "block_size": 32}, {"layout": LEDGER})
    names = [*pair.prefill.cache(3), bytes(16)]
    fetch_id = pair.decode.fetch_content(pair.prefill, names, state_slot=3)
    assert_everything(pair, fetch_id, pair.prefill.cached_blocks, 0, 3 * 64)


def assert_everything(pair: Pair, decode_id: bytes, blocks: list[int], start: int, n: int) -> None:
    """All arrays came: those of tokens from blocks of 32, as far as a token at `n` reads them, and those of
    requests from slot 1 to slot 3."""
    event = pair.event(decode_id)
    states = [(x, of) for x, of in zip(LEDGER.arrays, LEDGER.layers, strict=True) if not x.per_token]
    read = {of.name: next(of.read_of([(start, n)], [n])) for of, _ in LEDGER.token_arrays}
    size = sum((n - read[of.name][0]) * of.bytes * len(layers) for of, layers in LEDGER.token_arrays)
    size += sum(x.bytes * len(of) for x, of in states)
    assert (event.stats.bytes, event.stats.tokens) == (size, n - start)
    pair.assert_same(blocks, decode_id, start, n)
    for array, sent, received in zip(LEDGER.arrays[1:], pair.prefill.others, pair.decode.others, strict=True):
        if not array.per_token:
            continue
        there = positions(blocks, 32, *read[array.name])
        here = positions(pair.decode.reserved[decode_id], 16, *read[array.name])
        for layer, other in zip(sent, received, strict=True):
            assert torch.equal(layer.flatten(1, 2)[:, there].cpu(), other.flatten(1, 2)[:, here].cpu())
    assert_states(pair, 1, 3)
    pair.assert_whole()


@pytest.mark.parametrize("kept", ["float32", "bfloat16"])
def test_a_byte_of_a_state_that_changes_on_its_way(make_pair: Any, transport: Kind, kept: str) -> None:
    """The decode worker has all KV, so nothing but states comes. It verifies them as they were sent."""
    pair = make_pair(SIDES[0], side("float8_e4m3fn", kept), connected=False)
    with transport.bent(pair) as address:
        prefill_id = pair.prefill.hold(40, state_slot=1)
        decode_id = pair.decode.fetch(
            pair.prefill, prefill_id, 40, start=40, state_slot=3, kv_address=address
        )
        event = pair.event(decode_id)
        assert isinstance(event, kv.Injected)
        assert event.stats.bytes == state_bytes(pair)
        pair.assert_whole()
    assert_states(pair, 1, 3)
    counter, _ = transport.found
    assert pair.decode.stats().checksum_failures == {counter: 1}
