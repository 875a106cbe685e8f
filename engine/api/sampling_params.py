"""How a request wants its tokens chosen, and when it wants to stop. Names and meanings are vLLM's."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.api.structured_output import StructuredOutput

MAX_LOGPROBS = 20
"""Most alternatives per token that a request may ask for (the bound of OpenAI's API)."""
LARGEST = 1e6
"""Bounds what a logit is multiplied by, divided by, or shifted by: float32 then holds the result."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling and stop conditions of one request. Raises `ValueError` naming the field and its bound.

    The penalties, `min_tokens` and `max_tokens` count every generated token, also those that were generated
    by an earlier attempt and arrive as `EngineRequest.output_ids`.
    """

    temperature: float = 1.0
    """0 is greedy: the highest logit, and top_k, top_p, min_p do not matter."""
    top_k: int = 0
    """Only the k most likely tokens; 0 is all."""
    top_p: float = 1.0
    """Only the fewest most likely tokens whose probabilities (after top_k) add up to top_p."""
    min_p: float = 0.0
    """Only tokens at least min_p times as likely as the most likely one."""
    repetition_penalty: float = 1.0
    """Divides positive logits (multiplies negative ones) of tokens in prompt or output (CTRL, 2019)."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each token that is in the output."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once for each time it is in the output."""
    seed: int = 0
    """With a token's position it determines the token's random number, whatever else is in the batch."""
    max_tokens: int = 16
    min_tokens: int = 0
    """Below this many generated tokens neither EOS nor a stop token can be chosen."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of single tokens."""
    logprobs: int | None = None
    """Return each token's log probability and this many most likely alternatives; None is neither."""
    structured_output: StructuredOutput | None = None
    """What the output must be like; it ends with EOS where that is complete, whatever min_tokens says."""

    def __post_init__(self) -> None:
        def require(name: str, holds: bool, bound: str) -> None:
            if not holds:
                raise ValueError(f"{name} must be {bound}, not {getattr(self, name)!r}")

        require("temperature", 0 <= self.temperature <= LARGEST, f"between 0 and {LARGEST:g}")
        require("top_k", 0 <= self.top_k < 1 << 31, "1 to 2³¹ − 1, or 0 for no limit")
        require("top_p", 0 < self.top_p <= 1, "above 0 and at most 1")
        require("min_p", 0 <= self.min_p <= 1, "between 0 and 1")
        require(
            "repetition_penalty",
            1 / LARGEST <= self.repetition_penalty <= LARGEST,
            f"between {1 / LARGEST:g} and {LARGEST:g}",
        )
        require("presence_penalty", -2 <= self.presence_penalty <= 2, "between -2 and 2")
        require("frequency_penalty", -2 <= self.frequency_penalty <= 2, "between -2 and 2")
        require("max_tokens", self.max_tokens >= 1, "at least 1")
        require("min_tokens", 0 <= self.min_tokens <= self.max_tokens, "between 0 and max_tokens")
        require("stop_token_ids", all(t >= 0 for t in self.stop_token_ids), "token ids, which are at least 0")
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
        require(
            "logprobs", self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS, f"0 to {MAX_LOGPROBS}"
        )
