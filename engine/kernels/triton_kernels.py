"""The kernels of a CUDA device, behind the interface of `engine.kernels`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from baton.engine.kernels import (
    KV,
    Both,
    Experts,
    Fp8Experts,
    Fp8KV,
    HeadNorm,
    HeadStates,
    Kernels,
    LayerState,
    Mamba2,
    Quantized,
    Rates,
    StateLayer,
    fp8,
    in_form,
    norm,
    parts,
    silu,
)
from baton.engine.kernels.attention import index_kernels, latent_kernels, latent_tiling, prefill_wgmma, rope
from baton.engine.kernels.attention.decode import decode_attention, queries_that_share
from baton.engine.kernels.attention.exact_decode import exact_decode_attention
from baton.engine.kernels.attention.gather_kv import Gathered, gather, tile_gather
from baton.engine.kernels.attention.paged import AttentionMetadata
from baton.engine.kernels.attention.pieces import Pieces, Sharing, most_pieces, partition
from baton.engine.kernels.attention.prefill import Tiles, prefill_attention
from baton.engine.kernels.attention.tiles import (
    LONG,
    LONG_FROM,
    MOST_IN_LONG,
    SHORT,
    Shape,
    most_places,
    tile_work,
)
from baton.engine.kernels.image_rows import place_images, turn_images
from baton.engine.kernels.launch import multiprocessors
from baton.engine.kernels.moe.combine import combine
from baton.engine.kernels.moe.experts import Terms
from baton.engine.kernels.moe.grouped_linear import grouped_linear
from baton.engine.kernels.moe.shuffle import shuffle
from baton.engine.kernels.quantized.fp8_linear import Fp8Linear
from baton.engine.kernels.sampling import draft_kernels, race
from baton.engine.kernels.sampling.thresholds import thresholds
from baton.engine.kernels.state import causal_conv, delta_scan, gated_norm, ssd, state_update
from baton.engine.kernels.state.tiling import TritonStateTiling, chunk_tokens, tile_states
from baton.engine.kernels.upload import upload
from baton.engine.model_config import Activation, ClampedSwiGLU, LatentConfig, Scoring, Span, SquaredReLU

HEAD_DIMS = (16, 32, 64, 128, 256, 512)


@dataclass(frozen=True)
class TritonTiling:
    num_decodes: int
    block_size: int
    block_tables: Tensor  # [requests, blocks] int32
    pieces: Pieces | None  # None: no decodes
    prefills: Sequence[tuple[int, int]]  # in a graph, none
    tiles: Tiles | None  # None: no chunks
    span: Span | None

    @cached_property
    def gathered(self) -> Gathered | None:
        """The blocks that a cache in FP8 converts for its chunks, the same for all layers. A layer with a
        span needs few of them."""
        if not self.prefills or self.span:
            return None
        return tile_gather(self.prefills, self.num_decodes, self.block_tables, self.block_size)


class TritonKernels(Kernels):
    add_rms_norm = staticmethod(norm.add_rms_norm)
    quantize = staticmethod(fp8.quantize)
    place_images = staticmethod(place_images)
    turn_images = staticmethod(turn_images)
    norm_gate = staticmethod(gated_norm.norm_gate)
    gated_squares = staticmethod(gated_norm.gated_squares)
    gated_rms_norm = staticmethod(gated_norm.gated_rms_norm)
    write_latent = staticmethod(latent_kernels.write_latent)
    write_index = staticmethod(index_kernels.write_index)
    choose_positions = staticmethod(latent_kernels.choose_positions)
    latent_attention = staticmethod(latent_kernels.latent_attention)
    chunk_tokens = staticmethod(chunk_tokens)
    greedy = staticmethod(race.draw)
    draw = staticmethod(race.draw)
    follow = staticmethod(draft_kernels.follow)
    accepted = staticmethod(draft_kernels.accepted)

    def __init__(self, device: torch.device, head_dim: int, *, exact: bool = False) -> None:
        if head_dim not in HEAD_DIMS:
            raise ValueError(
                f"a model with head_dim {head_dim} cannot run on CUDA ({HEAD_DIMS} can); use --device cpu"
            )
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)  # Triton launches on the current device
        super().__init__(exact=exact)
        self._head_dim, self._multiprocessors = head_dim, multiprocessors(device)

    def fp8_linear(
        self, weight: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> Callable[[Quantized], Tensor]:
        return Fp8Linear(weight, scales, bias, dtype, self._multiprocessors, exact=self.exact)

    def activate(self, gate_up: Tensor, grouped: bool | None = None, activation: Activation = None) -> Any:
        if isinstance(activation, SquaredReLU):
            return in_form(gate_up.relu_().square_(), self, grouped, both=False)
        return silu.activate(gate_up, grouped, activation)

    def mix_experts(
        self,
        x: Tensor | Both,
        logits: Tensor,
        experts: Experts,
        counts: Tensor,
        *,
        slots: Tensor | None = None,
        shared: Callable[[], Tensor] | None = None,
        summed: bool = True,
    ) -> Any:
        gate_up, down, choice = experts.gate_up, experts.down, experts.choice
        on_input = choice.scoring is Scoring.SIGMOID_ON_INPUT
        count = len(gate_up if isinstance(gate_up, Tensor) else gate_up[0])
        local = range(experts.first, experts.first + count)
        shuffled = shuffle(logits, counts, choice, slots, local)
        plain, inputs = x if isinstance(x, Both) else (x, x)
        activation = experts.activation
        gated = isinstance(gate_up, Tensor) and isinstance(down, Tensor)
        gated = gated and isinstance(activation, ClampedSwiGLU | None)
        inner = grouped_linear(
            inputs,
            gate_up,
            shuffled,
            experts.gate_up_bias,
            dtype=plain.dtype,
            weighted=on_input,
            gated=gated,
            clamped=activation if isinstance(activation, ClampedSwiGLU) else None,
        )
        if not gated:
            inner = self.activate(inner, down.grouped if isinstance(down, Fp8Experts) else None, activation)
        y = grouped_linear(
            inner, down, shuffled, experts.down_bias, dtype=plain.dtype, weighted=False, routed=True
        )
        if on_input and choice.num_chosen == 1 and count == len(counts):
            return y if shared is None else y.add_(shared())
        terms = Terms(y, shuffled.weights, None if shared is None else shared(), not on_input)
        return combine(terms) if summed else terms

    def rope_and_write(
        self, qkv: Tensor, rotary: Tensor, norm: HeadNorm | None, kv: KV, slots: Tensor
    ) -> Tensor:
        rope.rope_and_write(qkv, rotary, norm, kv, slots)
        return qkv[:, : qkv.shape[1] - 2 * parts(kv)[0].shape[3]]

    def rotate(self, q: Tensor, rotary: Tensor, norm: HeadNorm | None) -> Tensor:
        rope.rotate(q, rotary, norm)
        return q

    def tile(
        self,
        metadata: AttentionMetadata,
        num_heads: int,
        num_kv_heads: int,
        dtype: torch.dtype,
        span: Span | None = None,
        head_dim: int | None = None,
    ) -> TritonTiling:
        head_dim = head_dim or self._head_dim
        decodes = metadata.num_decodes
        pieces = None
        if decodes:
            count = most_pieces(decodes, num_kv_heads, self._multiprocessors)
            contexts, places, sharing = metadata.contexts[:decodes], metadata.places, None
            if places is not None and span is None and not self.exact:
                sharing = Sharing(queries_that_share(num_heads // num_kv_heads), places, contexts)
            pieces = partition(contexts, num_kv_heads, count, span, exact=self.exact, sharing=sharing)
        tiles = None
        if metadata.tiles is not None or metadata.prefills:
            tiles = self._tiles(metadata, num_heads, num_kv_heads, dtype, span, head_dim)
        prefills = () if metadata.tiles is not None else metadata.prefills
        return TritonTiling(
            decodes, metadata.block_size, metadata.block_tables, pieces, prefills, tiles, span
        )

    def _tiles(
        self,
        metadata: AttentionMetadata,
        num_heads: int,
        num_kv_heads: int,
        dtype: torch.dtype,
        span: Span | None,
        head_dim: int,
    ) -> Tiles:
        shape, work = metadata.tile_shape, metadata.tiles
        if work is not None:
            places = most_places(self.tile_programs(shape, num_kv_heads))
            return Tiles(work, shape, places, wgmma=shape is LONG)
        prefills, images = metadata.prefills, metadata.images
        plain = span is None and not images
        shape = self.tile_shape(dtype, head_dim, metadata.block_size, plain=plain)
        wgmma = shape is LONG
        if head_dim <= MOST_IN_LONG and max(stop for _, stop in prefills) >= LONG_FROM:
            shape = LONG
        programs, tokens = self.tile_programs(shape, num_kv_heads), shape.tokens(num_heads // num_kv_heads)
        cut = tile_work(prefills, metadata.num_decodes, tokens, programs, shape.piece_keys, images)
        (on_device,) = upload([cut], metadata.contexts.device)
        return Tiles(on_device, shape, int((cut[:, 7] > 1).sum()), self.exact, wgmma)

    def tile_latent(
        self,
        metadata: AttentionMetadata,
        num_heads: int,
        shape: LatentConfig,
        dtype: torch.dtype,
        *,
        fp8: bool = False,
    ) -> latent_tiling.LatentTiling:
        return latent_tiling.tile_latent(
            metadata,
            num_heads,
            shape,
            shape.min_expanded_queries,
            dtype,
            self._multiprocessors,
            fp8=fp8,
            exact=self.exact,
        )

    def tile_shape(self, dtype: torch.dtype, head_dim: int, block_size: int, *, plain: bool) -> Shape:
        plain = plain and not self.exact
        return LONG if plain and prefill_wgmma.suits(dtype, head_dim, block_size) else SHORT

    def tile_programs(self, shape: Shape, num_kv_heads: int) -> int:
        return 0 if self.exact else shape.per_sm * self._multiprocessors // num_kv_heads

    def attention(
        self,
        q: Tensor,
        kv: KV,
        tiling: TritonTiling,
        sinks: Tensor | None,
        scale: float,
        softcap: float | None = None,
    ) -> Tensor:
        assert softcap is None or not self.exact, "no model with bounds of scores has the exact mode"
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if tiling.pieces is not None:
            decodes = slice(tiling.num_decodes)
            tables = tiling.block_tables
            attend = exact_decode_attention if self.exact else partial(decode_attention, softcap=softcap)
            attend(q[decodes], kv, tables, tiling.pieces, out[decodes], tiling.span, sinks, scale)
        if tiling.tiles is not None:
            tables = tiling.block_tables
            if isinstance(kv, Fp8KV) and tiling.gathered is not None:
                kv, tables = gather(kv, tiling.gathered.blocks, q.dtype), tiling.gathered.tables
            prefill_attention(q, kv, tables, tiling.tiles, out, tiling.span, sinks, scale, softcap)
        return out

    def thresholds(self, probs: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
        return thresholds(probs, top_k, top_p, min_p, exact=self.exact)

    def tile_states(self, metadata: AttentionMetadata, dtype: torch.dtype) -> TritonStateTiling:
        return tile_states(metadata, dtype, self._multiprocessors, exact=self.exact)

    def mix_states(
        self, x: Tensor, rates: Rates, layer: StateLayer, state: LayerState, tiling: TritonStateTiling
    ) -> Tensor:
        _, heads, head_dim, _ = state.ssm.shape
        y = x.new_empty(len(x), heads * head_dim)
        rows = x.new_empty(x.shape)
        if len(tiling.contexts) and not tiling.exact:
            causal_conv.convolve_next(x, layer, state.conv, tiling, rows)
        if tiling.scans is not None:
            causal_conv.convolve(x, layer, state.conv, tiling, rows)
        if not isinstance(layer, HeadStates):
            return rows
        if len(tiling.contexts) or tiling.exact:
            state_update.update(rows, rates, layer, state.ssm, tiling, y)
        if tiling.exact:
            return y
        if tiling.scans is not None and isinstance(layer, Mamba2):
            ssd.scan(rows, rates[0], layer, state.ssm, tiling, y)
        elif tiling.scans is not None:
            delta_scan.scan(rows, rates, layer, state.ssm, tiling, y)
        return y
