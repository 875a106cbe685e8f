"""Loads checkpoints in tests, and edits copies of them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from baton.engine import Engine, EngineConfig, build_engine


def load(path: Path, **config: Any) -> Engine:
    settings: dict[str, Any] = {"model": str(path), "dtype": "float32", "num_blocks": 8, **config}
    return build_engine(EngineConfig(**settings))


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
