"""Sampling parameters and stop conditions of a request: names, meanings, defaults and bounds. Those of vLLM.

This class says all of them once. `SamplingParams` in proto/worker.proto, the form on the wire, has its fields
without defaults and bounds. A body of a client (`router.api.sampling`) has null, texts and other APIs' names
beside these. Router and worker copy equal names (`router.preparation.jobs`, `worker.requests`)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple, get_type_hints

MAX_LOGPROBS = 20
"""Most alternatives per token that a request may ask for (the limit of OpenAI's API)."""
MAX_NAMED = 128
"""Most tokens that a request may name for its log probabilities."""
LARGEST = 1e6
"""Limit of numbers that scale or shift a logit, so that float32 holds the result."""
MAX_LISTED = 1024
"""Most entries of logit_bias, stop_token_ids, allowed_token_ids and bad_words."""
MAX_LENGTH = 1 << 17
"""Most characters of a schema, regex or grammar. This length compiles in 0.1 s."""


class Bounds(NamedTuple):
    """Of a number."""

    least: float
    most: float = math.inf
    above: bool = False
    """It must be more than `least`."""

    def __contains__(self, value: Any) -> bool:
        return self.least <= value <= self.most and not (self.above and value == self.least)

    def __str__(self) -> str:
        if self.most == math.inf:
            return f"at least {self.least:g}"
        least = "above {:g} and at most" if self.above else "between {:g} and"
        return f"{least.format(self.least)} {self.most:.10g}"


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The tokens that one request generates before its answer. Raises `ValueError` naming the bound."""

    end_id: int
    """The token that ends the reasoning."""
    start_id: int | None = None
    """The output reasons only if this is its first token. None: it reasons from its first token on."""
    budget: int | None = None
    """After this many tokens of reasoning, `end_id` is the only token allowed. None: no limit."""

    def __post_init__(self) -> None:
        if self.budget is not None and self.budget < 0:
            raise ValueError(f"reasoning.budget must be at least 0, not {self.budget}")

    @property
    def ids(self) -> tuple[int, ...]:
        """The tokens that it names."""
        return (self.end_id,) if self.start_id is None else (self.start_id, self.end_id)


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """The structure of one request's output. Raises `ValueError` naming kind and bound."""

    kind: Literal["json_schema", "regex", "grammar"]
    text: str
    """A JSON schema; a regular expression (https://docs.rs/regex) that the whole output must match; or a
    grammar in llguidance's variant of Lark."""

    def __post_init__(self) -> None:
        if self.kind not in ("json_schema", "regex", "grammar"):
            raise ValueError(
                f"structured_output.kind must be json_schema, regex or grammar, not {self.kind!r}"
            )
        if not 0 < len(self.text) <= MAX_LENGTH:
            raise ValueError(
                f"structured_output.{self.kind} must have 1 to {MAX_LENGTH} characters, not {len(self.text)}"
            )


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters and stop conditions of one request. Raises `ValueError` naming field and bound.

    The penalties, `min_tokens` and `max_tokens` count every generated token. Tokens of an earlier attempt,
    which arrive as `EngineRequest.output_ids`, count, too.
    """

    temperature: Annotated[float, Bounds(0, LARGEST)] = 1.0
    """0: greedy. The highest logit wins, and top_k, top_p and min_p have no effect."""
    top_k: Annotated[int, Bounds(0, (1 << 31) - 1)] = 0
    """Sample from the k most likely tokens only. 0: from all."""
    top_p: Annotated[float, Bounds(0, 1, above=True)] = 1.0
    """Sample from the smallest set of most likely tokens that reaches this probability, after top_k."""
    min_p: Annotated[float, Bounds(0, 1)] = 0.0
    """Sample only tokens that are at least min_p times as likely as the most likely token."""
    repetition_penalty: Annotated[float, Bounds(1 / LARGEST, LARGEST)] = 1.0
    """For tokens in prompt or output: divides a positive logit, multiplies a negative one (CTRL, 2019)."""
    presence_penalty: Annotated[float, Bounds(-2, 2)] = 0.0
    """Subtracted from the logit of each token in the output."""
    frequency_penalty: Annotated[float, Bounds(-2, 2)] = 0.0
    """Subtracted from a token's logit once for each time that the token is in the output."""
    seed: int = 0
    """Seed and position alone determine a token's random number; the rest of the batch does not matter."""
    max_tokens: Annotated[int, Bounds(1)] = 16
    min_tokens: Annotated[int, Bounds(0)] = 0
    """EOS and stop tokens are barred until this many tokens are generated."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Token id → number that is added to its logit."""
    allowed_token_ids: tuple[int, ...] = ()
    """The only tokens that may be generated. Empty: all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens that must not be in the output."""
    logprobs: Annotated[int | None, Bounds(0, MAX_LOGPROBS)] = None
    """How many most likely alternatives to return with each token's log probability. None: return neither."""
    logprob_token_ids: tuple[int, ...] = ()
    """With `logprobs`: the alternatives to return, in place of the most likely ones. Empty: those."""
    prompt_logprobs: Annotated[int | None, Bounds(0, MAX_LOGPROBS)] = None
    """How many alternatives to return for the tokens of the prompt. None: return neither."""
    structured_output: StructuredOutput | None = None
    """Structure of the output. The output ends with EOS where the structure is complete, even below
    min_tokens."""
    reasoning: Reasoning | None = None
    """The structure holds after the reasoning. It has no effect without a structure and without a budget."""

    @property
    def num_alternatives(self) -> int:
        """Alternatives to return with each token's log probability."""
        return len(self.logprob_token_ids) or self.logprobs or 0

    @property
    def has_grammar(self) -> bool:
        """True if not every token may come next."""
        budget = self.reasoning is not None and self.reasoning.budget is not None
        limited = bool(self.allowed_token_ids or self.bad_words)
        return self.structured_output is not None or budget or limited

    def __post_init__(self) -> None:
        def require(name: str, holds: bool, bound: object) -> None:
            if not holds:
                raise ValueError(f"{name} must be {bound}, not {getattr(self, name)!r}")

        for name, bounds in BOUNDS.items():
            value = getattr(self, name)
            require(name, value is None or value in bounds, bounds)
        require("min_tokens", self.min_tokens <= self.max_tokens, "at most max_tokens")
        require("stop_token_ids", all(t >= 0 for t in self.stop_token_ids), "token ids, which are at least 0")
        require("bad_words", all(self.bad_words), "sequences of at least one token")
        require("logit_bias", all(t >= 0 for t in self.logit_bias), "keyed by token ids, at least 0")
        require(
            "logit_bias",
            all(abs(b) <= LARGEST for b in self.logit_bias.values()),
            f"numbers between {-LARGEST:g} and {LARGEST:g}",
        )
        require(
            "ignore_eos",
            not (self.ignore_eos and self.structured_output),
            "false with structured_output, which ends with EOS",
        )
        named = self.logprob_token_ids
        require(
            "logprob_token_ids", len(set(named)) == len(named) <= MAX_NAMED, f"at most {MAX_NAMED}, each once"
        )


BOUNDS: Mapping[str, Bounds] = {
    name: bounds
    for name, hint in get_type_hints(SamplingParams, include_extras=True).items()
    for bounds in getattr(hint, "__metadata__", ())
}
"""Of the fields of `SamplingParams` that are numbers. None is in bounds, where a field may have it."""
