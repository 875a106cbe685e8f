"""Each operation in plain torch: its definition, and what runs on a CPU."""

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention import AttentionMetadata, TorchPlan, paged_attention, plan_attention
from engine.kernels import HeadNorm


class TorchKernels:
    def add_rms_norm(self, residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        if delta is not None:
            residual.add_(delta)
        return F.rms_norm(residual, weight.shape, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def rope_and_write(
        self, qkv: Tensor, rotary: Tensor, norm: HeadNorm | None, kv: Tensor, slots: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        num_kv_heads = kv.shape[3]
        num_heads = qkv.shape[1] - 2 * num_kv_heads
        qk, v = qkv.split((num_heads + num_kv_heads, num_kv_heads), dim=1)
        if norm is not None:
            qk = F.rms_norm(qk, qk.shape[-1:], eps=norm.eps) * norm.scale
        q, k = _rotated(qk, rotary.to(qk.dtype)).split((num_heads, num_kv_heads), dim=1)
        keys, values = kv.flatten(1, 2)
        keys.index_copy_(0, slots, k)
        values.index_copy_(0, slots, v)
        return q, k, v

    def plan(
        self, metadata: AttentionMetadata, num_heads: int, num_kv_heads: int, dtype: torch.dtype
    ) -> TorchPlan:
        return plan_attention(metadata, dtype)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, plan: TorchPlan) -> Tensor:
        return paged_attention(q, kv, plan)


def _rotated(x: Tensor, rotary: Tensor) -> Tensor:
    cos, sin = rotary.unbind(1)
    first, second = x.chunk(2, dim=-1)
    return torch.addcmul(x * cos[:, None], torch.cat((second, first), dim=-1), sin[:, None])
