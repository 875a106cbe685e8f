"""The header of a GGUF file: whole, or refused by the name of the file."""

import struct
from pathlib import Path

import pytest

from baton.engine.gguf_header import GGUFHeader


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def test_a_file_with_a_vocabulary_alone_lacks_no_byte(tmp_path: Path) -> None:
    """Such files have no tensor, so the last text ends the file."""
    path = tmp_path / "vocabulary.gguf"
    tokens = string("tokens") + struct.pack("<IIQ", 9, 8, 2) + string("one") + string("two")
    kind = string("kind") + struct.pack("<I", 8) + string("x")
    whole = struct.pack("<4sIQQ", b"GGUF", 3, 0, 2) + tokens + kind
    path.write_bytes(whole)
    assert GGUFHeader(path, vocabulary=True).metadata == {"tokens": ["one", "two"], "kind": "x"}
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"vocabulary\.gguf: (empty|corrupt or cut short at byte)"):
            GGUFHeader(path, vocabulary=True)
