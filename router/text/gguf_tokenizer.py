"""Makes a tokenizer of a GGUF file's metadata. Such a file has no tokenizer.json.

Only byte-level BPE is supported ("gpt2" in the file), built in the same way as transformers builds it. The
file holds only the name of the rule that splits text before the merges, for example "smollm". The
tokenizer.json of that model also splits off every digit, which changes the tokens of several spaces before a
digit. For a GGUF file transformers does not do that. Baton gives the same tokens as transformers.
"""

from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from baton.router.text.gguf_metadata import read_metadata
from baton.router.text.model_files import TextModel

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
_SPLITS = {"llama-bpe": _LLAMA3, "llama3": _LLAMA3, "llama-v3": _LLAMA3, "qwen2": _QWEN2, "tekken": _TEKKEN}
_PLAIN = ("default", "gpt-2", "smollm")
_CONTROL, _USER_DEFINED = 3, 4  # types of tokens in the file


def read_gguf(path: Path) -> TextModel:
    """Raises ValueError when it is not a GGUF file, or has a tokenizer that is not supported."""
    metadata = read_metadata(path)
    get = metadata.get
    kind, split = get("tokenizer.ggml.model"), get("tokenizer.ggml.pre", "gpt-2")
    if kind != "gpt2":
        raise ValueError(f"{path} has a tokenizer of kind {kind!r}; of GGUF files only 'gpt2' is supported")
    tokens, merges = get("tokenizer.ggml.tokens"), get("tokenizer.ggml.merges")
    if not isinstance(tokens, list) or not isinstance(merges, list):
        raise ValueError(f"{path} has no vocabulary (tokenizer.ggml.tokens and merges)")
    types: list[int] = get("tokenizer.ggml.token_type", [])

    def token(name: str) -> str | None:
        token_id = get(f"tokenizer.ggml.{name}_token_id")
        return None if token_id is None else tokens[token_id]

    splitter = _pre_tokenizer(split, path)
    tokenizer = Tokenizer(
        models.BPE(
            vocab={text: token_id for token_id, text in enumerate(tokens)},
            merges=[tuple(merge.split(" ", 1)) for merge in merges],
        )
    )
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.ByteLevel()
    bos = token("bos")
    if get("tokenizer.ggml.add_bos_token", False) and bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, get("tokenizer.ggml.bos_token_id"))]
        )
    for text, token_type in zip(tokens, types, strict=False):
        if token_type in (_CONTROL, _USER_DEFINED):
            special = token_type == _CONTROL
            tokenizer.add_tokens([AddedToken(text, normalized=False, special=special)])
    return TextModel(tokenizer, get("tokenizer.chat_template"), bos, token("eos"))


def _pre_tokenizer(name: str, path: Path) -> pre_tokenizers.PreTokenizer:
    if name in _PLAIN:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if name not in _SPLITS:
        known = ", ".join(sorted({*_PLAIN, *_SPLITS}))
        raise ValueError(f"{path} splits text as {name!r}; supported are {known}")
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLITS[name]), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
