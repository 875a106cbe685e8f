"""The compiler: its tokenizer finds no special token in a text."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE, Unigram
from tokenizers.pre_tokenizers import ByteLevel

from baton.grammars.compiler import for_texts

LETTERS = sorted(ByteLevel.alphabet())
END = 256
MODELS: dict[str, Any] = {
    "added": BPE({letter: i for i, letter in enumerate(LETTERS)}, []),
    "in the vocabulary": BPE(
        {text: i for i, text in enumerate([*LETTERS, "<end>", "<tool>", "<e", "<end", "nd"])},
        [("<", "e"), ("n", "d"), ("<e", "nd"), ("<end", ">")],
        unk_token="<end>",
    ),
    "with scores": Unigram([*((text, -1.0) for text in [*LETTERS, "<end>", "<tool>"])], END),
}


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_a_forced_text_has_no_special_token(name: str, special: bool):
    given = Tokenizer(MODELS[name])
    given.pre_tokenizer = ByteLevel(add_prefix_space=False)  # pyrefly: ignore[read-only]
    given.decoder = ByteLevelDecoder()  # pyrefly: ignore[read-only]
    given.add_tokens([AddedToken(text, special=special) for text in ("<end>", "<tool>", "[x]")])
    text = "a<end><tool>[x]<e"
    assert END in given.encode(text).ids
    ids = given.encode("<end><tool>").ids

    changed = for_texts(given.to_str())
    tokenizer = LLTokenizer(changed, eos_token=END)
    assert tokenizer.vocab_size == given.get_vocab_size()
    assert [tokenizer.is_special_token(token) for token in ids] == [True, True]
    matcher = LLMatcher(tokenizer, f"start: {json.dumps(text)} <[{ids[1]}]>", log_level=0)
    written = []
    while not matcher.is_accepting():
        bits = matcher.compute_bitmask()
        [token] = (token for token in range(tokenizer.vocab_size) if bits[token // 8] >> token % 8 & 1)
        assert matcher.consume_token(token), matcher.get_error()
        written.append(token)
    assert given.decode(written, skip_special_tokens=False) == f"{text}<tool>"
    assert written[-1] == ids[1]
    assert not set(written[:-1]) & set(ids)
