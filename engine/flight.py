"""A step under way, with the requests that it is for.

    launched ──▶ sampled ──▶ over (the device has computed all of it) ──▶ landed: its tokens are known

A step is sampled right after its launch. A grammar that must know the token before delays this until the step
before has landed; the device computes the forward pass meanwhile.
"""

from dataclasses import dataclass, field

from baton.engine.core.live_request import LiveRequest
from baton.engine.core.schedule import Chunk, Schedule
from baton.engine.execution.runner import Launched


@dataclass(slots=True, eq=False)
class Flight:
    """One launched step."""

    plan: Schedule
    ids: frozenset[bytes]
    """The requests that it computes."""
    sampled: list[LiveRequest]
    """The requests that get a token, by row."""
    scored: list[Chunk]
    """The positions that predict a token of a prompt with log probabilities."""
    launched: Launched
    is_sampled: bool = False
    refused: dict[int, str] = field(default_factory=dict)
    """By row, what is wrong with a request's grammar."""

    @property
    def waits(self) -> bool:
        """A grammar must know a token of the step before."""
        return any(
            live.grammar is not None and live.grammar.needs_tokens and live.pending for live in self.sampled
        )
