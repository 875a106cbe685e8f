"""How long answers will be, from those that have ended: of the same session, else of the same API key, else
of all. Pure, and bounded: what was not used for the longest time is forgotten first.

An answer that its limit has cut would have been longer. So the mean is the tokens of all answers, divided by
the number of those that ended themselves. For exponential lengths this mean is the most likely one."""

from collections.abc import Hashable, Sequence

from baton.steps.averages import Average

MOST_NAMES = 10_000
"""Sessions, keys and models that are remembered: 2 MB."""


class AnswerLengths:
    """Owned by one router. A name is a session, a key or the model."""

    def __init__(self) -> None:
        self._averages: dict[Hashable, Average] = {}  # the name that was used last is at the end

    def __len__(self) -> int:
        return len(self._averages)

    def ended(self, names: Sequence[Hashable], tokens: int, *, cut: bool = False) -> None:
        """A request of these names got an answer with so many tokens. `cut`: the client allowed no more."""
        for name in names:
            average = self._averages.pop(name, None) or Average()
            average.add(tokens, 0.0 if cut else 1.0)
            self._averages[name] = average
        while len(self._averages) > MOST_NAMES:
            del self._averages[next(iter(self._averages))]

    def expected(self, names: Sequence[Hashable], emitted: int, most: int) -> int:
        """Tokens that a request will still get, at least 1 and at most `most`.

        `names`: the most specific one first. `emitted`: tokens that it has. An answer that is longer than
        expected may be as long again."""
        averages = (self._averages[name].value for name in names if name in self._averages)
        known = next((value for value in averages if value), None)
        if known is None:  # no answer ended itself
            return most
        return max(1, min(most, round(known - emitted if emitted < known else known)))
