"""vLLM's cache tensors, as KV transfer sees them."""

from __future__ import annotations

import re

import pytest
import torch

from baton.content.cache_kinds import LATENT
from baton.vllm_worker.caches import layer_number, paged_kv
from tests.layouts import kv_layout

BLOCKS, BLOCK, HEADS, DIM = 5, 16, 3, 8


def test_on_cpus_keys_are_transposed() -> None:
    """As `cpu_attn_reshape_and_cache` of vLLM 0.32 writes them."""
    cache = torch.zeros(BLOCKS, HEADS, BLOCK, 2 * DIM)
    flat = cache.view(BLOCKS, HEADS, 2, BLOCK * DIM)
    token, head = 11, 2
    for i in range(DIM):
        flat[3, head, 0, i * BLOCK + token] = 1 + i
        flat[3, head, 1, token * DIM + i] = 100 + i
    caches = {"model.layers.1.attn": cache, "model.layers.0.attn": torch.zeros_like(cache)}
    kv = paged_kv(caches, BLOCK, HEADS, DIM, all_heads=HEADS)
    assert kv.layout == kv_layout(2, HEADS, DIM, "float32")
    [[[_, (keys, values)]]] = kv.planes  # in the order of layers
    assert keys[3, token, head].tolist() == [1 + i for i in range(DIM)]
    assert values[3, token, head].tolist() == [100 + i for i in range(DIM)]
    assert keys.count_nonzero() == values.count_nonzero() == DIM


@pytest.mark.parametrize("shape", [(BLOCKS, BLOCK, DIM), (BLOCKS, 1, BLOCK, DIM)], ids=str)
def test_latents_are_one_row_that_is_cut_into_heads(shape: tuple[int, ...]) -> None:
    cache = torch.arange(BLOCKS * BLOCK * DIM, dtype=torch.float32).view(shape)
    kv = paged_kv({"model.layers.0.attn": cache}, BLOCK, 1, DIM, all_heads=2, kind=LATENT)
    assert kv.layout == kv_layout(1, 2, DIM // 2, "float32", kind=LATENT)
    [[[[latents]]]] = kv.planes
    assert torch.equal(latents[3, 11].flatten(), cache[3].view(BLOCK, DIM)[11])


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        (torch.zeros(BLOCKS, BLOCK, HEADS, DIM), r"shape [5, 16, 3, 8]"),
        (torch.zeros(BLOCKS, HEADS, BLOCK, 2 * DIM, dtype=torch.uint8), "--kv-cache-dtype auto"),
    ],
)
def test_what_is_not_known_is_refused(cache: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        paged_kv({"model.layers.0.attn": cache}, BLOCK, HEADS, DIM, all_heads=HEADS)


def test_a_layer_has_one_number() -> None:
    assert layer_number("model.layers.31.self_attn.attn") == 31
    with pytest.raises(ValueError, match="should have one"):
        layer_number("model.blocks.3.mtp.0.attn")
