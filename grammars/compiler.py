"""Compiles grammars with llguidance (https://github.com/guidance-ai/llguidance). Pure."""

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
