"""What a simulation of placement measured."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from baton.steps.quantiles import percentile


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Of all requests, in seconds."""

    ttft: float
    ttft_p99: float
    gap_p99: float
    first_gap_p99: float


@dataclass(frozen=True, slots=True)
class Answer:
    """One request.

    Attributes:
        first: it was the first turn of its session.
        prompt, cached: tokens of the prompt, and of these, what the worker had that computed the others.
        tokens: of the answer.
        ttft: seconds until the first token.
        gap: mean seconds between two tokens.
    """

    first: bool
    prompt: int
    cached: int
    tokens: int
    ttft: float
    gap: float

    @property
    def latency(self) -> float:
        """Seconds until the last token, divided by the tokens."""
        return (self.ttft + self.gap * (self.tokens - 1)) / self.tokens


@dataclass(slots=True)
class PlacementOutcome:
    """What was measured, in seconds.

    Attributes:
        measures: whether the warm-up is over.
        gaps: how often each time between two tokens of a request occurred.
        first_gaps: times between the first two tokens.
        places: how many requests went to each place.
        seconds: until the last token.
        answers: the requests, in the order of their last tokens.
        flips: how many workers moved to the other pool.
        busy: seconds of the steps of each worker.
        most: decodes of the largest step.
    """

    measures: bool = False
    gaps: dict[float, float] = field(default_factory=lambda: defaultdict(float))
    first_gaps: list[float] = field(default_factory=list)
    places: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    answers: list[Answer] = field(default_factory=list)
    flips: int = 0
    busy: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    most: int = 0

    @property
    def ttft(self) -> list[float]:
        return [answer.ttft for answer in self.answers]

    def goodput(self, ttft: float, gap: float) -> float:
        """Share of the requests with first tokens within `ttft` seconds, and gaps of `gap` on average."""
        return sum(a.ttft <= ttft and a.gap <= gap for a in self.answers) / len(self.answers)

    def quantiles(self) -> Quantiles:
        ttft, first = self.ttft, self.first_gaps
        return Quantiles(
            percentile(ttft, 0.5), percentile(ttft, 0.99), self.gap(0.99), percentile(first, 0.99)
        )

    def gap(self, q: float) -> float:
        """The q-quantile of all gaps."""
        return percentile([*self.gaps], q, [*self.gaps.values()])
