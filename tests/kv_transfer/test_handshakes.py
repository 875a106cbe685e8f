"""Which unauthenticated lane gives way, and what refusals may write into the log. Pure."""

import logging
from typing import Any

import pytest

from baton.kv_transfer.process import stats
from baton.kv_transfer.process.handshakes import Handshakes
from baton.kv_transfer.process.stats import TransferCounters


def table(most: int, *lanes: tuple[str, str | None]) -> Any:
    """Lanes are names here, and were opened in this order."""
    join: Any = None
    handshakes: Any = Handshakes(most, TransferCounters(), join)
    for lane, address in lanes:
        assert handshakes.add(lane, address, 5.0) is None
    return handshakes


def test_the_oldest_of_the_busiest_address_gives_way() -> None:
    handshakes = table(4, ("a1", "a"), ("b1", "b"), ("a2", "a"), ("b2", "b"))
    assert handshakes.add("c1", "c", 5.0) == "a1"
    assert handshakes.add("c2", "c", 5.0) == "b1"
    assert handshakes.add("c3", "c", 5.0) == "c1", "it has the most now"
    assert handshakes.late(5.0) == ["a2", "b2", "c2", "c3"]


def test_addresses_that_have_authenticated_have_places_of_their_own() -> None:
    handshakes = table(2, ("peer", "p"))
    handshakes.proved("peer")
    for i in range(5):
        handshakes.add(f"stranger {i}", f"{i}", 5.0)
    assert handshakes.add("peer 1", "p", 5.0) is None
    assert handshakes.add("peer 2", "p", 5.0) is None
    assert handshakes.add("peer 3", "p", 5.0) == "peer 1"
    assert handshakes.late(5.0) == ["stranger 3", "stranger 4", "peer 2", "peer 3"]


def test_lanes_that_this_side_opens_need_no_place() -> None:
    handshakes = table(1, ("1", None), ("2", None), ("a", "a"))
    assert handshakes.add("3", None, 5.0) is None
    handshakes.closed("a")
    handshakes.closed("a")
    assert handshakes.late(5.0) == ["1", "2", "3"]


def test_refusals_fill_no_log_and_write_no_control_characters(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 100.0
    monkeypatch.setattr(stats.time, "monotonic", lambda: now)
    counters = TransferCounters()
    with caplog.at_level(logging.WARNING, "baton.kv"):
        for _ in range(1000):
            counters.refuse("hello", "a\nforged line \x1b[2J")
        assert counters.refused["hello"] == 1000
        assert caplog.messages == ["refused (hello): a\\nforged line \\x1b[2J"] * 10
        counters.refuse("secret", "another reason")
        assert len(caplog.messages) == 11
        now += 10
        counters.refuse("hello", "later")
    assert caplog.messages[11:] == ["refused (hello): 990 more in 10 s", "refused (hello): later"]
