"""Checkpoints of Qwen3-Next in the form of other families.

- Some matrices have the rows of several: each group of value heads has its queries, keys, values and gates in
  a row, and each query head has its gate. Here each has a matrix of its own.
- The channels of the convolution are queries, keys and values. Here they come in the order of `gated_delta`.
- The first dimensions of a head are rotated, as in `engine.loader.hybrid`. Heads and their norms take our
  order.
- Norms multiply by 1 + weight. Here the weight has the 1 already.

The layers that predict several tokens (`mtp`) are left out.
"""

import re
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from baton.engine.layers.ranks import Part
from baton.engine.loader.rows import ByRows, rotated_first

PLUS_ONE = re.compile(r".*(layernorm|[qk]_norm|model\.norm)\.weight")


class Qwen3NextCheckpoint(ByRows):
    """The `Checkpoint` of a Qwen3-Next model: reads `files`."""

    tensor = re.compile(r"(.*)\.(in_proj_qkvz|in_proj_ba|conv1d|q_proj|k_proj|q_norm|k_norm)\.(weight|bias)")
    left_out = "mtp."

    def _parts(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """The tensors that the rows of a stored one belong to."""
        config, mamba = self.config, self.config.mamba
        assert mamba is not None, "the loader sets it for this architecture"
        order = rotated_first(config.head_dim, config.rotary_dim or 0)
        shared, keys = mamba.num_heads // mamba.groups, mamba.groups * mamba.state_size
        match kind:
            case "in_proj_qkvz":
                sizes = [mamba.state_size] * 2 + [shared * mamba.head_dim] * 2
                yield from zip(
                    ("in_proj_" + part for part in "qkvz"), _split(mamba.groups, sizes), strict=True
                )
            case "in_proj_ba":
                yield from zip(("in_proj_b", "in_proj_a"), _split(mamba.groups, [shared] * 2), strict=True)
            case "conv1d":
                queries, of_keys, values = torch.arange(mamba.channels).split((keys, keys, mamba.inner_size))
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
