"""What is sent: sessions of one or more turns, as a pure function of their index.

`Synthetic` draws sessions from distributions. `Listed` holds the sessions of a data set or a trace. Both give
the same session for an index in every process.
"""

from __future__ import annotations

import msgspec
import numpy as np

from baton.bench.load.target.tokenization import Segment
from baton.bench.load.traffic.distribution import Distribution

PRESETS = {"2000/150": ("2000", "150"), "256/64": ("256", "64")}  # input, output tokens
DEFAULT_PRESET = "256/64"

_LENGTHS, _UNIQUE, _PREFIX = range(3)  # uses of a seed


class Turn(msgspec.Struct, frozen=True, array_like=True):
    """One request. Its prompt is `text` or `segments`. In a later turn the history precedes it.

    `think_seconds` is the time from the end of the last answer to the intended send time of this turn.
    """

    output_tokens: int
    segments: tuple[Segment, ...] = ()
    text: str = ""
    think_seconds: float = 0.0

    @property
    def input_tokens(self) -> int:
        """0 for a text, which only the server can count."""
        return sum(s.length for s in self.segments)


class Session(msgspec.Struct, frozen=True, array_like=True):
    """Turns that follow each other. `at` is the start in a trace, in seconds; else `arrivals` decides."""

    turns: tuple[Turn, ...]
    at: float = 0.0


class Synthetic(msgspec.Struct, frozen=True, tag=True):
    """An endless sequence. `prefix_len` input tokens are common to all sessions of one of `prefix_groups`
    groups."""

    seed: int
    input_len: Distribution
    output_len: Distribution
    turns: Distribution = Distribution("fixed", (1,))
    think_time: Distribution = Distribution("fixed", (0,))
    prefix_groups: int = 0
    prefix_len: int = 0
    least_input: int = 1

    @property
    def count(self) -> int | None:
        return None

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
    """Given sessions. If `timed`, each is sent once at its `at`. Else they are sent again and again."""

    sessions: tuple[Session, ...]
    timed: bool = False

    @property
    def count(self) -> int | None:
        return len(self.sessions) if self.timed else None

    @property
    def keeps_sessions(self) -> bool:
        return any(len(s.turns) > 1 for s in self.sessions)

    def session(self, index: int) -> Session:
        return self.sessions[index % len(self.sessions)]


Workload = Synthetic | Listed
