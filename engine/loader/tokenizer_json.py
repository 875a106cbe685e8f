"""Reads a model's tokenizer as Hugging Face's tokenizer.json, its vocabulary alone, or its EOS."""

import json
from pathlib import Path

from baton.engine import gguf_tokenizer
from baton.engine.gguf_header import GGUFHeader
from baton.engine.loader.settings import read_json


def tokenizer_json(source: str) -> str:
    """The text of tokenizer.json for a checkpoint's directory or GGUF file. Raises `ValueError` if there is
    no tokenizer, or if its kind is not supported."""
    path = Path(source)
    if path.is_file():
        return gguf_tokenizer.tokenizer_json(GGUFHeader(path, vocabulary=True))
    try:
        return (path / "tokenizer.json").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path / 'tokenizer.json'} cannot be read: {error}") from error


def vocabulary(source: str) -> dict[str, int]:
    """Text of each token, as the file spells it → its id. Empty if the checkpoint has no tokenizer. Raises
    `ValueError` if tokenizer.json is not a tokenizer."""
    path = Path(source)
    if path.is_file():
        tokens = GGUFHeader(path, vocabulary=True).metadata.get("tokenizer.ggml.tokens") or []
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


def eos_of_tokenizer(source: str) -> int | None:
    """The end token that the configuration of a directory's tokenizer names. Many fine-tunes of chats change
    it there alone. None: it names none, or `source` is a file, whose metadata the model's configuration has.
    Raises `ValueError` if its files are no JSON."""
    for file in (Path(source) / "tokenizer_config.json", Path(source) / "special_tokens_map.json"):
        token = read_json(file).get("eos_token") if file.is_file() else None
        token = token.get("content") if isinstance(token, dict) else token  # older files have objects
        if token is not None:
            return vocabulary(source).get(token)
    return None
