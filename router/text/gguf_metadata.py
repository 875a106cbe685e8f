"""Reads the metadata of a GGUF file: vocabulary, chat template, context length.

The layout is https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The reader of the `gguf` package
takes three seconds for a vocabulary of 49,152, because it makes an array of every token and every merge.
"""

import mmap
import struct
from pathlib import Path
from typing import Any

_SCALARS = {
    kind: struct.Struct(f"<{code}")
    for kind, code in enumerate(("B", "b", "H", "h", "I", "i", "f", "?", None, None, "Q", "q", "d"))
    if code is not None
}
_STRING, _ARRAY = 8, 9
_UINT32, _UINT64 = _SCALARS[4], _SCALARS[10]
_HEADER = struct.Struct("<4sIQQ")


def read_metadata(path: Path) -> dict[str, Any]:
    """Returns scalars, strings and lists of these, by key.

    Raises ValueError when the file is not a complete GGUF file.
    """
    try:
        with path.open("rb") as file:
            return _Metadata(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)).read()
    except (OSError, ValueError, KeyError, OverflowError, struct.error) as error:
        raise ValueError(f"{path} cannot be read as GGUF: {error}") from error


def context_length(path: Path) -> int:
    """Tokens of the model's context. Raises ValueError if the file does not say it."""
    metadata = read_metadata(path)
    architecture = metadata.get("general.architecture")
    length = metadata.get(f"{architecture}.context_length")
    if length is None:
        raise ValueError(f"{path} does not say how long {architecture}'s context is")
    return length


class _Metadata:
    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def read(self) -> dict[str, Any]:
        magic, version, _, count = self._unpack(_HEADER)
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError("it does not begin like a file of version 2 or 3")
        return {self._string(): self._value(self._unpack(_UINT32)[0]) for _ in range(count)}

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._unpack(_SCALARS[kind])[0]
        (kind,), (count,) = self._unpack(_UINT32), self._unpack(_UINT64)
        if kind in _SCALARS:
            return list(self._unpack(struct.Struct(f"<{count}{_SCALARS[kind].format[-1]}")))
        if kind == _STRING:
            return self._strings(count)
        return [self._value(kind) for _ in range(count)]

    def _strings(self, count: int) -> list[str]:
        """Returns as many strings. A loop of its own, since a vocabulary has a hundred thousand."""
        data, at, found = self._data, self._at, []
        for _ in range(count):
            (length,) = _UINT64.unpack_from(data, at)
            at += _UINT64.size
            found.append(data[at : at + length].decode())
            at += length
        if at > len(data):
            raise ValueError("cut short in a list of strings")
        self._at = at
        return found

    def _string(self) -> str:
        (length,) = self._unpack(_UINT64)
        value = self._data[self._at : self._at + length]
        if len(value) < length:
            raise ValueError(f"cut short at byte {self._at}")
        self._at += length
        return value.decode()

    def _unpack(self, layout: struct.Struct) -> tuple[Any, ...]:
        values = layout.unpack_from(self._data, self._at)
        self._at += layout.size
        return values
