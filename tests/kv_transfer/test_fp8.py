"""KV in FP8 at one side or both: it travels in FP8, with its scales. A side that keeps plain KV converts."""

from typing import Any

import pytest
import torch

import baton.kv_transfer as kv
from baton.engine.kernels.quantized.reference import quantize
from baton.kv_transfer.device.host_pool import converted
from baton.kv_transfer.device.pool import Window
from tests.layouts import kv_layout

from .ranks import as_bytes

FP8 = torch.float8_e4m3fn
FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def layout(dtype: str) -> kv.KVLayout:
    return kv_layout(3, 12, 16, dtype)


IN_FP8 = layout("float8_e4m3fn")


def rounded(exact: torch.Tensor) -> torch.Tensor:
    """What FP8 keeps of these numbers, with a scale for each head of a position."""
    scales = exact.abs().amax(dim=-1, keepdim=True) / 448
    return (exact / scales).to(FP8).float() * scales


@pytest.mark.cases(1)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("sent", "kept", "ranks"),
    [
        ("float8_e4m3fn", "float8_e4m3fn", (3, 2)),
        ("bfloat16", "float8_e4m3fn", (1, 3)),
        ("float32", "float8_e4m3fn", (4, 2)),
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
    assert (event.stats.tokens, event.stats.bytes) == (n - start, (n - start) * IN_FP8.bytes_per_token)
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


def test_a_slice_has_the_bits_that_an_engine_writes() -> None:
    exact = torch.randn(2, 3, 4, 16).bfloat16()
    exact[1, 2, 3] = 0
    values, scales = converted([as_bytes(exact).numpy()], "bfloat16", "float8_e4m3fn")
    written = quantize(exact.flatten(0, 2), grouped=False)
    for ours, theirs in ((values, written.values), (scales, written.scales)):
        assert torch.equal(torch.from_numpy(ours).flatten(), theirs.view(torch.uint8).flatten())


def test_numbers_that_are_not_finite_spoil_their_head_alone() -> None:
    exact = torch.randn(2, 3, 4, 16)
    exact[0, 1, 2, 5], exact[1, 2, 3, 0] = torch.nan, torch.inf
    values, scales = map(torch.from_numpy, converted([as_bytes(exact).numpy()], "float32", "float8_e4m3fn"))
    ours = values.view(FP8).float() * scales.view(torch.float32)
    sound = torch.ones(2, 3, 4, dtype=torch.bool)
    sound[0, 1, 2] = sound[1, 2, 3] = False
    assert torch.equal(ours[sound], rounded(exact)[sound])
    assert ours[~sound].isnan().any(dim=-1).all()


def test_a_gpu_that_does_not_know_fp8_decodes_it(kernel_device: str) -> None:
    """All 256 numbers, two of them NaN, with a scale of 1."""
    from baton.kv_transfer.device import copy_kernels

    held = Window(0, 1, 0, 8, 0, 0, 1, 8)
    bits = torch.arange(256).to(torch.uint8)
    dense = torch.cat((bits, torch.ones(16).view(torch.uint8))).to(kernel_device)
    pool = torch.zeros(2, 1, 1, 8, 16, device=kernel_device)
    block = torch.tensor([0], device=kernel_device)
    line = copy_kernels.line_to_convert(pool.data_ptr(), block.data_ptr(), dense.data_ptr(), held)
    table = torch.tensor([line], device=kernel_device)
    copy_kernels.launch_converting(table, pool, FP8, 8, into_pool=True)
    torch.testing.assert_close(pool.cpu().flatten(), bits.view(FP8).float(), equal_nan=True, rtol=0, atol=0)


def test_a_gpu_that_does_not_know_fp8_rounds_to_it_as_torch_does(kernel_device: str) -> None:
    """Heads with 448, so that their scale is 1: all numbers of FP8, those halfway between two, and the
    nearest ones of float32 to each."""
    from baton.kv_transfer.device import copy_kernels

    numbers = torch.arange(0x7F).to(torch.uint8).view(FP8).float()
    numbers = torch.cat((numbers, (numbers[1:] + numbers[:-1]) / 2))
    numbers = torch.cat([numbers, *(numbers.nextafter(torch.tensor(to)) for to in (-1.0, 448.0))])
    numbers = torch.cat((numbers, -numbers))
    heads = torch.nn.functional.pad(numbers, (0, -len(numbers) % 15)).view(-1, 15)
    heads = torch.cat((heads, torch.full((len(heads), 1), 448.0)), dim=1)
    held = Window(0, 1, 0, len(heads), 0, 0, 1, len(heads))
    pool = heads.view(1, 1, 1, -1, 16).to(kernel_device)
    dense = torch.zeros(len(heads) * (16 + 4), dtype=torch.uint8, device=kernel_device)
    block = torch.tensor([0], device=kernel_device)
    line = copy_kernels.line_to_convert(pool.data_ptr(), block.data_ptr(), dense.data_ptr(), held)
    table = torch.tensor([line], device=kernel_device)
    copy_kernels.launch_converting(table, pool, FP8, len(heads), into_pool=False)
    assert torch.equal(dense.cpu()[: heads.numel()], heads.to(FP8).view(torch.uint8).flatten())
