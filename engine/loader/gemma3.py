"""Checkpoints of Gemma 3 in the form of other families.

- A checkpoint that sees images, too, has its text model under the prefix `language_model.`. The rest of its
  tensors is left out.
- Norms multiply by 1 + weight. Here the weight has the 1 already.
"""

from collections.abc import Sequence

from torch import Tensor

from baton.engine.layers.ranks import Part
from baton.engine.layers.weights import Checkpoint
from baton.engine.loader.rearranged import Piece, Rearranged, of_text


class Gemma3Checkpoint(Rearranged[Piece]):
    """The `Checkpoint` of a Gemma 3 text model: reads `files`."""

    def __init__(self, files: Checkpoint) -> None:
        super().__init__(files)
        self._stored = of_text(files)

    def read(self, name: str, parts: Sequence[Part]) -> Tensor:
        tensor = self._files.read(self._stored[name], parts)
        return tensor.float() + 1 if name.endswith("norm.weight") else tensor
