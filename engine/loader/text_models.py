"""Checkpoints of Llama 4 and Gemma 3, in the form of other families.

Some see images, too. Such a checkpoint has its text model under the prefix `language_model.`. The rest of its
tensors is left out.

Gemma 3:
- Norms multiply by 1 + weight. Here the weight has the 1 already.

Llama 4:
- The halves of rotated heads are interleaved.
- A layer has two tensors for all its experts, transposed: `gate_up_proj` [experts, hidden_size, 2 * inner]
  and `down_proj` [experts, inner, hidden_size]. Here each expert has three tensors.
"""

import re
from collections.abc import Iterator, Sequence
from functools import partial

from torch import Tensor

from baton.engine.layers.ranks import Part
from baton.engine.layers.weights import Checkpoint
from baton.engine.loader.rearranged import Piece, Rearranged, halves

TEXT = "language_model."
ROTATED = re.compile(r"\.self_attn\.[qk]_proj\.(weight|bias)$")
FUSED = re.compile(r"(.*\.experts)\.(gate_up|down)_proj$")


def of_text(files: Checkpoint) -> dict[str, str]:
    """The tensors of the text model, by the names that they would have alone. A checkpoint that sees images,
    too, has them under a prefix."""
    prefix = TEXT if any(name.startswith(TEXT) for name in files.names()) else ""
    return {name.removeprefix(prefix): name for name in files.names() if name.startswith(prefix)}


class Gemma3Checkpoint(Rearranged):
    """The `Checkpoint` of a Gemma 3 text model: reads `files`."""

    def __init__(self, files: Checkpoint) -> None:
        super().__init__(files)
        self._stored = of_text(files)

    def read(self, name: str, parts: Sequence[Part]) -> Tensor:
        tensor = super().read(name, parts)
        return tensor.float() + 1 if name.endswith("norm.weight") else tensor


class Llama4Checkpoint(Rearranged):
    """The `Checkpoint` of a Llama 4 text model: reads `files`, and gives each expert its tensors."""

    def __init__(self, files: Checkpoint) -> None:
        super().__init__(files)
        for name, stored in of_text(files).items():
            if fused := FUSED.match(name):
                self._pieces.update(self._split(stored, *fused.groups()))
            elif ROTATED.search(name):
                self._pieces[name] = self._in_order(stored, halves(self.config.head_dim))
            else:
                self._stored[name] = stored

    def _split(self, stored: str, experts: str, kind: str) -> Iterator[tuple[str, Piece]]:
        """The matrices of a tensor with all experts, by the names that they would have alone."""
        shape = self._files.shape(stored)
        names = ["gate", "up"] if kind == "gate_up" else ["down"]
        if shape is None or len(shape) != 3 or 0 in shape or shape[2] % len(names):
            raise ValueError(f"{self._files.file_of(stored)}: tensor {stored} is {shape}, not of experts")
        count, columns, rows = shape
        size = rows // len(names)
        for expert in range(count):
            for i, name in enumerate(names):
                read = partial(self._read_matrix, stored, Part(expert, expert + 1, count), i * size, rows)
                yield f"{experts}.{expert}.{name}_proj.weight", Piece(stored, (size, columns), read)

    def _read_matrix(self, stored: str, expert: Part, first: int, size: int, parts: Sequence[Part]) -> Tensor:
        """Of one expert, in a stored tensor [experts, columns, rows]: rows from `first` on."""
        rows, columns = parts
        stored_rows = Part(first + rows.start, first + rows.stop, size)
        return self._files.read(stored, [expert, columns, stored_rows])[0].T
