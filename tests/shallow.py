"""The embedded model with fewer layers and tokens, for tests that start workers and need no sensible text.

An engine loads it in a fifth of the time, and a step takes a tenth. The logits of the best two tokens are a
hundred times as far apart as another batch changes them in float32.
"""

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from baton.engine.gguf_header import ARRAY, STRING, GGUFHeader

LAYERS = 4
VOCABULARY = 8192
"""The first tokens: special ones, single bytes, and what the first merges make, so texts need no others."""
_HEADER = struct.Struct("<4sIQQ")
"""Magic, version, number of tensors, number of metadata entries."""
_UINT32, _INT32, _ALIGNMENT = 4, 5, 32
_TOKENIZER = "tokenizer.ggml"


class _Entries(GGUFHeader):
    """Also knows where each entry of the metadata ends."""

    def __init__(self, path: Path) -> None:
        self.ends: list[int] = []
        super().__init__(path, vocabulary=True)

    def _value(self, kind: int) -> Any:
        value = super()._value(kind)
        self.ends.append(self.end)
        return value


def shallow(source: Path, target: Path, *, backwards: bool = False) -> Path:
    """Writes the GGUF file `source` with its first `LAYERS` layers and `VOCABULARY` tokens to `target`.
    `backwards`: the layers in the other order, which is the same model with other weights. Returns
    `target`."""
    file = _Entries(source)
    names = ("tokens", "merges", "token_type")
    tokens, merges, types = (file.metadata[f"{_TOKENIZER}.{name}"] for name in names)
    others = len(tokens) - len(merges)  # each merge makes the next token after these
    changed = {
        "llama.block_count": struct.pack("<II", _UINT32, LAYERS),
        "llama.vocab_size": struct.pack("<II", _UINT32, VOCABULARY),
        f"{_TOKENIZER}.tokens": _array(STRING, _strings(tokens[:VOCABULARY])),
        f"{_TOKENIZER}.merges": _array(STRING, _strings(merges[: VOCABULARY - others])),
        f"{_TOKENIZER}.token_type": _array(_INT32, [struct.pack("<i", each) for each in types[:VOCABULARY]]),
    }
    entries = []
    for key, begin, end in zip(file.metadata, [_HEADER.size, *file.ends], file.ends, strict=False):
        kept = file.data[begin:end]
        entries.append(_string(key) + changed[key] if key in changed else kept)
    described, weights, at = [], [], 0
    start = file.end + -file.end % file.metadata.get("general.alignment", _ALIGNMENT)
    ends = [*(offset for _, _, offset in file.tensors.values()), len(file.data) - start][1:]
    for (name, (shape, kind, begin)), end in zip(file.tensors.items(), ends, strict=True):
        if name.startswith("blk.") and int(name.split(".")[1]) >= LAYERS:
            continue
        if shape[0] == len(tokens):
            end = begin + (end - begin) // len(tokens) * VOCABULARY
            shape = (VOCABULARY, *shape[1:])
        if backwards and name.startswith("blk."):
            _, layer, rest = name.split(".", 2)
            name = f"blk.{LAYERS - 1 - int(layer)}.{rest}"
        described.append(
            _string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, at)
        )
        weights.append(file.data[start + begin : start + end])
        weights.append(bytes(-(end - begin) % _ALIGNMENT))
        at += len(weights[-2]) + len(weights[-1])
    magic, version, *_ = _HEADER.unpack_from(file.data)
    header = b"".join([_HEADER.pack(magic, version, len(described), len(entries)), *entries, *described])
    target.write_bytes(b"".join([header, bytes(-len(header) % _ALIGNMENT), *weights]))
    return target


def _string(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _strings(texts: Sequence[str]) -> list[bytes]:
    return [*map(_string, texts)]


def _array(kind: int, values: Sequence[bytes]) -> bytes:
    return struct.pack("<IIQ", ARRAY, kind, len(values)) + b"".join(values)
