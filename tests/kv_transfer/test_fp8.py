"""KV in FP8: it travels with its scales, and a receiver with another dtype converts it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import baton.kv_transfer as kv
from baton.kv_transfer.device.convert import Dense
from baton.kv_transfer.layout import Slice, slice_bytes

from .ranks import as_bytes, positions

FP8 = torch.float8_e4m3fn
FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def layout(dtype: str) -> kv.KVLayout:
    return kv.KVLayout(3, 12, 16, dtype)


def rounded(exact: torch.Tensor) -> torch.Tensor:
    """What FP8 keeps of these numbers, with a scale for each head of a position."""
    scales = exact.abs().amax(dim=-1, keepdim=True) / 448
    return (exact / scales).to(FP8).float() * scales


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("sent", "kept", "ranks"),
    [
        ("float8_e4m3fn", "float8_e4m3fn", (3, 2)),
        ("bfloat16", "float8_e4m3fn", (1, 3)),
        ("float8_e4m3fn", "bfloat16", (4, 1)),
        ("float8_e4m3fn", "float32", (1, 1)),
    ],
)
def test_a_transfer(make_pair: Any, sent: str, kept: str, ranks: tuple[int, int], device: str) -> None:
    """From blocks of 32 into blocks of 48. Decode has a part of the prompt. A layer takes several frames."""
    n, start = 230, 41
    both: dict[str, Any] = {"slot_bytes": 8192, "slots": 32, "device": device, "blocks": 24}
    pair = make_pair(
        {"layout": layout(sent), "ranks": ranks[0], "block_size": 32, **both},
        {"layout": layout(kept), "ranks": ranks[1], "block_size": 48, **both},
    )
    prefill_id = pair.prefill.hold(n)
    blocks = pair.prefill.held[prefill_id]
    decode_id = pair.decode.fetch(pair.prefill, prefill_id, n, start=start)
    event = pair.event(decode_id)
    assert isinstance(event, kv.Injected)
    assert (event.stats.tokens, event.stats.bytes) == (n - start, (n - start) * layout(sent).bytes_per_token)
    reserved = pair.decode.reserved[decode_id]
    for layer in range(3):
        there = pair.prefill.exact_rows(blocks, layer, start, n)
        here = pair.decode.exact_rows(reserved, layer, start, n)
        if sent == kept:
            assert torch.equal(here, there)
            pair.assert_same(blocks, decode_id, start, n)
        elif kept == "float8_e4m3fn":
            assert torch.equal(here, rounded(there))
        else:
            assert torch.equal(here, there.to(FLOATS[kept]).float())
        assert not pair.decode.exact_rows(reserved, layer, 0, start).any(), "nothing else is written"
    pair.until(lambda: pair.prefill.released, "the ACK to release the prefill")
    pair.assert_whole()


def test_chunks_of_a_prefix_cache(make_pair: Any) -> None:
    """The tokens of a fetch are counted, not computed from its bytes. The holder lacks the last chunk."""
    pair = make_pair(*[{"layout": layout("float8_e4m3fn"), "slot_bytes": 8192, "device": "cpu"}] * 2)
    names = pair.prefill.cache(3)
    fetch_id = pair.decode.fetch_content(pair.prefill, [*names[1:], bytes(16)], first_chunk=1)
    event = pair.event(fetch_id)
    assert isinstance(event, kv.Injected)
    assert event.stats.tokens == 128
    for layer in range(3):
        there = pair.prefill.exact_rows(pair.prefill.cached_blocks, layer, 64, 192)
        assert torch.equal(pair.decode.exact_rows(pair.decode.reserved[fetch_id], layer, 64, 192), there)


def test_numbers_that_are_not_finite_spoil_their_head_alone() -> None:
    exact = torch.randn(2, 3, 4, 16)
    exact[0, 1, 2, 5], exact[1, 2, 3, 0] = torch.nan, torch.inf
    dense = Dense(as_bytes(exact).numpy(), None).converted("float32", "float8_e4m3fn")
    assert dense.scales is not None
    ours = torch.from_numpy(dense.values).view(FP8).float() * torch.from_numpy(dense.scales)[..., None]
    sound = torch.ones(2, 3, 4, dtype=torch.bool)
    sound[0, 1, 2] = sound[1, 2, 3] = False
    assert torch.equal(ours[sound], rounded(exact)[sound])
    assert ours[~sound].isnan().any(dim=-1).all()


def test_a_gpu_that_does_not_know_fp8_decodes_it(kernel_device: str) -> None:
    """All 256 numbers, two of them NaN, with a scale of 1."""
    from baton.kv_transfer.device import copy_kernels

    piece = Slice(0, 0, 8, 0, 1)
    bits = torch.arange(256).to(torch.uint8)
    dense = torch.cat((bits, torch.ones(16).view(torch.uint8))).to(kernel_device)
    pool = torch.zeros(2, 1, 1, 8, 16, device=kernel_device)
    block = torch.tensor([0], device=kernel_device)
    line = copy_kernels.line_to_convert(pool, None, block, dense.data_ptr(), piece, (0, 8), 0)
    copy_kernels.launch_converting(torch.tensor([line], device=kernel_device), pool, FP8, 8)
    torch.testing.assert_close(pool.cpu().flatten(), bits.view(FP8).float(), equal_nan=True, rtol=0, atol=0)


def test_kernel_of_scales(kernel_device: str) -> None:
    from baton.kv_transfer.device import copy_kernels

    pool = torch.rand(2, 9, 4, 16, device=kernel_device)
    blocks, piece = torch.tensor([7, 2, 5], device=kernel_device), Slice(0, 1, 3, 5, 37)
    dense = torch.zeros(2, 37, 3, device=kernel_device)
    table = torch.tensor(
        [copy_kernels.line(pool, blocks, dense.data_ptr(), piece, (1, 4), 0)], device=kernel_device
    )
    copy_kernels.launch(table, pool, 37, 3, into_pool=False)
    position = torch.arange(5, 42, device=kernel_device)
    block, offset = blocks[position // 16], position % 16
    assert torch.equal(dense, pool.transpose(2, 3)[:, block, offset, 1:4])
    other = torch.zeros_like(pool)
    copy_kernels.launch(
        torch.tensor([[other.data_ptr(), *table[0, 1:].tolist()]], device=kernel_device), other, 37, 3,
        into_pool=True,
    )  # fmt: skip
    expected = torch.zeros_like(pool)
    expected.transpose(2, 3)[:, block, offset, 1:4] = dense
    assert torch.equal(other, expected)


@pytest.mark.usefixtures("exact_casts")
@pytest.mark.parametrize(
    ("sent", "kept"),
    [("bfloat16", "float8_e4m3fn"), ("float32", "float8_e4m3fn"), ("float8_e4m3fn", "float16")],
)
def test_kernel_that_converts(kernel_device: str, sent: str, kept: str) -> None:
    """Against the torch code of `Dense`. The pool has heads 2 to 5 of 8, and the slice has heads 1 to 4."""
    from baton.kv_transfer.device import copy_kernels

    whole = kv.KVLayout(1, 8, 16, sent)
    piece, held = Slice(0, 1, 4, 5, 37), (2, 5)
    exact = torch.randn(2, 37, 4, 16)
    exact[1, 3] = 0
    if sent == "float8_e4m3fn":
        scales = torch.rand(2, 37, 4) + 0.1
        slot = np.concatenate([as_bytes(x).flatten().numpy() for x in (exact.to(FP8), scales)])
    else:
        slot = as_bytes(exact.to(FLOATS[sent])).flatten().numpy()
    assert len(slot) == slice_bytes(whole, piece)
    expected = Dense.of(memoryview(bytearray(slot)), piece, whole).converted(sent, kept)

    pool = torch.zeros(2, 9, 16, 4, 16, device=kernel_device).to(getattr(torch, kept))
    of_pool = torch.zeros(2, 9, 4, 16, device=kernel_device) if kept == "float8_e4m3fn" else None
    blocks, dense = torch.tensor([7, 2, 5], device=kernel_device), torch.from_numpy(slot).to(kernel_device)
    line = copy_kernels.line_to_convert(pool, of_pool, blocks, dense.data_ptr(), piece, held, 2)
    table = torch.tensor([line], device=kernel_device)
    copy_kernels.launch_converting(table, pool, getattr(torch, sent), 37 * 4)

    rows = positions([7, 2, 5], 16, 5, 42)
    ours = pool.cpu().flatten(1, 2)[:, rows].float()
    values = torch.from_numpy(expected.values).view(getattr(torch, kept)).float()[:, :, 1:4]
    if of_pool is not None:
        assert expected.scales is not None
        scales = of_pool.cpu().transpose(2, 3).flatten(1, 2)[:, rows]
        assert torch.equal(scales[..., :3], torch.from_numpy(expected.scales)[:, :, 1:4])
        assert not scales[..., 3:].any()
    assert torch.equal(ours[:, :, :3], values)
    assert not ours[:, :, 3:].any()
    assert int((pool.cpu().float() != 0).any(dim=-1).sum()) == int((values != 0).any(dim=-1).sum())
