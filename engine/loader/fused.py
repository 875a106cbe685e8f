"""Checkpoints of Phi-3 and GLM-4 in the form of other families.

- One tensor has the rows of query, key and value (Phi-3), and one those of gate and up.
- The first dimensions of a head are rotated, as in `engine.loader.hybrid`. GLM-4 stores their halves in
  turns. Query and key heads take our order when they are read.
"""

import re
from collections.abc import Iterator

import torch
from torch import Tensor

from baton.engine.loader.rows import ByRows, rotated_first


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
