"""Loads checkpoints in tests, and edits copies of them."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from baton.engine import Engine, EngineConfig, build_engine
from baton.engine.loader import check_model


def load(path: Path, **config: Any) -> Engine:
    settings: dict[str, Any] = {"model": str(path), "dtype": "float32", "num_blocks": 8, **config}
    return build_engine(EngineConfig(**settings))


def config_of(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "config.json").read_text())


@contextmanager
def edited_tensors(directory: Path) -> Iterator[dict[str, Tensor]]:
    """The tensors of a checkpoint, which is written with what the block makes of them."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    yield tensors
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, {"format": "pt"})


def assert_refused(directory: Path, message: str, **config: Any) -> None:
    """By the check, which raises what loading would raise, and reads no weight."""
    with pytest.raises(ValueError, match=message):
        check_model(EngineConfig(str(directory), **config))


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edited_copy(path: Path, tmp_path: Path, **changes: Any) -> Path:
    """A copy of a checkpoint with these changes in its configuration."""
    copy = shutil.copytree(path, tmp_path / "copy")
    edit_json(copy / "config.json", **changes)
    return copy


def flip_last_tensor(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-200:] = bytes(200)
    path.write_bytes(data)


def is_refused(read: Callable[[], Any], source: str) -> bool:
    """Whether this raises a `ValueError` that names `source`. Any other exception fails the test."""
    try:
        read()
    except ValueError as error:
        if not str(error).startswith(f"{source}: "):
            raise
        return True
    return False
