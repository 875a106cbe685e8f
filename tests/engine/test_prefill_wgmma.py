"""The kernel for Hopper's tensor cores, run on a CPU (`gluon_on_cpu`), against torch."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.device import DEVICE
from tests.engine.attention_step import Step
from tests.engine.gluon_on_cpu import Kernel
from tests.engine.kernel_checks import F16

pytestmark = [pytest.mark.all, pytest.mark.skipif(DEVICE != "cpu", reason="a GPU runs the kernel itself")]

CHUNKS = [(70, 71), (500, 540), (3, 9), (384, 386)]


@pytest.fixture
def on_hopper(triton_kernels: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    from baton.engine.kernels import warp_groups
    from baton.engine.kernels.attention import prefill_wgmma, tiles

    monkeypatch.setattr(prefill_wgmma, "_attend", Kernel("_attend", [warp_groups, prefill_wgmma]))
    monkeypatch.setattr(prefill_wgmma, "on_hopper", lambda: True)
    monkeypatch.setattr(prefill_wgmma, "_l2_bytes", lambda _: 1 << 19)
    monkeypatch.setattr(tiles, "LEAST_KEYS", 128)
    long = tiles.LONG._replace(piece_keys=16)
    monkeypatch.setattr("baton.engine.kernels.triton_kernels.LONG", long)
    return triton_kernels


@pytest.mark.parametrize(
    ("heads", "head_dim", "block_size", "multiprocessors"),
    [((4, 1), 128, 16, 1), ((8, 2), 128, 64, 12), ((7, 1), 128, 192, 9), ((3, 1), 256, 32, 7)],
)
def test_chunks_behind_prefixes(
    on_hopper: Any,
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    multiprocessors: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With tiles of one piece, and of several."""
    monkeypatch.setattr(on_hopper, "_head_dim", head_dim)
    monkeypatch.setattr(on_hopper, "_multiprocessors", multiprocessors)
    step = Step(CHUNKS, heads, head_dim, block_size, F16)
    tiles = on_hopper.tile(step.metadata, *heads, F16).tiles
    assert tiles.wgmma
    assert bool(tiles.places) == (multiprocessors > 1)
    step.check(on_hopper, DEVICE)


def test_padding_tiles_of_a_graph_do_nothing(on_hopper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from baton.engine.kernels.attention.tiles import tile_work

    monkeypatch.setattr(on_hopper, "_head_dim", 128)
    monkeypatch.setattr(on_hopper, "_multiprocessors", 12)
    step = Step(CHUNKS, (8, 2), 128, 64, F16)
    expected, *_ = step.run(on_hopper, DEVICE)
    m, shape = step.metadata, on_hopper.tile_shape(F16, 128, 64, plain=True)
    programs = on_hopper.tile_programs(shape, 2)
    work = tile_work(m.prefills, m.num_decodes, shape.tokens(4), programs, shape.piece_keys)
    padded = F.pad(torch.from_numpy(work), (0, 0, 0, 3))
    step.metadata = replace(m, prefills=[], tiles=padded, tile_shape=shape)
    tiles = on_hopper.tile(step.metadata, 8, 2, F16).tiles
    assert tiles.wgmma
    assert tiles.places
    out, *_ = step.run(on_hopper, DEVICE)
    assert torch.equal(out, expected)
