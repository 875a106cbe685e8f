"""How the layers of a model attend in a step, to what `layer_caches` has.

Layers of one shape share a tiling of the step. A layer says that its KV is written before it attends. Chunks
of latents attend between two graphs (`Apart`).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from baton.engine.execution.graphs import Attends, LayerDone, TileShape
from baton.engine.execution.layer_caches import LayerCaches
from baton.engine.kernels import (
    FP8,
    Fp8KV,
    HeadNorm,
    Index,
    IndexedLatents,
    IndexQueries,
    Kernels,
    LatentHeads,
    LatentNorm,
    Rates,
    StateLayer,
)
from baton.engine.kernels.attention.chosen import attend_chosen, keep_keys, requests_of
from baton.engine.kernels.attention.paged import Apart, AttentionMetadata
from baton.engine.kernels.attention.tiles import NO_IMAGES, SHORT
from baton.engine.kernels.state.by_request import advance_states, tile_requests
from baton.engine.model_config import ModelConfig, Span
from baton.engine.models.cache_spec import AttentionCache, CacheSpec, SharedCache
from baton.kv_names.cache_kinds import ATTENTION


class AttentionShape(NamedTuple):
    """What the tiling of a layer with keys and values depends on. Layers of one shape share a tiling."""

    span: Span | None
    num_heads: int
    num_kv_heads: int
    head_dim: int
    whole_images: bool
    """Whether a token of an image sees all tokens of it."""


def attention_shapes(
    cache: Sequence[CacheSpec], config: ModelConfig, layers: Iterable[int]
) -> dict[int, AttentionShape]:
    """The shape of each of these layers of a model, as far as they have keys and values."""
    whole_layers = () if config.vision is None else config.vision.whole_layers
    shapes = dict[int, AttentionShape]()
    for number in layers:
        layer = source = cache[number]
        if isinstance(layer, SharedCache):
            source = cache[layer.source]
        if isinstance(source, AttentionCache) and source.kind == ATTENTION:
            assert isinstance(layer, AttentionCache | SharedCache), "the layer attends"
            shapes[number] = AttentionShape(
                layer.span, config.heads(number), source.num_kv_heads, source.head_dim, number in whole_layers
            )
    return shapes


class LayerAttention:
    """Of a model on one device, or of its draft head.

    Attributes:
        shapes: of its layers with keys and values, by their index in the cache.
    """

    def __init__(
        self,
        kernels: Kernels,
        cache: LayerCaches,
        config: ModelConfig,
        shapes: Mapping[int, AttentionShape],
        dtype: torch.dtype,
    ) -> None:
        """`config` is that of this rank."""
        self.shapes = shapes
        self._tiled = {*shapes.values()}
        self._kernels = kernels
        self._cache = cache
        self._config = config
        self._dtype = dtype

    def of_step(self, attention: AttentionMetadata, layer_done: LayerDone) -> Any:
        """What the layers call to attend in a step, as `Attend` or as `AttendLatent`."""
        kernels, caches, sources = self._kernels, self._cache.of_layers, self._cache.sources
        latents = self._config.latent
        latent_tiling: Any = None
        if latents is not None:
            latent_tiling = self._tile_latent(attention)
        of_layers = [attention.of_layers(windowed=windowed) for windowed in (False, True)]
        requests = cache(lambda windowed: [*requests_of(of_layers[windowed])])  # waits for the device
        causal = [replace(each, images=NO_IMAGES) for each in of_layers]
        tilings = {
            shape: kernels.tile(
                (of_layers if shape.whole_images else causal)[shape.span is not None],
                shape.num_heads,
                shape.num_kv_heads,
                self._dtype,
                shape.span,
                shape.head_dim,
            )
            for shape in self._tiled
        }

        def attend(
            layer: int,
            qkv: Tensor,
            rotary: Tensor,
            norm: HeadNorm | None,
            sinks: Tensor | None,
            scale: float,
            softcap: float | None = None,
            chosen: Tensor | None = None,
        ) -> Tensor:
            source, shape = sources[layer], self.shapes[layer]
            kv = caches[source]
            if source == layer:
                slots = of_layers[shape.span is not None].slots
                q = kernels.rope_and_write(qkv, rotary, norm, kv, slots)
            else:
                q = kernels.rotate(qkv, rotary, norm)
            layer_done(layer)  # before attention, so that computing more of the layer hides the transfer
            if chosen is not None:
                of_layer = requests(shape.span is not None)
                return attend_chosen(q, kv, of_layer, chosen, sinks, scale, softcap)
            return kernels.attention(q, kv, tilings[shape], sinks, scale, softcap)

        def attend_latent(
            layer: int,
            q: Tensor,
            latent: Tensor,
            shared: Tensor,
            norm: LatentNorm,
            rotary: Tensor,
            heads: LatentHeads,
            index: Index | None,
        ) -> Tensor:
            cache = caches[layer]
            kv, keys = cache if isinstance(cache, IndexedLatents) else (cache, None)
            kernels.write_latent(q, latent, shared, norm, rotary, kv, attention.slots)
            queries = None
            if index is not None:
                assert keys is not None, "the cache of the layer has its index"
                queries = kernels.write_index(index, rotary, keys, attention.slots)

            def attend_in(
                q: Tensor, queries: IndexQueries | None, tiling: Any, out: Tensor | None = None
            ) -> Tensor:
                if queries is not None and keys is not None:
                    kernels.choose_positions(queries, keys, tiling)
                return kernels.latent_attention(q, kv, tiling, heads, out)

            apart = attention.apart
            if apart is None:
                layer_done(layer)
                return attend_in(q, queries, latent_tiling)
            apart.q[: len(q)] = q
            kept = None if queries is None else apart.keep(queries)
            apart.layers[layer] = lambda tiling: attend_in(apart.q, kept, tiling, apart.out)
            # The decodes come before the chunks: their padding may write to rows of these.
            attend_in(q, queries, latent_tiling, apart.out)
            layer_done(layer)
            return apart.out[: len(q)]

        return attend_latent if latents else attend

    def mix_of_step(self, attention: AttentionMetadata, layer_done: LayerDone) -> Any:
        """What the layers call to take their states past the tokens of a step, as `Mix` or `MixModules`."""
        kernels, caches = self._kernels, self._cache.of_layers
        if self._config.modules is not None:
            of_requests = tile_requests(attention) if self._cache.has_states else None
            of_tokens = attention.of_layers(windowed=False)
            parts = cache(lambda: [part for each in requests_of(of_tokens) for part in each.parts()])

            def mix_module(layer: int, advance: Any) -> None:
                """`advance`: as `MixModules` or `MixIndex` take it."""
                if isinstance(keys := caches[layer], Tensor):
                    for part in parts():
                        advance(part.rows, part.start, partial(keep_keys, keys, of_tokens.slots, part))
                else:
                    assert of_requests is not None, "the layer has states"
                    advance_states(advance, keys, of_requests)
                layer_done(layer)

            return mix_module
        tiling = kernels.tile_states(attention, self._dtype)

        def mix(layer: int, x: Tensor, rates: Rates, parameters: StateLayer) -> Tensor:
            y = kernels.mix_states(x, rates, parameters, caches[layer], tiling)
            layer_done(layer)
            return y

        return mix

    def _tile_latent(self, attention: AttentionMetadata) -> Any:
        heads, latent = self._config.num_heads, self._config.latent
        assert latent is not None, "asked of models with latents only"
        caches = (
            cache.latents if isinstance(cache, IndexedLatents) else cache for cache in self._cache.of_layers
        )
        fp8 = any(isinstance(cache, Fp8KV) for cache in caches)
        return self._kernels.tile_latent(attention, heads, latent, self._dtype, fp8=fp8)

    def apart(self, rows: int, device: torch.device) -> tuple[Apart, Attends] | None:
        """Memory for chunks that attend between graphs, and what makes them do so in each layer. None: chunks
        attend in graphs."""
        heads, shape = self._config.num_heads, self._config.latent
        if shape is None:
            return None
        empty = partial(torch.zeros, dtype=self._dtype, device=device)
        q, out = (empty((rows, heads, n)) for n in (shape.nope_dim + shape.rope_dim, shape.value_dim))
        apart, index = Apart(q, out), shape.index
        if index is not None:
            of_keys = torch.float32 if self._dtype is torch.float32 else FP8
            values = torch.zeros(rows, index.num_heads, index.head_dim, dtype=of_keys, device=device)
            weights = torch.zeros(rows, index.num_heads, device=device)
            apart = Apart(q, out, index=IndexQueries(values, weights))

        def attends(attention: AttentionMetadata) -> LayerDone:
            groups = self._tile_latent(attention)
            tiling = [group for group in groups if group.rows.start >= attention.num_decodes]

            def attend(layer: int) -> None:
                if layer in apart.layers:  # others have states
                    apart.layers[layer](tiling)

            return attend

        return apart, attends


def tile_shape(
    kernels: Kernels,
    shapes: Iterable[AttentionShape],
    dtype: torch.dtype,
    block_size: int,
    *,
    fp8: bool,
    windowed: bool,
) -> TileShape | None:
    """What graphs cut chunks into, for all layers with windows or all without. None: there is no such layer.
    The most query heads that share a KV head in one of them decide, and its fewest programs. `fp8`: a cache
    is in FP8."""
    shapes = [x for x in shapes if (x.span is not None) is windowed]
    if not shapes:
        return None
    plain = not fp8 and not windowed
    found = {kernels.tile_shape(dtype, shape.head_dim, block_size, plain=plain) for shape in shapes}
    chosen = found.pop() if len(found) == 1 else SHORT
    tokens = chosen.tokens(max(shape.num_heads // shape.num_kv_heads for shape in shapes))
    programs = kernels.tile_programs(chosen, max(shape.num_kv_heads for shape in shapes))
    return TileShape(tokens, programs, chosen)
