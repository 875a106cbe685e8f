"""The gated delta rule (Yang 2024) and Kimi's (KDA, 2025): parameters of a layer, and plain torch that
defines them.

The layer keeps what Mamba-2 keeps (`mamba2`): values take the place of x, keys that of B, and queries that of
C. A token has Δ and β of each head beside them. A new value replaces what the state has for its key:

    v, k, q = silu(convolution of the channels over the last `width` tokens); k and q are normalized
    state   = exp(softplus(Δ + bias) A) · state
    state   = state + sigmoid(β) (v − state · k) ⊗ k
    y       = state · q / √state_size

The tokens of a prompt are computed in chunks. With s_i as in `mamba2`, and β_i in place of its sigmoid, the
values that a chunk writes solve a triangular system, since each depends on those before it:

    w_i   = β_i (v_i − exp(s_i) state · k_i − Σ_{j < i} exp(s_i − s_j) (k_i · k_j) w_j)
    y_i   = exp(s_i) state · q_i + Σ_{j ≤ i} exp(s_i − s_j) (q_i · k_j) w_j
    state = exp(s_last) state + Σ_j exp(s_last − s_j) w_j ⊗ k_j

In *KDA* each dimension c of a key decays by itself: Δ, s and exp are vectors [state_size], and

    exp(s_i) state · k_i            is    state · (exp(s_i) k_i)
    exp(s_i − s_j) (k_i · k_j)      is    Σ_c k_ic k_jc exp(s_ic − s_jc)
    exp(s_last − s_j) w_j ⊗ k_j     is    w_j ⊗ (exp(s_last − s_j) k_j)
"""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.kernels.state.mamba2 import CHUNK, HeadStates, Prompt, Rates, TorchStateTiling, in_float32

EPS = 1e-6
"""Of the norm of keys and queries."""


class GatedDelta(HeadStates):
    chunk: ClassVar[int] = CHUNK
    """Tokens of a chunk on a CPU."""

    def update(self, rows: Tensor, rates: Rates, state: Tensor, tiling: TorchStateTiling) -> Tensor:
        v, k, q = self._parts(rows, state)
        decay, beta = self._decay_and_share(rates)
        kept = state[tiling.slots].float().masked_fill_(tiling.fresh[:, None, None, None], 0)
        kept *= decay.exp()[:, :, None]
        written = (v - (kept @ k[..., None])[..., 0]) * beta[:, :, None]
        kept += written[..., None] * k[:, :, None]
        state[tiling.slots] = kept.to(state.dtype)
        return (kept @ q[..., None])[..., 0]

    def scan(self, rows: Tensor, rates: Rates, state: Tensor, prompt: Prompt) -> Tensor:
        v, k, q = (part.transpose(0, 1) for part in self._parts(rows, state))  # [heads, tokens, …]
        decay, beta = (part.transpose(0, 1) for part in self._decay_and_share(rates))
        before = state[prompt.slot].to(torch.float32, copy=True)
        if prompt.fresh:
            before.zero_()
        y = torch.empty_like(v)
        for at, copy in prompt.pieces(self.chunk):
            keys, queries, share = k[:, at], q[:, at], beta[:, at, None]
            total = decay[:, at].cumsum(dim=1)
            of_keys, of_queries = self._products(keys, queries, total)
            grown, decay_to_end = total.exp(), (total[:, -1:] - total).exp_()
            written = torch.linalg.solve_triangular(  # the diagonal counts as 1
                of_keys.mul_(share),
                (v[:, at] - (keys * grown) @ before.mT).mul_(share),
                upper=False,
                unitriangular=True,
            )
            y[:, at] = (queries * grown) @ before.mT + of_queries @ written
            before = before * grown[:, -1:] + written.mT @ (keys * decay_to_end)
            if copy is not None:
                state[copy] = before
        state[prompt.slot] = before
        return y.transpose(0, 1)

    def _products(self, keys: Tensor, queries: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        """Of the keys of a chunk, and of its queries, with its keys: Σ_c k_ic k_jc exp(s_ic − s_jc) for j ≤ i
        [heads, tokens, tokens]. `total`: s, [heads, tokens, 1 or state_size]."""
        decays = (total - total.mT).tril_().exp_().tril_()
        return (keys @ keys.mT).mul_(decays), (queries @ keys.mT).mul_(decays)

    def _decay_and_share(self, rates: Rates) -> tuple[Tensor, Tensor]:
        """The logarithm of the factor of a state [rows, heads, 1 or state_size], and sigmoid(β)
        [rows, heads]."""
        dt, beta = rates
        steps = F.softplus(dt.float() + self.dt_bias).unflatten(1, (len(self.a), -1))
        return steps * self.a[:, None], beta.float().sigmoid()

    def _parts(self, rows: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Values [rows, heads, head_dim], keys and queries [rows, heads, state_size], in float32."""
        v, k, q = in_float32(rows, self.groups, state)
        shared = v.shape[2]
        k, q = (_normalized(part).repeat_interleave(shared, dim=1) for part in (k, q))
        return v.flatten(1, 2), k, q * state.shape[3] ** -0.5


class KimiDelta(GatedDelta):
    """`dt_bias` is [heads · state_size]. Each head is a group."""

    chunk = 16  # its products have no form of a product of matrices

    def _products(self, keys: Tensor, queries: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        tokens = total.shape[1]
        later = torch.ones(tokens, tokens, dtype=torch.bool).triu_(1)[..., None]
        decays = (total[:, :, None] - total[:, None]).masked_fill_(later, float("-inf")).exp_()
        decays *= keys[:, None]  # [heads, tokens, tokens, state_size]
        return (decays * keys[:, :, None]).sum(3), (decays * queries[:, :, None]).sum(3)


def _normalized(x: Tensor) -> Tensor:
    return x * (x.square().sum(dim=2, keepdim=True) + EPS).rsqrt()


def norm_gate(x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, sigmoid: bool = False) -> Tensor:
    """The RMSNorm of each head of x [rows, size], times weight [head_dim], times silu(gate), or `sigmoid` of
    it. gate [rows, size], with rows at any stride."""
    heads = x.float().unflatten(1, (-1, len(weight)))
    normed = F.rms_norm(heads, weight.shape, weight.float(), eps).flatten(1)
    gate = gate.float()
    return (normed * (gate.sigmoid() if sigmoid else F.silu(gate))).to(x.dtype)
