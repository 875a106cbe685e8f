"""Grammars: the tokens that a request with structured output may have next.

    compile ──▶ (a thread of its own) ──▶ ready ──▶ allowed, once for each token ──▶ …

`llguidance` (https://github.com/guidance-ai/llguidance) walks the grammar: it consumes tokens and returns one
bit for each token of the vocabulary. A matcher consumes the request's generated tokens just before the next
mask. So a request that joins, is prefilled again with its output, or is retargeted needs nothing special.
EOS is allowed only where the grammar may end.

The first grammar reads the model's tokenizer, which holds Python's lock for a fraction of a second. Grammars
compile without that lock, and a request that waits for its grammar delays no other request.
"""

from array import array
from collections.abc import Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

from engine.api.request import EngineRequest
from engine.api.structured_output import StructuredOutput
from engine.core.live_request import Grammar
from engine.loader.tokenizer_json import tokenizer_json

LIMITS: dict[str, Any] = {
    "step_max_items": 20_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}
"""Lower than llguidance's own limits, so that a mask takes at most 0.03 s, and a request's states 40 MB."""

WHITESPACE = r"[ \n\r\t]{1,32}"
"""White space between the parts of JSON. It is bounded, since some models would emit newlines forever."""


def _source(wanted: StructuredOutput) -> str:
    """The grammar as llguidance reads it."""
    match wanted.kind:
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(wanted.text, {"whitespace_pattern": WHITESPACE})
        case "regex":
            return LLMatcher.grammar_from_regex(wanted.text)
        case "grammar":
            return LLMatcher.grammar_from_lark(wanted.text)


class CompiledGrammar:
    """The grammar of one request. Owned by its `LiveRequest`; used in the engine's thread."""

    def __init__(self, compiling: "Future[LLMatcher]", position: int) -> None:
        """`compiling` gives a matcher that has consumed the generated tokens before `position`."""
        self._compiling = compiling
        self._position = position

    @property
    def ready(self) -> bool:
        return self._compiling.done()

    def abandon(self) -> None:
        """Cancels the compilation, since the request has ended."""
        self._compiling.cancel()

    def after(self, token_ids: "array[int]") -> LLMatcher:
        """The matcher, after it consumed all of the request's tokens. Later calls need the same tokens and
        may add some. Raises `ValueError` if the grammar is not valid, exceeds a limit, or does not allow the
        tokens."""
        matcher = self._compiling.result()
        matcher.consume_tokens(token_ids[self._position :].tolist())
        self._position = len(token_ids)
        check(matcher)
        return matcher


class Grammars:
    """Compiles grammars for one model, and returns the tokens that they allow. Owns a thread."""

    def __init__(self, source: str, vocab_size: int, eos_ids: Collection[int]) -> None:
        """`source`: the checkpoint's directory or file."""
        self._source = source
        self._vocab_size = vocab_size
        self._eos_ids = sorted(eos_ids)
        self._tokenizer: LLTokenizer | None = None
        self._executor: LLExecutor | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._compiling: set[Future[LLMatcher]] = set()

    def compile(self, wanted: StructuredOutput, request: EngineRequest) -> CompiledGrammar:
        """Starts to compile the grammar of a request. `CompiledGrammar.after` raises its errors."""
        future = self._thread.submit(self._compile, wanted, request.output_ids)
        self._compiling.add(future)
        future.add_done_callback(self._compiling.discard)
        return CompiledGrammar(future, len(request.prompt_ids) + len(request.output_ids))

    def wait(self, seconds: float) -> None:
        """Waits until one of the grammars that are being compiled is ready, at most this long."""
        wait(list(self._compiling), seconds, FIRST_COMPLETED)

    def allowed(
        self, batch: Sequence[tuple[Grammar | None, "array[int]"]]
    ) -> tuple[tuple[list[int], np.ndarray] | None, dict[int, str]]:
        """Returns the rows of a batch that have a grammar, with their `engine.step.TokenMask.bits`. None: no
        row has one. Also returns, by row, the error of each grammar that failed. The bits of a failed row
        mean nothing."""
        failed: dict[int, str] = {}
        matchers: list[tuple[LLMatcher, int]] = []  # with the row of the mask
        rows: list[int] = []
        for row, (grammar, token_ids) in enumerate(batch):
            if grammar is None:
                continue
            try:
                matchers.append((grammar.after(token_ids), len(rows)))
                rows.append(row)
            except ValueError as error:
                failed[row] = str(error)
        if not matchers:
            return None, failed
        if self._executor is None:
            self._executor = LLExecutor()
        bits = np.zeros((len(rows), -(-self._vocab_size // 32)), dtype=np.int32)
        self._executor.unsafe_compute_mask_ptr(matchers, bits.ctypes.data, bits.strides[0], len(rows))
        for (matcher, _), row in zip(matchers, rows, strict=True):
            try:
                check(matcher)
            except ValueError as error:
                failed[row] = str(error)
        return (rows, bits), failed

    def _compile(self, wanted: StructuredOutput, output_ids: list[int]) -> LLMatcher:
        if self._tokenizer is None:
            self._tokenizer = self._load_tokenizer()
        matcher = LLMatcher(self._tokenizer, _source(wanted), log_level=0, limits=LLParserLimits(**LIMITS))
        matcher.consume_tokens(output_ids)
        return matcher

    def _load_tokenizer(self) -> LLTokenizer:
        if not self._eos_ids:
            raise ValueError("structured output needs a model with an end-of-sequence token")
        text = tokenizer_json(self._source)
        tokenizer = LLTokenizer(text, n_vocab=self._vocab_size, eos_token=self._eos_ids)
        if tokenizer.vocab_size != self._vocab_size:
            counts = f"{tokenizer.vocab_size} tokens, the model {self._vocab_size}"
            raise ValueError(f"{self._source}: the tokenizer has {counts}")
        return tokenizer


def check(matcher: LLMatcher) -> None:
    """Raises `ValueError` if the matcher's grammar is wrong or exceeds a limit."""
    if matcher.is_error():
        reason = " ".join(matcher.get_error().removesuffix("<non-verbose/>").split())
        raise ValueError(f"structured output: {reason}")
