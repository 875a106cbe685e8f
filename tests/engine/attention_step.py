"""A random step for the kernels of attention, and what the torch kernels make of it."""

import random
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from baton.engine.arrange import arrange
from baton.engine.execution.inputs import attention_metadata, read_by_device
from baton.engine.kernels import KV, AttentionMetadata, HeadNorm, Kernels
from baton.engine.kernels.attention.paged import first_seen
from baton.engine.kernels.attention.tiles import NO_IMAGES, Images
from baton.engine.model_config import Span
from baton.engine.step import Draws, Variant
from tests.engine.kernel_checks import F32, close, normal

LARGEST_TILE = 128  # keys that a kernel loads at once


def placed(metadata: AttentionMetadata, put: Callable[[Tensor], Tensor]) -> AttentionMetadata:
    """The metadata with its tensors where `put` copies them."""
    return replace(
        metadata,
        slots=put(metadata.slots),
        block_tables=put(metadata.block_tables),
        contexts=put(metadata.contexts),
        tiles=None if metadata.tiles is None else put(metadata.tiles),
        places=None if metadata.places is None else put(metadata.places),
    )


class Step:
    """A random step: requests with cached KV, and the QKV product of the step's tokens. What no request may
    see is NaN: unused blocks, positions after a request's own, and tiles before its span."""

    def __init__(
        self,
        spans: list[tuple[int, int]],
        heads: tuple[int, int] = (4, 2),
        head_dim: int = 64,
        block_size: int = 16,
        dtype: torch.dtype = F32,
        seed: int = 0,
        span: Span | None = None,
        with_sinks: bool = False,
        scale: float | None = None,
        decodes: Sequence[tuple[int, int]] = (),
        ahead: int = 1,
        images: Images = NO_IMAGES,
        softcap: float | None = None,
    ) -> None:
        """`decodes`: spans that decode. Those of one token do, too. `ahead`: as in `arrange`. `images`: as in
        `AttentionMetadata`."""
        self.scale, self.softcap = head_dim**-0.5 if scale is None else scale, softcap
        self.heads, self.dtype, self.span = heads, dtype, span
        self.sinks = normal(heads[0], seed=seed + 97).to(dtype) if with_sinks else None
        decodes = [span for span in spans if span[1] - span[0] == 1 or span in decodes]
        self.spans = decodes + [span for span in spans if span not in decodes]
        width = max(-(-stop // block_size) for _, stop in spans)
        num_blocks = len(spans) * width + 3
        free = list(range(num_blocks))
        random.Random(seed).shuffle(free)
        tables = torch.tensor([[free.pop() for _ in range(width)] for _ in spans], dtype=torch.int32)
        slots = [
            tables[i].long()[torch.arange(stop) // block_size] * block_size + torch.arange(stop) % block_size
            for i, (_, stop) in enumerate(self.spans)
        ]
        starts, stops = zip(*self.spans, strict=True)
        none = np.zeros(0, np.float32)
        step = arrange(
            [0] * sum(stop - start for start, stop in spans), starts, stops,
            [array("i", table.tolist()) for table in tables], [], Variant.GREEDY, Draws(*[none] * 5),
            num_decodes=len(decodes), hands_over=False, block_size=block_size, table_width=width,
            keys=None if ahead == 1 else np.zeros((0, ahead), np.int32),
        )  # fmt: skip
        tensors = {name: torch.from_numpy(values) for name, values in read_by_device(step).items()}
        self.metadata = attention_metadata(
            tensors,
            block_size=block_size,
            num_decodes=step.decode_rows,
            prefills=step.prefills,
            images=images,
        )
        tokens, all_heads = len(self.metadata.slots), heads[0] + 2 * heads[1]
        self.kv = torch.full((2, num_blocks, block_size, heads[1], head_dim), torch.nan, dtype=dtype)
        for i, (s, (start, _)) in enumerate(zip(slots, self.spans, strict=True)):
            cached = normal(2, start, heads[1], head_dim, seed=seed + i).to(dtype)
            hidden = int(first_seen(torch.tensor(start), span)) // LARGEST_TILE * LARGEST_TILE
            self.kv.flatten(1, 2)[:, s[hidden:start]] = cached[:, hidden:]
        self.qkv = normal(tokens, all_heads, head_dim, seed=seed + 99).to(dtype)
        angles = normal(tokens, head_dim // 2, seed=seed + 98)
        cos, sin = angles.cos(), angles.sin()
        self.rotary = torch.stack((cos.repeat(1, 2), torch.cat((-sin, sin), dim=1)), dim=1)

    def run(
        self, kernels: Kernels, device: str, norm: HeadNorm | None = None, *, exact: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Attention's output, the cache, and the rotated queries; with `exact` all in float64."""
        kv = (self.kv.double() if exact else self.kv).to(device, copy=True)
        out, q = self.run_on(kv, kernels, device, norm, exact=exact)
        return out, kv, q

    def run_on(
        self, kv: KV, kernels: Kernels, device: str, norm: HeadNorm | None = None, *, exact: bool = False
    ) -> tuple[Tensor, Tensor]:
        """As `run`, with a cache on the device, which gets the KV of the step."""

        def put(x: Tensor) -> Tensor:
            return (x.double() if exact and x.is_floating_point() else x).to(device, copy=True)

        metadata = placed(self.metadata, put)
        rotary = put(self.rotary)
        if norm is not None:
            norm = HeadNorm(put(norm.scale), norm.eps)
        q = kernels.rope_and_write(put(self.qkv), rotary, norm, kv, metadata.slots)
        tiling = kernels.tile(metadata, *self.heads, torch.float64 if exact else self.dtype, self.span)
        sinks = None if self.sinks is None else put(self.sinks)
        return kernels.attention(q, kv, tiling, sinks, self.scale, self.softcap), q

    def check(self, kernels: Kernels, device: str, norm: HeadNorm | None = None) -> None:
        out, kv, q = self.run(kernels, device, norm)
        expected, expected_kv, expected_q = self.run(Kernels(), "cpu", norm, exact=True)
        close(q, expected_q)
        written = expected_kv.isfinite()
        assert torch.equal(kv.cpu().isfinite(), written), "each position is in its slot, and nothing else is"
        close(kv.cpu()[written], expected_kv[written])
        close(out, expected)


RAGGED = [(0, 1), (15, 16), (70, 71), (0, 5), (3, 20), (60, 95)]
