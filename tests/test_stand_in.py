"""Doubles fail when the class that they stand in for changes."""

from collections.abc import Sequence
from typing import Any

import pytest

from tests.stand_in import implements, stand_in


class Real:
    slots: int

    def __init__(self) -> None:
        self.made = 1

    @property
    def size(self) -> int:
        return 1

    def ask(self, name: str, *, most: int) -> Sequence[str] | None:
        return [name] * most


def test_a_stand_in_does_what_it_is_told() -> None:
    asked: list[Any] = []
    size = [3]
    real = stand_in(
        Real,
        made=7,
        slots=2,
        size=property(lambda _: size[0]),
        ask=lambda name, most: asked.append((name, most)),
    )
    assert (real.made, real.slots, real.size) == (7, 2, 3)
    size[0] = 4
    assert real.size == 4
    assert real.ask("a", most=2) is None
    assert asked == [("a", 2)]
    assert isinstance(real, Real)


@pytest.mark.parametrize("members", [{"none": 1}, {"ask": 1}, {"size": lambda: 1}])
def test_a_stand_in_has_only_what_the_class_has(members: dict[str, Any]) -> None:
    with pytest.raises(AssertionError, match="Real"):
        stand_in(Real, **members)


def test_a_call_and_its_result_are_those_of_the_class() -> None:
    @implements(Real)
    class Double:
        def ask(self, *args: Any, **named: Any) -> Any:
            return 1 if named["most"] else ["none"]

    double = Double()
    assert double.ask("a", most=0) == ["none"]
    with pytest.raises(AssertionError, match="returns no 1"):
        double.ask("a", most=1)
    for args, named in ((("a", 1), {}), (("a",), {"least": 1})):
        with pytest.raises(TypeError):
            double.ask(*args, **named)
    with pytest.raises(AssertionError, match="no 'tell'"):
        implements(Real)(type("Other", (), {"tell": lambda self: None}))
