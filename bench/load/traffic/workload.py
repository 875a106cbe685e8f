"""What is sent and when: pure functions of a specification and a seed.

Sessions of one or more turns follow from their index. `Synthetic` draws them from distributions. `Listed`
holds those of a trace or of a file with texts. `Arrivals` has the times of an open loop. Every client process
computes the same sessions and times, and takes its share of them. A closed loop has no times: a user starts
its next session when the last one ended.
"""

import itertools
import math
from collections.abc import Iterator
from typing import ClassVar, Self

import msgspec
import numpy as np

from baton.bench.load.target.tokenization import Segment

SYNTAX = (
    "N | uniform:LOW,HIGH | normal:MEAN,SD | lognormal:MEDIAN,SIGMA | exponential:MEAN, "
    "each with @LOW,HIGH behind it for draws within bounds"
)
_ARGUMENTS = {"fixed": 1, "uniform": 2, "normal": 2, "lognormal": 2, "exponential": 1}


class Distribution(msgspec.Struct, frozen=True):
    """A distribution of non-negative numbers. `SYNTAX` says what the parameters of each kind mean.

    A draw outside the bounds becomes the bound that it exceeds.
    """

    kind: str
    parameters: tuple[float, ...]
    bounds: tuple[float, float] | None = None

    @classmethod
    def parse(cls, text: str, option: str) -> Self:
        """Raises ValueError that names `option`, the flag with this text."""
        spec, bounded, limits = text.strip().partition("@")
        kind, colon, values = spec.partition(":")
        if not colon:
            kind, values = "fixed", kind
        parameters, bounds = _numbers(values), _numbers(limits) if bounded else None
        if (
            len(parameters) != _ARGUMENTS.get(kind)
            or (kind == "uniform" and parameters[0] > parameters[1])
            or (bounds is not None and (len(bounds) != 2 or bounds[0] > bounds[1]))
        ):
            raise ValueError(f"{option} {text!r} is not a distribution. Write {SYNTAX}, with numbers ≥ 0.")
        return cls(kind, parameters, None if bounds is None else (bounds[0], bounds[1]))

    def draw(self, rng: np.random.Generator) -> float:
        return self._bounded(self._drawn(rng))

    def _drawn(self, rng: np.random.Generator) -> float:
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

    def _bounded(self, number: float) -> float:
        return number if self.bounds is None else min(self.bounds[1], max(self.bounds[0], number))

    def draw_length(self, rng: np.random.Generator, min_tokens: int = 1) -> int:
        """A whole number of tokens. Both ends of `uniform` are as likely as the numbers between."""
        if self.kind == "uniform":
            tokens = rng.integers(round(self.parameters[0]), round(self.parameters[1]) + 1)
            return max(min_tokens, round(self._bounded(float(tokens))))
        return max(min_tokens, round(self.draw(rng)))

    @property
    def least(self) -> float:
        """The smallest possible number."""
        return self._bounded(self.parameters[0] if self.kind in ("fixed", "uniform") else 0.0)

    def __str__(self) -> str:
        numbers, bounds = (",".join(f"{x:g}" for x in some) for some in (self.parameters, self.bounds or ()))
        spec = numbers if self.kind == "fixed" else f"{self.kind}:{numbers}"
        return f"{spec}@{bounds}" if bounds else spec


def _numbers(text: str) -> tuple[float, ...]:
    """Numbers ≥ 0 with commas between. Empty for any other text."""
    try:
        numbers = tuple(float(x) for x in text.split(","))
    except ValueError:
        return ()
    return numbers if all(math.isfinite(x) and x >= 0 for x in numbers) else ()


class Arrivals(msgspec.Struct, frozen=True):
    """An open loop of `rate` sessions a second.

    Its gaps are drawn from a gamma distribution with the shape `burstiness`, as vLLM's `--burstiness`: 1 is
    Poisson, less is burstier, more is smoother. None: they are equal.
    """

    rate: float
    burstiness: float | None = 1.0

    def times(self, seed: int) -> Iterator[float]:
        """Seconds since the start of the run, ascending, without end."""
        if self.burstiness is None:
            yield from (k / self.rate for k in itertools.count())
            return
        now = 0.0
        for gap in _unit_gaps(seed, self.burstiness):
            now += gap / self.rate
            yield now

    def __str__(self) -> str:
        names = {1.0: "poisson", None: "constant"}
        shape = "" if self.burstiness in names else f", burstiness {self.burstiness:g}"
        return f"{names.get(self.burstiness, 'gamma')} {self.rate:g}/s{shape}"


def _unit_gaps(seed: int, shape: float) -> Iterator[float]:
    """Gaps with mean 1."""
    rng = np.random.default_rng([seed, 1])
    while True:
        yield from rng.gamma(shape, 1.0 / shape, 1024).tolist()


AGENTS = {
    "prefix_len": 4000, "context_len": 6000, "turns": "10", "input_len": "lognormal:876,0.8@50,8000",
    "output_len": "uniform:60,240", "think_time": "exponential:1.5",
}  # fmt: skip
"""Sessions of agents: of a prompt, 92 % are what the turn before had, and answers are short."""

_LENGTHS, _UNIQUE, _PREFIX = range(3)  # uses of a seed


class Turn(msgspec.Struct, frozen=True, array_like=True):
    """One request. In a later turn the history precedes its prompt.

    `think_seconds` is the time from the end of the last answer to the intended send time of this turn.
    `messages` are those of a dataset, in place of the segments.
    """

    output_tokens: int
    segments: tuple[Segment, ...] = ()
    think_seconds: float = 0.0
    messages: tuple[dict[str, str], ...] = ()

    @property
    def input_tokens(self) -> int:
        return sum(s.length for s in self.segments)


class Session(msgspec.Struct, frozen=True, array_like=True):
    """Turns that follow each other.

    Attributes:
        at: the start in a trace, in seconds; else `arrivals` decides.
        bound: sessions with the same number are parts of one, for servers. None: the index of the session.
    """

    turns: tuple[Turn, ...]
    at: float = 0.0
    bound: int | None = None


class Synthetic(msgspec.Struct, frozen=True, tag=True):
    """An endless sequence.

    Attributes:
        input_len: tokens that a turn adds to the prompt before it.
        prefix_len: tokens that all sessions of one of `prefix_groups` groups begin with.
        opening_len: tokens that the first turn has before its `input_len`; the prefix is a part of them. If
            0, it is a part of `input_len`.
    """

    count: ClassVar[None] = None
    seed: int
    input_len: Distribution
    output_len: Distribution
    turns: Distribution = Distribution("fixed", (1,))
    think_time: Distribution = Distribution("fixed", (0,))
    prefix_groups: int = 0
    prefix_len: int = 0
    opening_len: int = 0
    least_input: int = 1

    @property
    def keeps_sessions(self) -> bool:
        return self.turns != Distribution("fixed", (1,))

    def session(self, index: int) -> Session:
        rng = np.random.default_rng([self.seed, _LENGTHS, index])
        return Session(tuple(self._turn(index, turn, rng) for turn in range(self.turns.draw_length(rng))))

    def _turn(self, index: int, turn: int, rng: np.random.Generator) -> Turn:
        length = self.input_len.draw_length(rng, self.least_input) + (0 if turn else self.opening_len)
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
    """The sessions of a file, each sent once: at its `at` if they are `timed`, else when the load says."""

    sessions: tuple[Session, ...]
    timed: bool = True

    @property
    def keeps_sessions(self) -> bool:
        return any(session.bound is not None or len(session.turns) > 1 for session in self.sessions)

    @property
    def count(self) -> int | None:
        return len(self.sessions) if self.timed else None

    def session(self, index: int) -> Session:
        return self.sessions[index]


Workload = Synthetic | Listed
