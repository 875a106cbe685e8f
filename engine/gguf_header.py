"""The header of a GGUF file, llama.cpp's format: its metadata, and where its tensors are.

The layout is described in https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The reader of the `gguf`
package takes three seconds for a vocabulary of 49,152, because it makes an array of every token and every
merge.
"""

import mmap
import re
import struct
from pathlib import Path
from typing import Any

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
LENGTH = struct.Struct("<Q")
PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


class GGUFHeader:
    """The parsed header, and the mapped file.

    Attributes:
        metadata: scalars, strings and arrays by key. Lists of strings belong to the tokenizer, and are None
            without `vocabulary`.
        tensors: by name the shape, outermost dimension first as in torch; the number of the type; and the
            first byte, counted from the beginning of the data section.
        end: the byte behind the header.
    """

    def __init__(self, path: Path, *, vocabulary: bool = False) -> None:
        """Raises `ValueError` naming the file if the header is not complete."""
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, tuple[tuple[int, ...], int, int]] = {}
        self._vocabulary = vocabulary
        try:
            if not path.stat().st_size:
                raise ValueError(f"{path}: empty; download it again")
            with path.open("rb") as file:
                self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error}") from error
        self.end = 0
        try:
            self._parse()
        except (struct.error, OverflowError) as error:  # whose text is about buffers
            raise ValueError(f"{path}: corrupt or cut short at byte {self.end}; download it again") from error
        except (UnicodeDecodeError, KeyError) as error:
            raise ValueError(f"{path}: corrupt or cut short at byte {self.end}: {error}") from error

    def _parse(self) -> None:
        magic, version, num_tensors, num_entries = self._unpack("4sIQQ")
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError(f"{self.path}: not a GGUF file of version 2 or 3")
        for _ in range(num_entries):
            key = self._string()
            (kind,) = self._unpack("I")
            self.metadata[key] = self._value(kind)
        for _ in range(num_tensors):
            name = self._string()
            (dimensions,) = self._unpack("I")
            shape = self._unpack(f"{dimensions}Q")[::-1]
            self.tensors[name] = shape, *self._unpack("IQ")

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind != ARRAY:
            return self._unpack(SCALARS[kind])[0]
        kind, count = self._unpack("IQ")
        if kind != STRING:
            return self._unpack(f"{count}{SCALARS[kind]}")
        data, at, length_at, texts = self.data, self.end, LENGTH.unpack_from, []
        for _ in range(count):  # a hundred thousand in a vocabulary
            begin = at + LENGTH.size
            at = begin + length_at(data, at)[0]
            if self._vocabulary:
                texts.append(data[begin:at].decode())
        self._advance(at)
        return texts if self._vocabulary else None

    def _string(self) -> str:
        (length,) = LENGTH.unpack_from(self.data, self.end)
        begin = self.end + LENGTH.size
        self._advance(begin + length)
        return self.data[begin : self.end].decode()

    def _advance(self, to: int) -> None:
        self.end = to
        if to > len(self.data):
            raise OverflowError("a string is longer than the file")

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + layout, self.data, self.end)
        self.end += struct.calcsize("<" + layout)
        return values


def parts_of(path: Path) -> list[Path]:
    """The files of a checkpoint in several, if this is the name of the first. Others are alone."""
    named = PART.fullmatch(path.name)
    if named is None or int(named[2]) != 1:
        return [path]
    count = int(named[3])
    return [path.with_name(f"{named[1]}-{part:05}-of-{count:05}.gguf") for part in range(1, count + 1)]
