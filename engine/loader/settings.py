"""Reads the JSON files of a checkpoint, and checks the kind of each value."""

import json
import math
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

COUNTED = (
    "num_hidden_layers",
    "num_nextn_predict_layers",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
)
MOST_COUNTED = 4096
"""Of layers or experts. Lists have an entry for each."""


def read_json(path: Path) -> dict[str, Any]:
    """Raises `ValueError` naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: must be a JSON object")
    return value


class Settings:
    """Settings by their keys. Methods raise `ValueError` naming `source` and the key that is wrong. A setting
    without a default is needed; null stands for the default."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self.values = values
        self.source = source

    @property
    def architecture(self) -> str:
        named = self.values.get("architectures") or ["(none named)"]
        return str(named[0] if isinstance(named, list) else named)

    def get(self, name: str, default: Any = None) -> Any:
        """The value of any kind, also null."""
        return self.values.get(name, default)

    def unlike(self, supported: Mapping[str, Collection[Any]]) -> Iterator[str]:
        """Describes each of these settings that is neither null nor one of its supported values."""
        for name, values in supported.items():
            if self.get(name) not in (None, *values):
                yield f"{name} {self.get(name)!r} of {self.architecture}"

    def integer(self, name: str, default: int | None = None) -> int:
        """Above 0."""
        value = self.values.get(name)
        value = default if value is None else value
        if type(value) is not int or value < 1:
            raise ValueError(f"{self.source}: {name} must be a positive integer, not {value!r}")
        if name in COUNTED and value > MOST_COUNTED:
            raise ValueError(
                f"{self.source}: {name} {value} is not supported: it may be {MOST_COUNTED} at most"
            )
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Above 0."""
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
            raise ValueError(f"{self.source}: {name} must be a number above 0, not {value!r}")
        return float(value)

    def integers(self, name: str) -> list[int]:
        """No value stands for an empty list."""
        values = self.values.get(name) or []
        if not isinstance(values, list) or any(type(value) is not int for value in values):
            raise ValueError(f"{self.source}: {name} must be a list of integers, not {values!r}")
        return values
