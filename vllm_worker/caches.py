"""vLLM's KV cache tensors as KV transfer sees them.

vLLM changes their layout: shapes are recognised, and strides are taken as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from baton.content.cache_kinds import ATTENTION, LATENT, CacheArray, CacheKind
from baton.kv_transfer import KVLayout, PagedKV

if TYPE_CHECKING:
    from baton.kv_transfer.transport import Rows

_DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


def paged_kv(
    caches: Mapping[str, torch.Tensor],
    block_size: int,
    heads: int,
    head_dim: int,
    *,
    all_heads: int,
    kind: CacheKind = ATTENTION,
    rank: int = 0,
    ranks: int = 1,
) -> PagedKV:
    """Returns the cache of a model with one kind of layers, as a rank has it.

    Args:
        caches: by name of the layer, each with a number in its name.
        block_size: tokens of a block.
        heads: KV heads that the tensors have.
        head_dim: of K and of V, or the numbers of a latent.
        all_heads: KV heads of the model, or those into which a latent is cut.
        kind: of its layers (`content.cache_kinds`).

    Raises ValueError for a layout or a dtype that is not known.
    """
    names = sorted(caches, key=layer_number)
    cut = all_heads if kind == LATENT else 1
    layers = [_rows(name, caches[name], block_size, heads, head_dim, cut) for name in names]
    dtype = layers[0][0].dtype
    if dtype not in _DTYPES:
        raise ValueError(f"vLLM keeps KV as {dtype}: start it with --kv-cache-dtype auto")
    array = CacheArray(kind, "kv", len(layers[0]), all_heads, head_dim // cut, _DTYPES[dtype])
    layout = KVLayout.of([(array,)] * len(layers))
    return PagedKV([[layers]], block_size, layout, str(layers[0][0].device), rank, ranks)


def layer_number(name: str) -> int:
    """Returns the number of a layer: 3 for `model.layers.3.self_attn.attn`."""
    numbers = [int(part) for part in name.split(".") if part.isdecimal()]
    if len(numbers) != 1:
        raise ValueError(f"vLLM's layer {name!r} has {len(numbers)} numbers in its name, and should have one")
    return numbers[0]


def _rows(name: str, cache: torch.Tensor, block: int, heads: int, dim: int, cut: int) -> Rows:
    """Returns K and V, or latents that are `cut` into heads, each as a view [blocks, block_size, heads,
    head_dim]."""
    match tuple(cache.shape):
        case (_, b, d) if (b, 1, d) == (block, heads, dim):  # latents in 0.26
            return cache.unflatten(2, (cut, -1)).unsqueeze(0)
        case (_, 1, b, d) if (b, 1, d) == (block, heads, dim):  # in 0.32
            return cache[:, 0].unflatten(2, (cut, -1)).unsqueeze(0)
        case (_, h, b, d) if (b, h, d) == (block, heads, 2 * dim):
            return cache.unflatten(3, (2, dim)).permute(3, 0, 2, 1, 4) if cache.is_cuda else _on_cpu(cache)
    raise ValueError(
        f"vLLM's cache of {name} has shape {list(cache.shape)}, which this version of Baton does not know "
        f"(blocks of {block} tokens, {heads} heads of {dim})"
    )


def _on_cpu(cache: torch.Tensor) -> Rows:
    """Returns K and V of vLLM's attention for CPUs without AMX (`cpu_attn_vec.hpp`).

    A block of a head is K of all its tokens, [head_dim, block_size], and then V, [block_size, head_dim]."""
    if cache.dtype is torch.bfloat16 and torch.cpu._is_amx_tile_supported():
        raise ValueError("vLLM's cache in bfloat16 on CPUs with AMX is not supported: use --dtype float32")
    blocks, heads, block, both = cache.shape
    k, v = cache.view(blocks, heads, 2, block * both // 2).unbind(2)
    keys = k.unflatten(2, (both // 2, block)).permute(0, 3, 1, 2)
    return keys, v.unflatten(2, (block, both // 2)).transpose(1, 2)
