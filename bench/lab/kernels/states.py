"""The cases of state layers: Mamba-2, the gated delta rule and KDA. Of each the scan of prompts, and the step
of decodes against the bytes of the states."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from baton.bench.lab.kernels.cases import Case, Cases, Make, nbytes
from baton.engine.kernels import AttentionMetadata, GatedDelta, HeadStates, KimiDelta, LayerState, Mamba2
from baton.engine.kernels.launch import multiprocessors
from baton.engine.kernels.state import ssd
from baton.engine.kernels.state.mamba2 import scan_work
from baton.engine.kernels.state.tiling import TOKENS, TritonStateTiling, chunk_tokens


@dataclass(frozen=True, slots=True)
class StateShape:
    """The sizes of one layer. `prompts`: (requests, tokens of each) of a step."""

    heads: int
    head_dim: int
    groups: int
    prompts: tuple[tuple[int, int], ...]
    state_size: int = 128
    width: int = 4
    dtype: torch.dtype = torch.bfloat16
    batches: tuple[int, ...] = (1, 8, 32, 64, 128, 256)

    @property
    def channels(self) -> int:
        return self.heads * self.head_dim + 2 * self.groups * self.state_size


@dataclass(frozen=True, slots=True)
class Mamba2Shape(StateShape):
    """The defaults are those of Bamba-9B."""

    heads: int = 128
    head_dim: int = 64
    groups: int = 1
    prompts: tuple[tuple[int, int], ...] = (
        (1, 256), (1, 2000), (1, 8000), (1, 32000), (4, 2000), (16, 2000),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class DeltaShape(StateShape):
    """The defaults are those of Qwen3.5-35B-A3B; with `of_keys` and 32 groups, those of Kimi-Linear."""

    heads: int = 32
    head_dim: int = 128
    groups: int = 16
    prompts: tuple[tuple[int, int], ...] = ((1, 256), (1, 2000), (1, 8000), (4, 2000), (16, 500))
    of_keys: bool = False
    """KDA: each dimension of a key decays by itself."""

    @property
    def steps(self) -> int:
        """Values of Δ of a token."""
        return self.heads * (self.state_size if self.of_keys else 1)


S = TypeVar("S", bound=StateShape)


class StateCases(Cases[S]):
    def __iter__(self) -> Iterator[Make]:
        for requests, tokens in self.shape.prompts:
            yield partial(self.scan, requests, tokens)
        for batch in self.shape.batches:
            yield partial(self.decode, batch)

    def scan(self, requests: int, tokens: int) -> Case:
        raise NotImplementedError

    def decode(self, batch: int) -> Case:
        raise NotImplementedError

    def state(self, slots: int) -> LayerState:
        shape = self.shape
        ssm = torch.zeros(slots, shape.heads, shape.head_dim, shape.state_size, device=self.device)
        return LayerState(self.normal(slots, shape.width - 1, shape.channels), ssm)

    def slots(self, requests: int) -> Tensor:
        return torch.arange(requests, dtype=torch.int32, device=self.device)

    def no_copies(self, rows: int) -> Tensor:
        """As in a step of an engine that copies no states."""
        return torch.zeros(rows, dtype=torch.int32, device=self.device)

    def of_decodes(self, batch: int) -> AttentionMetadata:
        contexts = torch.full((batch,), 1000, dtype=torch.int32, device=self.device)
        slots = self.slots(batch)
        return AttentionMetadata(
            1, slots, slots, contexts, batch, [], state_slots=slots, state_copies=self.no_copies(batch)
        )

    def mixed(
        self, name: str, metadata: AttentionMetadata, x: Tensor, others: list[Tensor], layer: HeadStates,
        requests: int, operations: int,
    ) -> Case:  # fmt: skip
        """Convolution, and scan or step."""
        state, tiling = self.state(requests), self.kernels.tile_states(metadata, self.shape.dtype)
        y = len(x) * self.shape.heads * self.shape.head_dim * x.itemsize
        return Case(
            name,
            sum(map(nbytes, (x, *others))) + y + 2 * sum(map(nbytes, state)),
            operations,
            lambda: self.kernels.mix_states(x, others, layer, state, tiling),
        )


class Mamba2Cases(StateCases[Mamba2Shape]):
    def layer(self) -> Mamba2:
        ones = torch.ones(self.shape.heads, device=self.device)
        weight = self.normal(self.shape.width, self.shape.channels) / 2
        return Mamba2(weight, weight[0], ones, -ones, self.shape.groups, ones, (0.0, float("inf")))

    def scan(self, requests: int, tokens: int) -> Case:
        """The scan alone, after the convolution."""
        shape, layer, (_, state) = self.shape, self.layer(), self.state(requests)
        rows = self.normal(requests * tokens, shape.channels)
        dt, y = self.normal(len(rows), shape.heads), self.normal(len(rows), shape.heads * shape.head_dim)
        slots, length = self.slots(requests), chunk_tokens(shape.dtype)
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
        projected = self.normal(batch, self.shape.channels + self.shape.heads)
        x, dt = projected.tensor_split([self.shape.channels], dim=1)
        metadata = self.of_decodes(batch)
        return self.mixed(f"mamba2.decode.b{batch}", metadata, x, [dt], self.layer(), batch, 0)


class DeltaCases(StateCases[DeltaShape]):
    @property
    def name(self) -> str:
        return "kda" if self.shape.of_keys else "gated_delta"

    def scan(self, requests: int, tokens: int) -> Case:
        shape, rows, slots = self.shape, requests * tokens, self.slots(requests)
        metadata = AttentionMetadata(
            1, torch.empty(rows, device=self.device), slots, slots, 0, [(0, tokens)] * requests,
            state_slots=slots, state_copies=self.no_copies(rows),
        )  # fmt: skip
        # The products with the state, those within chunks, and the solution of their systems.
        inner = shape.state_size * shape.head_dim
        each = 6 * inner + TOKENS * (4 * shape.state_size + 2 * shape.head_dim)
        name, operations = f"{self.name}.{requests}x{tokens}", rows * shape.heads * each
        return self.mixed(name, metadata, *self.inputs(rows), requests, operations)

    def decode(self, batch: int) -> Case:
        name = f"{self.name}.decode.b{batch}"
        return self.mixed(name, self.of_decodes(batch), *self.inputs(batch), batch, 0)

    def inputs(self, rows: int) -> tuple[Tensor, list[Tensor], HeadStates]:
        shape, device = self.shape, self.device
        x, *others = (self.normal(rows, size) for size in (shape.channels, shape.steps, shape.heads))
        weight = self.normal(shape.width, shape.channels) / 2
        bias, rates = torch.ones(shape.steps, device=device), -torch.ones(shape.heads, device=device)
        kind: Any = KimiDelta if shape.of_keys else GatedDelta
        return x, others, kind(weight, None, bias, rates / 16, shape.groups)
