"""Checkpoints in Hugging Face format: config.json, generation_config.json, *.safetensors."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.loader.hf_config import model_config_from_hf
from engine.model_config import ModelConfig

INDEX = "model.safetensors.index.json"


def read_config(directory: Path) -> ModelConfig:
    """Raises `ValueError` naming the file and the key that is wrong."""
    path = directory / "config.json"
    if not path.is_file():
        raise ValueError(f"{directory}: no config.json in there, so it is no model directory")
    generation = directory / "generation_config.json"
    return model_config_from_hf(
        _read_json(path), _read_json(generation) if generation.is_file() else {}, str(path)
    )


class HFCheckpoint:
    def __init__(self, directory: Path) -> None:
        self.config = read_config(directory)
        self.source = str(directory)
        index = directory / INDEX
        self._file_of: dict[str, Path] = {}
        if index.is_file():
            shards = _read_json(index).get("weight_map", {})
            files = {name: directory / name for name in sorted(set(shards.values()))}
        else:
            shards = None
            files = {path.name: path for path in sorted(directory.glob("*.safetensors"))}
        if not files:
            raise ValueError(
                f"{directory}: no *.safetensors in there (other weight formats are not supported)"
            )
        self._handles = {path: _open(path) for path in files.values()}
        for path, handle in self._handles.items():
            self._file_of.update(dict.fromkeys(handle.keys(), path))
        for name, shard in (shards or {}).items():
            if self._file_of.get(name) != files[shard]:
                raise ValueError(f"{files[shard]}: tensor {name} is missing, though {INDEX} says it is there")

    def names(self) -> Collection[str]:
        return self._file_of.keys()

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        path = self._file_of[name]
        try:
            return self._handles[path].get_tensor(name)
        except SafetensorError as error:
            raise ValueError(f"{path}: tensor {name} cannot be read: {error}") from error


def _open(path: Path) -> Any:
    if not path.is_file():
        raise ValueError(f"{path}: missing, though {INDEX} names it; the download is incomplete")
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{path}: corrupt or cut short, download it again: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: must be a JSON object")
    return value
