"""Stand-ins for parts of the product: they have some members of a class, and none that the class lacks.

A double that only notes calls goes on as before when the contract of the real part changes. With these, a
member that the class lacks, a call that it does not take and a result that it does not return fail the test.
"""

import dis
import inspect
from collections.abc import Callable
from functools import cached_property, wraps
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


def stand_in(real: type[T], /, **members: Any) -> T:
    """Returns an object with these members of `real` alone. Type checkers take it for a `real`.

    A value stays as it is, a `property` is asked at each use, and a function gets the calls without `self`.
    """
    made = {name: _member(real, name, given, has_self=False) for name, given in members.items()}
    made["__class__"] = property(lambda _: real)
    return type(real.__name__, (), made)()


def implements(real: type, /) -> Callable[[type[T]], type[T]]:
    """A decorator of a class with some members of `real`. What the class notes for its test is set in its
    `__init__`."""

    def check(double: type[T]) -> type[T]:
        for name, given in list(vars(double).items()):
            if not name.startswith("_"):
                setattr(double, name, _member(real, name, given, has_self=True))
        return double

    return check


def names_of(real: type) -> set[str]:
    """The names of all members, also of those that only `__init__` sets."""
    names = set(dir(real))
    for each in real.__mro__:
        names |= inspect.get_annotations(each).keys()
        if inspect.isfunction(made := vars(each).get("__init__")):
            names |= {step.argval for step in dis.get_instructions(made) if step.opname == "STORE_ATTR"}
    return names


def _member(real: type, name: str, given: Any, *, has_self: bool) -> Any:
    assert name in names_of(real), f"{real.__name__} has no {name!r}"
    found = inspect.getattr_static(real, name, None)
    if not inspect.isroutine(found):
        is_value = isinstance(given, property) or not isinstance(found, property | cached_property)
        assert is_value or not callable(given), f"{real.__name__}.{name} is no method"
        return given if has_self or not callable(given) else staticmethod(given)
    assert callable(given), f"{real.__name__}.{name} is a method"
    method = inspect.unwrap(getattr(found, "__func__", found))
    signature, result_type = inspect.signature(method), _result_type(method)
    first = () if isinstance(found, staticmethod) else (None,)

    @wraps(given)
    def call(self: Any, *args: Any, **named: Any) -> Any:
        signature.bind(*first, *args, **named)
        result = given(self, *args, **named) if has_self else given(*args, **named)
        assert _fits(result, result_type), f"{method.__qualname__} returns no {result!r}"
        return result

    return call


def _result_type(method: Callable[..., Any]) -> Any:
    if inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method):
        return Any
    try:
        return get_type_hints(method).get("return", Any)
    except NameError:  # of a module that only type checkers import
        return Any


def _fits(value: object, hint: Any) -> bool:
    """Whether the value has this type, as far as its class says."""
    if hint is Any:
        return True
    if get_origin(hint) in (Union, UnionType):
        return any(_fits(value, each) for each in get_args(hint))
    found = get_origin(hint) or hint
    if found is float:
        return isinstance(value, float | int)
    is_class = isinstance(found, type) and not getattr(found, "_is_protocol", False)
    return not is_class or isinstance(value, found)
