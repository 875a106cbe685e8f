"""How long tests wait for what must come."""

WITHIN = 100.0
"""Seconds. Only a test that hangs waits so long, on any machine: the error then says what never came. Pytest
ends a test after 600 s."""
