"""What a layer computes between its matrix products, on any device.

    once a step    tile, tile_latent, tile_states        where to read and write, for all layers of a kind
    each layer     add_rms_norm → [QKV product] → rope_and_write → attention → [output product]
                   add_rms_norm → [gate-up product] → activate → [down product]
                   or, with experts: add_rms_norm → [router's product] → mix_experts
    with latents   [products of query and latent] → write_latent → latent_attention → [output product]
    with an index  write_index → choose_positions, before latent_attention
    with states    [input product] → mix_states → gated_rms_norm or norm_gate → [output product], in place of
                   attention
    with FP8       add_rms_norm, activate or quantize, before fp8_linear
    at its end     greedy, or draw with or without thresholds: from logits to tokens

`Kernels` is plain torch: it defines each operation, and runs on a CPU. `TritonKernels` runs on CUDA, replaces
each operation and must match it. Only `kernels_for` chooses between the two.

CUDA graphs can capture every operation, and the tilings if `AttentionMetadata.prefills` is empty. These
launch the same grid for all values in the tensors, read lengths on the device, and never wait for it. Keep
the metadata in static tensors, and give padding rows context 0 and slot −1.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.kernels.attention import index, latent
from baton.engine.kernels.attention.index import Index, IndexedLatents, IndexLayer
from baton.engine.kernels.attention.latent import LatentHeads, LatentNorm
from baton.engine.kernels.attention.paged import (
    KV,
    AttentionMetadata,
    Fp8KV,
    HeadNorm,
    IndexQueries,
    paged_attention,
    parts,
    tile_attention,
)
from baton.engine.kernels.attention.tiles import SHORT, Shape
from baton.engine.kernels.moe.experts import Choice, Experts, Terms, activated, mix, route
from baton.engine.kernels.quantized.reference import (
    FLOATS,
    FP8,
    FP8_GROUP,
    Both,
    FourBits,
    Fp8Experts,
    Quantized,
    fp8_linear,
    quantize,
    rounded,
    spread,
)
from baton.engine.kernels.sampling import drafts
from baton.engine.kernels.sampling.reference import SMALLEST_TEMPERATURE, draw, greedy, thresholds
from baton.engine.kernels.state import gated_delta, mamba2
from baton.engine.kernels.state.gated_delta import GatedDelta, KimiDelta
from baton.engine.kernels.state.mamba2 import (
    HeadStates,
    LayerState,
    Mamba2,
    Rates,
    ShortConvolution,
    StateLayer,
)
from baton.engine.model_config import Activation, LatentConfig, Span


class Kernels:
    """The operations in plain torch. Tensors are contiguous and have the model's dtype, unless a docstring
    says otherwise.

    `exact`: each row of a result has the same bits whatever the other rows and the cut of prompts
    (`--batch-invariant`)."""

    def __init__(self, *, exact: bool = False) -> None:
        self.exact = exact

    quantize = staticmethod(quantize)
    fp8_linear = staticmethod(fp8_linear)
    write_latent = staticmethod(latent.write_latent)
    write_index = staticmethod(index.write_index)
    norm_gate = staticmethod(gated_delta.norm_gate)
    gated_squares = staticmethod(mamba2.gated_squares)
    gated_rms_norm = staticmethod(mamba2.gated_rms_norm)
    greedy = staticmethod(greedy)
    draw = staticmethod(draw)
    thresholds = staticmethod(thresholds)
    follow = staticmethod(drafts.follow)
    accepted = staticmethod(drafts.accepted)

    def add_rms_norm(
        self,
        residual: Tensor,
        delta: Tensor | Terms | None,
        weight: Tensor,
        eps: float,
        grouped: bool | None = None,
        *,
        both: bool = False,
    ) -> Any:
        """Adds delta to residual [rows, size], in place. Returns the RMSNorm of the sum (Zhang & Sennrich
        2019) times weight [size]. Without delta, residual is only read. `grouped`: as in `quantize`, which
        the result goes through. None: it is not quantized. `both`: if it is, returns `Both`."""
        assert not isinstance(delta, Terms), "this class adds up the experts itself"
        if delta is not None:
            residual.add_(delta)
        y = self._rms_norm(residual, weight, eps)
        return in_form(y, self, grouped, both=both)

    def _rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dtype is not torch.bfloat16:
            return F.rms_norm(x, weight.shape, weight, eps)
        # One kernel instead of seven: the mean of x and −x is 0, so their layer norm is the RMSNorm.
        size = x.shape[1]
        both = torch.cat((x, -x), dim=1)
        return F.layer_norm(both, (2 * size,), eps=eps)[:, :size] * weight

    def activate(self, gate_up: Tensor, grouped: bool | None = None, activation: Activation = None) -> Any:
        """[rows, 2 * size] → [rows, size]: the first half is of gate. For `SquaredReLU` [rows, size], of up
        alone. May overwrite `gate_up`. `grouped`: as in `add_rms_norm`."""
        return in_form(activated(gate_up, activation), self, grouped, both=False)

    def place_images(
        self, rows: Tensor, index: Tensor, features: Tensor, part: int, *, added: bool = False
    ) -> None:
        """Writes features [image rows, parts, size] of a part into the rows [rows, size] that `index` names,
        in place. `added`: adds them. index [rows] int32: of each row its image row, −1: it is text."""
        at = (index >= 0).nonzero()[:, 0]
        values = features[index[at], part]
        rows.index_copy_(0, at, rows[at] + values if added else values)

    def turn_images(
        self, rotary: Tensor, index: Tensor, positions: Tensor, table: Tensor, axes: Tensor
    ) -> None:
        """Writes the rotation of image rows into rotary [rows, 2, head_dim], in place. positions
        [image rows, 3]: along each axis. table [positions, 2, head_dim]; axes [head_dim] int64: the axis by
        which each number of a head turns. `index`: as in `place_images`."""
        at = (index >= 0).nonzero()[:, 0]
        parts = table[positions[index[at]]]  # [image rows, 3, 2, head_dim]
        rotary.index_copy_(0, at, parts.gather(1, axes.expand(len(parts), 1, 2, -1))[:, 0])

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
        """A mixture of experts: the weighted sum of down(silu(gate(x)) * up(x)) over each token's experts.

        x [tokens, size], `Both` for experts in FP8. Each token chooses by logits [tokens, experts]. counts
        [experts] int32 must be zero, and becomes the number of tokens of each expert. Returns [tokens, size].

        slots [tokens]: a row with slot −1 pads a graph. It has no expert, and its result is undefined. None:
        no row is padding. Inputs of weights in FP8 are quantized. The result of `shared` [tokens, size],
        which is called last, is added. Not `summed`: the result is for `add_rms_norm`, which adds up terms.
        """
        routing = route(logits, experts.choice)
        counts += routing.experts.flatten().bincount(minlength=len(counts))
        matrices = experts.gate_up, experts.down
        gate_up, down = (each if isinstance(each, Tensor) else each.exact() for each in matrices)
        grouped = experts.down.grouped if isinstance(experts.down, Fp8Experts) else None
        round_inner = None if grouped is None else partial(rounded, grouped=grouped)
        plain, inputs = (x.plain, spread(*x.quantized)) if isinstance(x, Both) else (x, x)
        y = mix(inputs, routing, counts.tolist(), gate_up, down, experts, round_inner, exact=self.exact)
        y = y.to(plain.dtype)
        return y if shared is None else y.add_(shared())

    def rope_and_write(
        self, qkv: Tensor, rotary: Tensor, norm: HeadNorm | None, kv: KV, slots: Tensor
    ) -> Tensor:
        """Rotates query and key heads, and writes key and value heads to the cache.

        The heads are those of qkv [tokens, num_heads + 2 * num_kv_heads, head_dim]. `norm` applies first,
        then rotary, which is `Rotary.at(positions)`. `kv` is the layer's cache; slots [tokens] int64. A cache
        in FP8 gets the same keys and values, quantized. Returns q [tokens, num_heads, head_dim]: a strided
        view of qkv or of new memory. The rest of qkv is undefined afterwards."""
        cache, scales = parts(kv)
        num_kv_heads, head_dim = cache.shape[3:]
        num_heads = qkv.shape[1] - 2 * num_kv_heads
        qk, v = qkv.split((num_heads + num_kv_heads, num_kv_heads), dim=1)
        if norm is not None:
            qk = F.rms_norm(qk, qk.shape[-1:], eps=norm.eps) * norm.scale
        q, k = _rotated(qk, rotary.to(qk.dtype)).split((num_heads, num_kv_heads), dim=1)
        if scales is None:
            keys, values = cache.flatten(1, 2)
            keys.index_copy_(0, slots, k)
            values.index_copy_(0, slots, v)
        else:
            rows = self.quantize(torch.stack((k, v)).view(-1, head_dim), grouped=False)
            shape, block_size = (2, *k.shape), cache.shape[2]
            cache.flatten(1, 2)[:, slots] = rows.values.view(shape)
            places = scales.transpose(2, 3)
            places[:, slots // block_size, slots % block_size] = rows.scales.view(shape[:-1])
        return q

    def rotate(self, q: Tensor, rotary: Tensor, norm: HeadNorm | None) -> Tensor:
        """As `rope_and_write`, of queries [tokens, num_heads, head_dim] alone: nothing is written."""
        if norm is not None:
            q = F.rms_norm(q, q.shape[-1:], eps=norm.eps) * norm.scale
        return _rotated(q, rotary.to(q.dtype))

    def tile(
        self,
        metadata: AttentionMetadata,
        num_heads: int,
        num_kv_heads: int,
        dtype: torch.dtype,
        span: Span | None = None,
        head_dim: int | None = None,
    ) -> Any:
        """The tiling that `attention` needs, the same for all layers of a step that have this span and these
        heads. `head_dim`: of the layers. None: that of the model."""
        return tile_attention(metadata, span, dtype, exact=self.exact)

    def attention(
        self,
        q: Tensor,
        kv: KV,
        tiling: Any,
        sinks: Tensor | None,
        scale: float,
        softcap: float | None = None,
    ) -> Tensor:
        """Every query attends to the positions of its request up to its own, from the first in the tiling's
        span. q is as `rope_and_write` returns it, and kv holds this step's keys and values. sinks
        [num_heads]: logits that take part in the softmax of each head, without a value. `scale` multiplies
        the products of queries and keys; `softcap` · tanh(product / `softcap`) takes the place of each.
        Returns [tokens, num_heads, head_dim]."""
        return paged_attention(q, kv, tiling, sinks, scale, softcap)

    def tile_latent(
        self,
        metadata: AttentionMetadata,
        num_heads: int,
        shape: LatentConfig,
        dtype: torch.dtype,
        *,
        fp8: bool = False,
    ) -> Any:
        """The tiling that `latent_attention` needs, the same for all layers of a step. `fp8`: the caches are
        in FP8."""
        least = math.inf if self.exact else shape.min_expanded_queries
        groups = tile_attention(metadata, None, dtype, exact=self.exact)
        return latent.LatentTiling(groups, least, groups, shape.index.most_chosen if shape.index else None)

    def latent_attention(
        self, q: Tensor, kv: KV, tiling: Any, heads: LatentHeads, out: Tensor | None = None
    ) -> Tensor:
        """As `attention`, with q [tokens, heads, nope_dim + rope_dim] as `write_latent` leaves it. Returns
        [tokens, heads, value_dim]: `out`, of which only the rows in the tiling change. None: new memory."""
        assert out is None, "only graphs have memory for it"
        return latent.latent_attention(q, kv, tiling, heads)

    def choose_positions(self, queries: IndexQueries, keys: KV, tiling: Any) -> None:
        """Each query of a step chooses among the positions up to its own. Their keys are in the cache. With
        this tiling, that of `tile_latent`, it then attends to what it chose, until it chooses again."""
        tiling.groups = index.choose(queries, keys, tiling.unmasked, tiling.most_chosen)

    def tile_states(self, metadata: AttentionMetadata, dtype: torch.dtype) -> Any:
        """The tiling that `mix_states` needs, the same for all layers of a step."""
        return mamba2.tile_states(metadata)

    def mix_states(
        self, x: Tensor, rates: Rates, layer: StateLayer, state: LayerState, tiling: Any
    ) -> Tensor:
        mix = mamba2.mix_states_by_row if self.exact else mamba2.mix_states
        return mix(x, rates, layer, state, tiling)

    def tile_shape(self, dtype: torch.dtype, head_dim: int, block_size: int, *, plain: bool) -> Shape:
        """The shape of tiles in graphs. `plain`: layers without a span, an image, or a cache in FP8."""
        return SHORT

    def tile_programs(self, shape: Shape, num_kv_heads: int) -> int:
        """Pieces that the device computes at once for a KV head. 0: tiles are not cut."""
        return 0

    def chunk_tokens(self, dtype: torch.dtype) -> int:
        """Tokens of a chunk in `AttentionMetadata.scans`. The states can be copied after each chunk."""
        return 1  # states can be copied after any token


def in_form(x: Tensor, kernels: Kernels, grouped: bool | None, *, both: bool) -> Any:
    """x as `Kernels.add_rms_norm` returns its result."""
    if grouped is None:
        return x
    quantized = kernels.quantize(x, grouped=grouped)
    return Both(x, quantized) if both else quantized


class LinearMethod:
    """The base of products y = x Wᵀ + b, for x [rows, in] and W [out, in] kept in one format."""

    takes_both = False
    """Whether x is `Both` where `quantizes` is not None."""

    def quantizes(self, rows: int) -> bool | None:
        """Whether x of so many rows is best in FP8 with a scale for each group of columns, or for each row.
        None: in the model's dtype."""
        return None

    def __call__(self, x: Any) -> Tensor:
        """x: a tensor, or as `quantizes` says `Quantized`."""
        raise NotImplementedError

    def silu_mul(self, x: Any, kernels: Kernels) -> Tensor:
        """`Kernels.activate` of the product. A format may have one kernel for both."""
        return kernels.activate(self(x))


def _rotated(x: Tensor, rotary: Tensor) -> Tensor:
    cos, sin = rotary.unbind(1)
    return torch.addcmul(x * cos[:, None], x.roll(x.shape[-1] // 2, -1), sin[:, None])


def from_hopper_on(device: torch.device) -> bool:
    """Whether the device is a Hopper GPU or a later one: it multiplies FP8 numbers, and its copy engine loads
    tiles. Where there is no GPU, the question is about one of these on another machine (`baton plan`)."""
    if device.type != "cuda":
        return False
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(device) >= (9, 0)


def kernels_for(device: torch.device, head_dim: int, *, exact: bool = False) -> Kernels:
    """The kernels for this device. `exact`: as in `Kernels`. Raises `ValueError` if CUDA has no kernel for
    this head_dim, or if Triton is not installed; the message then names the extra."""
    if device.type == "cpu":
        return Kernels(exact=exact)
    try:
        from baton.engine.kernels.triton_kernels import TritonKernels
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise ValueError(
            f"--device {device} needs Triton: in Baton's source directory `pip install -e '.[cuda]'` "
            "installs it; or use --device cpu"
        ) from error
    return TritonKernels(device, head_dim, exact=exact)
