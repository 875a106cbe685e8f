"""The load of the experts of a mixture, as an engine reports it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExpertStats:
    """The load of the experts of a mixture. The device counts, and the counts may be seconds old."""

    tokens: list[int]
    """Of each expert since the start, in all layers together."""
    imbalance: float
    """Tokens of a layer's busiest expert, as a multiple of the mean of its experts: recent steps, mean of all
    layers. 0 before the first."""
    used: float
    """Experts with tokens in one layer of one step, which reads only these: recent steps, mean. 0 before the
    first."""
