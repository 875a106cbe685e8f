"""vLLM's KV cache tensors as KV transfer sees them.

vLLM keeps layers in *groups*: all layers of a group have one block table. Blocks of all groups come from one
pool, and share its memory. A kernel may cut a block into smaller ones. The spec of its group says what a
block holds:

- attention, also within windows, and latents: what each token has. Their layouts are recognised by shape.
- a spec with `shapes`: the states of a linear layer. They travel as bytes, as they are after the prompt.
- any other spec, also one that is not known here: bytes. A block travels in full, so both sides must have
  blocks of one size.

vLLM changes layouts: strides are taken as they are. Pages may be padded, and only what they hold is copied.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from baton.kv_names import CHUNK_TOKENS
from baton.kv_names.cache_kinds import ATTENTION, LATENT, STATE, CacheArray, CacheKind, Unit, Window
from baton.kv_transfer import KVLayout, PagedKV
from baton.vllm_worker.attachment import Pool
from baton.vllm_worker.metadata import Begun, Blocks, BlockTable

if TYPE_CHECKING:
    from baton.kv_transfer.transport import Rows

_DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
_BYTES = CacheKind("bytes", Unit.TOKEN)
_DRAFTS = {"draft_model", "mtp"}
"""Parts of the names of layers that make drafts, if they have numbers of their own."""
_STATE_MODES = "none", "align", "all"
"""In which the last block of a request has its states."""
_PIECE_BYTES = 4096
"""Most bytes of the pieces into which a state is cut, so that it fits into any slot."""

Cache = torch.Tensor | Sequence[torch.Tensor]
"""Of a layer. In 0.26 a linear layer has a tensor for each of its states."""


@dataclass(frozen=True, slots=True)
class Heads:
    """Into what KV of the model is cut, over all ranks."""

    attention: int
    """KV heads of most layers."""
    latent_head_dim: int = 0
    """Numbers of a head of a latent (`cache_kinds.latent_head_dim`)."""
    rank: int = 0
    ranks: int = 1


@dataclass(frozen=True, slots=True)
class Caches:
    """The caches of a model, as a rank has them."""

    kv: PagedKV
    layers: Mapping[str, int]
    """The number of each layer, by its name."""
    tables: Sequence[BlockTable]
    """Of each group."""


@dataclass(frozen=True, slots=True)
class _LayerCache:
    array: CacheArray
    rows: Rows
    group: int
    block_size: int
    """Tokens of a block of the kernel."""


def caches_of(caches: Mapping[str, Cache], groups: Sequence[Any], num_blocks: int, heads: Heads) -> Caches:
    """
    Args:
        caches: by name of the layer, each with a number in its name. A layer that reads the cache of another
            layer has the same tensor.
        groups: vLLM's KVCacheGroupSpecs.
        num_blocks: of vLLM's pool.

    Raises ValueError for a layout or a dtype that is not known.
    """
    specs = {
        name: (number, spec_of(group.kv_cache_spec, name))
        for number, group in enumerate(groups)
        for name in group.layer_names
    }
    own = {_address(caches[name]) for name in specs}
    if unknown := sorted(x for x in caches.keys() - specs.keys() if _address(caches[x]) not in own):
        raise ValueError(f"vLLM has no group for the caches of {', '.join(unknown)}")
    numbers = {place: i for i, place in enumerate(sorted({layer_place(name) for name in caches}))}
    by_name = {name: numbers[layer_place(name)] for name in caches}
    layers: list[dict[str, _LayerCache]] = [{} for _ in numbers]
    seen: set[tuple[int, int]] = set()
    for name, (group, spec) in sorted(specs.items(), key=lambda item: (by_name[item[0]], item[0])):
        if (place := (group, _address(caches[name]))) in seen:
            continue  # it reads the cache of another layer
        seen.add(place)
        found = _layer_cache(name, caches[name], group, spec, num_blocks, heads)
        of_layer = layers[by_name[name]]
        if found.array.name in of_layer:  # as the keys of an indexer beside a latent
            part = name.partition(f".{layer_place(name)[1]}.")[2]
            found = replace(found, array=replace(found.array, name=part))
        of_layer[found.array.name] = found
    layout = KVLayout.of([[each.array for each in of_layer.values()] for of_layer in layers])
    planes, tables, block_sizes = [], [], []
    for array, kept_by in zip(layout.arrays, layout.layers, strict=True):
        kept = {layer: layers[layer][array.name] for layer in kept_by}
        if len(sizes := {each.block_size for each in kept.values()}) > 1:
            raise ValueError(f"vLLM keeps {array.name} of several layers in blocks of {sorted(sizes)} tokens")
        planes.append([[each.rows for each in kept.values()]])
        tables.append({layer: each.group for layer, each in kept.items()})
        block_sizes += sizes
    device = str(next(x for cache in caches.values() for x in _tensors(cache)).device)
    kv = PagedKV(
        planes, math.lcm(*block_sizes), layout, device, heads.rank, heads.ranks,
        num_tables=len(groups), tables=tables, block_sizes=block_sizes,
    )  # fmt: skip
    kernel_blocks = {each.group: each.block_size for of_layer in layers for each in of_layer.values()}
    block_tables = list[BlockTable]()
    for i, spec in enumerate(group.kv_cache_spec for group in groups):
        pieces = 1 if keeps_states(spec) else spec.block_size // kernel_blocks.get(i, spec.block_size)
        block_tables.append(table_of(spec, pieces))
    return Caches(kv, by_name, block_tables)


def table_of(spec: Any, pieces: int = 1) -> BlockTable:
    """That of a request in a group. `pieces`: blocks of the kernel in a block."""
    return BlockTable(spec.block_size, keeps_states(spec), pieces, _window(spec))


def clear_rest(caches: Caches, begun: Begun) -> None:
    """Writes zeros behind the tokens of a request, up to the end of its last block in each layer: attention
    multiplies what is there by 0, which of NaN makes NaN."""
    kv, tokens = caches.kv, begun.num_tokens
    for number, (array, layers) in enumerate(zip(kv.layout.arrays, kv.layout.layers, strict=True)):
        if array.kind in (STATE, _BYTES):  # these come in full
            continue
        size = kv.block_sizes[number]
        for layer, rows in zip(layers, kv.planes[number][0], strict=True):
            table, of_group = caches.tables[group := kv.tables[number][layer]], begun.blocks[group]
            blocks = table.of(of_group, tokens)
            for i in range(tokens // size, table.entries(tokens)):
                for plane in rows:
                    plane[blocks[i], tokens % size if i == tokens // size else 0 :] = 0


def clear_states(caches: Caches, blocks: Blocks) -> None:
    """Writes zeros as the states of a request that begins with one token. Other requests have left theirs."""
    kv = caches.kv
    for number, (array, layers) in enumerate(zip(kv.layout.arrays, kv.layout.layers, strict=True)):
        if array.kind != STATE:
            continue
        for layer, rows in zip(layers, kv.planes[number][0], strict=True):
            group = kv.tables[number][layer]
            [slot] = caches.tables[group].of(blocks[group], 1)
            for plane in rows:
                plane[slot] = 0


def pool_of(groups: Sequence[Any], num_blocks: int) -> Pool:
    """What `num_blocks` of vLLM are for requests, whose groups all take blocks of them."""
    specs = [group.kv_cache_spec for group in groups]
    bounds = [(spec.block_size, _most_blocks(spec)) for spec in specs]
    complete = [size for size, most in bounds if most is None] or [bounds[0][0]]
    bounded = tuple((size, most) for size, most in bounds if most is not None)
    block_size = math.lcm(*complete)
    weight = sum(block_size // size for size in complete)
    if len(bounded) == len(specs):
        bounded = bounded[1:]
    first = next((i for i, (_, most) in enumerate(bounds) if most is None), 0)
    alike = all(
        _most_blocks(spec_of(group.kv_cache_spec, name)) == most
        for group, (_, most) in zip(groups, bounds, strict=True)
        for name in group.layer_names
    )
    alike &= all(size == block_size for size, _ in bounds)
    fit = 0 in (block_size % CHUNK_TOKENS, CHUNK_TOKENS % block_size)
    moves = fit and alike and bounds[first][1] is None
    tables = tuple(map(table_of, specs)) if moves else ()
    return Pool(block_size, num_blocks // weight, weight, bounded, first, tables)


def _most_blocks(spec: Any) -> int | None:
    """That a request has while it decodes. None: those of all its tokens."""
    if keeps_states(spec):
        return 2  # with a prefix cache: where the last state is, and where the next one will be
    window = _window(spec)
    return None if window is None else -(-window.length // spec.block_size) + 1


def spec_of(spec: Any, name: str) -> Any:
    """The spec of a layer of a group: a group may have layers whose blocks differ in size alone."""
    return getattr(spec, "kv_cache_specs", {}).get(name, spec)


def keeps_states(spec: Any) -> bool:
    """Whether a group keeps something of each request, and not of each token."""
    return hasattr(spec, "shapes")


def layer_place(name: str) -> tuple[bool, int]:
    """Returns whether a layer makes drafts and has a number of its own, so that it is computed after all
    others, and its number: 3 for `model.layers.3.self_attn.attn`."""
    parts = name.split(".")
    numbers = [int(part) for part in parts if part.isdecimal()]
    if len(numbers) != 1:
        raise ValueError(f"vLLM's layer {name!r} has {len(numbers)} numbers in its name, and should have one")
    return not _DRAFTS.isdisjoint(parts), numbers[0]


def _layer_cache(
    name: str, cache: Cache, group: int, spec: Any, num_blocks: int, heads: Heads
) -> _LayerCache:
    if keeps_states(spec):
        array, rows = _states(name, cache, spec, heads)
        return _LayerCache(array, rows, group, 1)
    [tensor], kind, window = _tensors(cache), type(spec).__name__, _window(spec)
    block_size = spec.block_size // (len(tensor) // num_blocks or 1)
    if kind == "MLAAttentionSpec" and tensor.dtype in _DTYPES and getattr(spec, "tokens_per_state", 1) == 1:
        count, dim = spec.head_size // heads.latent_head_dim, heads.latent_head_dim
        rows = _rows(name, tensor, block_size, 1, spec.head_size, count)
        array = CacheArray(LATENT, "kv", 1, count, dim, _DTYPES[tensor.dtype], window)
    elif kind in ("FullAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec"):
        if tensor.dtype not in _DTYPES:
            raise ValueError(f"vLLM keeps KV as {tensor.dtype}: start it with --kv-cache-dtype auto")
        rows = _rows(name, tensor, block_size, spec.num_kv_heads, spec.head_size, 1)
        dtype = _DTYPES[tensor.dtype]
        usual = spec.num_kv_heads == max(1, heads.attention // heads.ranks)
        # Layers with another number of heads, as those of a draft model: each rank counts as having its own.
        count = heads.attention if usual else spec.num_kv_heads * heads.ranks
        array = CacheArray(ATTENTION, "kv", 2, count, spec.head_size, dtype, window)
    else:
        array, rows = _bytes(name, tensor, block_size, window, heads)
    return _LayerCache(array, rows, group, block_size)


def _window(spec: Any) -> Window | None:
    """What tokens of a group read. vLLM frees blocks of which none is read."""
    if type(spec).__name__ == "FullAttentionSpec":
        return None  # blocks of layers with windows stay, if they are in one group with others
    if length := getattr(spec, "sliding_window", None):
        return Window(length, tile=1)
    if length := getattr(spec, "attention_chunk_size", None):
        return Window(length, chunked=True, tile=1)
    return None


def _states(name: str, cache: Cache, spec: Any, heads: Heads) -> tuple[CacheArray, Rows]:
    """The states of a layer lie behind each other in a page, and are one run of bytes."""
    if (mode := getattr(spec, "mamba_cache_mode", "none")) not in _STATE_MODES:
        raise ValueError(
            f"vLLM keeps states of {name} by --mamba-cache-mode {mode}, which this version of Baton does not "
            "know: add --no-enable-prefix-caching"
        )
    size = sum(
        math.prod(shape) * dtype.itemsize for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
    )
    first, *_ = _tensors(cache)
    whole = first.flatten(1) if len(_tensors(cache)) == 1 else None
    if whole is not None and whole.shape[1] * whole.itemsize < size:  # in 0.28 it has the padding, too
        raise ValueError(f"vLLM's states of {name} have {whole.shape[1] * whole.itemsize} bytes, not {size}")
    page = first.stride(0) * first.itemsize
    pages = torch.empty(0, dtype=torch.uint8, device=first.device).set_(
        first.untyped_storage(), first.storage_offset() * first.itemsize, (len(first), size), (page, 1)
    )
    array, rows = _as_numbers(name, pages, math.gcd(size, _PIECE_BYTES))
    # Ranks share states out in ways of their own, so that each has pieces of its own.
    array = CacheArray(STATE, "state", 1, array.heads * heads.ranks, array.head_dim, array.dtype)
    return array, rows.unsqueeze(0)


def _bytes(
    name: str, cache: torch.Tensor, block: int, window: Window | None, heads: Heads
) -> tuple[CacheArray, Rows]:
    """A block holds a run of bytes. Each of its tokens counts as an equal share."""
    pages = cache.flatten(1) if cache[0].is_contiguous() else None
    if pages is None or pages.shape[1] * pages.itemsize % block:
        raise ValueError(
            f"vLLM's cache of {name} has shape {list(cache.shape)} and strides {list(cache.stride())}, which "
            f"this version of Baton does not know (blocks of {block} tokens)"
        )
    pages = pages.view(torch.uint8)
    found, rows = _as_numbers(name, pages, pages.shape[1] // block)
    array = CacheArray(_BYTES, "bytes", 1, heads.ranks, found.head_dim, found.dtype, window, block)
    return array, rows.unsqueeze(0)


def _as_numbers(name: str, pages: torch.Tensor, size: int) -> tuple[CacheArray, torch.Tensor]:
    """Cuts pages of bytes into pieces of `size` bytes: [blocks, pieces, 1, numbers]."""
    if size % 4 or pages.stride(0) % 4 or pages.storage_offset() % 4:
        raise ValueError(f"vLLM's cache of {name} has pieces of {size} bytes, which are no 32-bit words")
    pieces = pages.view(torch.float32).unflatten(1, (-1, 1, size // 4))
    return CacheArray(_BYTES, "", 1, pieces.shape[1], size // 4, "float32"), pieces


def _tensors(cache: Cache) -> Sequence[torch.Tensor]:
    return [cache] if isinstance(cache, torch.Tensor) else cache


def _address(cache: Cache) -> int:
    return _tensors(cache)[0].data_ptr()


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
    if cache.dtype is torch.bfloat16 and torch.cpu.get_capabilities().get("amx_tile"):
        raise ValueError("vLLM's cache in bfloat16 on CPUs with AMX is not supported: use --dtype float32")
    blocks, heads, block, both = cache.shape
    k, v = cache.view(blocks, heads, 2, block * both // 2).unbind(2)
    keys = k.unflatten(2, (both // 2, block)).permute(0, 3, 1, 2)
    return keys, v.unflatten(2, (block, both // 2)).transpose(1, 2)
