"""Each operation in plain torch: it defines the result, and runs on a CPU."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.kernels import (
    FP8,
    FP8_GROUP,
    KV,
    SMALLEST_TEMPERATURE,
    Experts,
    Fp8Experts,
    GatedDelta,
    HeadNorm,
    LayerState,
    Mamba2,
    Quantized,
    parts,
)
from baton.engine.kernels.attention.paged import AttentionMetadata, TorchPlan, paged_attention, plan_attention
from baton.engine.kernels.moe.experts import mix, route
from baton.engine.kernels.state import gated_delta, mamba2
from baton.engine.kernels.state.mamba2 import TorchStatePlan
from baton.engine.model_config import Span


class TorchKernels:
    norm_gate = staticmethod(gated_delta.norm_gate)
    gated_squares = staticmethod(mamba2.gated_squares)
    gated_rms_norm = staticmethod(mamba2.gated_rms_norm)

    def add_rms_norm(self, residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        if delta is not None:
            residual.add_(delta)
        if residual.dtype is not torch.bfloat16:
            return F.rms_norm(residual, weight.shape, weight, eps)
        # One kernel instead of seven: the mean of x and −x is 0, so their layer norm is the RMSNorm.
        size = residual.shape[1]
        both = torch.cat((residual, -residual), dim=1)
        return F.layer_norm(both, (2 * size,), eps=eps)[:, :size] * weight

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh").mul_(up)

    def add_rms_norm_quantized(
        self, residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float, *, grouped: bool
    ) -> Quantized:
        return self.quantize(self.add_rms_norm(residual, delta, weight, eps), grouped=grouped)

    def silu_mul_quantized(self, gate_up: Tensor, *, grouped: bool) -> Quantized:
        return self.quantize(self.silu_mul(gate_up), grouped=grouped)

    def quantize(self, x: Tensor, *, grouped: bool) -> Quantized:
        size = x.shape[1]
        width = FP8_GROUP if grouped else size
        groups = F.pad(x.float(), (0, -size % width)).unflatten(1, (-1, width))
        scales = groups.abs().amax(dim=2).clamp_min(2.0**-100) / torch.finfo(FP8).max
        return Quantized((groups / scales[:, :, None]).flatten(1)[:, :size].to(FP8), scales)

    def fp8_linear(
        self, weight: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> Callable[[Quantized], Tensor]:
        exact = _spread(weight, scales.T)
        added = None if bias is None else bias.float()
        return lambda x: F.linear(_spread(*x), exact, added).to(dtype)

    def mix_experts(
        self,
        x: Tensor,
        logits: Tensor,
        experts: Experts,
        counts: Tensor,
        *,
        slots: Tensor | None = None,
        shared: Callable[[], Tensor] | None = None,
    ) -> Tensor:
        routing = route(logits, experts.num_chosen, experts.scoring)
        counts += routing.experts.flatten().bincount(minlength=len(counts))
        gate_up, down = experts.gate_up, experts.down
        assert isinstance(gate_up, Tensor) == isinstance(down, Tensor), "experts have one format"
        inputs, rounded = x, None
        if isinstance(gate_up, Fp8Experts):
            inputs, gate_up = self._rounded(x, grouped=gate_up.grouped), _exact(gate_up)
        if isinstance(down, Fp8Experts):
            rounded, down = partial(self._rounded, grouped=down.grouped), _exact(down)
        y = mix(inputs, routing, counts.tolist(), gate_up, down, experts, rounded).to(x.dtype)
        return y if shared is None else y.add_(shared())

    def _rounded(self, x: Tensor, *, grouped: bool) -> Tensor:
        """x as its numbers in FP8 stand for it, in float32."""
        return _spread(*self.quantize(x, grouped=grouped))

    def rope_and_write(
        self, qkv: Tensor, rotary: Tensor, norm: HeadNorm | None, kv: KV, slots: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
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
            quantized = self.quantize(torch.stack((k, v)).view(-1, head_dim), grouped=False)
            shape, block_size = (2, *k.shape), cache.shape[2]
            cache.flatten(1, 2)[:, slots] = quantized.values.view(shape)
            places = scales.transpose(2, 3)
            places[:, slots // block_size, slots % block_size] = quantized.scales.view(shape[:-1])
        return q, k, v

    def plan(
        self,
        metadata: AttentionMetadata,
        num_heads: int,
        num_kv_heads: int,
        dtype: torch.dtype,
        span: Span | None = None,
    ) -> TorchPlan:
        return plan_attention(metadata, span, dtype)

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv: KV,
        plan: TorchPlan,
        sinks: Tensor | None = None,
        scale: float | None = None,
    ) -> Tensor:
        return paged_attention(q, kv, plan, sinks, scale)

    def plan_states(self, metadata: AttentionMetadata, dtype: torch.dtype) -> TorchStatePlan:
        return mamba2.plan_states(metadata)

    def tile_programs(self, num_kv_heads: int) -> int:
        return 0

    def chunk_tokens(self, dtype: torch.dtype) -> int:
        return 1  # states can be copied after any token

    def mamba2(self, projected: Tensor, layer: Mamba2, state: LayerState, plan: TorchStatePlan) -> Tensor:
        return mamba2.mamba2(projected, layer, state, plan)

    def gated_delta(
        self, projected: Tensor, layer: GatedDelta, state: LayerState, plan: TorchStatePlan
    ) -> Tensor:
        return gated_delta.gated_delta(projected, layer, state, plan)

    def greedy(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        return logits.argmax(dim=-1), logits.isfinite().all(dim=-1)

    def draw(
        self,
        logits: Tensor,
        temperature: Tensor,
        keys: Tensor,
        probs: Tensor | None = None,
        least: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        tokens, finite = self.greedy(logits)
        if probs is None or least is None:
            probs = torch.softmax(logits / temperature.clamp_min(SMALLEST_TEMPERATURE)[:, None], dim=-1)
        else:
            probs = torch.where(probs < least[:, None], 0.0, probs)
        raced = (probs / exponentials(keys, logits.shape[1])).argmax(dim=-1)
        return torch.where(temperature > 0, raced, tokens), finite

    def thresholds(self, probs: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
        vocabulary = probs.shape[1]
        top_k, top_p = top_k[:, None], top_p[:, None]
        width = min(vocabulary, max(CANDIDATES, int(torch.where(top_k < vocabulary, top_k, 0).max())))
        while True:
            best = probs.topk(width, dim=-1).values
            allowed = best.masked_fill(torch.arange(width) >= top_k, 0.0)
            total = torch.where(top_k <= width, allowed.sum(dim=-1, keepdim=True), 1.0)
            kept = (allowed > 0) & (allowed.cumsum(dim=-1) - allowed < top_p * total)
            count = kept.sum(dim=-1, keepdim=True).clamp_min(1)
            undecided = (count == width) & (top_k > width) & (top_p < 1)
            if width == vocabulary or not undecided.any():
                break
            width = min(vocabulary, 16 * width)
        least = best.gather(1, count - 1)
        unlimited = (top_k >= vocabulary) & (top_p > 1)
        return torch.maximum(torch.where(unlimited, 0.0, least)[:, 0], min_p * best[:, 0])


CANDIDATES = 256
"""Most likely tokens that `thresholds` sorts first. It sorts more if these do not decide."""


def exponentials(keys: Tensor, count: int) -> Tensor:
    """[keys, count] exponentially distributed random numbers. Each is a hash (Wellons' lowbias32) of its key,
    int32, and its column. The smallest numbers are the most exact, since they decide the race."""
    columns = torch.arange(count, dtype=torch.int32, device=keys.device) * (0x9E3779B1 - (1 << 32))
    x = keys[:, None] ^ columns
    # Masked, because a right shift of int32 copies the sign.
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    x *= 0x7FEB352D
    x ^= (x >> 15).bitwise_and_(0x1FFFF)
    x *= 0x846CA68B - (1 << 32)
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    uniform = x.float().add_(0.5).mul_(2.0**-32)  # in (-½, ½), and finest around 0
    uniform.sub_(uniform.floor())
    return uniform.neg_().log1p_().neg_()


def _spread(values: Tensor, scales: Tensor) -> Tensor:
    """values [rows, size] times scales [rows or rows / FP8_GROUP, groups], in float32."""
    width = values.shape[1] if scales.shape[1] == 1 else FP8_GROUP
    scales = scales.repeat_interleave(len(values) // len(scales), dim=0)
    return values.float() * scales.repeat_interleave(width, dim=1)[:, : values.shape[1]]


def _exact(weight: Fp8Experts) -> Tensor:
    """[experts, out, in] float32."""
    return torch.stack([_spread(values, scales.T) for values, scales in zip(*weight, strict=True)])


def _rotated(x: Tensor, rotary: Tensor) -> Tensor:
    cos, sin = rotary.unbind(1)
    return torch.addcmul(x * cos[:, None], x.roll(x.shape[-1] // 2, -1), sin[:, None])
