"""A KV cache in FP8: kernels against attention over the numbers that the cache stands for, and engines."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from baton.engine.kernels import FP8, Fp8KV, Kernels
from baton.engine.model_config import Span
from baton.engine.models import cache_bytes_per_token
from tests.device import DEVICE
from tests.engine.attention_step import RAGGED, Step
from tests.engine.conftest import MakeEngine, request_of, tokens_of
from tests.engine.kernel_checks import BF16, F16, F32, close
from tests.engine.random_checkpoints import save_random

pytestmark = [pytest.mark.all, pytest.mark.usefixtures("exact_casts")]


def quantized(kv: Tensor, device: str = "cpu") -> Fp8KV:
    """A cache with these numbers. Slots with NaN stay NaN, and so do their scales."""
    scales = kv.float().abs().amax(dim=-1).clamp_min(2.0**-100) / 448
    values = (kv.float() / scales[..., None]).to(FP8)
    return Fp8KV(values.to(device), scales.transpose(2, 3).contiguous().to(device))


def exact(kv: Fp8KV) -> Tensor:
    return kv.values.double() * kv.scales.transpose(2, 3)[..., None].double()


def check(step: Step, kernels: Kernels, device: str) -> None:
    """Compares the cache with the rounded keys and values, and the result with attention over the cache."""
    m, kv = step.metadata, quantized(step.kv, device)
    out, q = step.run_on(kv, kernels, device)
    kv = Fp8KV(*(part.cpu() for part in kv))

    plain = step.kv.double()
    q64 = Kernels().rope_and_write(step.qkv.double(), step.rotary.double(), None, plain, m.slots)
    close(q, q64)
    written = plain.isfinite()
    assert torch.equal(exact(kv).isfinite(), written), "each position is in its slot, and nothing else is"
    error = (exact(kv) - plain).abs().amax(dim=-1)
    assert (error <= 0.045 * plain.abs().amax(dim=-1))[written.all(dim=-1)].all(), "half a step of FP8"
    tiling = Kernels().tile(m, *step.heads, torch.float64, step.span)
    of_queries = None if step.sinks is None else step.sinks.double()
    close(out, Kernels().attention(q64, exact(kv), tiling, of_queries, step.scale, step.softcap))


@pytest.mark.parametrize("seed", range(2))
def test_torch_kernels(seed: int) -> None:
    for dtype, span in ((F32, None), (BF16, Span(24, chunked=True))):
        check(Step(RAGGED, (4, 2), 16, 16, dtype, seed, span=span), Kernels(), "cpu")


@pytest.mark.parametrize(
    ("head_dim", "block_size", "dtype", "span", "with_sinks", "softcap"),
    [
        (64, 24, F32, None, True, None),
        (128, 128, BF16, None, False, 1.0),
        (64, 128, F16, Span(70), True, None),
        (16, 16, BF16, Span(24, chunked=True), True, None),
    ],
)
def test_triton_kernels(
    triton_kernels: Kernels,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    span: Span | None,
    with_sinks: bool,
    softcap: float | None,
) -> None:
    """Products of FP8 are in float16, so the interpreter computes bfloat16, too."""
    spans = [(0, 1), (70, 71), (3, 20), (150, 190)]
    step = Step(spans, (3, 1), head_dim, block_size, dtype, span=span, with_sinks=with_sinks, softcap=softcap)
    check(step, triton_kernels, DEVICE)


@pytest.mark.parametrize(
    ("head_dim", "block_size", "dtype"),
    [
        (64, 24, F32),
        (64, 192, F16),
        *(pytest.param(128, n, BF16, marks=pytest.mark.gpu) for n in (128, 192, 320)),
    ],
)
def test_long_chunks_gather_their_blocks(
    triton_kernels: Kernels,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from baton.engine.kernels.attention import tiles
    from baton.engine.kernels.attention.gather_kv import gather

    used: list[int] = []

    def counted(kv: Fp8KV, blocks: Tensor, to: torch.dtype) -> Tensor:
        used.append(len(blocks))
        return gather(kv, blocks, to)

    monkeypatch.setattr("baton.engine.kernels.triton_kernels.gather", counted)
    monkeypatch.setattr(tiles, "LONG_FROM", 100)
    monkeypatch.setattr(triton_kernels, "_head_dim", head_dim)  # of `prefill_wgmma`
    check(Step([(70, 71), (3, 20), (150, 400)], (3, 1), head_dim, block_size, dtype), triton_kernels, DEVICE)
    assert used == [-(-20 // block_size) + -(-400 // block_size)]


def test_which_chunks_gather_their_blocks() -> None:
    from baton.engine.kernels.attention.gather_kv import MOST_POSITIONS, tile_gather

    tables = torch.zeros(2, 1 + MOST_POSITIONS // 128, dtype=torch.int32)
    for chunk, gathers in (((1000, 1128), True), ((1000, 1127), False), ((0, MOST_POSITIONS + 1), False)):
        assert (tile_gather([chunk], 1, tables, 128) is not None) is gathers


def test_scales_may_be_very_different(triton_kernels: Kernels) -> None:
    """Float16 does not hold these values. The largest are in the last tile of keys."""
    step = Step([(90, 91), (10, 60)], (4, 2), 64, 16, BF16)
    step.kv[1] *= 1e-6
    step.qkv[:, 4:6] *= 1e-3
    step.qkv[:, :4] *= 1e3
    step.qkv[-1, 6:] *= 1e6
    check(step, triton_kernels, DEVICE)


@pytest.mark.parametrize("part", [slice(4, 5), slice(6, 7)], ids=["key", "value"])
def test_numbers_that_are_not_finite_spoil_their_request_alone(triton_kernels: Kernels, part: slice) -> None:
    step = Step([(20, 21), (40, 41), (0, 9), (5, 20)], (4, 2), 64, 16, F32)
    rows = {0: slice(0, 1), 1: slice(1, 2), 2: slice(2, 11), 3: slice(11, 26)}

    for kernels, device in ((Kernels(), "cpu"), (triton_kernels, DEVICE)):
        before, _ = step.run_on(quantized(step.kv, device), kernels, device)
        sound = step.qkv.clone()
        for request, broken in ((0, torch.nan), (1, torch.inf), (3, -torch.inf)):
            step.qkv[rows[request].stop - 1, part, 5] = broken
        after, _ = step.run_on(quantized(step.kv, device), kernels, device)
        step.qkv = sound
        for request, its in rows.items():
            if request != 2:
                assert not after[its][-1, :2].isfinite().all(dim=-1).any(), "both query heads of the KV head"
            else:
                assert torch.equal(after[its], before[its])


def test_rows_that_pad_a_graph_write_nothing(triton_kernels: Kernels) -> None:
    step = Step([(8, 9), (40, 41), (41, 42)], (2, 1), 64, 16)
    step.metadata.slots[1] = -1
    kv = quantized(step.kv, DEVICE)
    step.run_on(kv, triton_kernels, DEVICE)
    written = exact(Fp8KV(*(part.cpu() for part in kv))).isfinite().all(dim=-1).all(dim=0)
    assert int(written.sum()) == 9 + 40 + 42


def test_an_engine_on_these_kernels(tmp_path: Path, check_tokens_of_kernels: Callable[..., None]) -> None:
    """A model with windows and sinks."""
    save_random(
        tmp_path, "GptOss", num_hidden_layers=1, attention_bias=True, layer_types=["sliding_attention"]
    )
    check_tokens_of_kernels(tmp_path, kv_cache_dtype="fp8")


def test_a_token_does_not_depend_on_chunks_blocks_and_other_requests(
    tiny_engine: MakeEngine,
) -> None:
    requests = [request_of(i, range(3, 7 + 19 * i), max_tokens=12, ignore_eos=True) for i in range(4)]
    alone = [
        tokens_of(tiny_engine(kv_cache_dtype="fp8", num_blocks=64), [request])[0] for request in requests
    ]
    engine = tiny_engine(
        kv_cache_dtype="fp8", num_blocks=200, block_size=8, max_num_batched_tokens=13, max_num_seqs=4
    )
    assert tokens_of(engine, requests) == alone
    assert isinstance(engine.caches[0], Fp8KV)
    assert cache_bytes_per_token(engine.cache_spec[:1]) == 2 * 2 * (16 + 4)
    plain = tiny_engine(num_blocks=64)
    assert engine.content_root != plain.content_root
    assert engine.model_fingerprint == plain.model_fingerprint


def test_a_scale_of_zeros_is_not_zero() -> None:
    qkv = torch.zeros(1, 4, 16)
    kv = quantized(torch.full((2, 1, 16, 1, 16), torch.nan))
    rotary = torch.stack((torch.ones(1, 16), torch.zeros(1, 16)), dim=1)
    Kernels().rope_and_write(qkv, rotary, None, kv, torch.tensor([3]))
    assert (kv.scales[:, 0, 0, 3] > 0).all()
    assert not exact(kv)[:, 0, 3].any()
