"""Where work goes: pure functions over a snapshot of the workers, one file each.

A policy sees loads and returns a choice. It keeps nothing, waits for nothing, and knows neither connections
nor clocks, so that the same objects run in the router and in a simulator.
"""

from router.policy.least_loaded import DecodeLoad, least_loaded
from router.policy.sticky import Ring, sticky

__all__ = ["DecodeLoad", "Ring", "least_loaded", "sticky"]
