"""The tokenizer of a GGUF file as the text of Hugging Face's tokenizer.json.

A file has the vocabulary, and only the name of the rules that split text before the merges
(`tokenizer.ggml.pre`). The rules are those of llama.cpp (src/llama-vocab.cpp at 00ad355e). Where these only
come near the expressions of the models' own tokenizer.json (tekken, gpt-4o), they are the models' own.
"""

import json
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple

from baton.engine.gguf_header import GGUFHeader

REMEDY = "name a directory with the model's tokenizer.json with --tokenizer"
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # types of tokens

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35 = _QWEN2.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_OTHER = r"[^\r\n\p{L}\p{N}]?"
_TEKKEN = (
    rf"{_OTHER}{_UPPER}*{_LOWER}+|{_OTHER}{_UPPER}+{_LOWER}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_GPT4O = (
    rf"{_OTHER}{_UPPER}*{_LOWER}+{_CONTRACTION}?|{_OTHER}{_UPPER}+{_LOWER}*{_CONTRACTION}?|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)


class Rules(NamedTuple):
    splits: tuple[str, ...]
    """Each splits what the one before has left: its matches, and what is between them."""
    whole: bool = False
    """Whether a piece that is a token is taken whole, whatever the merges."""
    bos: bool = False
    """Whether a text begins with BOS if the file does not say so."""


_EXACT = Rules((_LLAMA3,), whole=True, bos=True)
RULES: Mapping[str, Rules] = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "lfm2", "pixtral"), _EXACT),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), Rules((_LLAMA3,))),
    **dict.fromkeys(
        ("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez", "solar-open", "grok-2"),
        Rules((_QWEN2,)),
    ),
    "qwen35": Rules((_QWEN35,)),
    "tekken": Rules((_TEKKEN,), whole=True, bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), Rules((_GPT4O,))),
    **dict.fromkeys(
        ("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4", "gigachat"),
        Rules((_GPT2,)),
    ),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"),
        Rules((r"\p{N}", _GPT2)),
    ),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), Rules(_DEEPSEEK3)),
    "deepseek-coder": Rules((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
    "falcon": Rules((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    "minicpm5": Rules((r"\p{N}{1,3}", _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}+")), whole=True),
    "default": Rules((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
}
"""By the name in a file. A file without a name has "default"."""


def token_of(header: GGUFHeader, name: str) -> tuple[str, int] | None:
    """The text and the id of a special token, such as "bos". None: the model has none."""
    token_id = header.metadata.get(f"tokenizer.ggml.{name}_token_id")
    tokens = header.metadata.get("tokenizer.ggml.tokens") or ()
    if token_id is None or token_id >= len(tokens):  # llama.cpp ignores such an id, too
        return None
    return tokens[token_id], token_id


def tokenizer_json(header: GGUFHeader) -> str:
    """From a header with its vocabulary. Raises `ValueError` naming the file for a kind of tokenizer, or for
    rules, that are not supported."""
    kind = header.metadata.get("tokenizer.ggml.model")
    if kind not in KINDS:
        raise ValueError(
            f"{header.path} has a tokenizer of kind {kind!r}; supported are {', '.join(KINDS)}; {REMEDY}"
        )
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list):
        raise ValueError(f"{header.path} has no vocabulary (tokenizer.ggml.tokens)")
    parts, begins = KINDS[kind](header, tokens)
    tokenizer = {"version": "1.0", "added_tokens": _added(header, tokens), **parts}
    return json.dumps(tokenizer | _around(header, bos=begins))


def _byte_level(header: GGUFHeader, tokens: list[str]) -> tuple[dict[str, Any], bool]:
    """BPE over the bytes of a text, as transformers builds it; and whether a text begins with BOS."""
    get, name = header.metadata.get, header.metadata.get("tokenizer.ggml.pre", "default")
    merges = get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise ValueError(f"{header.path} has no merges (tokenizer.ggml.merges)")
    if name not in RULES:
        raise ValueError(
            f"{header.path} splits text as {name!r}; supported are {', '.join(sorted(RULES))}; {REMEDY}"
        )
    rules = RULES[name]
    decoder = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    splits = [
        {"type": "Split", "pattern": {"Regex": rule}, "behavior": "Isolated", "invert": False}
        for rule in rules.splits
    ]
    return {
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, decoder | {"use_regex": False}]},
        "decoder": decoder,
        "model": {
            "type": "BPE",
            "vocab": {token: token_id for token_id, token in enumerate(tokens)},
            "merges": merges,
            "ignore_merges": rules.whole,
        },
    }, rules.bos


def _sentencepiece(header: GGUFHeader, tokens: list[str]) -> tuple[dict[str, Any], bool]:
    """SentencePiece's BPE: of all pairs that make a token, the one with the best token is merged first."""
    scores = header.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, tuple) or len(scores) != len(tokens):
        raise ValueError(f"{header.path} has no score of each token (tokenizer.ggml.scores)")
    space = {"pattern": {"String": " "}, "content": "▁", "type": "Replace"}
    decoders: list[dict[str, Any]] = [
        {"pattern": {"String": "▁"}, "content": " ", "type": "Replace"},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    normalizers: list[dict[str, Any]] = [space]
    if header.metadata.get("tokenizer.ggml.add_space_prefix", True):
        normalizers.insert(0, {"type": "Prepend", "prepend": "▁"})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = token_of(header, "unknown") or (tokens[0], 0)
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "vocab": {token: token_id for token_id, token in enumerate(tokens)},
            "merges": list(_merges(header, tokens, scores)),
            "unk_token": unknown[0],
            "fuse_unk": True,
            "byte_fallback": True,
        },
    }, True


KINDS = {"gpt2": _byte_level, "llama": _sentencepiece}


def _merges(header: GGUFHeader, tokens: list[str], scores: tuple[float, ...]) -> Iterator[tuple[str, str]]:
    """All pairs of tokens that make a token, the best token first."""
    special = {token_id for token_id, _, _ in _special(header, tokens)}
    plain = {token: token_id for token_id, token in enumerate(tokens) if token_id not in special}
    for token_id in sorted(plain.values(), key=lambda token_id: -scores[token_id]):
        token = tokens[token_id]
        pairs = ((token[:at], token[at:]) for at in range(1, len(token)))
        found = [(left, right) for left, right in pairs if left in plain and right in plain]
        yield from sorted(found, key=lambda pair: (plain[pair[0]], plain[pair[1]]))


def _special(header: GGUFHeader, tokens: list[str]) -> Iterator[tuple[int, str, bool]]:
    """Id and text of each token that a text is cut at, and whether it is a control token."""
    types = header.metadata.get("tokenizer.ggml.token_type") or ()
    for token_id, (token, kind) in enumerate(zip(tokens, types, strict=False)):
        if kind in (UNKNOWN, CONTROL, USER_DEFINED):
            yield token_id, token, kind != USER_DEFINED


def _added(header: GGUFHeader, tokens: list[str]) -> list[dict[str, Any]]:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": token_id, "content": token, "special": control, **plain}
        for token_id, token, control in _special(header, tokens)
    ]


def _around(header: GGUFHeader, *, bos: bool) -> dict[str, Any]:
    """The tokens before and after each text. `bos`: whether BOS is one, if the file does not say so."""
    get = header.metadata.get
    first = token_of(header, "bos") if get("tokenizer.ggml.add_bos_token", bos) else None
    last = token_of(header, "eos") if get("tokenizer.ggml.add_eos_token", False) else None
    if first is None and last is None:
        return {}

    def written(token: tuple[str, int] | None) -> list[dict[str, Any]]:
        return [] if token is None else [{"SpecialToken": {"id": token[0], "type_id": 0}}]

    single = [*chain(written(first), [{"Sequence": {"id": "A", "type_id": 0}}], written(last))]
    special = {text: {"id": text, "ids": [i], "tokens": [text]} for text, i in filter(None, (first, last))}
    return {
        "post_processor": {
            "type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": special,
        }
    }  # fmt: skip
