"""Checkpoints in which tensors have the rows of several, or their rows in another order.

Phi-3 and GLM-4:
- One tensor has the rows of query, key and value (Phi-3), and one those of gate and up.
- The first dimensions of a head are rotated, as in `engine.loader.hybrid`. GLM-4 stores their halves in
  turns. Query and key heads take our order when they are read.

Qwen3-Next:
- Some matrices have the rows of several: each group of value heads has its queries, keys, values and gates in
  a row, and each query head has its gate. Here each has a matrix of its own.
- The channels of the convolution are queries, keys and values. Here they come in the order of `gated_delta`.
- The first dimensions of a head are rotated, as in `engine.loader.hybrid`. Heads and their norms take our
  order.
- Norms multiply by 1 + weight. Here the weight has the 1 already.
- The layers that predict several tokens (`mtp`) are left out.
"""

import re
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from baton.engine.layers.ranks import Part
from baton.engine.loader.rearranged import ByRows, rotated_first

PLUS_ONE = re.compile(r".*(layernorm|[qk]_norm|model\.norm)\.weight")


class Phi3Checkpoint(ByRows):
    """The `Checkpoint` of a Phi-3 model: reads `files`."""

    tensor = re.compile(r"(.*)\.(qkv_proj|gate_up_proj)\.(weight)")
    interleaved = False

    def _parts(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        config = self.config
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        match kind:
            case "gate_up_proj":
                rows = torch.arange(2 * config.intermediate_size)
                yield from zip(("gate_proj", "up_proj"), rows.chunk(2), strict=True)
            case "qkv_proj":
                q, k, v = torch.arange(queries + 2 * keys).split((queries, keys, keys))
                yield from (("q_proj", self._heads(q)), ("k_proj", self._heads(k)), ("v_proj", v))
            case _:
                yield kind, self._heads(torch.arange(queries if kind == "q_proj" else keys))

    def _heads(self, rows: Tensor) -> Tensor:
        """The rows of query or key heads, in our order."""
        config = self.config
        assert config.rotary_dim is not None, "the loader sets it for this architecture"
        order = rotated_first(config.head_dim, config.rotary_dim, interleaved=self.interleaved)
        return rows.view(-1, config.head_dim)[:, order].flatten()


class Glm4Checkpoint(Phi3Checkpoint):
    """The `Checkpoint` of a dense GLM-4 model: reads `files`."""

    tensor = re.compile(r"(.*)\.(q_proj|k_proj|gate_up_proj)\.(weight|bias)")
    interleaved = True


class Qwen3NextCheckpoint(ByRows):
    """The `Checkpoint` of a Qwen3-Next model: reads `files`."""

    tensor = re.compile(r"(.*)\.(in_proj_qkvz|in_proj_ba|conv1d|q_proj|k_proj|q_norm|k_norm)\.(weight|bias)")
    left_out = "mtp."

    def _parts(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """The tensors that the rows of a stored one belong to."""
        config, state = self.config, self.config.state
        assert state is not None, "the loader sets it for this architecture"
        order = rotated_first(config.head_dim, config.rotary_dim or 0)
        shared, keys = state.num_heads // state.groups, state.groups * state.state_size
        match kind:
            case "in_proj_qkvz":
                sizes = [state.state_size] * 2 + [shared * state.head_dim] * 2
                yield from zip(
                    ("in_proj_" + part for part in "qkvz"), _split(state.groups, sizes), strict=True
                )
            case "in_proj_ba":
                yield from zip(("in_proj_b", "in_proj_a"), _split(state.groups, [shared] * 2), strict=True)
            case "conv1d":
                queries, of_keys, values = torch.arange(state.channels).split((keys, keys, state.inner_size))
                yield kind, torch.cat((values, of_keys, queries))
            case "q_proj":
                queries, gates = _split(config.num_heads, [config.head_dim] * 2)
                yield kind, queries.view(-1, config.head_dim)[:, order].flatten()
                yield "gate_proj", gates
            case "k_proj":
                rows = torch.arange(config.num_kv_heads * config.head_dim)
                yield kind, rows.view(-1, config.head_dim)[:, order].flatten()
            case _:
                yield kind, order

    def read(self, name: str, parts: Sequence[Part]) -> Tensor:
        tensor = super().read(name, parts)
        return tensor.float() + 1 if PLUS_ONE.fullmatch(name) else tensor


def _split(count: int, sizes: Sequence[int]) -> list[Tensor]:
    """The rows of each of several parts, of which each of `count` heads or groups has all in a row."""
    rows = torch.arange(count * sum(sizes)).view(count, -1)
    return [part.flatten() for part in rows.split(list(sizes), dim=1)]
