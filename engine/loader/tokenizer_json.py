"""Reads a model's tokenizer as Hugging Face's tokenizer.json, or its vocabulary alone."""

import json
from pathlib import Path
from typing import Any

from gguf.constants import TokenType

from baton.engine.loader.gguf_file import GGUFFile


def tokenizer_json(source: str) -> str:
    """The text of tokenizer.json for a checkpoint's directory or GGUF file. Raises `ValueError` if there is
    no tokenizer, or if its kind is not supported."""
    path = Path(source)
    if path.is_file():
        return json.dumps(_from_gguf(path))
    try:
        return (path / "tokenizer.json").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path / 'tokenizer.json'} cannot be read: {error}") from error


def vocabulary(source: str) -> dict[str, int]:
    """Text of each token, as the file spells it → its id. Empty if the checkpoint has no tokenizer. Raises
    `ValueError` if tokenizer.json is not a tokenizer."""
    path = Path(source)
    if path.is_file():
        tokens = GGUFFile(path, vocabulary=True).metadata.get("tokenizer.ggml.tokens") or []
        return {token: token_id for token_id, token in enumerate(tokens)}
    if not (path / "tokenizer.json").is_file():
        return {}
    try:
        tokenizer = json.loads(tokenizer_json(source))
        tokens = tokenizer["model"]["vocab"]
        if isinstance(tokens, list):  # a Unigram model has pairs of a token and its score
            tokens = {token: token_id for token_id, (token, _) in enumerate(tokens)}
        added = {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or ()}
        return {**tokens, **added}
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path / 'tokenizer.json'} is not a tokenizer: {error!r}") from error


def _from_gguf(path: Path) -> dict[str, Any]:
    """A byte-level BPE tokenizer. All files are assumed to split text as GPT-2 does. Where a model splits
    differently, only the preferred spelling of a text differs."""
    metadata = GGUFFile(path, vocabulary=True).metadata
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ValueError(f"{path} has a tokenizer of kind {kind!r}; for GGUF files only 'gpt2' is supported")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    types: list[int] = metadata.get("tokenizer.ggml.token_type", [])
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": token_id, "content": token, "special": token_type == TokenType.CONTROL, **plain}
            for token_id, (token, token_type) in enumerate(zip(tokens, types, strict=False))
            if token_type in (TokenType.CONTROL, TokenType.USER_DEFINED)
        ],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": {token: token_id for token_id, token in enumerate(tokens)},
            "merges": metadata["tokenizer.ggml.merges"],
        },
    }
