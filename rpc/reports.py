"""How often a worker may report its status to its routers."""

SHORTEST_REPORT = 0.05
"""Seconds between two reports."""
LONGEST_REPORT = 1.0


def bounded_report(seconds: float) -> float:
    """Returns `seconds`, or the bound that they exceed."""
    return min(LONGEST_REPORT, max(SHORTEST_REPORT, seconds))
