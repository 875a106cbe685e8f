"""Random checkpoints of tiny models without transformers, which takes three seconds to import."""

import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from baton.engine.layers.ranks import Shard
from baton.engine.layers.weights import DeclaredWeights, PlainFormat
from baton.engine.loader.families import model_class
from baton.engine.loader.hf import DummyCheckpoint
from baton.engine.loader.hf_config import read_config
from tests.engine.conftest import TINY, tiny_of_kind


class _Declared(DummyCheckpoint):
    """Notes the shapes of the tensors that a model asks for."""

    def __init__(self, directory: Path) -> None:
        super().__init__(read_config(directory), str(directory), 0, torch.device("cpu"))
        self.shapes: dict[str, list[int]] = {}

    def read(self, name: str, parts: Sequence[Shard]) -> Tensor:
        self.shapes[name] = [part.size for part in parts]
        return super().read(name, parts)


def save_random(directory: Path, kind: str, **changes: Any) -> None:
    """Writes a model of this kind as `save_tiny` does, but with tensors in the form of most families: for
    some kinds the fixture `one_form` has to say so."""
    architecture = f"{kind.removesuffix('Text')}ForCausalLM"
    config: dict[str, Any] = {"architectures": [architecture], "dtype": "float32", **TINY}
    config |= tiny_of_kind(kind) | changes
    (directory / "config.json").write_text(json.dumps(config))
    declared = _Declared(directory)
    weights = DeclaredWeights(declared, PlainFormat(), sampled=True)
    model_class(declared.config, declared.source)(declared.config, weights)
    tensors: dict[str, Tensor] = {}
    for name, shape in declared.shapes.items():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))  # in whatever order models read
        values = torch.randn(shape, generator=generator)
        is_matrix = name.endswith(".weight") and not name.endswith("norm.weight")
        # Matrices as in `TINY`. Else zeros and ones would prove nothing.
        tensors[name] = values * config["initializer_range"] if is_matrix else 1 + values.clamp(-2, 2) / 4
    save_file(tensors, directory / "model.safetensors")
