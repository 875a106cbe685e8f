"""Grammars: which tokens a request may have next, where its output must have a structure.

    compile ──▶ (a thread of its own) ──▶ ready ──▶ allowed, once for each token ──▶ …

`llguidance` (https://github.com/guidance-ai/llguidance) walks the grammar: it is given tokens, and says
which may follow, a bit for each of the vocabulary. What it has consumed is a function of the request's
generated tokens, and catches up with them just before the next mask: so a request that joins, is prefilled
again with its output, or is retargeted needs nothing special. EOS is allowed only where the grammar may end.

The model's tokenizer is read with the first grammar, and keeps Python's lock for a fraction of a second then.
Grammars compile without that lock, and a request that waits for its grammar keeps nobody else waiting.
"""

from array import array
from collections.abc import Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import torch
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from torch import Tensor

from engine.loader.tokenizer_json import tokenizer_json
from engine.request import EngineRequest
from engine.structured_output import LIMITS, StructuredOutput


@dataclass(frozen=True, slots=True)
class TokenMask:
    """Rows of a batch that may not have every token next."""

    rows: list[int]
    bits: Tensor
    """[rows, words] int32 in the host's memory: bit i of word w says that token 32 w + i is allowed."""


class Grammar:
    """One request's. Owned by its `LiveRequest`; used in the engine's thread."""

    def __init__(self, compiling: "Future[LLMatcher]", position: int) -> None:
        """Compiled, it will have consumed what was generated of the first `position` tokens."""
        self._compiling = compiling
        self._position = position

    @property
    def ready(self) -> bool:
        return self._compiling.done()

    def abandon(self) -> None:
        """Nobody waits for it any more."""
        self._compiling.cancel()

    def after(self, token_ids: "array[int]") -> LLMatcher:
        """Has consumed all of the request's tokens, which only ever grow. Raises ValueError for a grammar
        that is not valid, met a limit, or does not take these tokens."""
        matcher = self._compiling.result()
        matcher.consume_tokens(token_ids[self._position :].tolist())
        self._position = len(token_ids)
        check(matcher)
        return matcher


class Grammars:
    """Compiles grammars for one model, and says what they allow."""

    def __init__(self, source: str, vocab_size: int, eos_ids: Collection[int]) -> None:
        """`source`: the checkpoint's directory or file."""
        self._source = source
        self._vocab_size = vocab_size
        self._eos_ids = sorted(eos_ids)
        self._tokenizer: LLTokenizer | None = None
        self._executor: LLExecutor | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._compiling: set[Future[LLMatcher]] = set()

    def compile(self, wanted: StructuredOutput, request: EngineRequest) -> Grammar:
        """What is wrong with it shows when it is used."""
        future = self._thread.submit(self._compile, wanted, request.output_ids)
        self._compiling.add(future)
        future.add_done_callback(self._compiling.discard)
        return Grammar(future, len(request.prompt_ids) + len(request.output_ids))

    def wait(self, seconds: float) -> None:
        """Until a grammar that was being compiled is ready."""
        wait(list(self._compiling), seconds, FIRST_COMPLETED)

    def allowed(
        self, batch: Sequence[tuple[Grammar | None, "array[int]"]]
    ) -> tuple[TokenMask | None, dict[int, str]]:
        """What those requests of a batch that have a grammar may have after their tokens, and by row what is
        wrong with the grammars that fail: such a row is masked by nothing that means anything."""
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
        bits = torch.zeros((len(rows), -(-self._vocab_size // 32)), dtype=torch.int32)
        self._executor.unsafe_compute_mask_ptr(matchers, bits.data_ptr(), 4 * bits.shape[1], len(rows))
        for (matcher, _), row in zip(matchers, rows, strict=True):
            try:
                check(matcher)
            except ValueError as error:
                failed[row] = str(error)
        return TokenMask(rows, bits), failed

    def _compile(self, wanted: StructuredOutput, output_ids: list[int]) -> LLMatcher:
        if self._tokenizer is None:
            self._tokenizer = self._load_tokenizer()
        matcher = LLMatcher(self._tokenizer, wanted.grammar, log_level=0, limits=LLParserLimits(**LIMITS))
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
    """Raises ValueError saying what is wrong with its grammar, or which limit it met."""
    if matcher.is_error():
        reason = " ".join(matcher.get_error().removesuffix("<non-verbose/>").split())
        raise ValueError(f"structured output: {reason}")
