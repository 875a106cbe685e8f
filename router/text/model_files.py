"""Finds the files of a model that a router reads, on disk or on the hub."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from baton.engine.gguf_header import GGUFHeader
from baton.engine.gguf_tokenizer import token_of, tokenizer_json
from baton.vision.images import PREPROCESSOR, PROCESSOR, ImageSettings, image_settings, processor_settings

TEMPLATE_FILES = {
    "default": "chat_template.jinja",
    "tool_use": "additional_chat_templates/tool_use.jinja",
}
HUB_FILES = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "config.json",
    "chat_template.json",
    "generation_config.json",
    PREPROCESSOR,
    PROCESSOR,
    *TEMPLATE_FILES.values(),
]

COMMON = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
IN_GGUF = {"unk": "unknown", "sep": "seperator", "pad": "padding"}  # as llama.cpp spells them

CONTEXTS = {"gemma3_text": 131072}
"""The context of models whose published configurations leave it out, by `model_type`."""


@dataclass(frozen=True)
class TextModel:
    """What a router reads from a Hugging Face directory or a GGUF file."""

    tokenizer: Tokenizer
    chat_template: str | None
    tool_use: str | None
    """The chat template for chats with tools, if they have one of their own."""
    special_tokens: Mapping[str, str]
    """Those that a chat template gets, by names such as "bos_token"."""


def locate(model: str, revision: str | None, flag: str = "--model") -> Path:
    """Returns the path of a model. For a hub id, downloads the tokenizer files, but no weights.

    Raises ValueError, which names the flag, when there is no such model.
    """
    path = Path(model).expanduser()
    if path.exists():
        return path
    if model.endswith(".gguf") or model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise ValueError(f"{flag} {model}: there is no such file or directory")
    # Late, since a local model does not need these slow imports.
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(huggingface_hub.snapshot_download(model, revision=revision, allow_patterns=HUB_FILES))
    except HFValidationError as error:
        raise ValueError(f"{flag} {model}: neither a path nor the id of a model on the hub") from error
    except (HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise ValueError(f"{flag} {model}: not a path, and the hub does not provide it: {error}") from error


def context_length(model: str, revision: str | None) -> int:
    """Tokens of the model's context: what workers take by default. Raises ValueError if it is not known.

    Of a model on the hub it downloads the small files."""
    path = locate(model, revision)
    if not path.is_dir():
        metadata = GGUFHeader(path).metadata
        length = metadata.get(f"{metadata.get('general.architecture')}.context_length")
        if length is None:
            raise ValueError(f"{path} does not say how long the model's context is")
        return length
    config = _read_json(path / "config.json")
    if isinstance(text := config.get("text_config"), dict):  # of a model that also sees images
        config = config | {key: value for key, value in text.items() if value is not None}
    names = "max_position_embeddings", "model_max_length", "n_positions"  # of Kimi-Linear, and of GPT-2
    named = CONTEXTS.get(config.get("model_type", ""))
    length = next((config[name] for name in names if name in config), named)
    if not isinstance(length, int) or length < 1:
        raise ValueError(f"{path / 'config.json'} has no max_position_embeddings")
    rope = config.get("rope_scaling") or config.get("rope_parameters")  # as the engine's loader
    if not isinstance(rope, dict) or rope.get("rope_type", rope.get("type")) != "yarn":
        return length
    original = rope.get("original_max_position_embeddings") or length
    factor = rope.get("factor") or length / original
    return max(length, round(factor * original))  # the length may be that before scaling


def images_of(path: Path) -> ImageSettings | None:
    """How the model at this path takes images. None: it takes none. Raises ValueError for settings that are
    wrong."""
    if not path.is_dir():
        return None
    processor = processor_settings(lambda name: _read_json(path / name))
    return image_settings(_read_json(path / "config.json"), processor, str(path))


def read_directory(path: Path) -> TextModel:
    """Reads a Hugging Face directory. Raises ValueError when a file is missing or malformed."""
    file = path / "tokenizer.json"
    if not file.is_file():
        other = (path / "tiktoken.model").is_file()
        remedy = " (its tiktoken.model can be converted: docs/troubleshooting.md)" if other else ""
        raise ValueError(f"{path} has no tokenizer.json{remedy}")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exceptions
        raise ValueError(f"{file} cannot be loaded: {error}") from error
    config = _read_json(path / "tokenizer_config.json")
    templates = _named(config.get("chat_template"), path / "tokenizer_config.json")
    if not templates:  # older models that see images have it there
        file = path / "chat_template.json"
        templates = _named(_read_json(file).get("chat_template"), file)
    for name, part in TEMPLATE_FILES.items():
        if (path / part).is_file():
            templates[name] = (path / part).read_text()
    tool_use = templates.get("tool_use")
    older = {} if "added_tokens_decoder" in config else _read_json(path / "special_tokens_map.json")
    tokens = _special_tokens({**older, **config})
    return TextModel(tokenizer, templates.get("default", tool_use), tool_use, tokens)


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """As transformers 5.23 gives them to templates: each `…_token`, and those that a further object names.
    Older files keep a token in an object."""
    named = {name: each for name, each in config.items() if name.endswith("_token")}
    for key in ("extra_special_tokens", "model_specific_special_tokens"):
        if isinstance(further := config.get(key), dict):
            named |= further
    texts = {name: each.get("content") if isinstance(each, dict) else each for name, each in named.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def read_gguf(path: Path) -> TextModel:
    """Reads a GGUF file. Raises ValueError if it is none, or has a tokenizer that is not supported."""
    header = GGUFHeader(path, vocabulary=True)
    tokenizer = Tokenizer.from_str(tokenizer_json(header))
    found = {name: token_of(header, IN_GGUF.get(name, name)) for name in COMMON}
    tokens = {f"{name}_token": token[0] for name, token in found.items() if token is not None}
    key = "tokenizer.chat_template"
    template, tool_use = header.metadata.get(key), header.metadata.get(f"{key}.tool_use")
    return TextModel(tokenizer, template, tool_use, tokens)


def _named(template: Any, file: Path) -> dict[str, str]:
    """Returns the templates of a configuration: one text, or a list of texts with names."""
    if isinstance(template, list):
        try:
            return {entry["name"]: str(entry["template"]) for entry in template}
        except (TypeError, KeyError):
            raise ValueError(
                f"{file}: chat_template must be a text, or a list of name and template"
            ) from None
    return {"default": str(template)} if template else {}


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds no JSON object")
    return value
