"""The tokens of a chat are those of the tokenizer, whatever was kept of earlier turns."""

import random
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from baton.router.text.chat import MOST_BYTES, ChatEncoder
from baton.router.text.tokenizer import ModelTokenizer

PIECES = [
    "<s>", "</s>", "<a>", "<a><b>", "<b>", "<left>", "<right>", "<norm>", "<unk>", "<|im_start|>",
    "<|im_end|>", "<|im_start", "<", ">", " ", "  ", "\n", "user", " user\n", "Hello", "it's", " 2024", "é",
    "e\u0301", "🙂", "漢字",
]  # fmt: skip


class Spy:
    """A tokenizer that notes what it encodes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.texts: list[str] = []
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
        self.texts += texts
        return self._tokenizer.encode_batch_fast(texts, **options)


def metaspace() -> Tokenizer:
    """As of a SentencePiece model: a space before the text, and tokens that take the spaces beside them."""
    characters = ["<unk>", "▁", "H", "e", "l", "o", "u", "s", "r", "<", ">", "a", "▁u", "\n"]
    made = Tokenizer(models.Unigram([(c, -1.0) for c in characters], unk_id=0))
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    names = ["<unk>", "<s>", "</s>", "<a>", "<a><b>", "<b>"]
    made.add_special_tokens([AddedToken(name, normalized=False) for name in names])
    made.add_special_tokens([AddedToken("<left>", lstrip=True, normalized=False)])
    made.add_special_tokens([AddedToken("<right>", rstrip=True, normalized=False)])
    made.add_tokens([AddedToken("<norm>", normalized=True), AddedToken("  ", normalized=False)])
    return made


@pytest.fixture(params=["byte-level", "metaspace"])
def any_tokenizer(request: pytest.FixtureRequest, tokenizer: ModelTokenizer) -> Tokenizer:
    return metaspace() if request.param == "metaspace" else tokenizer._tokenizer


@pytest.mark.parametrize("most_bytes", [MOST_BYTES, 4000])
def test_tokens_are_those_of_the_tokenizer(any_tokenizer: Tokenizer, most_bytes: int):
    rng = random.Random(most_bytes)
    encoder = ChatEncoder(any_tokenizer, most_bytes)
    texts = [""]
    for _ in range(400):
        before = rng.choice(texts)
        texts.append(before[: rng.randint(0, 60)] + "".join(rng.choices(PIECES, k=rng.randint(0, 12))))
        expected = any_tokenizer.encode(texts[-1], add_special_tokens=False).ids
        assert encoder.encode(texts[-1], None) == expected, repr(texts[-1])


def test_the_tokens_of_the_texts_used_last_are_kept(tokenizer: ModelTokenizer):
    """In so many bytes. A token takes four of them."""
    spy = Spy(tokenizer._tokenizer)
    encoder = ChatEncoder(spy, most_bytes=40_000)  # pyrefly: ignore[bad-argument-type]
    texts = [f"<|im_start|>{number}{' a b' * 500}" for number in range(20)]
    for text in texts:
        encoder.encode(text, None)
    tokens = 4 * len(tokenizer.encode(texts[0], add_special_tokens=False))
    spy.texts.clear()
    for text in reversed(texts[-3:]):
        encoder.encode(text, None)
    assert not any(spy.texts)
    for text in texts[: -(40_000 // tokens)]:
        encoder.encode(text, None)
        assert text in spy.texts


def test_a_turn_tokenizes_only_what_is_new_to_its_scope(tokenizer: ModelTokenizer):
    spy = Spy(tokenizer._tokenizer)
    encoder = ChatEncoder(spy)  # pyrefly: ignore[bad-argument-type]
    messages = [{"role": "user", "content": "Name a fruit."}, {"role": "assistant", "content": "Apple."}]
    new = [*messages, {"role": "user", "content": "Another."}]
    first, second = (tokenizer.chat_template.render(m, add_generation_prompt=False) for m in (messages, new))
    encoder.encode(first, "a")
    spy.texts.clear()
    encoder.encode(second, "a")
    assert "".join(spy.texts) == "<|im_start|>user\nAnother."
    encoder.encode(second, "b")
    assert first in "".join(spy.texts), "it used what another scope has sent"
