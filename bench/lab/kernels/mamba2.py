"""The cases of Mamba-2: the scan of prompts, and the step of decodes against the bytes of the states."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from baton.bench.lab.kernels.cases import Case, Cases, Make, nbytes
from baton.engine.kernels import AttentionMetadata, LayerState, Mamba2
from baton.engine.kernels.launch import multiprocessors
from baton.engine.kernels.state import ssd
from baton.engine.kernels.state.mamba2 import scan_work
from baton.engine.kernels.state.tiling import TOKENS, TritonStateTiling, chunk_tokens


@dataclass(frozen=True, slots=True)
class Mamba2Shape:
    """The sizes of one layer. The defaults are those of Bamba-9B."""

    heads: int = 128
    head_dim: int = 64
    state_size: int = 128
    groups: int = 1
    width: int = 4
    dtype: torch.dtype = torch.bfloat16
    batches: tuple[int, ...] = (1, 8, 32, 64, 128, 256)
    prompts: tuple[tuple[int, int], ...] = (
        (1, 256),
        (1, 2000),
        (1, 8000),
        (1, 32000),
        (4, 2000),
        (16, 2000),
    )
    """(requests, tokens of each) of a step."""

    @property
    def channels(self) -> int:
        return self.heads * self.head_dim + 2 * self.groups * self.state_size


class Mamba2Cases(Cases[Mamba2Shape]):
    def __iter__(self) -> Iterator[Make]:
        for requests, tokens in self.shape.prompts:
            yield partial(self.scan, requests, tokens)
        for batch in self.shape.batches:
            yield partial(self.decode, batch)

    def layer(self) -> Mamba2:
        shape, device = self.shape, self.device
        ones = torch.ones(shape.heads, device=device)
        weight = self.normal(shape.width, shape.channels) / 2
        return Mamba2(weight, weight[0], ones, -ones, shape.groups, ones, (0.0, float("inf")))

    def state(self, slots: int) -> LayerState:
        shape, device = self.shape, self.device
        ssm = torch.zeros(slots, shape.heads, shape.head_dim, shape.state_size, device=device)
        return LayerState(self.normal(slots, shape.width - 1, shape.channels), ssm)

    def no_copies(self, rows: int) -> Tensor:
        """As in a step of an engine that copies no states."""
        return torch.zeros(rows, dtype=torch.int32, device=self.device)

    def scan(self, requests: int, tokens: int) -> Case:
        """The scan alone, after the convolution."""
        shape, layer, (_, state) = self.shape, self.layer(), self.state(requests)
        rows = self.normal(requests * tokens, shape.channels)
        dt, y = self.normal(len(rows), shape.heads), self.normal(len(rows), shape.heads * shape.head_dim)
        slots = torch.arange(requests, dtype=torch.int32, device=self.device)
        length = chunk_tokens(shape.dtype)
        units, copies = multiprocessors(self.device), self.no_copies(len(rows))
        scans = torch.from_numpy(scan_work([(0, tokens)] * requests, 0, length)).to(self.device)
        tiling = TritonStateTiling(slots, slots[:0], scans, copies, requests, length, units)
        # The products with the state, and those within chunks of the length that needs fewest.
        inner = shape.state_size * shape.head_dim
        each = 4 * inner + TOKENS * (shape.state_size + shape.head_dim)
        return Case(
            f"ssd.{requests}x{tokens}",
            nbytes(rows) + nbytes(dt) + nbytes(y) + 2 * nbytes(state),
            len(rows) * shape.heads * each,
            lambda: ssd.scan(rows, dt, layer, state, tiling, y),
        )

    def decode(self, batch: int) -> Case:
        """Convolution and step."""
        shape, layer, state = self.shape, self.layer(), self.state(batch)
        contexts = torch.full((batch,), 1000, dtype=torch.int32, device=self.device)
        slots = torch.arange(batch, dtype=torch.int32, device=self.device)
        metadata = AttentionMetadata(
            1, slots, slots, contexts, batch, [], state_slots=slots, state_copies=self.no_copies(batch)
        )
        projected = self.normal(batch, shape.channels + shape.heads)
        x, dt = projected.tensor_split([shape.channels], dim=1)
        tiling = self.kernels.tile_states(metadata, shape.dtype)
        y = batch * shape.heads * shape.head_dim * projected.itemsize
        return Case(
            f"mamba2.decode.b{batch}",
            nbytes(projected) + y + 2 * sum(map(nbytes, state)),
            0,
            lambda: self.kernels.mix_states(x, [dt], layer, state, tiling),
        )
