"""Service-level objectives: `ttft=500,itl=50` limits every request, `ttft.p99=500,itl.p99=15` limits the
run.

Goodput is the rate of requests that meet all bounds on a request (DistServe, OSDI 2024). A failed request
meets no bound.
"""

import re
from collections.abc import Callable, Sequence
from typing import Self

import msgspec

from baton.bench.load.measurement import quantiles

METRICS = ("ttft", "itl", "gap", "handover", "e2e")
QUANTILES = (*quantiles.QUANTILES, "max")
SYNTAX = (
    "METRIC=LIMIT or METRIC.QUANTILE=LIMIT, separated by commas; METRIC one of "
    f"{', '.join(METRICS)}; QUANTILE one of {', '.join(QUANTILES)}; LIMIT in ms, or with a unit: 1.5s"
)


def renamed(text: str) -> str:
    """Metrics by their present names: earlier reports and command lines say ttit for itl."""
    return re.sub(r"\bttit\b", "itl", text)


class Bound(msgspec.Struct, frozen=True):
    metric: str
    quantile: str  # "" bounds every request
    limit_ms: float

    def __str__(self) -> str:
        return f"{self.metric}{'.' if self.quantile else ''}{self.quantile}={self.limit_ms:g}ms"


class Slo(msgspec.Struct, frozen=True):
    """The bounds on each request and on the run. Empty: no objective."""

    bounds: tuple[Bound, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Self:
        return cls(tuple(_bound(part, text) for part in renamed(text).split(",") if part.strip()))

    @property
    def per_request(self) -> Sequence[Bound]:
        return [b for b in self.bounds if not b.quantile]

    @property
    def per_run(self) -> Sequence[Bound]:
        return [b for b in self.bounds if b.quantile]

    def met_by_request(self, value_ms: Callable[[str], float | None]) -> bool:
        """`value_ms(metric)` is the value of a request that succeeded.

        None, as for one token's gap, meets any bound.
        """
        values = ((value_ms(bound.metric), bound.limit_ms) for bound in self.per_request)
        return all(value is None or value <= limit for value, limit in values)

    def __str__(self) -> str:
        return ", ".join(map(str, self.bounds))


def _bound(part: str, slo: str) -> Bound:
    name, equals, limit = (x.strip() for x in part.partition("="))
    metric, _, quantile = name.partition(".")
    try:
        limit_ms = parse_ms(limit)
    except ValueError:
        limit_ms = -1.0
    if not equals or metric not in METRICS or (quantile and quantile not in QUANTILES) or limit_ms <= 0:
        raise ValueError(f"--slo {slo!r}: cannot read {part.strip()!r}. Write {SYNTAX}.")
    return Bound(metric, quantile, limit_ms)


def parse_ms(text: str) -> float:
    """`50`, `50ms` and `0.05s` are equal. Raises ValueError."""
    for suffix, factor in (("ms", 1.0), ("s", 1000.0)):
        if text.endswith(suffix):
            return float(text.removesuffix(suffix)) * factor
    return float(text)
