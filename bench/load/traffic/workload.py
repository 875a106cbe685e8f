"""What is sent and when: pure functions of a specification and a seed.

Sessions of one or more turns follow from their index. `Synthetic` draws them from distributions. `Listed`
holds those of a trace. `Arrivals` has the times of an open loop. Every client process
computes the same sessions and times, and takes its share of them. A closed loop has no times: a user starts
its next session when the last one ended.
"""

import itertools
import math
from collections.abc import Iterator
from typing import ClassVar, Literal, Self

import msgspec
import numpy as np

from baton.bench.load.target.tokenization import Segment

SYNTAX = "N | uniform:LOW,HIGH | normal:MEAN,SD | lognormal:MEDIAN,SIGMA | exponential:MEAN"
_ARGUMENTS = {"fixed": 1, "uniform": 2, "normal": 2, "lognormal": 2, "exponential": 1}


class Distribution(msgspec.Struct, frozen=True):
    """A distribution of non-negative numbers. `SYNTAX` says what the parameters of each kind mean."""

    kind: str
    parameters: tuple[float, ...]

    @classmethod
    def parse(cls, text: str, option: str) -> Self:
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


ArrivalKind = Literal["poisson", "constant", "gamma"]


class Arrivals(msgspec.Struct, frozen=True):
    """An open loop of `rate` sessions a second.

    `gamma` draws gaps with the shape `burstiness`, as vLLM's `--burstiness`: 1 is Poisson, less is burstier,
    more is smoother.
    """

    kind: ArrivalKind
    rate: float
    burstiness: float = 1.0

    def times(self, seed: int) -> Iterator[float]:
        """Seconds since the start of the run, ascending, without end."""
        if self.kind == "constant":
            yield from (k / self.rate for k in itertools.count())
        now = 0.0
        for gap in _unit_gaps(seed, self.burstiness if self.kind == "gamma" else 1.0):
            now += gap / self.rate
            yield now

    def __str__(self) -> str:
        shape = f", burstiness {self.burstiness:g}" if self.kind == "gamma" else ""
        return f"{self.kind} {self.rate:g}/s{shape}"


def _unit_gaps(seed: int, shape: float) -> Iterator[float]:
    """Gaps with mean 1."""
    rng = np.random.default_rng([seed, 1])
    while True:
        yield from rng.gamma(shape, 1.0 / shape, 1024).tolist()


PRESETS = {"2000/150": ("2000", "150"), "256/64": ("256", "64")}  # input, output tokens
DEFAULT_PRESET = "256/64"

_LENGTHS, _UNIQUE, _PREFIX = range(3)  # uses of a seed


class Turn(msgspec.Struct, frozen=True, array_like=True):
    """One request. In a later turn the history precedes its prompt.

    `think_seconds` is the time from the end of the last answer to the intended send time of this turn.
    """

    output_tokens: int
    segments: tuple[Segment, ...]
    think_seconds: float = 0.0

    @property
    def input_tokens(self) -> int:
        return sum(s.length for s in self.segments)


class Session(msgspec.Struct, frozen=True, array_like=True):
    """Turns that follow each other. `at` is the start in a trace, in seconds; else `arrivals` decides."""

    turns: tuple[Turn, ...]
    at: float = 0.0


class Synthetic(msgspec.Struct, frozen=True, tag=True):
    """An endless sequence. `prefix_len` input tokens are common to all sessions of one of `prefix_groups`
    groups."""

    count: ClassVar[None] = None
    seed: int
    input_len: Distribution
    output_len: Distribution
    turns: Distribution = Distribution("fixed", (1,))
    think_time: Distribution = Distribution("fixed", (0,))
    prefix_groups: int = 0
    prefix_len: int = 0
    least_input: int = 1

    @property
    def keeps_sessions(self) -> bool:
        return self.turns != Distribution("fixed", (1,))

    def session(self, index: int) -> Session:
        rng = np.random.default_rng([self.seed, _LENGTHS, index])
        return Session(tuple(self._turn(index, turn, rng) for turn in range(self.turns.draw_length(rng))))

    def _turn(self, index: int, turn: int, rng: np.random.Generator) -> Turn:
        length = self.input_len.draw_length(rng, self.least_input)
        shared = self.prefix_len if self.prefix_groups and turn == 0 else 0
        unique = Segment((self.seed, _UNIQUE, index, turn), length - shared)
        prefix = ()
        if shared:
            prefix = (Segment((self.seed, _PREFIX, int(rng.integers(self.prefix_groups))), shared),)
        return Turn(
            output_tokens=self.output_len.draw_length(rng),
            segments=(*prefix, unique),
            think_seconds=self.think_time.draw(rng) if turn else 0.0,
        )


class Listed(msgspec.Struct, frozen=True, tag=True):
    """Sessions of one turn. Each is sent once, at its `at`."""

    keeps_sessions: ClassVar[bool] = False
    sessions: tuple[Session, ...]

    @property
    def count(self) -> int:
        return len(self.sessions)

    def session(self, index: int) -> Session:
        return self.sessions[index]


Workload = Synthetic | Listed
