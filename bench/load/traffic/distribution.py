"""Lengths and think times as users write them: `128`, `uniform:100,200`, `lognormal:800,0.6`, …"""

from __future__ import annotations

import math

import msgspec
import numpy as np

SYNTAX = "N | uniform:LOW,HIGH | normal:MEAN,SD | lognormal:MEDIAN,SIGMA | exponential:MEAN"
_ARGUMENTS = {"fixed": 1, "uniform": 2, "normal": 2, "lognormal": 2, "exponential": 1}


class Distribution(msgspec.Struct, frozen=True):
    """A distribution of non-negative numbers. `SYNTAX` says what the parameters of each kind mean."""

    kind: str
    parameters: tuple[float, ...]

    @classmethod
    def parse(cls, text: str, option: str) -> Distribution:
        """Raises ValueError that names `option`, the flag with this text."""
        kind, colon, rest = text.strip().partition(":")
        if not colon:
            kind, rest = "fixed", kind
        try:
            parameters = tuple(float(x) for x in rest.split(","))
        except ValueError:
            parameters = ()
        if (
            len(parameters) != _ARGUMENTS.get(kind)
            or not all(math.isfinite(x) and x >= 0 for x in parameters)
            or (kind == "uniform" and parameters[0] > parameters[1])
        ):
            raise ValueError(f"{option} {text!r} is not a distribution. Write {SYNTAX}, with numbers ≥ 0.")
        return cls(kind, parameters)

    def draw(self, rng: np.random.Generator) -> float:
        p = self.parameters
        match self.kind:
            case "fixed":
                return p[0]
            case "uniform":
                return float(rng.uniform(p[0], p[1]))
            case "normal":
                return max(0.0, float(rng.normal(p[0], p[1])))
            case "lognormal":
                return float(p[0] * np.exp(rng.normal(0.0, p[1])))
            case "exponential":
                return float(rng.exponential(p[0]))
        raise AssertionError(f"unknown distribution {self.kind}")

    def draw_length(self, rng: np.random.Generator, least: int = 1) -> int:
        """A whole number of tokens. Both ends of `uniform` are as likely as the numbers between."""
        if self.kind == "uniform":
            return max(least, int(rng.integers(round(self.parameters[0]), round(self.parameters[1]) + 1)))
        return max(least, round(self.draw(rng)))

    @property
    def least(self) -> float:
        """The smallest possible number."""
        return self.parameters[0] if self.kind in ("fixed", "uniform") else 0.0

    def __str__(self) -> str:
        numbers = ",".join(f"{x:g}" for x in self.parameters)
        return numbers if self.kind == "fixed" else f"{self.kind}:{numbers}"
