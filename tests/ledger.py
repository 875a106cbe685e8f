"""Kinds of cache that only tests know, and a model that keeps them: `register` makes an engine serve it.

Every second layer keeps three arrays in place of KV: a `mark` of each token, whose heads ranks share out; a
`stamp` of each token, which all ranks hold; and a `ledger` of each request, which depends on every token
before it in order. Each row reads all marks up to its own position, and the stamps in its window. So a
position, a state or an array that is lost, old, or in another place changes the tokens of a request.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from baton.engine.api.pools import Pool
from baton.engine.kernels import Kernels
from baton.engine.kernels.attention.paged import AttentionMetadata
from baton.engine.kernels.state.mamba2 import Prompt, TorchStateTiling
from baton.engine.layers.weights import Weights
from baton.engine.loader.families import FAMILIES
from baton.engine.loader.families.family import Family
from baton.engine.model_config import ModelConfig
from baton.engine.models.cache_spec import (
    AttentionCache,
    CacheMemory,
    CacheSpec,
    DeviceTensors,
    Places,
    of_slots,
)
from baton.engine.models.llama import Llama, LlamaAttention
from baton.kv_names.cache_kinds import CacheArray, CacheKind, Unit, Window
from tests.engine.checkpoints import edit_json

NAME = "LedgerForCausalLM"
MARK, STAMP = CacheKind("mark", Unit.TOKEN), CacheKind("stamp", Unit.TOKEN, copied=True)
LEDGER = CacheKind("ledger", Unit.REQUEST)
WINDOW = 40
"""Tokens whose stamps a token reads."""
LARGEST = 65521
"""Values are below this prime, so float32 holds them and a step from one to the next."""


class LedgerState(NamedTuple):
    mark: Tensor  # [1, blocks, block_size, heads, 1]
    stamp: Tensor  # [1, blocks, block_size, 2, 3]
    ledger: Tensor  # [slots, 1, heads, 2]


@dataclass(frozen=True, slots=True)
class LedgerCache:
    heads: int

    @property
    def arrays(self) -> tuple[CacheArray, ...]:
        return (
            CacheArray(MARK, "mark", 1, self.heads, 1, "float32"),
            CacheArray(STAMP, "stamp", 1, 2, 3, "float32", Window(WINDOW)),
            CacheArray(LEDGER, "ledger", 1, self.heads, 2, "float32"),
        )

    def allocate(self, places: Places, memory: CacheMemory) -> LedgerState:
        blocks, size, slots = places.num_blocks, places.block_size, places.num_slots
        mark = memory.tensor(Pool.BLOCKS, (1, blocks, size, self.heads, 1), torch.float32)
        stamp = memory.tensor(Pool.BLOCKS, (1, blocks, size, 2, 3), torch.float32)
        ledger = memory.tensor(Pool.SLOTS, (1, slots, 1, self.heads, 2), torch.float32)[0]
        state = LedgerState(mark, stamp, ledger)
        for tensor in state if isinstance(memory, DeviceTensors) else ():  # else a part has no memory
            tensor.fill_(torch.nan)
        return state

    def planes(self, cache: LedgerState) -> Sequence[Sequence[Tensor]]:
        return [[cache.mark], [cache.stamp], [of_slots(cache.ledger)]]

    def slots(self, cache: LedgerState) -> Sequence[Tensor]:
        return (cache.ledger,)


@dataclass(frozen=True, slots=True)
class Tiling(TorchStateTiling):
    step: AttentionMetadata


@dataclass(frozen=True, slots=True)
class Ledger:
    """The heads of a rank."""

    numbers: Tensor  # [heads] float32

    def mix(self, rows: Tensor, state: LedgerState, tiling: Tiling) -> Tensor:
        """rows [tokens, 2] float32: token ids and positions. Returns [tokens, heads]."""
        (ids, positions), step = rows.unbind(1), tiling.step
        places = step.slots
        mark, stamp = state.mark[0].flatten(0, 1), state.stamp[0].flatten(0, 1)  # [places, heads, …]
        mark[places] = ((ids[:, None] * 17 + positions[:, None] * 5 + self.numbers) % 251)[..., None]
        stamps = ids[:, None] * 13 + positions[:, None] * 11 + torch.arange(6.0)
        stamp[places] = (stamps % 241).unflatten(1, (2, 3))
        found = torch.empty(len(rows), len(self.numbers))
        decodes = zip(tiling.slots.tolist(), tiling.fresh.tolist(), strict=True)
        spans = [Prompt(slot, fresh, slice(i, i + 1)) for i, (slot, fresh) in enumerate(decodes)]
        for request, (slot, fresh, rows_of, copies) in enumerate([*spans, *tiling.prompts]):
            value = torch.zeros(len(self.numbers)) if fresh else state.ledger[slot, 0, :, 0].clone()
            table, kept = step.block_tables[request].long(), dict(copies)
            for count, row in enumerate(range(rows_of.start, rows_of.stop), 1):
                position = int(positions[row])
                value = (value * 31 + ids[row] * 7 + position + self.numbers) % LARGEST
                if count in kept:
                    state.ledger[kept[count], 0] = torch.stack((value, LARGEST - value), dim=1)
                seen = torch.arange(position + 1)
                read = table[seen // step.block_size] * step.block_size + seen % step.block_size
                found[row] = value + mark[read].sum((0, 2)) + 3 * stamp[read[-WINDOW:]].sum()
            state.ledger[slot, 0] = torch.stack((value, LARGEST - value), dim=1)
        return found


class LedgerMixer(LlamaAttention):
    def __init__(self, config: ModelConfig, weights: Weights, name: str) -> None:
        super().__init__(config, weights, name)
        heads = weights.ranks.shard(config.num_heads)
        self.parameters = Ledger(torch.arange(heads.start, heads.stop, dtype=torch.float32))

    def __call__(self, layer: int, x: Tensor, rotary: Tensor, attend: Any) -> Tensor:
        found = attend(layer, self.parameters)
        waves = (found[..., None] * torch.arange(1.0, self.head_dim + 1)).sin() * 3
        return self.out(waves.flatten(1).to(x.dtype))


class LedgerModel(Llama):
    @staticmethod
    def cache_spec(config: ModelConfig, dtype: torch.dtype, kv_dtype: torch.dtype) -> tuple[CacheSpec, ...]:
        attention = AttentionCache(config.num_kv_heads, config.head_dim, kv_dtype)
        ledger = LedgerCache(config.num_heads)
        return tuple(ledger if layer % 2 else attention for layer in range(config.num_layers))

    @classmethod
    def mixer(cls, config: ModelConfig, weights: Weights, layer: int) -> Any:
        mixer = LedgerMixer if layer % 2 else LlamaAttention
        return mixer(config, weights, f"model.layers.{layer}.self_attn")

    def __call__(self, token_ids: Tensor, positions: Tensor, attend: Any, mix: Any) -> Tensor:
        rows = torch.stack((token_ids, positions), dim=1).float()
        residual, delta = self.embed(token_ids)
        rotary = self.rotary.at(positions)
        for i, layer in enumerate(self.layers):
            caller = (lambda number, of: mix(number, rows, (), of)) if i % 2 else attend
            delta = layer(i, residual, delta, rotary, caller)
        return self.norm(residual, delta)


def register() -> None:
    """In this process."""
    if NAME in FAMILIES:
        return
    FAMILIES[NAME] = Family(model=LedgerModel)
    tile_states, mix_states = Kernels.tile_states, Kernels.mix_states

    def tile(self: Kernels, metadata: AttentionMetadata, dtype: torch.dtype) -> Any:
        found = tile_states(self, metadata, dtype)
        return Tiling(found.slots, found.fresh, found.prompts, metadata)

    def mix(self: Kernels, x: Tensor, beside: Any, layer: Any, state: Any, tiling: Any) -> Tensor:
        if isinstance(layer, Ledger):
            return layer.mix(x, state, tiling)
        return mix_states(self, x, beside, layer, state, tiling)

    Kernels.tile_states, Kernels.mix_states = tile, mix  # pyrefly: ignore


def model_of(directory: Path) -> Path:
    """Makes a Llama the model of this module, with the same weights."""
    edit_json(directory / "config.json", architectures=[NAME])
    return directory
