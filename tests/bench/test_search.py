import pytest

from baton.bench.load.commands import LEAST_RATE, MOST_RATE, highest_rate


def _search(capacity: float, first: float) -> tuple[float | None, list[float]]:
    asked = highest_rate(first)
    rates = [next(asked)]
    try:
        while True:
            rates.append(asked.send(rates[-1] <= capacity))
    except StopIteration as end:
        return end.value, rates


@pytest.mark.parametrize("capacity", [0.05, 0.9, 1.0, 3.7, 22.0, 640.0])
@pytest.mark.parametrize("first", [0.5, 4.0, 100.0])
def test_the_rate_found_is_good_and_close(capacity: float, first: float) -> None:
    found, rates = _search(capacity, first)
    assert found is not None
    assert found in rates
    assert capacity / 1.05 <= found <= capacity
    assert len(rates) <= 20
    assert len(set(rates)) == len(rates)


def test_no_good_rate_gives_none() -> None:
    found, rates = _search(0.0, 1.0)
    assert found is None
    assert min(rates) >= LEAST_RATE


def test_a_search_ends_if_every_rate_is_good() -> None:
    found, rates = _search(1e9, 1.0)
    assert found == max(rates) <= MOST_RATE
