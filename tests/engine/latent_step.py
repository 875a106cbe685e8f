"""A random step for the kernels of latent attention, and what its definition makes of it."""

from typing import Any

import torch
from torch import Tensor

from baton.engine.kernels import KV, Fp8KV, Kernels, LatentHeads, LatentNorm
from baton.engine.model_config import LatentConfig
from baton.kv_names.cache_kinds import latent_head_dim
from tests.engine.attention_step import Step, placed
from tests.engine.kernel_checks import F32, close, normal


class LatentStep:
    """Requests with cached latents, as in `Step`, and the products of the step's tokens. What no request may
    see is NaN."""

    def __init__(
        self,
        spans: list[tuple[int, int]],
        heads: int = 4,
        dims: tuple[int, int, int, int] = (32, 16, 16, 16),
        block_size: int = 16,
        dtype: torch.dtype = F32,
        decodes: list[tuple[int, int]] | None = None,
    ) -> None:
        """`dims`: rank, nope_dim, rope_dim and value_dim."""
        rank, nope, rope, value = dims
        self.rank, self.rope, self.dtype = rank, rope, dtype
        step = Step(spans, (heads, 1), rank + rope, block_size, dtype, decodes=decodes or ())
        self.metadata = step.metadata
        head_dim = latent_head_dim(rank, rank + rope)
        self.kv = step.kv[:1, :, :, 0].unflatten(3, (-1, head_dim)).clone()
        tokens = len(self.metadata.slots)
        self.q = normal(tokens, heads, nope + rope, seed=91).to(dtype)
        self.latent, self.shared = (normal(tokens, n, seed=92 + n).to(dtype) for n in (rank, rope))
        angles = normal(tokens, rope // 2, seed=98)
        cos, sin = angles.cos(), angles.sin()
        self.rotary = torch.stack((cos.repeat(1, 2), torch.cat((-sin, sin), dim=1)), dim=1)
        up = (normal(heads, nope + value, rank, seed=90) / rank**0.5).to(dtype)
        self.shape = LatentConfig(None, *dims, (nope + rope) ** -0.5)
        self.heads, self.up, self.nope = LatentHeads.of(up, self.shape), up, nope
        self.norm = LatentNorm(normal(rank, seed=89).to(dtype), 1e-6)

    def run(self, kernels: Kernels, device: str, *, exact: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Attention's output, the cache, and the rotated queries; with `exact` all in float64."""
        kv = (self.kv.double() if exact else self.kv).to(device, copy=True)
        out, q = self.run_on(kv, kernels, device, exact=exact)
        return out, kv, q

    def run_on(self, kv: KV, kernels: Kernels, device: str, *, exact: bool = False) -> tuple[Tensor, Tensor]:
        """As `run`, with a cache on the device, which gets the latents of the step."""

        def put(x: Tensor) -> Tensor:
            return (x.double() if exact and x.is_floating_point() else x).to(device, copy=True)

        metadata = placed(self.metadata, put)
        parts = self.q.flatten(1), self.latent, self.shared
        # As the product leaves them, whose rows have all three.
        made = torch.cat([put(part) for part in parts], dim=1)
        q, latent, shared = made.split([part.shape[1] for part in parts], dim=1)
        q = q.unflatten(1, self.q.shape[1:])
        norm = LatentNorm(put(self.norm.weight), self.norm.eps)
        kernels.write_latent(q, latent, shared, norm, put(self.rotary), kv, metadata.slots)
        dtype, fp8 = torch.float64 if exact else self.dtype, isinstance(kv, Fp8KV)
        tiling = kernels.tile_latent(metadata, q.shape[1], self.shape, dtype, fp8=fp8)
        self.choose(kernels, tiling)
        heads = self.heads._replace(keys=put(self.heads.keys), values=put(self.heads.values))
        return kernels.latent_attention(q, kv, tiling, heads), q

    def choose(self, kernels: Kernels, tiling: Any) -> None:
        """Queries attend to all that they see."""

    def expected(self, kv: Tensor | None = None) -> Tensor:
        """The output by the definition, query by query, in float64. `kv`: a cache with the latents of the
        step. None: the one that `run` makes."""
        _, written, q = self.run(Kernels(), "cpu", exact=True)
        kv = written if kv is None else kv
        cached, m = kv.flatten(0, 2).flatten(1), self.metadata
        up, nope = self.up.double(), self.nope
        found: list[Tensor] = []
        queries = [(i, int(m.contexts[i]) - 1) for i in range(m.num_decodes)]
        for request, (start, stop) in enumerate(m.prefills, m.num_decodes):
            queries += [(request, position) for position in range(start, stop)]
        for (request, position), query in zip(queries, q, strict=True):
            at = torch.arange(position + 1)
            slots = m.block_tables[request].long()[at // m.block_size] * m.block_size + at % m.block_size
            latents, shared = cached[slots].split((self.rank, self.rope), dim=1)
            made = torch.einsum("pr,hdr->phd", latents, up)
            keys = torch.cat((made[..., :nope], shared[:, None].expand(-1, len(up), -1)), dim=2)
            weights = (torch.einsum("phd,hd->hp", keys, query) * self.heads.scale).softmax(dim=1)
            found.append(torch.einsum("hp,phv->hv", weights, made[..., nope:]))
        return torch.stack(found)

    def check(self, kernels: Kernels, device: str) -> None:
        out, kv, q = self.run(kernels, device)
        expected, expected_kv, expected_q = self.run(Kernels(), "cpu", exact=True)
        close(q, expected_q)
        written = expected_kv.isfinite()
        assert torch.equal(kv.cpu().isfinite(), written), "each position is in its slot, and nothing else is"
        close(kv.cpu()[written], expected_kv[written])
        close(out, expected)
