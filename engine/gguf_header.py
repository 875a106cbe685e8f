"""The header of a GGUF file, llama.cpp's format: its metadata, where its tensors are, and its tokenizer.

The layout is described in https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The reader of the `gguf`
package takes three seconds for a vocabulary of 49,152, because it makes an array of every token and every
merge.
"""

import json
import mmap
import struct
from pathlib import Path
from typing import Any

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
LENGTH = struct.Struct("<Q")
CONTROL, USER_DEFINED = 3, 4  # types of tokens

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2 = None  # the rule of the pre-tokenizer itself
SPLITS = {
    **dict.fromkeys(("default", "gpt-2", "smollm"), _GPT2),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), _LLAMA3),
    "qwen2": _QWEN2,
    "tekken": _TEKKEN,
}
"""The rules that split text before the merges, by their names in a file."""


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


def token_of(header: GGUFHeader, name: str) -> tuple[str, int] | None:
    """The text and the id of a special token, such as "bos". None: the model has none."""
    token_id = header.metadata.get(f"tokenizer.ggml.{name}_token_id")
    return None if token_id is None else (header.metadata["tokenizer.ggml.tokens"][token_id], token_id)


def tokenizer_json(header: GGUFHeader) -> str:
    """The tokenizer as the text of Hugging Face's tokenizer.json, from a header with its vocabulary.

    Only byte-level BPE is supported ("gpt2" in the file), built in the same way as transformers builds it.
    The file has only the name of the rule that splits text before the merges, for example "smollm". The
    tokenizer.json of that model also splits off every digit, which changes the tokens of several spaces
    before a digit. For a GGUF file transformers does not do that. Raises `ValueError` naming the file for
    another kind or rule."""
    get, path = header.metadata.get, header.path
    kind, split = get("tokenizer.ggml.model"), get("tokenizer.ggml.pre", "gpt-2")
    if kind != "gpt2":
        raise ValueError(f"{path} has a tokenizer of kind {kind!r}; of GGUF files only 'gpt2' is supported")
    tokens, merges = get("tokenizer.ggml.tokens"), get("tokenizer.ggml.merges")
    if not isinstance(tokens, list) or not isinstance(merges, list):
        raise ValueError(f"{path} has no vocabulary (tokenizer.ggml.tokens and merges)")
    if split not in SPLITS:
        raise ValueError(f"{path} splits text as {split!r}; supported are {', '.join(sorted(SPLITS))}")
    rule = SPLITS[split]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    steps: list[dict[str, Any]] = [byte_level | {"use_regex": rule is None}]
    if rule is not None:
        steps.insert(
            0, {"type": "Split", "pattern": {"Regex": rule}, "behavior": "Isolated", "invert": False}
        )
    types = get("tokenizer.ggml.token_type") or ()
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [
            {"id": token_id, "content": token, "special": token_type == CONTROL, **plain}
            for token_id, (token, token_type) in enumerate(zip(tokens, types, strict=False))
            if token_type in (CONTROL, USER_DEFINED)
        ],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": byte_level | {"use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": {token: token_id for token_id, token in enumerate(tokens)},
            "merges": merges,
        },
    }
    if get("tokenizer.ggml.add_bos_token", False) and (bos := token_of(header, "bos")) is not None:
        text, token_id = bos
        single = [{"SpecialToken": {"id": text, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
        special = {text: {"id": text, "ids": [token_id], "tokens": [text]}}
        tokenizer["post_processor"] = {
            "type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": special,
        }  # fmt: skip
    return json.dumps(tokenizer)
