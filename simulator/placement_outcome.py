"""What a simulation of placement measured."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Of all requests, in seconds."""

    ttft: float
    ttft_p99: float
    gap_p99: float
    first_gap_p99: float


@dataclass(slots=True)
class PlacementOutcome:
    """What was measured, in seconds.

    Attributes:
        measures: whether the warm-up is over.
        ttft: times to the first token.
        gaps: how often each time between two tokens of a request occurred.
        first_gaps: times between the first two tokens.
        places: how many requests went to each place.
        seconds: until the last token.
        answers: of each request the time to its first token, and the mean of its gaps.
        flips: how many workers moved to the other pool.
    """

    measures: bool = False
    ttft: list[float] = field(default_factory=list)
    gaps: dict[float, float] = field(default_factory=lambda: defaultdict(float))
    first_gaps: list[float] = field(default_factory=list)
    places: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    answers: list[tuple[float, float]] = field(default_factory=list)
    flips: int = 0

    def goodput(self, ttft: float, gap: float) -> float:
        """Share of the requests with first tokens within `ttft` seconds, and gaps of `gap` on average."""
        return sum(first <= ttft and mean <= gap for first, mean in self.answers) / len(self.answers)

    def quantiles(self) -> Quantiles:
        ttft, first = Counter(self.ttft), Counter(self.first_gaps)
        p99 = (quantile(counts, 0.99) for counts in (ttft, self.gaps, first))
        return Quantiles(quantile(ttft, 0.5), *p99)


def quantile(counts: Mapping[float, float], share: float) -> float:
    """The least value that this share of the samples does not exceed. `counts`: of each value."""
    left = share * sum(counts.values())
    for value in sorted(counts):
        left -= counts[value]
        if left <= 0:
            return value
    raise ValueError("there are no samples")
