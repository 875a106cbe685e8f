"""Whether fetching KV takes less time than computing it: measured for each source. Pure."""

import math
from dataclasses import dataclass, field

from baton.steps.averages import Average

MEMORY = 0.7
"""Factor on the weight of the fetches before, in averages."""
RETRY = 5.0
"""Seconds after which a fetch that seems not to pay is tried all the same. Otherwise slow ones, as the first
ones of a process may be, would be the last. Such a fetch costs what it takes longer than computing."""
LONGEST = 40
"""Bits of a number of tokens that no prompt has."""


@dataclass(slots=True)
class Link:
    """What recent fetches from one source took: a tier here, a tier of another worker, or a store."""

    idle_close: float = math.inf
    """Seconds without a fetch after which the next one has to make a session first."""
    waited: Average = field(default_factory=lambda: Average(MEMORY))  # seconds until the first frame
    transfers: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Seconds from then on of the last two fetches of a size. Sizes differ by a factor of two."""
    tokens_per_s: Average = field(default_factory=lambda: Average(MEMORY))  # from the first frame on
    paused_until: float = 0.0  # time.monotonic()
    connecting: float = 0.0  # seconds until the last new session was up
    measured_at: float = -math.inf  # time.monotonic()
    refused: bool = False  # since the last probe, a prompt was computed because of what was measured
    tries_at: float = -math.inf  # time.monotonic(): a fetch that seems not to pay. Infinite: none did so
    token_seconds: float = 0.0  # of the last probe. 0: there was none

    def pays(self, tokens: int, seconds: float, now: float) -> bool:
        """Whether a fetch of so many tokens takes less than `seconds`, as far as known. 0: not known.

        Now and then the answer is yes although a fetch seems to take longer (`RETRY`). Where probes measure,
        no prompt has to try."""
        if now < self.paused_until:
            return False
        if not seconds or not self.transfers:
            return True
        connecting = self.connecting if self._has_ended(now) else 0.0
        if connecting + self.expected(tokens) < seconds:
            return True
        self.refused = True
        if self.token_seconds:
            return False
        if now < self.tries_at:
            return False
        first, self.tries_at = math.isinf(self.tries_at), now + RETRY
        return not first

    def expected(self, tokens: int) -> float:
        """Seconds to fetch so many tokens. 0: not known.

        Short fetches say little about the speed of long ones. So a fetch longer than all before is expected
        to take as long as the longest of them. This makes the worker try it. Of the last two of a size the
        faster one counts, since one may have come at a bad time."""
        if not self.transfers:
            return 0.0
        shorter = [size for size in self.transfers if size <= tokens.bit_length()]
        if shorter:
            transfer = min(self.transfers[max(shorter)])
        else:
            size = min(self.transfers)
            transfer = min(self.transfers[size]) * tokens / (1 << size)
        return self.waited.value + transfer

    def _has_ended(self, now: float) -> bool:
        """Whether the session of the last fetch has probably ended."""
        return now >= self.measured_at + self.idle_close

    def probed(self, waited: float, token_seconds: float) -> None:
        """The first answer and a token took so long, and no prompt waited. Until there are fetches, this
        counts for all sizes. Then fetches are believed to take longer, or less long, by the factor that
        probes do."""
        self.waited = Average(MEMORY)
        self.waited.add(waited)
        if self.token_seconds:
            factor = token_seconds / self.token_seconds
            self.tokens_per_s.scale(1 / factor)
            self.transfers = {
                size: (factor * before, factor * last) for size, (before, last) in self.transfers.items()
            }
        else:
            self.tokens_per_s.add(1.0, token_seconds)
            self.transfers[LONGEST] = ((1 << LONGEST) * token_seconds,) * 2
        self.token_seconds, self.refused = token_seconds, False

    def measured(
        self, tokens: int, waited: float, seconds: float, now: float, connecting: float = 0.0
    ) -> None:
        if self._has_ended(now):
            self.connecting = connecting
        self.measured_at = now
        self.tokens_per_s.add(tokens, seconds)
        self.waited.add(waited)
        size = tokens.bit_length()
        _, before = self.transfers.get(size, (seconds, seconds))
        self.transfers[size] = before, seconds
