"""Triton's kernels of latent attention against the torch kernels that define them (`kernel_checks`)."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from baton.engine.kernels import Fp8KV, Kernels
from baton.engine.model_config import LatentConfig
from tests.device import DEVICE
from tests.engine.attention_step import RAGGED, placed
from tests.engine.kernel_checks import BF16, F16, F32, close
from tests.engine.latent_step import LatentStep
from tests.engine.test_fp8_kv import exact, quantized

pytestmark = pytest.mark.all


@pytest.mark.parametrize(
    ("heads", "block_size", "dtype"),
    [(16, 16, F32), (5, 64, F32), (20, 192, F16), pytest.param(128, 128, BF16, marks=pytest.mark.gpu)],
)
def test_decodes_and_chunks(triton_kernels: Kernels, heads: int, block_size: int, dtype: torch.dtype) -> None:
    """Decodes of one piece and of several, with one and several queries; chunks that are absorbed, and some
    that are expanded. Blocks of 16 heads that the heads do not fill."""
    spans = [*RAGGED, (399, 401), (300, 301)]
    LatentStep(spans, heads, block_size=block_size, dtype=dtype, decodes=[(399, 401)]).check(
        triton_kernels, DEVICE
    )


@pytest.mark.parametrize("dims", [(512, 128, 64, 128), (512, 192, 64, 256)], ids=["deepseek-v3", "glm"])
@pytest.mark.parametrize("least", [1, 1000], ids=["expanded", "absorbed"])
@pytest.mark.parametrize(
    ("heads", "block_size", "dtype"),
    [
        (2, 64, F32),
        *(pytest.param(*of, BF16, marks=pytest.mark.gpu) for of in ((5, 192), (128, 64))),
        pytest.param(20, 320, F16, marks=pytest.mark.gpu),
    ],
)
def test_the_sizes_of_published_models(
    triton_kernels: Kernels,
    monkeypatch: pytest.MonkeyPatch,
    dims: tuple[int, int, int, int],
    least: int,
    heads: int,
    block_size: int,
    dtype: torch.dtype,
) -> None:
    """Heads of 192 are padded to 256, and have values of 128."""
    monkeypatch.setattr(LatentConfig, "min_expanded_queries", least)
    spans = [(0, 1), (63, 64), (40, 41), (700, 701), (30, 45)]
    LatentStep(spans, heads, dims, block_size, dtype).check(triton_kernels, DEVICE)


@pytest.mark.parametrize(
    ("heads", "block_size", "dims", "dtype"),
    [
        (16, 16, (32, 16, 16, 16), F32),
        (5, 64, (64, 16, 16, 16), F16),
        *(pytest.param(n, 64, (512, 128, 64, 128), BF16, marks=pytest.mark.gpu) for n in (20, 128)),
    ],
)
@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.usefixtures("exact_casts")
def test_latents_in_fp8(
    triton_kernels: Kernels,
    heads: int,
    block_size: int,
    dims: tuple[int, int, int, int],
    dtype: torch.dtype,
    on_cpu: bool,
) -> None:
    """The cache has the rounded latents, and the result is attention over what it has."""
    spans = [*RAGGED, (399, 401), (300, 301)]
    step = LatentStep(spans, heads, dims, block_size, dtype, decodes=[(399, 401)])
    kernels, device = (Kernels(), "cpu") if on_cpu else (triton_kernels, DEVICE)
    kv = quantized(step.kv, device)
    out, q = step.run_on(kv, kernels, device)
    kv = Fp8KV(*(part.cpu() for part in kv))
    _, plain, exact_q = step.run(Kernels(), "cpu", exact=True)
    close(q, exact_q)
    written = plain.isfinite()
    assert torch.equal(exact(kv).isfinite(), written), "each position is in its slot, and nothing else is"
    error = (exact(kv) - plain).abs().amax(dim=-1)
    assert (error <= 0.045 * plain.abs().amax(dim=-1))[written.all(dim=-1)].all(), "half a step of FP8"
    close(out, step.expected(exact(kv)))


@pytest.mark.parametrize("held", [1, 4])
def test_a_context_that_the_scratch_memory_does_not_hold(
    triton_kernels: Kernels, monkeypatch: pytest.MonkeyPatch, held: int
) -> None:
    """Of 256 positions it holds one head or all four. The context of 257 positions is expanded two heads at a
    time, or absorbed. Latents of 100 positions are gathered at a time."""
    from baton.engine.kernels.attention import latent_kernels, latent_tiling

    monkeypatch.setattr(LatentConfig, "min_expanded_queries", 2)
    monkeypatch.setattr(latent_tiling, "SCRATCH_BYTES", 256 * held * (32 + 16) * 4)
    monkeypatch.setattr(latent_tiling, "MOST_ABSORBED", 4)
    monkeypatch.setattr(latent_kernels, "GATHERED", 100)
    step = LatentStep([(126, 128), (250, 257), (0, 3), (60, 63), (0, 2), (5, 6)])
    metadata = placed(step.metadata, lambda x: x.to(DEVICE))
    tiling = triton_kernels.tile_latent(metadata, 4, step.shape, F32)
    found = [
        (
            part.scratch.keys.shape[3] if isinstance(part, latent_tiling.ExpandedChunks) else 0,
            *part.rows.indices(18)[:2],
        )
        for part in tiling
    ]
    if held == 4:
        assert found == [(0, 0, 1), (4, 1, 3), (2, 3, 10), (4, 10, 16), (4, 16, 18)]
    else:
        assert found == [(0, 0, 1), (2, 1, 3), (0, 3, 7), (0, 7, 10), (2, 10, 13), (2, 13, 16), (2, 16, 18)]
    step.check(triton_kernels, DEVICE)


def test_padding_rows_write_and_read_nothing(triton_kernels: Kernels) -> None:
    """As in a captured graph."""
    step = LatentStep([(8, 9), (40, 41), (41, 42)])
    expected, _, _ = step.run(Kernels(), "cpu")
    m, before = step.metadata, step.kv.clone()
    step.metadata = replace(m, slots=m.slots.clone(), contexts=m.contexts.clone())
    step.metadata.slots[1], step.metadata.contexts[1] = -1, 0
    out, kv, _ = step.run(triton_kernels, DEVICE)
    assert not out[1].any()
    close(out[[0, 2]], expected[[0, 2]])
    changed = ~torch.eq(kv.cpu().nan_to_num(7), before.nan_to_num(7)).flatten(3).all(-1).flatten()
    assert int(changed.sum()) == 2


@pytest.mark.parametrize(("start", "stop"), [(0, 1), (0, 40), (700, 705), (1000, 1200)])
@pytest.mark.parametrize("programs", [1, 64])
def test_the_pieces_of_a_chunk_cover_each_context_once(start: int, stop: int, programs: int) -> None:
    from baton.engine.kernels.attention.latent_tiling import pieces_between

    pieces = pieces_between(start, stop, 64, programs, torch.device("cpu"))
    work, first = pieces.work.tolist(), pieces.first.tolist()
    assert len(work) == first[-1] <= stop - start + max(programs, stop - start)
    for row in range(stop - start):
        own = work[first[row] : first[row + 1]]
        assert [piece[0] for piece in own] == [row] * len(own)
        assert [piece[1] for piece in own] == [0, *(piece[2] for piece in own[:-1])]
        assert own[-1][2] == start + row + 1
        assert all(piece[1] % 64 == 0 for piece in own)


def test_rows_that_pad_a_graph(triton_kernels: Kernels) -> None:
    """There are more rows than decodes."""
    step = LatentStep([(8, 9), (70, 71)])
    expected, _, _ = step.run(triton_kernels, DEVICE)
    m = step.metadata
    step.q, step.latent, step.shared, step.rotary = (
        F.pad(x, (*[0] * (2 * x.dim() - 1), 3), value=torch.nan)
        for x in (step.q, step.latent, step.shared, step.rotary)
    )
    step.metadata = replace(
        m,
        slots=F.pad(m.slots, (0, 3), value=-1),
        contexts=F.pad(m.contexts, (0, 3)),
        block_tables=F.pad(m.block_tables, (0, 0, 0, 3)),
        num_decodes=5,
    )
    out, _, _ = step.run(triton_kernels, DEVICE)
    close(out[:2], expected.cpu())
