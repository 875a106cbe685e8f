"""Waiting for descriptors."""

from __future__ import annotations

import os
import time

import pytest

from kv_transfer.wait import wait


def test_who_is_ready() -> None:
    (a, b), (c, d) = os.pipe(), os.pipe()
    assert wait([a, c], 0) == []
    assert wait([a], None, [b]) == [b]
    os.write(d, b"x")
    assert wait([a, c], None) == [c]
    os.close(b)
    assert wait([a, c], 1) == [a, c], "closed at the other end"
    for fd in (a, c, d):
        os.close(fd)


@pytest.mark.parametrize("seconds", [0.0, 0.0002, 0.02, 1.1])
def test_how_long(seconds: float) -> None:
    """Also less than a millisecond, and never less than asked for."""
    read_fd, write_fd = os.pipe()
    took = []
    for _ in range(1 if seconds > 1 else 20):
        start = time.monotonic()
        assert wait([read_fd], seconds) == []
        took.append(time.monotonic() - start)
    assert seconds - 1e-6 <= min(took) < seconds + (0.0007 if seconds < 1 else 0.9)
    for fd in (read_fd, write_fd):
        os.close(fd)
