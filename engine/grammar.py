"""Grammars: the tokens that a request with structured output may have next.

    compile ──▶ (`grammar_compiler`) ──▶ ready ──▶ allowed, once for each token ──▶ …

`llguidance` (https://github.com/guidance-ai/llguidance) walks the grammar: it consumes tokens and returns one
bit for each token of the vocabulary. A matcher consumes the request's generated tokens just before the next
mask. So a request that joins, is prefilled again with its output, or is retargeted needs nothing special.
EOS is allowed only where the grammar may end.

A request may reason first, up to a token that ends the reasoning. The matcher gets only the tokens after it.
Until then every token is allowed, except EOS if a structure follows. When the budget of the reasoning is
spent, only its ending token is allowed.

The first grammar reads the model's tokenizer, which holds Python's lock: for 1.4 s with 150,000 tokens, and
no step is launched meanwhile. Grammars compile without that lock, and a request that waits for its grammar
delays no other request.
"""

import os
import time
from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from functools import partial
from typing import NamedTuple

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from baton.engine.api.request import EngineRequest
from baton.engine.api.sampling_params import Reasoning
from baton.engine.grammar_compiler import Compiler, Shared
from baton.grammars.compiler import for_texts, readable

TOKEN_SECONDS = 0.002
"""CPU time of a grammar for each token, on average. JSON takes 0.1 ms, with 300 optional properties 0.2 ms.
The limits of `grammars.trials` do not bound it: the work on an ambiguous grammar grows with each token."""
SPARE_SECONDS = 0.25
"""CPU time that a grammar may take beyond this at once. The first tokens take more, for states that are not
known yet."""

DEAR_SECONDS = 0.0005
"""From this time for each token on, a grammar counts in `TENANT_SECONDS`."""
TENANT_SECONDS = 0.02
"""CPU time that the dear grammars of a tenant may take for each step together, on average: a step waits for
all of them. Grammars of ordinary JSON never add up to it."""
_NEWEST = 0.05
"""Weight of the newest token in an average."""


class Matcher:
    """Walks the grammar of one request. It fails if it takes more CPU time than allowed, since all requests
    of a step wait for it.

    CPU time depends on the grammar, and not on what else the machine does."""

    def __init__(self, matcher: LLMatcher, shared: Shared, seconds: float = SPARE_SECONDS) -> None:
        """`matcher`: a copy of `shared`. `seconds` of CPU time may it take at once."""
        self._matcher = matcher
        self.shared = shared
        self._seconds_left = seconds
        self.average = 0.0
        """Seconds of CPU time for a mask."""

    def release(self) -> None:
        """The request has ended. Nothing may follow."""
        matcher = self._matcher
        del self._matcher
        self.shared.release(matcher)

    def copy(self) -> "Matcher":
        return Matcher(self._matcher.deep_copy(), self.shared, self._seconds_left)

    def consume(self, token_ids: Sequence[int]) -> None:
        """Goes on with these tokens. llguidance holds Python's lock meanwhile."""
        for token in token_ids:
            began = time.thread_time()
            self._matcher.consume_token(token)
            self._used(time.thread_time() - began - TOKEN_SECONDS)
            self.check()

    def fill(self, words: np.ndarray) -> None:
        """Writes a bit for each token of the vocabulary. `check` says whether they are right."""
        began = time.thread_time()
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        seconds = time.thread_time() - began
        self._used(seconds)
        self.average += _NEWEST * (seconds - self.average)

    def _used(self, seconds: float) -> None:
        self._seconds_left = min(SPARE_SECONDS, self._seconds_left - seconds)

    def check(self) -> None:
        """Raises `ValueError` if the grammar is wrong, exceeds a limit or takes too long."""
        if self._matcher.is_error():
            raise ValueError(f"structured output: {readable(self._matcher.get_error())}")
        if self._seconds_left < 0:
            most = f"{TOKEN_SECONDS * 1000:g} ms for each token"
            remedy = "avoid rules that match a text in many ways"
            raise ValueError(f"structured output: the grammar takes more than {most}; {remedy}")


class Allowed(NamedTuple):
    """The tokens that may come next."""

    matcher: Matcher | None = None
    """Allows its tokens. None: all tokens are allowed."""
    also: int | None = None
    """A token that is allowed, too."""
    only: int | None = None
    """The only token that is allowed."""
    eos: bool = True
    """False: EOS is not allowed."""
    within: np.ndarray | None = None
    """[words] uint32: of the tokens above, only those with a bit here are allowed. None: all of them."""
    barred: tuple[int, ...] = ()
    """Tokens that are not allowed."""

    @property
    def everything(self) -> bool:
        """All tokens are allowed."""
        limits = self.matcher is not None, self.only is not None, self.within is not None, self.barred
        return self.eos and not any(limits)


class CompiledGrammar:
    """The grammar of one request. Owned by its `LiveRequest`; used in the engine's thread."""

    def __init__(
        self,
        compiling: "Future[Matcher] | None",
        request: EngineRequest,
        consumed: int,
        within: np.ndarray | None,
    ) -> None:
        """`compiling` gives a matcher that has consumed the first `consumed` tokens of the answer. None: the
        request has no structure. `within` is that of `Allowed`."""
        prompt, reasoning = len(request.prompt_ids), request.sampling.reasoning
        self._compiling = compiling
        self._reasoning = reasoning
        self._bad_words = request.sampling.bad_words
        self._within = within
        self._prompt = prompt
        self._consumed = consumed
        self._read = prompt  # tokens before this position are known not to end the reasoning
        self._answer = prompt if reasoning is None else None

    @property
    def ready(self) -> bool:
        return self._compiling is None or self._compiling.done()

    def tell_ready(self, ready: Callable[[object], None]) -> None:
        """Calls `ready` in a thread of the compiler once it is `ready`, unless it is."""
        if self._compiling is not None and not self._compiling.done():
            self._compiling.add_done_callback(ready)

    @property
    def needs_tokens(self) -> bool:
        """False if what may come next depends on no further token, as after reasoning without a structure."""
        reasons = self._reasoning is not None and self._answer is None
        return reasons or self._compiling is not None or bool(self._bad_words)

    def abandon(self) -> None:
        """Gives the grammar back, since the request has ended."""
        if self._compiling is not None and not self._compiling.cancel():
            self._compiling.add_done_callback(_release)

    def copy(self) -> "CompiledGrammar":
        """A copy that consumes other tokens. The grammar must be ready."""
        other = copy(self)
        if self._compiling is not None and self._compiling.exception() is None:
            other._compiling = Future()
            other._compiling.set_result(self._compiling.result().copy())
        return other

    def after(self, token_ids: "array[int]") -> Allowed:
        """Returns what may come after the request's tokens.

        Later calls need the same tokens and may add some. Raises `ValueError` if the grammar is not valid,
        exceeds a limit, or does not allow the tokens.
        """
        allowed = self._next(token_ids)
        if allowed.only is not None:
            return allowed
        return allowed._replace(within=self._within, barred=tuple(self._barred(token_ids)))

    def _barred(self, token_ids: "array[int]") -> Iterator[int]:
        """Yields the tokens that would complete a bad word."""
        for word in self._bad_words:
            start = len(token_ids) - len(word) + 1
            if start >= self._prompt and tuple(token_ids[start:]) == word[:-1]:
                yield word[-1]

    def _next(self, token_ids: "array[int]") -> Allowed:
        """Returns what the structure and the reasoning allow after the request's tokens."""
        reasoning = self._reasoning
        if reasoning is None:
            return Allowed(self._matcher(token_ids, self._prompt))
        if self._answer is None and len(token_ids) > self._prompt:
            self._answer = answer_start(reasoning, token_ids, self._prompt, self._read)
            self._read = len(token_ids)
        if self._answer is not None:
            return Allowed(self._matcher(token_ids, self._answer))
        num_output = len(token_ids) - self._prompt
        if not num_output and reasoning.start_id is not None:
            return Allowed(self._matcher(token_ids, self._prompt), also=reasoning.start_id)
        spent = num_output - (reasoning.start_id is not None)
        if reasoning.budget is not None and spent >= reasoning.budget:
            return Allowed(only=reasoning.end_id)
        return Allowed(eos=self._compiling is None)

    def _matcher(self, token_ids: "array[int]", answer: int) -> Matcher | None:
        if self._compiling is None:
            return None
        matcher = self._compiling.result()
        matcher.consume(token_ids[answer + self._consumed :])
        self._consumed = len(token_ids) - answer
        matcher.check()
        return matcher


def _release(compiling: "Future[Matcher]") -> None:
    if compiling.exception() is None:
        compiling.result().release()


def answer_start(reasoning: Reasoning, token_ids: Sequence[int], prompt: int, read: int) -> int | None:
    """Returns the position where the answer starts; None: the output still reasons.

    `prompt`: position of the first output token, which must exist. `read`: the position from which on the end
    of the reasoning is searched."""
    if reasoning.start_id not in (None, token_ids[prompt]):
        return prompt
    new = token_ids[read:]
    return read + new.index(reasoning.end_id) + 1 if reasoning.end_id in new else None


def _matcher(output_ids: Sequence[int], shared: Shared) -> Matcher:
    """Returns a matcher that has consumed these tokens."""
    matcher = Matcher(shared.copy(), shared)
    matcher.consume(output_ids)
    return matcher


def too_dear(costs: Sequence[tuple[bytes, float]]) -> list[int]:
    """Returns the rows that fail since the grammars of their tenants take too long together: the dearest
    ones. `costs`: tenant and average seconds of each row."""
    sums: dict[bytes, float] = {}
    failed = []
    for seconds, row in sorted((seconds, row) for row, (_, seconds) in enumerate(costs)):
        if seconds >= DEAR_SECONDS:
            tenant, _ = costs[row]
            if (together := sums.get(tenant, 0.0) + seconds) > TENANT_SECONDS:
                failed.append(row)
            else:
                sums[tenant] = together
    return failed


class Grammars:
    """Compiles grammars for one model, and returns the tokens that they allow. Owns threads and a process."""

    def __init__(
        self, read: Callable[[str], str], source: str, vocab_size: int, eos_ids: Collection[int]
    ) -> None:
        """`read` returns the text of tokenizer.json of `source`, the directory or file with the tokenizer."""
        self._read = read
        self._source = source
        self._vocab_size = vocab_size
        self._eos_ids = sorted(eos_ids)
        self._helpers = min(32, len(os.sched_getaffinity(0)) * 4 // 5)
        self._compiler: Compiler[Matcher] = Compiler(self._load_tokenizer, vocab_size, self._helpers + 1)
        self._masks = ThreadPoolExecutor(max(1, self._helpers), thread_name_prefix="masks")

    def compile(self, request: EngineRequest) -> CompiledGrammar:
        """Starts to compile the grammar of a request. `CompiledGrammar.after` raises its errors."""
        wanted, reasoning = request.sampling.structured_output, request.sampling.reasoning
        answer: Sequence[int] = request.output_ids
        if reasoning is not None:
            start = answer_start(reasoning, answer, 0, 0) if answer else None
            answer = [] if start is None else answer[start:]
        future = None
        if wanted is not None:
            future = self._compiler.compile(request.tenant, wanted, partial(_matcher, answer))
        ids = request.sampling.allowed_token_ids
        within = self._words(ids) if ids else None
        return CompiledGrammar(future, request, len(answer), within)

    def _words(self, token_ids: Sequence[int]) -> np.ndarray:
        """Returns [words] uint32 with the bits of these tokens."""
        ids = np.array(token_ids)
        words = np.zeros(-(-self._vocab_size // 32), dtype=np.uint32)
        np.bitwise_or.at(words, ids // 32, np.uint32(1) << (ids % 32).astype(np.uint32))
        return words

    def wait(self, seconds: float) -> None:
        """Waits until one of the grammars that are being compiled is ready, at most this long."""
        self._compiler.wait(seconds)

    def close(self) -> None:
        """No request may follow."""
        self._compiler.close()

    def allowed(
        self, batch: Sequence[tuple[CompiledGrammar | None, "array[int]"]]
    ) -> tuple[tuple[list[int], np.ndarray] | None, dict[int, str]]:
        """Returns the rows of a batch that have a grammar, with their `TokenMask.bits`. None: no
        row has one. Also returns, by row, the error of each grammar that failed. The bits of a failed row
        mean nothing."""
        failed: dict[int, str] = {}
        limits: list[Allowed] = []
        rows: list[int] = []
        for row, (grammar, token_ids) in enumerate(batch):
            if grammar is None:
                continue
            try:
                allowed = grammar.after(token_ids)
            except ValueError as error:
                failed[row] = str(error)
            else:
                if not allowed.everything:
                    limits.append(allowed)
                    rows.append(row)
        if not rows:
            return None, failed
        return (rows, self._bits(limits, rows, failed)), failed

    def _bits(self, limits: Sequence[Allowed], rows: Sequence[int], failed: dict[int, str]) -> np.ndarray:
        """Returns `TokenMask.bits`. Adds to `failed` the rows where a matcher failed."""
        bits = np.zeros((len(rows), -(-self._vocab_size // 32)), dtype=np.int32)
        words = bits.view(np.uint32)
        self._fill([(one.matcher, word) for one, word in zip(limits, words, strict=True) if one.matcher])
        costs = [(m.shared.key.tenant, m.average) if (m := one.matcher) else (b"", 0.0) for one in limits]
        for i in too_dear(costs):
            most = f"{TENANT_SECONDS * 1000:g} ms for each step together"
            failed[rows[i]] = (
                f"structured output: the grammars of this client's requests take more than {most}"
            )
        for limit, row, word in zip(limits, rows, words, strict=True):
            if limit.matcher is not None:
                try:
                    limit.matcher.check()
                except ValueError as error:
                    failed[row] = str(error)
            elif limit.only is None:
                word[:] = 0xFFFFFFFF
            for token in (limit.also, limit.only):
                if token is not None:
                    word[token // 32] |= np.uint32(1 << token % 32)
            if limit.within is not None:
                word &= limit.within
            for token in (*limit.barred, *(() if limit.eos else self._eos_ids)):
                word[token // 32] &= ~np.uint32(1 << token % 32)
            if not word.any():
                failed[row] = "allowed_token_ids, bad_words and structured output allow no token together"
        return bits

    def _fill(self, matchers: Sequence[tuple[Matcher, np.ndarray]]) -> None:
        """Writes the bits of these matchers, in several threads."""
        # Copies of one grammar would wait for each other.
        together: dict[Shared, list[tuple[Matcher, np.ndarray]]] = {}
        for matcher, words in matchers:
            together.setdefault(matcher.shared, []).append((matcher, words))
        left = iter(together.values())  # the threads share it

        def fill() -> None:
            for copies in left:
                for matcher, words in copies:
                    matcher.fill(words)

        helpers = [self._masks.submit(fill) for _ in range(min(self._helpers, len(together) - 1))]
        fill()
        for helper in helpers:
            helper.result()

    def _load_tokenizer(self) -> LLTokenizer:
        if not self._eos_ids:
            raise ValueError("structured output needs a model with an end-of-sequence token")
        text = for_texts(self._read(self._source))
        tokenizer = LLTokenizer(text, n_vocab=self._vocab_size, eos_token=self._eos_ids)
        if tokenizer.vocab_size != self._vocab_size:
            counts = f"{tokenizer.vocab_size} tokens, the model {self._vocab_size}"
            raise ValueError(f"{self._source}: the tokenizer has {counts}")
        return tokenizer
