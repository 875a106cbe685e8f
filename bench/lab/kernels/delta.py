"""The cases of the gated delta rule and of KDA: the scan of prompts, and the step of decodes against the
bytes of the states. Both with their convolution."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from baton.bench.lab.kernels.cases import Case, Cases, Make, nbytes
from baton.engine.kernels import AttentionMetadata, GatedDelta, HeadStates, KimiDelta, LayerState
from baton.engine.kernels.state.tiling import TOKENS


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """The sizes of one layer. The defaults are those of Qwen3.5-35B-A3B; with `of_keys` and 32 groups, those
    of Kimi-Linear."""

    heads: int = 32
    head_dim: int = 128
    state_size: int = 128
    groups: int = 16
    of_keys: bool = False
    """KDA: each dimension of a key decays by itself."""
    width: int = 4
    dtype: torch.dtype = torch.bfloat16
    batches: tuple[int, ...] = (1, 8, 32, 64, 128, 256)
    prompts: tuple[tuple[int, int], ...] = ((1, 256), (1, 2000), (1, 8000), (4, 2000), (16, 500))
    """(requests, tokens of each) of a step."""

    @property
    def channels(self) -> int:
        return self.heads * self.head_dim + 2 * self.groups * self.state_size

    @property
    def steps(self) -> int:
        """Values of Δ of a token."""
        return self.heads * (self.state_size if self.of_keys else 1)


class DeltaCases(Cases[DeltaShape]):
    def __iter__(self) -> Iterator[Make]:
        for requests, tokens in self.shape.prompts:
            yield partial(self.scan, requests, tokens)
        for batch in self.shape.batches:
            yield partial(self.decode, batch)

    @property
    def name(self) -> str:
        return "kda" if self.shape.of_keys else "gated_delta"

    def scan(self, requests: int, tokens: int) -> Case:
        shape, rows = self.shape, requests * tokens
        slots = torch.arange(requests, dtype=torch.int32, device=self.device)
        metadata = AttentionMetadata(
            1, torch.empty(rows, device=self.device), slots, slots, 0, [(0, tokens)] * requests,
            state_slots=slots, state_copies=self.no_copies(rows),
        )  # fmt: skip
        # The products with the state, those within chunks, and the solution of their systems.
        inner = shape.state_size * shape.head_dim
        each = 6 * inner + TOKENS * (4 * shape.state_size + 2 * shape.head_dim)
        return self.case(
            f"{self.name}.{requests}x{tokens}", metadata, rows, requests, rows * shape.heads * each
        )

    def decode(self, batch: int) -> Case:
        contexts = torch.full((batch,), 1000, dtype=torch.int32, device=self.device)
        slots = torch.arange(batch, dtype=torch.int32, device=self.device)
        metadata = AttentionMetadata(
            1, slots, slots, contexts, batch, [], state_slots=slots, state_copies=self.no_copies(batch)
        )
        return self.case(f"{self.name}.decode.b{batch}", metadata, batch, batch, 0)

    def case(self, name: str, metadata: AttentionMetadata, rows: int, requests: int, operations: int) -> Case:
        shape, device = self.shape, self.device
        ssm = torch.zeros(requests, shape.heads, shape.head_dim, shape.state_size, device=device)
        state = LayerState(self.normal(requests, shape.width - 1, shape.channels), ssm)
        x, dt, share = (self.normal(rows, size) for size in (shape.channels, shape.steps, shape.heads))
        layer, tiling = self.layer(), self.kernels.tile_states(metadata, shape.dtype)
        y = rows * shape.heads * shape.head_dim * x.itemsize
        return Case(
            name,
            sum(map(nbytes, (x, dt, share))) + y + 2 * sum(map(nbytes, state)),
            operations,
            lambda: self.kernels.mix_states(x, [dt, share], layer, state, tiling),
        )

    def layer(self) -> HeadStates:
        shape, weight = self.shape, self.normal(self.shape.width, self.shape.channels) / 2
        bias, rates = (
            torch.ones(shape.steps, device=self.device),
            -torch.ones(shape.heads, device=self.device),
        )
        kind = KimiDelta if shape.of_keys else GatedDelta
        return kind(weight, None, bias, rates / 16, shape.groups)

    def no_copies(self, rows: int) -> Tensor:
        """As in a step of an engine that copies no states."""
        return torch.zeros(rows, dtype=torch.int32, device=self.device)
