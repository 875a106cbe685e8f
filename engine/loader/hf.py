"""Checkpoints in Hugging Face format: config.json, generation_config.json, *.safetensors or dummy weights.

A trainer may give tensors in its GPU memory in place of those in a file (`engine.loader.device_file`).
"""

import hashlib
import logging
from collections.abc import Collection, Sequence
from copy import copy
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from baton.engine import trainer_files
from baton.engine.layers.ranks import Shard
from baton.engine.layers.weights import Checkpoint
from baton.engine.loader import device_file
from baton.engine.loader.device_file import DeviceFile
from baton.engine.loader.hf_config import read_config
from baton.engine.loader.rearranged import Files
from baton.engine.loader.settings import read_json
from baton.engine.model_config import ModelConfig

log = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"
OTHER_FORMATS = ["*/*", "consolidated*"]
"""Files in which a repository has the same weights once more, as those of Meta, Mistral and OpenAI."""


class HFCheckpoint(Files):
    """A checkpoint in a directory. Its files are mapped, so `read` returns tensors in the page cache."""

    def __init__(
        self, directory: Path, config: ModelConfig | None = None, device: torch.device | None = None
    ) -> None:
        """`config` None: that of the directory. `device`: of the model; None: none is loaded."""
        self.config = config or read_config(directory)
        self.source = str(directory)
        index = directory / INDEX
        shard_of = _read_index(index) if index.is_file() else {}
        paths = [directory / name for name in sorted({*shard_of.values()})]
        paths = paths or sorted(
            path
            for kind in (".safetensors", trainer_files.SUFFIX)
            for path in directory.glob(f"*{kind}")
            if not fnmatch(path.name, OTHER_FORMATS[1])
        )
        if not paths:
            raise ValueError(
                f"{directory}: no *.safetensors in there (other weight formats are not supported)"
            )
        self._handles = {path: _open(path, device) for path in paths}
        self.copies = any(isinstance(handle, DeviceFile) for handle in self._handles.values())
        self._file_of: dict[str, Path] = {}
        further: list[str] = []  # which the index leaves out
        for path, handle in self._handles.items():
            for name in handle.keys():  # noqa: SIM118, not a dictionary
                if shard_of and shard_of.get(name) != path.name:
                    further.append(f"{name} of {path.name}")
                elif name in self._file_of:
                    raise ValueError(f"{path}: tensor {name} is in {self._file_of[name].name} too")
                else:
                    self._file_of[name] = path
        if further:
            log.warning(
                "%s: files have %d tensors that %s does not name there, such as %s: they are left out",
                directory, len(further), INDEX, min(further),
            )  # fmt: skip
        for name, shard in shard_of.items():
            if name not in self._file_of:
                raise ValueError(
                    f"{directory / shard}: tensor {name} is missing, though {INDEX} says it is there"
                )

        layers = self.config.num_layers
        # The prefixes of the layers that predict further tokens.
        self._further = tuple(f"model.layers.{layers + i}." for i in range(self.config.further_layers))
        self._names = [name for name in self._file_of if not name.startswith(self._further)]

    def names(self) -> Collection[str]:
        return self._names

    def next_token_layer(self) -> "HFCheckpoint | None":
        if not self._further:
            return None
        of_layer, copies = copy(self), ("embed_tokens.weight", "shared_head.head.weight")
        layer = [name for name in self._file_of if name.startswith(self._further[:1])]
        of_layer._names = [name for name in layer if not name.endswith(copies)]
        return of_layer

    def file_of(self, name: str) -> str:
        return str(self._file_of.get(name, self.source))

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._handles[self._file_of[name]].get_slice(name).get_shape())

    def read(self, name: str, parts: Sequence[Shard]) -> Tensor:
        path = self._file_of[name]
        handle = self._handles[path]
        if isinstance(handle, DeviceFile):
            return handle.read(name, parts)
        try:
            return handle.get_tensor(name)[tuple(part.indices for part in parts)]
        except SafetensorError as error:
            raise ValueError(f"{path}: tensor {name} cannot be read: {error}") from error


class DummyCheckpoint(Checkpoint):
    """Random weights in a model's shape, for benchmarks without a download. Each tensor depends only on seed,
    name and kind of device."""

    def __init__(self, config: ModelConfig, source: str, seed: int, device: torch.device) -> None:
        self.config = config
        self.source = source
        self._seed = seed
        self._device = device

    def of(self, config: ModelConfig) -> "DummyCheckpoint":
        """Weights of another shape."""
        return DummyCheckpoint(config, self.source, self._seed, self._device)

    def next_token_layer(self) -> "DummyCheckpoint | None":
        return self if self.config.further_layers else None

    def names(self) -> Collection[str]:
        return ()

    def file_of(self, name: str) -> str:
        return self.source

    def shape(self, name: str) -> None:
        return None

    def read(self, name: str, parts: Sequence[Shard]) -> Tensor:
        return self._whole(name, [part.size for part in parts])[tuple(part.indices for part in parts)]

    def _whole(self, name: str, shape: Sequence[int]) -> Tensor:
        if name.endswith("norm.weight") or name == "rope_freqs.weight":
            return torch.ones(shape, device=self._device)
        digest = hashlib.sha256(f"{self._seed} {name}".encode()).digest()
        generator = torch.Generator(self._device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        return torch.empty(shape, device=self._device).normal_(std=0.02, generator=generator)


def _read_index(path: Path) -> dict[str, str]:
    """Name of a tensor → name of the file that has it."""
    shard_of = read_json(path).get("weight_map")
    if not isinstance(shard_of, dict) or not shard_of:
        raise ValueError(f"{path}: has no weight_map with the file of each tensor")
    for name, shard in shard_of.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise ValueError(f"{path}: tensor {name} must be in a file of this directory, not in {shard!r}")
    return shard_of


def _open(path: Path, device: torch.device | None) -> Any:
    if path.name.endswith(trainer_files.SUFFIX):
        return DeviceFile(path, device_file.check_device(path, device))
    if not path.is_file():
        raise ValueError(
            f"{path}: missing, though its directory or {INDEX} names it; the download is incomplete"
        )
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{path}: corrupt or cut short, download it again: {error}") from error
