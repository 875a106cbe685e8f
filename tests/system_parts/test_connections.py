"""The bound of a port's connections, and which of them ends."""

import itertools
import random
from collections import Counter

import pytest

from baton.system.connections import Connection, Connections


class Port:
    """A port with at most four connections, and one extra."""

    def __init__(self) -> None:
        self.connections = Connections("--port", 4, extra=1)
        self.ended: list[str] = []

    def open(self, host: str, name: str) -> Connection | None:
        return self.connections.open(host, lambda: self.ended.append(name))


@pytest.mark.parametrize(
    ("hosts", "ended"),
    [
        pytest.param("a a a b c", ["0"], id="the oldest of the address that has most"),
        pytest.param("b a a a b b", ["1", "2"], id="then of the next one that has most"),
        pytest.param("2001:db8::1 2001:db8::2 c d e", ["0"], id="a network of IPv6 counts as one address"),
        pytest.param("c ::ffff:9.9.9.9 ::ffff:9.9.9.9 d e", ["1"], id="an address of IPv4 within IPv6, too"),
        pytest.param("c ::ffff:9.9.9.8 ::ffff:9.9.9.9 d e", ["0"], id="but not all of these"),
    ],
)
def test_above_the_bound_the_oldest_idle_one_of_the_busiest_address_ends(
    hosts: str, ended: list[str]
) -> None:
    port = Port()
    for name, host in enumerate(hosts.split()):
        assert port.open(host, str(name)) is not None
    assert port.ended == ended
    assert len(port.connections) == 4


def test_a_busy_connection_never_ends(caplog: pytest.LogCaptureFixture) -> None:
    port = Port()
    for name in "abcd":
        connection = port.open("busy", name)
        assert connection is not None
        connection.busy()
    extra = port.open("probe", "e")
    assert extra is not None
    assert extra.is_extra, "a probe is still answered"
    extra.busy()
    assert port.open("other", "f") is None
    assert port.ended == []
    extra.idle()
    assert port.open("other", "f") is not None
    assert port.ended == ["e"]
    assert len(caplog.records) == 1, "the log says it once"


def test_counts_hold_in_any_order_of_events() -> None:
    rng, connections, ended = random.Random(0), Connections("--port", 30), list[int]()
    idle: dict[Connection, str] = {}
    busy: dict[Connection, str] = {}
    numbers, opened = itertools.count(), dict[int, Connection]()
    for _ in range(3000):
        match rng.randrange(4):
            case 0 | 1:
                host, full = rng.choice("abcde"), len(connections) == 30
                most = max(Counter(idle.values()).values(), default=0)
                number = next(numbers)
                made = connections.open(host, lambda number=number: ended.append(number))
                if full and idle:
                    gone = opened.pop(ended.pop())
                    assert Counter(idle.values())[idle.pop(gone)] == most
                if made is not None:
                    idle[made], opened[number] = host, made
            case 2 if idle:
                connection = rng.choice(list(idle))
                busy[connection] = idle.pop(connection)
                connection.busy()
            case _ if busy:
                connection = rng.choice(list(busy))
                host = busy.pop(connection)
                if rng.random() < 0.5:
                    connection.idle()
                    idle[connection] = host
                else:
                    connection.close()
                    connection.close()
        assert len(connections) == len(idle) + len(busy)
        assert not ended
