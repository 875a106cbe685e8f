"""Compiles grammars with llguidance (https://github.com/guidance-ai/llguidance). Pure."""

import json
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

LIMITS: dict[str, Any] = {
    "step_max_items": 20_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}
"""Lower than llguidance's own limits, so that the states of a request take at most 40 MB."""
WHITESPACE = r"[ \n\r\t]{1,32}"
"""White space between the parts of JSON. It is bounded, since some models would emit newlines forever."""
TOO_MUCH = "too much to compile"


def source(kind: str, text: str) -> str:
    """Returns a grammar as llguidance reads it. `kind`: json_schema, regex or grammar (Lark). Raises
    ValueError."""
    match kind:
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(text, {"whitespace_pattern": WHITESPACE})
        case "regex":
            return LLMatcher.grammar_from_regex(text)
        case _:
            return LLMatcher.grammar_from_lark(text)


def compiled(tokenizer: LLTokenizer, kind: str, text: str) -> LLMatcher:
    """Compiles without Python's lock. A text that was not tried may end the process. Raises ValueError."""
    limits = LLParserLimits(**LIMITS)
    matcher = LLMatcher(tokenizer, source(kind, text), log_level=0, limits=limits)
    if matcher.is_error():
        raise ValueError(readable(matcher.get_error()))
    return matcher


def for_texts(tokenizer_json: str) -> str:
    """Returns a tokenizer.json that finds no special token in a text. Raises ValueError.

    Where a grammar leaves no choice, llguidance asks for the tokens of the text, and allows the first of them
    alone. Then it refuses special ones, and all added ones in angle brackets are special for it. So a `const`
    like "<tool_call>" would end the output. Here these tokens have names that no text has: a grammar names
    them by their numbers.
    """
    tokenizer = json.loads(tokenizer_json)
    model, names = tokenizer["model"], dict[str, str]()
    for token in tokenizer.get("added_tokens") or ():
        name = token["content"]
        if token["special"] or (name.startswith("<") and name.endswith(">")):
            token["content"] = names[name] = f"<\uffff{token['id']}>"  # no character is U+FFFF
    if isinstance(vocab := model["vocab"], list):  # a Unigram model has pairs of a token and its score
        model["vocab"] = [(names.get(token, token), score) for token, score in vocab]
    elif renamed := names.keys() & vocab.keys():
        model["vocab"] = {names.get(token, token): number for token, number in vocab.items()}
        if "merges" in model:
            model["merges"] = [merge for merge in model["merges"] if _merged(merge) not in renamed]
        if (unknown := model.get("unk_token")) in renamed:
            model["unk_token"] = names[unknown]
    return json.dumps(tokenizer)


def _merged(merge: str | list[str]) -> str:
    """Returns the token that a merge makes. Older files have a space between its parts."""
    return "".join(merge.split(" ") if isinstance(merge, str) else merge)


def readable(error: str) -> str:
    """Returns an error of llguidance as one line."""
    line = " ".join(error.partition("<backtrace>")[0].removesuffix("<non-verbose/>").split())
    dead_end = "the grammar allows no token after this output, which it does not end either"
    return dead_end if line == "NoExtensionBias" else line


class Alphabet:
    """The tokens of a model as far as a compiler needs them: single bytes, and the numbers of all others."""

    eos_token_id = 256
    bos_token_id = None
    special_token_ids = (256,)

    def __init__(self, vocab_size: int) -> None:
        end = b"\xff" + "≺EOS≻".encode()  # no text spells it
        self.tokens = [*(bytes([i]) for i in range(256)), end, *[b""] * (vocab_size - 257)]

    def __call__(self, text: bytes) -> list[int]:
        return list(text)

    def tokenizer(self) -> LLTokenizer:
        return LLTokenizer(TokenizerWrapper(self), slices=[])


def error_of(tokenizer: LLTokenizer, kind: str, text: str) -> str:
    """Returns what is wrong with a text, or nothing. For a process that is `limited`."""
    try:
        matcher = compiled(tokenizer, kind, text)
        matcher.compute_bitmask()
        return readable(matcher.get_error())
    except Exception as error:  # noqa: BLE001  (whatever it is, it is the text's)
        return str(error) or TOO_MUCH
