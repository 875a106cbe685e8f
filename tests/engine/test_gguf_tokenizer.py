"""The tokenizers of GGUF files give the token ids that llama.cpp gives for the same file."""

from pathlib import Path
from typing import Any
from unicodedata import category

import gguf
import numpy as np
import pytest
from tokenizers import Tokenizer

from baton.engine.gguf_header import GGUFHeader
from baton.engine.gguf_tokenizer import RULES, tokenizer_json
from tests import llama_cpp
from tests.engine.test_gguf import write
from tests.router.test_tokenizer import TEXTS, random_texts

UNIQUE = {rules: name for name, rules in reversed([*RULES.items()])}.values()
"""A name of each rule."""

TEXT = "It's a   12 Don'T\n\n  6789 x=1,5 École 今日2"

_WORDS, _APART = (1589, 506, 253), (1589, 23, 99, 253)
_END = (38, 39, 40, 41, 1792, 45, 33, 28, 37, 28239, 83, 1747, 216, 15076, 228, 23274, 115, 34)
_LLAMA3 = (*_WORDS, 256, 216, 33, 34, 4250, 23, 68, 1116, 216, 216)
_DEFAULT = (*_APART, 256, 216, 33, 34, 4250, 23, 68, 8866, 216)
_DEEPSEEK = (*_WORDS, 333, 33, 34, 4250, 23, 68, 1116, 256)
RECORDED: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("dbrx", "qwen2", "qwen35", "gpt-4o"), _LLAMA3),
    **dict.fromkeys(("llama-bpe", "tekken"), (1, *_LLAMA3)),
    **dict.fromkeys(("default", "none", "falcon"), _DEFAULT),
    **dict.fromkeys(("deepseek-v3", "minicpm5"), _DEEPSEEK),
    "gpt-2": (*_WORDS, *_DEFAULT[len(_APART) :]),
    "smollm": (*_WORDS, 333, 33, 34, 4250, 23, 68, 39892),
    "deepseek-coder": (*_APART, 333, 33, 34, 4250, 23, 68, 198, 198, 256),
}
"""Token ids of TEXT up to _END from llama.cpp, by the rules that a file with the embedded model's
vocabulary names."""

SCORES = {"▁": -8.0, "a": -9.0, "b": -9.0, "ab": -3.0, "ba": -2.0, "▁a": -4.0, "▁ab": -1.0, "aba": -5.0}


def read(path: Path) -> Tokenizer:
    return Tokenizer.from_str(tokenizer_json(GGUFHeader(path, vocabulary=True)))


def changed(path: Path, **metadata: Any) -> Tokenizer:
    """The tokenizer of a file whose metadata of the tokenizer are others. None: the file lacks them."""
    header = GGUFHeader(path, vocabulary=True)
    for key, value in metadata.items():
        header.metadata[f"tokenizer.ggml.{key}"] = value
    header.metadata = {key: value for key, value in header.metadata.items() if value is not None}
    return Tokenizer.from_str(tokenizer_json(header))


@pytest.mark.parametrize("pre", RECORDED)
def test_a_text_is_split_as_by_llama_cpp(pre: str, embedded_model_path: Path) -> None:
    name = None if pre == "none" else pre
    ids = changed(embedded_model_path, pre=name, add_bos_token=None).encode(TEXT).ids
    assert ids == [*RECORDED[pre], *_END]


def test_bos_and_eos_of_a_text(embedded_model_path: Path) -> None:
    for pre, metadata, ids in (
        ("smollm", {}, [65]),
        ("llama-bpe", {"add_bos_token": None}, [1, 65]),  # its rules say so
        ("llama-bpe", {"add_bos_token": False}, [65]),
        ("llama-bpe", {"bos_token_id": None, "add_bos_token": None}, [65]),
        ("llama-bpe", {"bos_token_id": 1 << 30, "add_bos_token": None}, [65]),
        ("qwen2", {"add_bos_token": True, "add_eos_token": True}, [1, 65, 2]),
    ):
        ids_read = changed(embedded_model_path, pre=pre, **metadata).encode("Q").ids
        assert ids_read == ids, (pre, metadata)


def write_model(path: Path, header: GGUFHeader, pre: str | None) -> Path:
    """A model of one layer with the vocabulary of another file."""
    writer, size, metadata = gguf.GGUFWriter(path, "llama"), 32, header.metadata
    for add in (writer.add_embedding_length, writer.add_feed_forward_length, writer.add_context_length):
        add(size)
    for add in (writer.add_block_count, writer.add_head_count, writer.add_head_count_kv):
        add(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model(metadata["tokenizer.ggml.model"])
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    tokens = metadata["tokenizer.ggml.tokens"]
    writer.add_token_list(tokens)
    writer.add_token_types(metadata["tokenizer.ggml.token_type"])
    writer.add_token_merges(metadata["tokenizer.ggml.merges"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    norms = ["output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"]
    parts = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    shapes = {"token_embd": (len(tokens), size), **{f"blk.0.{part}": (size, size) for part in parts}}
    for name, shape in {**shapes, **dict.fromkeys(norms, (size,))}.items():
        writer.add_tensor(f"{name}.weight", np.zeros(shape, np.float32))
    write(writer)
    return path


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_cpp.install(tmp_path_factory.mktemp("llama-cpp"))


def has_marks(text: str) -> bool:
    return any(category(character).startswith("M") for character in text)


@pytest.mark.long
@pytest.mark.parametrize("pre", [*UNIQUE, None])
def test_token_ids_are_those_of_llama_cpp(
    pre: str | None, embedded_model_path: Path, installed: Path, tmp_path: Path
) -> None:
    model = write_model(tmp_path / "model.gguf", GGUFHeader(embedded_model_path, vocabulary=True), pre)
    texts = [*TEXTS, *random_texts(300), TEXT]
    if pre in ("tekken", "gpt-4o"):  # llama.cpp's expressions leave marks out, the models' own have them
        texts = [text for text in texts if not has_marks(text)]
    tokenizer = read(model)
    theirs = llama_cpp.token_ids(installed, model, texts)
    assert {text: tokenizer.encode(text).ids for text in texts} == dict(zip(texts, theirs, strict=True))
    if pre in RECORDED:
        assert theirs[texts.index(TEXT)] == [*RECORDED[pre], *_END]


def test_sentencepiece_merges_the_best_token_first(tmp_path: Path) -> None:
    special = {"<unk>": 2, "<s>": 3, "</s>": 3, "\n\n": 4}
    octets = [f"<0x{octet:02X}>" for octet in range(256)]
    tokens = [*special, *octets, *SCORES]
    header = GGUFHeader.__new__(GGUFHeader)
    header.path = tmp_path / "model.gguf"
    header.metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": (*[0.0] * (len(special) + 256), *SCORES.values()),
        "tokenizer.ggml.token_type": (*special.values(), *[6] * 256, *[1] * len(SCORES)),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    tokenizer = Tokenizer.from_str(tokenizer_json(header))
    for text, expected in (
        ("ab", ["<s>", "▁ab"]),
        ("abab", ["<s>", "▁a", "ba", "b"]),  # "ba" is better than "ab"
        ("a\n\nb é", ["<s>", "▁a", "\n\n", "▁", "b", "▁", "<0xC3>", "<0xA9>"]),
    ):
        assert tokenizer.encode(text).tokens == expected
        assert tokenizer.decode(tokenizer.encode(text).ids) == text.replace("\n\nb", "\n\n b")
    header.metadata["tokenizer.ggml.add_space_prefix"] = False
    assert Tokenizer.from_str(tokenizer_json(header)).encode("ab").tokens == ["<s>", "ab"]
    del header.metadata["tokenizer.ggml.scores"]
    with pytest.raises(ValueError, match=r"model\.gguf has no score of each token"):
        tokenizer_json(header)
